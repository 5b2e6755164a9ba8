"""The plan against an oracle that knows the true costs and the true acceptance, in a simulated engine."""

import math
import random
import statistics

import pytest

from tokenspeed.config import Shape
from tokenspeed.spec.calibration import Calibration, encode
from tokenspeed.spec.cost import Costs
from tokenspeed.spec.gain import Acceptance, Gain, Offset, default_prior, level_index
from tokenspeed.spec.plan import AdaptivePlan, StaticPlan, plan_for

SHAPES = (Shape(3, 2, 6), Shape(5, 4, 16), Shape(8, 4, 16), Shape(12, 4, 16))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT, LIFE = 300, 60  # tokens of a row; rounds that a request lives, on average
OWN_SPREAD = 0.4  # standard deviation of a request's own level


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


class Row:
    def __init__(self, rng: random.Random):
        self.offset, self.num_tokens, self.level = Offset(), CONTEXT, rng.gauss(0, OWN_SPREAD)


class World:
    """True times and chances. Costs are those of a GPU: flat up to 64 rows, then linear."""

    def __init__(self, seed: int, prior_error: float):
        self.rng, self.level, self.slowness = random.Random(seed), 0.0, 1.0
        error = {shape: self.rng.gauss(0, prior_error) for shape in SHAPES}
        self.logits = {s: [math.log(p / (1 - p)) + error[s] for p in default_prior(s)] for s in SHAPES}

    def time(self, batch: int, shape: Shape | None) -> float:
        padded = next(b for b in BATCHES if b >= batch)
        draft = shape.steps * 150 * (1 + padded * shape.topk / 256) if shape else 0
        nodes = shape.nodes if shape else 1
        return self.slowness * (4000 + max(0, padded * nodes - 64) * 12 + padded * 3 + draft)

    def chances(self, shape: Shape, row: Row) -> list[float]:
        return [sigmoid(logit + self.level + row.level) for logit in self.logits[shape]]

    def tokens(self, shape: Shape | None, rows: list[Row]) -> float:
        total = float(len(rows))
        for row in rows if shape else ():
            reach = 1.0
            for chance in self.chances(shape, row):
                reach *= chance
                total += reach
        return total

    def accepted(self, shape: Shape, row: Row) -> int:
        count = 0
        while count < shape.steps and self.rng.random() < self.chances(shape, row)[count]:
            count += 1
        return count


class Load:
    """Runs rounds of a plan in a world and compares with the best shape of each round."""

    def __init__(self, world: World, plan, batch: int, noise: float):
        self.world, self.plan, self.noise = world, plan, noise
        self.rows = [Row(world.rng) for _ in range(batch)]
        self.used: dict[Shape | None, int] = {}
        self.made = 0  # tokens that were emitted in rounds with trees

    def regret(self, rounds: int) -> float:
        """Share of the oracle's tokens that the plan did not make in the same time."""
        world, rng, batch = self.world, self.world.rng, len(self.rows)
        made = possible = 0.0
        for _ in range(rounds):
            self.rows = [Row(rng) if rng.random() < 1 / LIFE else row for row in self.rows]
            shape = self.plan.choose(self.rows)
            self.used[shape] = self.used.get(shape, 0) + 1
            time = world.time(batch, shape)
            speeds = [world.tokens(s, self.rows) / world.time(batch, s) for s in (None, *SHAPES)]
            made += world.tokens(shape, self.rows)
            possible += max(speeds) * time
            seen = time * math.exp(rng.gauss(0, self.noise)) * (5 if rng.random() < 0.01 else 1)
            rows = [(row, world.accepted(shape, row) if shape else 0) for row in self.rows]
            self.made += sum(accepted + 1 for _, accepted in rows) if shape else 0
            self.plan.observe(shape, rows, int(seen))
        return 1 - made / possible


def plan_in(world: World, cost_error: float) -> AdaptivePlan:
    shapes = (None, *SHAPES)
    table = {
        (b, s): world.time(b, s) * math.exp(world.rng.gauss(0, cost_error)) for b in BATCHES for s in shapes
    }
    return AdaptivePlan(Gain({s: default_prior(s) for s in SHAPES}), Costs(table), SHAPES)


@pytest.mark.parametrize("level", [-3.0, 0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 3, 8, 64, 256])
def test_steady_state(batch, level):
    """Right priors, 5 % of noise: a mean regret of at most 5 %, over more runs where chance weighs more."""
    found = []
    for seed in range(24 if batch == 1 else 3):
        world = World(seed, 0.0)
        world.level = level
        load = Load(world, plan_in(world, 0.02), batch, 0.05)
        load.regret(150)
        found.append(load.regret(150))
    assert statistics.mean(found) <= 0.05, found


@pytest.mark.parametrize("batch", [3, 64])
def test_wrong_priors_and_noisy_times(batch):
    """Every shape's prior is off by its own error, times by 10 % and each measurement by 20 %."""
    found = []
    for seed in range(6):
        world = World(seed, 0.25)
        load = Load(world, plan_in(world, 0.1), batch, 0.2)
        load.regret(200)
        found.append(load.regret(200))
    assert statistics.mean(found) <= 0.05, found


@pytest.mark.parametrize(("before", "after"), [(-3.0, 0.0), (0.0, -3.0), (0.0, 1.0), (1.0, -1.0)])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_the_200_rounds_after_a_shift(batch, before, after):
    found = []
    for seed in range(3):
        world = World(seed, 0.1)
        world.level = before
        load = Load(world, plan_in(world, 0.05), batch, 0.1)
        load.regret(200)
        world.level = after
        found.append(load.regret(200))
    assert statistics.mean(found) <= 0.10, found


@pytest.mark.parametrize("batch", [1, 8])
def test_a_machine_whose_speed_swings(batch):
    """Every kind of round takes 1.6 times as long for 80 rounds, then not: no other shape is better for that."""
    found = []
    for seed in range(4):
        world = World(seed, 0.0)
        load = Load(world, plan_in(world, 0.02), batch, 0.1)
        for world.slowness in (1.0, 1.6) * 2:
            found.append(load.regret(80))
    assert statistics.mean(found) <= 0.03, found


def test_a_load_that_swings():
    """1 -> 128 -> 1 requests: trees at 1, plain rounds or small trees at 128, trees again at once."""
    world = World(0, 0.0)
    plan = plan_in(world, 0.0)
    for batch in (1, 128, 1):
        load = Load(world, plan, batch, 0.05)
        assert load.regret(200) <= 0.06
        assert load.used.get(None, 0) <= 20 if batch == 1 else load.used.get(SHAPES[3], 0) <= 20


def test_rounds_above_the_limit_are_plain():
    world = World(0, 0.0)
    plan = plan_in(world, 0.0)
    plan.plain_above = 4
    rows = [Row(world.rng) for _ in range(5)]
    assert plan.choose(rows) is None and plan.choose(rows[:4]) is not None


@pytest.mark.parametrize("accepted", range(4))
def test_evidence_is_the_derivative_of_the_likelihood(accepted):
    model, at, h = Acceptance((0.8, 0.6, 0.5)), 0.5, 1e-5

    def log_likelihood(level: float) -> float:
        chances = [sigmoid(math.log(p / (1 - p)) + level) for p in (0.8, 0.6, 0.5)]
        fails = [] if accepted == 3 else [1 - chances[accepted]]
        return sum(math.log(p) for p in chances[:accepted] + fails)

    score, information = (table[level_index(at)][accepted] for table in (model.scores, model.information))
    left, middle, right = (log_likelihood(at + x) for x in (-h, 0, h))
    assert score == pytest.approx((right - left) / (2 * h), rel=1e-6)
    assert information == pytest.approx(-(right - 2 * middle + left) / h**2, rel=1e-3)


def test_expected_tokens():
    model = Acceptance((0.5, 0.5))
    assert model.tokens({level_index(0.0): 1}) == pytest.approx(1 + 0.5 + 0.25)
    assert (
        model.tokens({level_index(-100.0): 1}) == pytest.approx(1.0, abs=0.02)
        and model.tokens({level_index(100.0): 1}) > 2.9
    )
    for _ in range(2000):
        model.learn(1.75, 1.4)
    assert model.tokens({level_index(0.0): 1}) == pytest.approx(1.4, rel=0.02)


def test_costs():
    shape = Shape(3, 2, 6)
    table = {(1, None): 10.0, (4, None): 40.0, (1, shape): 20.0, (4, shape): 80.0}
    padded, smooth = Costs(table, {None: 0.5}), Costs(table, padded=False)
    assert [padded.time(b, None) for b in (1, 2, 4)] == pytest.approx([10, 40, 40])
    assert padded.time(1, None, context=6) == pytest.approx(13)
    assert [smooth.time(b, shape) for b in (1, 2, 3, 4, 8)] == pytest.approx([20, 40, 60, 80, 160])
    for _ in range(200):
        smooth.learn(1, shape, 0, 30.0)
    assert smooth.time(1, shape) == pytest.approx(30.0)
    slower = 1.5 ** (2 / 3)  # what is believed to be the machine, not the tree
    assert smooth.time(1, None) == pytest.approx(10 * slower)
    assert smooth.time(4, shape) == pytest.approx(80 * slower)
    for _ in range(200):
        smooth.learn(1, None, 0, 10.0)
        smooth.learn(1, shape, 0, 30.0)
    assert smooth.time(1, shape) == pytest.approx(30.0, rel=0.05)  # it was the tree
    assert smooth.time(1, None) == pytest.approx(10.0, rel=0.05)
    before = smooth.time(4, None)
    smooth.learn(4, None, 0, 1e9)
    assert smooth.time(4, None) < 1.17 * before
    smooth.learn(4, None, 0, 0.0)  # a clock that did not move says nothing
    for _ in range(100):
        padded.learn(1, None, 6, 26.0)
    assert padded.time(1, None, context=6) == pytest.approx(26.0)  # its context is slower too


@pytest.mark.parametrize(
    "table",
    [{}, {(1, None): 0.0}, {(1, None): math.nan}, {(1, None): 1.0, (2, Shape(3, 2, 6)): 1.0}],
)
def test_tables_that_are_no_costs(table):
    with pytest.raises(ValueError):
        Costs(table)


def test_the_plan_of_a_server():
    rows = [Row(random.Random(0))]
    pinned = plan_for((SHAPES[0],), None, None)
    assert isinstance(pinned, StaticPlan) and pinned.choose(rows) == SHAPES[0]
    assert plan_for((), None, None).choose(rows) is None
    limited = StaticPlan(SHAPES[1], 8)
    assert [limited.choose(rows * n) for n in (1, 8, 9, 64)] == [SHAPES[1]] * 2 + [None] * 2
    size = (3, 2, 6)
    times = [(1, None, 100.0), (1, size, 110.0), (8, None, 100.0), (8, size, 900.0)]
    plan = plan_for(SHAPES, None, encode(Calibration(times)))
    assert plan.choose(rows) == SHAPES[0] and plan.choose(rows * 8) is None
    hopeless = Calibration(times, priors=[(size, [0.01] * 3)])
    assert plan_for(SHAPES, None, encode(hopeless)).choose(rows) is None


def test_a_batch_uses_the_trees_it_was_timed_with():
    """The small tree at 8 requests, the large one at 1, and 4 run in the graphs of 8."""
    large, small = SHAPES[3], SHAPES[0]
    table = {(1, None): 100.0, (1, large): 101.0, (8, None): 100.0, (8, small): 101.0}
    costs = Costs(table)
    assert costs.time(4, large) == costs.time(1, small) == costs.time(8, large) == math.inf
    assert Costs(table, padded=False).time(4, large) == math.inf
    costs.learn(8, large, 0, 5.0)  # an answer from before the batch grew
    plan = AdaptivePlan(Gain({s: default_prior(s) for s in (large, small)}), costs, (large, small))
    rows = [Row(random.Random(0))]
    assert [plan.choose(rows * n) for n in (1, 4, 8, 1)] == [large, small, small, large]


def test_the_plan_counts_what_it_expected():
    world = World(0, 0.0)
    plan = plan_in(world, 0.0)
    load = Load(world, plan, 8, 0.05)
    load.regret(300)
    assert plan.expected_tokens == pytest.approx(load.made, rel=0.1)
