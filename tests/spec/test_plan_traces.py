"""The plan against plain rounds and each fixed tree, over counted texts and the times of an H200 (`trace_engine`)."""

import json
import statistics
from functools import cache

import msgspec
import pytest
from spec.trace_engine import TRACES, Device, read_texts, serve

from tokenspeed.config import Shape
from tokenspeed.hub.resolve import DEMO_DRAFT
from tokenspeed.spec.calibration import Calibration, encode
from tokenspeed.spec.cost import Costs
from tokenspeed.spec.eagle4.formats import parse_draft
from tokenspeed.spec.plan import AdaptivePlan, StaticPlan, plan_for

# The 8B inflation as its worker timed it at a start.
TIMES = json.loads(TRACES.with_name("times_8b_h200.json").read_text())
# Plain rounds then make 13,326 tokens a second with 160 requests, and 16,329 with 256; measured: 13,356 and 16,597.
# With this loss, which is fitted to that, the plan without its margin makes 0.99 and 0.92; measured: 0.96 and 0.97.
ROW_US = 16.0
NUM = 64  # requests of a run at least: with fewer, at low loads, which texts come last decides


def calibration() -> Calibration:
    """What a server without a calibration file starts with: these times, and what the demo draft states."""
    raw = json.loads((DEMO_DRAFT / "config.json").read_text())
    stated = parse_draft(raw, "eagle4", DEMO_DRAFT).acceptance
    priors = [((s.steps, s.topk, s.nodes), prior) for s, prior in stated]
    return msgspec.convert({**TIMES, "priors": priors}, Calibration)


def true_costs(error: float) -> Costs:
    """The same, trees slower by `error`; a tree that a batch was not timed with runs as in the nearest that was."""
    table = {(b, Shape(*s) if s else None): us * (1 + error * bool(s)) for b, s, us in TIMES["times"]}
    batches = sorted({batch for batch, _ in table})
    for shape in {shape for _, shape in table}:
        timed = [b for b in batches if (b, shape) in table]
        for b in batches:
            near = next((t for t in timed if t >= b), timed[-1])
            table.setdefault((b, shape), table[near, shape] * max(1.0, b / near))
    return Costs(table, {Shape(*s) if s else None: us for s, us in TIMES["per_token"]})


@cache
def speed(shape: Shape | None, requests: int, error: float) -> float:
    return serve(
        StaticPlan(shape), Device(true_costs(error), 0.01, 1, ROW_US), read_texts(), requests, num=NUM
    )


def fixed_for(requests: int) -> list[Shape | None]:
    ladder = calibration().ladder()
    return [None, *ladder[min(batch for batch in ladder if batch >= requests)]]


@pytest.mark.parametrize("error", [-0.05, 0.05])
@pytest.mark.parametrize("requests", [1, 3, 8, 16, 33, 64, 80, 128, 160, 256])
def test_the_plan_never_loses(requests, error):
    """At 0.98 of plain rounds at least, and within 5 % of the best fixed tree, from the first round on."""
    runs = []
    for seed in range(
        2, 5 if requests <= 16 else 3
    ):  # of rounds' times, which decide more where few rounds are seen
        plan = plan_for((), None, encode(calibration()))
        assert isinstance(plan, AdaptivePlan)
        runs.append(
            serve(plan, Device(true_costs(error), 0.01, seed, ROW_US), read_texts(), requests, num=NUM)
        )
    found = statistics.mean(runs)
    speeds = {str(shape): speed(shape, requests, error) for shape in fixed_for(requests)}
    assert found >= 0.98 * speeds["None"], (runs, speeds)
    assert found >= 0.95 * max(speeds.values()), (runs, speeds)


def test_a_text_is_walked_as_it_was_counted():
    """A request after another, one fixed tree: the rounds are those that the counts say, the answers whole."""
    shape, text = Shape(8, 4, 16), read_texts()[1]
    counts, at, rounds = text.accepted[shape], 1, 0
    while at < text.length:
        at, rounds = at + counts[at - 1] + 1, rounds + 1
    device = Device(true_costs(0.0), 0.0, 0)
    made = serve(StaticPlan(shape), device, [text], 1, max_tokens=1000, num=2) * device.now / 1e6
    assert made == pytest.approx(2 * text.length)
    assert 2 * rounds <= device.rounds[str(shape)] <= 2 * (rounds + 1)  # and one in flight when it ends
