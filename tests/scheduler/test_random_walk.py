"""Many requests at random: aborts, stop strings, failures, tiny pools. Books are checked after each event."""

import random

import pytest
from fake_ring import Ring, expected, generate, scheduler_with
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tokenspeed.config import Shape

SHAPES = [None, Shape(2, 1, 3), Shape(3, 2, 6), Shape(4, 4, 16)]


class Changing:
    """Another shape each step, as a cost model may choose."""

    expected_tokens = 0.0

    def __init__(self, rng: random.Random):
        self._rng = rng

    def choose(self, rows) -> Shape | None:
        assert rows
        return self._rng.choice(SHAPES)

    def observe(self, shape, rows, elapsed_us) -> None:
        assert all(0 <= accepted <= (shape.steps if shape else 0) for _, accepted in rows)


def random_request(rng: random.Random, rid: int, stems: list[list[int]]) -> tuple[list[int], dict]:
    prompt = rng.choice(stems)[: rng.randint(0, 30)] + [rng.randrange(50) for _ in range(rng.randint(1, 20))]
    params = dict(
        max_tokens=rng.randint(1, 30),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=(3,) if rng.random() < 0.2 else (),
        logprobs=0 if rng.random() < 0.3 else None,
        prompt_logprobs=0 if rng.random() < 0.1 else None,
    )
    if rng.random() < 0.2:
        params["min_tokens"] = rng.randint(0, params["max_tokens"])
    return prompt, params


def play(scheduler, seed: int, count: int, unkind: float = 0.0, fail_share: float = 0.0) -> Ring:
    """Runs `count` requests, sent in bursts; a share `unkind` is aborted or stopped at a random moment."""
    rng = random.Random(seed)
    ring = Ring(scheduler, seed, fail_share)
    stems = [[rng.randrange(50) for _ in range(30)] for _ in range(4)]
    requests = [random_request(rng, rid, stems) for rid in range(count)]
    ring.requests = dict(enumerate(requests))
    ring.unkind = set()
    coming = list(range(count))
    while coming or not scheduler.is_idle:
        dice = rng.random()
        if coming and dice < 0.25:
            rid = coming.pop(0)
            prompt, params = requests[rid]
            ring.add(generate(rid, prompt, **params))
        elif dice < 0.25 + 0.1 * unkind:
            disturb(ring, rng)
        elif dice < 0.6:
            ring.send()
        elif ring.sent:
            ring.answer()
        else:
            assert ring.send() or scheduler.is_idle, "stuck"
    return ring


def disturb(ring: Ring, rng: random.Random) -> None:
    live = [rid for rid, answer in ring.answers.items() if not answer.finished]
    if not live:
        return
    rid = rng.choice(live)
    ring.unkind.add(rid)
    if rng.random() < 0.7 or not ring.answers[rid].tokens:
        ring.abort(rid)
    else:
        ring.stop_string(rid, rng.randint(1, len(ring.answers[rid].tokens)))


def assert_all_answered(ring: Ring) -> None:
    for rid, (prompt, params) in ring.requests.items():
        answer = ring.answers[rid]
        assert len(answer.finished) == 1, f"request {rid} has {len(answer.finished)} ends"
        tokens, reason = expected(prompt, generate(rid, prompt, **params).params)
        finished = answer.finished[0]
        if rid in ring.unkind or finished.reason == "error":
            assert answer.tokens == tokens[: len(answer.tokens)]
            assert finished.reason in ("abort", "stop", "error", reason)
        else:
            assert (answer.tokens, finished.reason) == (tokens, reason)
        if params["logprobs"] is not None:
            assert [entry.logprob for entry in answer.logprobs] == answer.tokens
        if params["prompt_logprobs"] is not None and answer.tokens:
            assert [entry.logprob for entry in answer.prompt_logprobs] == prompt[1:]
    cache = ring.scheduler.cache
    assert ring.scheduler.is_idle and cache.num_used == 0
    assert cache.num_free + cache.num_cached == cache.num_total
    cache.pool.drop(cache.tree.evict(cache.num_cached))
    cache.check()
    assert cache.num_free == cache.num_total


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
@pytest.mark.parametrize("num_pages", [21, 40, 230])  # 20 pages of 4: one request may take them all
def test_200_requests(num_pages, rounds_in_flight):
    scheduler = scheduler_with(
        num_pages=num_pages, rounds_in_flight=rounds_in_flight, max_num_batched_tokens=16
    )
    scheduler.plan = Changing(random.Random(1))
    ring = play(scheduler, seed=num_pages, count=200)
    assert_all_answered(ring)
    assert (scheduler.counters.num_preemptions > 0) == (num_pages < 230)


@pytest.mark.parametrize("seed", range(4))
def test_200_requests_with_aborts_stop_strings_and_failures(seed):
    scheduler = scheduler_with(num_pages=30, rounds_in_flight=1 + seed % 2, enable_prefix_caching=seed != 3)
    scheduler.plan = Changing(random.Random(seed))
    ring = play(scheduler, seed=100 + seed, count=200, unkind=0.5, fail_share=0.02)
    assert len(ring.unkind) > 20 and scheduler.counters.num_nan_aborted_requests > 3
    assert_all_answered(ring)


def test_storm_of_aborts():
    """A thousand requests, most of them gone soon."""
    scheduler = scheduler_with(SHAPES[2], num_pages=40)
    ring = play(scheduler, seed=5, count=1000, unkind=3.0)
    assert len(ring.unkind) > 300
    assert_all_answered(ring)


class Walk(RuleBasedStateMachine):
    """Hypothesis picks the events, and shrinks them when something breaks."""

    @initialize(
        pages=st.integers(12, 40),
        rounds=st.integers(1, 3),
        seed=st.integers(0, 99),
        size=st.sampled_from([1, 4]),
    )
    def start(self, pages, rounds, seed, size):
        scheduler = scheduler_with(
            num_pages=1 + pages * 4 // size, page_size=size, rounds_in_flight=rounds, max_num_seqs=3,
            max_num_batched_tokens=9, max_model_len=47,
        )  # fmt: skip
        self.rng = random.Random(seed)
        scheduler.plan = Changing(self.rng)
        self.ring = Ring(scheduler, seed)
        self.ring.requests, self.ring.unkind = {}, set()

    @rule(
        stem=st.integers(0, 1),
        shared=st.integers(0, 20),
        tail=st.integers(1, 5),
        max_tokens=st.integers(0, 20),
    )
    def add(self, stem, shared, tail, max_tokens):
        rid = len(self.ring.requests)
        prompt = [stem + 2] * shared + [rid % 50] * tail
        params = dict(max_tokens=max_tokens, ignore_eos=rid % 2 == 0, logprobs=None, prompt_logprobs=None)
        self.ring.requests[rid] = prompt, params
        self.ring.add(generate(rid, prompt, **params))

    @rule()
    def send(self):
        self.ring.send()

    @precondition(lambda self: self.ring.sent)
    @rule()
    def answer(self):
        self.ring.answer()

    @rule()
    def disturb(self):
        disturb(self.ring, self.rng)

    def teardown(self):
        if "ring" in vars(self):
            self.ring.run()
            assert_all_answered(self.ring)


Walk.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestWalk = Walk.TestCase
