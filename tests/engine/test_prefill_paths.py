"""However a prompt gets into the cache, the answer and the draft's success are the same, and so are the draft's rows.

Whole or in chunks, cold or after a prefix hit (of a prompt, or of an answer that decoding has written). The draft's
rows decide nothing but how often it is right, so a fault in them shows in no token: both are compared here.
"""

from collections.abc import Callable

import pytest
import torch
from harness import Answer, InProcessEngine, greedy
from tiny import make_tiny_draft

LENGTHS = [1, 15, 16, 17, 31, 32, 33, 48]
SHAPE = "4/4/16"
WINDOW = 3  # more than one row, so that what stands before the last token has a say
NUM_TOKENS = 18


@pytest.fixture(scope="module")
def target(tiny_model_dir):
    return tiny_model_dir("llama")


@pytest.fixture(scope="module", params=["eagle", "eagle4"])
def make(request, target, tmp_path_factory):
    """make(**options) -> an engine with a draft of this method."""
    window = {} if request.param == "eagle" else {"sliding_window": WINDOW}
    draft = make_tiny_draft(tmp_path_factory.mktemp("draft"), target, request.param, **window)

    def engine(**options) -> InProcessEngine:
        return InProcessEngine(target, spec=request.param, draft=str(draft), spec_shape=SHAPE, **options)

    return engine


@pytest.fixture(scope="module")
def cold(make):
    """cold(prompt) -> what `one` says of an engine that computes every prompt whole."""
    engine = make(enable_prefix_caching=False)
    known: dict[tuple[int, ...], tuple] = {}

    def ask(prompt: list[int]) -> tuple[Answer, tuple[torch.Tensor, torch.Tensor]]:
        key = tuple(prompt)
        if key not in known:
            known[key] = one(engine, prompt)
        return known[key]

    return ask


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (length,), generator=generator).tolist()


def one(engine: InProcessEngine, prompt: list[int]) -> tuple[Answer, tuple[torch.Tensor, torch.Tensor]]:
    """The answer to a single request, and the draft's K and V of tokens 1.. of prompt and answer."""
    (answer,) = engine.generate([prompt], greedy(NUM_TOKENS, ignore_eos=True))
    inner = engine.runner.engine
    slot = engine.scheduler._free_slots[-1]  # its block table stands until the next step
    indices = torch.arange(1, len(prompt) + NUM_TOKENS)[None]
    places = inner.state.kv_slots(inner.state.block_table[slot : slot + 1], indices)[0]
    keys, values = inner.drafter._pool.slots(0)
    return answer, (keys[places].clone(), values[places].clone())


def check(engine: InProcessEngine, cold: Callable, prompt: list[int]) -> Answer:
    got, rows = one(engine, prompt)
    expected, expected_rows = cold(prompt)
    assert got.token_ids == expected.token_ids
    for a, b in zip(rows, expected_rows, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert got.finished.accepted_per_depth == expected.finished.accepted_per_depth
    assert got.finished.num_rounds == expected.finished.num_rounds
    return got


def test_the_draft_is_right_and_wrong(cold):
    answers = [cold(text(n, n))[0] for n in LENGTHS]
    accepted, rounds = (sum(getattr(a.finished, f) for a in answers) for f in ("num_accepted", "num_rounds"))
    assert 0.1 < accepted / rounds < 3.5


@pytest.mark.parametrize("budget", [16, 7])
def test_chunks(make, cold, budget):
    engine = make(enable_prefix_caching=False, max_num_batched_tokens=budget)
    for length in LENGTHS:
        check(engine, cold, text(length, length))


def test_chunks_of_several_prompts(make, cold):
    """Prompts share each step's budget, beside rounds of those that are further."""
    engine = make(enable_prefix_caching=False, max_num_batched_tokens=16)
    prompts = [text(length, length) for length in LENGTHS]
    params = greedy(NUM_TOKENS, ignore_eos=True)
    for prompt, got in zip(prompts, engine.generate(prompts, params), strict=True):
        expected, _ = cold(prompt)
        assert got.token_ids == expected.token_ids
        assert got.finished.accepted_per_depth == expected.finished.accepted_per_depth


def test_prefix_of_a_prompt(make, cold):
    engine = make()
    for length in LENGTHS:
        check(engine, cold, text(length, length))
        again = check(
            engine, cold, text(length, length)
        )  # the same prompt: all its whole pages but the last token's
        assert again.finished.num_cached == (length - 1) // 16 * 16
        longer = check(engine, cold, text(length, length) + text(5, 1))
        assert longer.finished.num_cached == length // 16 * 16


def test_prefix_of_an_answer(make, cold):
    """Pages that rounds have filled, with kept paths across their borders."""
    engine = make()
    for length in LENGTHS:
        prompt = text(length, 100 + length)
        first = check(engine, cold, prompt)
        known = length + NUM_TOKENS - 1  # the last token has no K/V
        second = check(engine, cold, prompt + first.token_ids + text(3, 2))
        assert second.finished.num_cached == known // 16 * 16


def test_prefix_hit_and_chunks(make, cold):
    engine = make(max_num_batched_tokens=7)
    for length in LENGTHS:
        check(engine, cold, text(length, length))
        check(engine, cold, text(length, length) + text(19, 3))


def test_a_lost_aux_state_is_noticed(make, cold, monkeypatch):
    engine = make()
    one(engine, text(32, 32))
    monkeypatch.setattr(engine.runner.engine, "resume", lambda slot, page: None)
    with pytest.raises(AssertionError):
        check(engine, cold, text(32, 32) + text(5, 1))
