"""Rounds without speculation in between: the answer stays, and so do the draft's rows that trees would have left."""

import itertools

import pytest
import torch
from harness import InProcessEngine, greedy
from tiny import make_tiny_draft

from tokenspeed.config import Shape

SHAPE = Shape(4, 4, 16)
NUM_TOKENS = 40
PROMPT = list(range(40, 75))


class Pattern:
    """A plan that goes through `kinds` over and over: t is a tree, p a plain round."""

    expected_tokens = 0.0

    def __init__(self, kinds: str):
        self._kinds = itertools.cycle(kinds)

    def choose(self, rows) -> Shape | None:
        return SHAPE if next(self._kinds) == "t" else None

    def observe(self, shape, rows, elapsed_us) -> None:
        pass


@pytest.fixture(scope="module", params=["eagle", "eagle3", "eagle4"])
def make(request, tiny_model_dir, tmp_path_factory):
    target = tiny_model_dir("llama")
    window = {} if request.param == "eagle" else {"sliding_window": 3}
    draft = str(make_tiny_draft(tmp_path_factory.mktemp("draft"), target, request.param, **window))
    return lambda **options: InProcessEngine(
        target, spec=request.param, draft=draft, spec_shape=str(SHAPE), **options
    )


def run(engine: InProcessEngine) -> tuple[list[int], torch.Tensor]:
    """The tokens of the answer, and the draft's K and V of tokens 1.. of prompt and answer."""
    (answer,) = engine.generate([PROMPT], greedy(NUM_TOKENS, ignore_eos=True))
    inner, slot = engine.runner.engine, engine.scheduler._free_slots[-1]
    indices = torch.arange(1, len(PROMPT) + NUM_TOKENS)[None]
    places = inner.state.kv_slots(inner.state.block_table[slot : slot + 1], indices)[0]
    return answer.token_ids, torch.stack([rows[places] for rows in inner.drafter._pool.slots(0)])


@pytest.mark.parametrize("kinds", ["p", "tp", "ptt", "ppppt"])
def test_plain_rounds_leave_what_trees_leave(make, kinds):
    expected, rows = run(make())
    engine = make()
    engine.scheduler.plan = Pattern(kinds)
    got, mixed = run(engine)
    assert got == expected
    torch.testing.assert_close(mixed, rows, rtol=1e-4, atol=1e-4)


def test_a_crowd_is_served_plainly(make):
    """Above the limit rounds are plain, and trees come back when the others have gone."""
    prompts, lengths = [PROMPT, [5, 9, 17], [11], [7, 7, 7, 8]], [NUM_TOKENS, 4, 6, 8]
    params = [greedy(n, ignore_eos=True) for n in lengths]
    trees, limited = make(), make(speculative_disable_by_batch_size=2)
    expected, got = trees.generate(prompts, params), limited.generate(prompts, params)
    assert [a.token_ids for a in got] == [a.token_ids for a in expected]
    rounds = [a.finished.num_rounds for a in got]
    assert 0 < rounds[0] < NUM_TOKENS - 5 and rounds[1] == 0
