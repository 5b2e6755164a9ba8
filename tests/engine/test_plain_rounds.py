"""Rounds without speculation in between: the answer stays, and so do the draft's rows that trees would have left."""

import itertools

import pytest
import torch
from harness import InProcessEngine, greedy
from tiny import make_tiny_draft

from tokenspeed.config import Shape
from tokenspeed.spec.evaluate import accepted_everywhere
from tokenspeed.worker.replay import read

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


def trees_of(engine: InProcessEngine, prompt: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The answer's tokens; the root's index and the accepted tokens of each round that had a tree."""
    inner, seen = engine.runner.engine, []
    whole_round = inner.round

    def watched(slots, host_slots, shape, max_len):
        (start,) = (inner.state.lengths[slots] - 1).tolist()
        result = whole_round(slots, host_slots, shape, max_len)
        if shape is not None:
            seen.append((start, int(result.counts[0]) - 1))
        return result

    inner.round = watched
    (answer,) = engine.generate([prompt], greedy(NUM_TOKENS, ignore_eos=True))
    inner.round = whole_round
    assert answer.finished.num_rounds == len(seen)
    return answer.token_ids, seen


@pytest.mark.parametrize("kinds", ["t", "tp", "ptt", "ppppt", "tttp" + 7 * "p" + 9 * "t"])
def test_a_tree_accepts_what_it_would_without_plain_rounds_before(make, kinds):
    """What a tree is worth depends on the text before it alone. That is known for every index from one reading of
    the text, so no mean has to be compared and no noise allowed: each tree accepts just so many."""
    engine, reader, every = make(), make().runner.engine, []
    for number in range(5):
        prompt = torch.randint(
            3, 300, (30 + number,), generator=torch.Generator().manual_seed(number)
        ).tolist()
        engine.scheduler.plan = Pattern(kinds)
        tokens, seen = trees_of(engine, prompt)
        text = torch.tensor(prompt + tokens)
        with torch.inference_mode():
            states = read(reader, text)
            known = accepted_everywhere(
                reader.drafter, text, states, len(prompt), SHAPE, reader.pool.page_size
            ).tolist()
        # The last tree may go on past the text.
        got = [min(accepted, len(text) - 1 - start) for start, accepted in seen]
        assert got == [known[start - len(prompt)] for start, _ in seen]
        every += got
    assert 0 < sum(every) < SHAPE.steps * len(every)


def test_a_crowd_is_served_plainly(make):
    """Above the limit rounds are plain, and trees come back when the others have gone."""
    prompts, lengths = [PROMPT, [5, 9, 17], [11], [7, 7, 7, 8]], [NUM_TOKENS, 4, 6, 8]
    params = [greedy(n, ignore_eos=True) for n in lengths]
    trees, limited = make(), make(speculative_disable_by_batch_size=2)
    expected, got = trees.generate(prompts, params), limited.generate(prompts, params)
    assert [a.token_ids for a in got] == [a.token_ids for a in expected]
    rounds = [a.finished.num_rounds for a in got]
    assert 0 < rounds[0] < NUM_TOKENS - 5 and rounds[1] == 0
