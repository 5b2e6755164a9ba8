"""The scheduler against a worker that checks every row: single cases whose answers are known beforehand."""

import pytest
from fake_ring import EOS, TREE, Ring, assert_answered, expected, generate, prompt_of, scheduler_with

from tokenspeed.config import Shape
from tokenspeed.ipc.messages import unpack

BUDGET = 32


@pytest.mark.parametrize("rounds_in_flight", [1, 2, 3])
@pytest.mark.parametrize("shape", [None, TREE])
@pytest.mark.parametrize(
    "length", [1, 2, BUDGET - 1, BUDGET, BUDGET + 1, 2 * BUDGET - 1, 2 * BUDGET, 2 * BUDGET + 1]
)
def test_chunk_boundaries(length, shape, rounds_in_flight):
    ring = Ring(scheduler_with(shape, rounds_in_flight=rounds_in_flight))
    prompt = prompt_of(length)
    ring.add(generate(1, prompt, max_tokens=20, ignore_eos=True))
    ring.run()
    assert_answered(ring, 1, prompt, max_tokens=20, ignore_eos=True)
    chunks = [unpack(step.prefill_counts) for step in ring.steps if step.prefill_counts]
    assert [sum(c) for c in chunks] == [BUDGET] * (length // BUDGET) + [length % BUDGET] * bool(
        length % BUDGET
    )


def test_decode_follows_prefill_without_waiting_for_the_answer():
    ring = Ring(scheduler_with(rounds_in_flight=2))
    ring.add(generate(1, prompt_of(5), max_tokens=3, ignore_eos=True))
    first, second = ring.send(), ring.send()
    assert unpack(first.prefill_counts) == [5] and not first.decode_slots
    assert second.decode_slots == first.prefill_slots
    assert ring.send() is None  # two in flight
    ring.answer()
    assert ring.send().decode_slots  # a third token may still come
    ring.answer()
    assert ring.send() is None  # the step in flight brings the last token for certain
    ring.run()
    assert_answered(ring, 1, prompt_of(5), max_tokens=3, ignore_eos=True)


def test_every_running_row_decodes_in_every_step():
    ring = Ring(scheduler_with(TREE, max_num_seqs=4))
    for rid in range(3):
        ring.add(generate(rid, prompt_of(4, rid), max_tokens=60, ignore_eos=True))
    while len(ring.scheduler.running) < 3 or any(not a.tokens for a in ring.answers.values()):
        ring.send()
        ring.answer()
    ring.add(generate(9, prompt_of(150), max_tokens=5))
    prefilling = 0
    while not ring.answers[9].tokens:
        step = ring.send()
        live = [r.slot for r in ring.scheduler.running.values() if r.rid != 9]
        assert set(live) <= set(unpack(step.decode_slots)), "a long prompt starves decoding"
        prefilling += bool(step.prefill_slots)
        ring.answer()
    assert prefilling == 5  # 150 tokens, 32 a step
    ring.run()


def test_a_short_prompt_does_not_wait_for_a_long_one():
    ring = Ring(scheduler_with())
    ring.add(generate(1, prompt_of(150), max_tokens=2))
    ring.add(generate(2, prompt_of(100, 5), max_tokens=2))
    ring.add(generate(3, prompt_of(6, 9), max_tokens=2))
    step = ring.send()
    # A quarter of 32 was kept for those behind; 6 of these 8 are wanted, 2 go back to the long one.
    assert unpack(step.prefill_counts) == [26, 6]
    assert [unpack(a.input_ids)[0] for a in step.admit] == [prompt_of(150)[0], prompt_of(6, 9)[0]]
    ring.answer()
    assert unpack(ring.send().prefill_counts) == [32]
    ring.run()
    for rid, prompt in ((1, prompt_of(150)), (2, prompt_of(100, 5)), (3, prompt_of(6, 9))):
        assert_answered(ring, rid, prompt, max_tokens=2)


def test_several_prompts_share_a_step():
    ring = Ring(scheduler_with())
    for rid in range(4):
        ring.add(generate(rid, prompt_of(8, rid), max_tokens=2))
    assert unpack(ring.send().prefill_counts) == [8, 8, 8, 8]
    ring.run()


def test_prefix_hit_leaves_a_token_to_compute():
    ring = Ring(scheduler_with())
    prompt = prompt_of(16)
    for rid, cached in ((1, 0), (2, 12), (3, 12)):
        ring.add(generate(rid, prompt, max_tokens=5, ignore_eos=True))
        ring.run()
        assert_answered(ring, rid, prompt, max_tokens=5, ignore_eos=True)
        assert ring.answers[rid].finished[0].num_cached == cached
    longer = prompt + ring.answers[1].tokens + [3]
    ring.add(generate(4, longer, max_tokens=5))
    ring.run()
    # 16 + 5 tokens are known, the last without K/V: 5 whole pages of 4.
    assert ring.answers[4].finished[0].num_cached == 20
    assert_answered(ring, 4, longer, max_tokens=5)
    counters = ring.scheduler.counters
    assert counters.prefix_cache_queries == 16 * 3 + 22
    assert counters.prefix_cache_hits == 12 * 2 + 20


def test_prompt_is_shared_while_its_first_request_still_runs():
    ring = Ring(scheduler_with())
    prompt = prompt_of(40)
    ring.add(generate(1, prompt, max_tokens=100, ignore_eos=True))
    while not ring.answers[1].tokens:
        ring.send()
        ring.answer()
    ring.add(generate(2, prompt, max_tokens=4, ignore_eos=True))
    ring.run()
    assert ring.answers[2].finished[0].num_cached == 36
    assert_answered(ring, 1, prompt, max_tokens=100, ignore_eos=True)
    assert_answered(ring, 2, prompt, max_tokens=4, ignore_eos=True)


def test_equal_prompts_at_once_leave_no_duplicate_pages():
    ring = Ring(scheduler_with(TREE))
    prompt = prompt_of(12)
    for rid in range(2):
        ring.add(generate(rid, prompt, max_tokens=10, ignore_eos=True))
    ring.run()
    cache = ring.scheduler.cache
    assert cache.num_cached == (12 + 10 - 1) // 4
    assert cache.num_free == cache.num_total - cache.num_cached


def test_prefix_caching_off():
    ring = Ring(scheduler_with(enable_prefix_caching=False))
    for rid in range(2):
        ring.add(generate(rid, prompt_of(16), max_tokens=5))
        ring.run()
        assert ring.answers[rid].finished[0].num_cached == 0
    assert ring.scheduler.cache.num_free == 100 and ring.scheduler.counters.prefix_cache_queries == 0


def find_stop(prompt: list[int], at_least: int) -> tuple[int, int]:
    """A token that first appears in the answer at an index >= at_least: the token and the index."""
    tokens, _ = expected(prompt, generate(0, prompt, max_tokens=60, ignore_eos=True).params)
    for i in range(at_least, 60):
        if tokens[i] not in tokens[:i]:
            return tokens[i], i
    raise AssertionError("no such token")


@pytest.mark.parametrize("shape", [None, Shape(8, 1, 9)])
@pytest.mark.parametrize("at_least", range(0, 12))
def test_stop_token_anywhere_in_a_round(shape, at_least):
    prompt = prompt_of(9, 2)
    token, index = find_stop(prompt, at_least)
    ring = Ring(scheduler_with(shape), seed=at_least)
    params = dict(max_tokens=60, ignore_eos=True, stop_token_ids=(token,), logprobs=0)
    ring.add(generate(1, prompt, **params))
    ring.run()
    assert_answered(ring, 1, prompt, **params)
    assert len(ring.answers[1].tokens) == len(ring.answers[1].logprobs) == index + 1
    assert [entry.logprob for entry in ring.answers[1].logprobs] == ring.answers[1].tokens


def test_eos_and_ignore_eos_and_min_tokens():
    prompt = next(
        p
        for p in (prompt_of(5, k) for k in range(1000))
        if EOS in expected(p, generate(0, p, max_tokens=20, ignore_eos=True).params)[0][:10]
    )
    for rid, params in enumerate((dict(), dict(ignore_eos=True), dict(min_tokens=15), dict(min_tokens=20))):
        ring = Ring(scheduler_with(TREE))
        ring.add(generate(rid, prompt, max_tokens=20, **params))
        ring.run()
        assert_answered(ring, rid, prompt, max_tokens=20, **params)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 17])
@pytest.mark.parametrize("shape", [None, TREE])
def test_max_tokens_is_exact(max_tokens, shape):
    ring = Ring(scheduler_with(shape))
    ring.add(generate(1, prompt_of(6), max_tokens=max_tokens, ignore_eos=True))
    ring.run()
    assert len(ring.answers[1].tokens) == max_tokens
    assert_answered(ring, 1, prompt_of(6), max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("length", [58, 59, 60, 61, 62, 63])
@pytest.mark.parametrize("shape", [None, TREE])
def test_context_limit(length, shape):
    """The pool holds the context limit exactly, and a tree's nodes past it: a page too many would be missed."""
    ring = Ring(scheduler_with(shape, max_model_len=64, num_pages=19 if shape else 17))
    ring.add(generate(1, prompt_of(length), max_tokens=64 - length, ignore_eos=True))
    ring.run()
    assert len(ring.answers[1].tokens) == 64 - length
    assert_answered(ring, 1, prompt_of(length), max_tokens=64 - length, ignore_eos=True)
    assert all((step.shape is None) == (shape is None) for step in ring.steps if step.decode_slots)


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
def test_a_request_that_fills_the_pool_ends_in_plain_rounds(rounds_in_flight):
    """There is room for its last tokens, but none for a tree beside them; that is no reason to preempt it."""
    ring = Ring(scheduler_with(TREE, num_pages=1 + 8, rounds_in_flight=rounds_in_flight))
    ring.add(generate(1, prompt_of(20), max_tokens=13, ignore_eos=True))
    ring.run()
    assert_answered(ring, 1, prompt_of(20), max_tokens=13, ignore_eos=True)
    assert ring.scheduler.counters.num_preemptions == 0
    shapes = [step.shape is None for step in ring.steps if step.decode_slots]
    assert shapes == sorted(shapes) and set(shapes) == {False, True}


@pytest.mark.parametrize("length", [1, 5, 40, 70])
def test_prompt_logprobs(length):
    ring = Ring(scheduler_with())
    prompt = prompt_of(length)
    ring.add(generate(1, prompt, max_tokens=4))
    ring.run()
    for rid, max_tokens in ((2, 4), (3, 0)):
        ring.add(generate(rid, prompt, max_tokens=max_tokens, prompt_logprobs=0))
        ring.run()
        answer = ring.answers[rid]
        assert [entry.logprob for entry in answer.prompt_logprobs] == prompt[1:]
        assert answer.finished[0].num_cached == 0  # a cached token would have no entry
        assert_answered(ring, rid, prompt, max_tokens=max_tokens)
    assert ring.answers[3].finished[0].reason == "length"


def test_refusals():
    ring = Ring(scheduler_with(num_pages=9, max_model_len=200))  # 8 pages of 4 tokens
    ring.add(generate(1, prompt_of(33), max_tokens=1))
    ring.add(generate(2, prompt_of(20), max_tokens=14))
    ring.add(generate(3, [], max_tokens=1))
    ring.add(generate(4, prompt_of(200), max_tokens=1))
    params = [ring.answers[rid].finished[0].param for rid in (1, 2, 3, 4)]
    assert params == [None, "max_tokens", None, None]
    for rid in (1, 2, 3, 4):
        finished = ring.answers[rid].finished[0]
        assert (finished.reason, finished.status) == ("error", 400)
    assert "KV pool" in ring.answers[2].finished[0].message
    assert ring.scheduler.is_idle and ring.send() is None
    ring.add(
        generate(5, prompt_of(20), max_tokens=13, ignore_eos=True)
    )  # just fits: the last token needs no page
    ring.run()
    assert_answered(ring, 5, prompt_of(20), max_tokens=13, ignore_eos=True)


def test_a_full_server_prefills_for_several_at_a_time():
    """Answers end one by one; the prompts that follow share prefills, none waits more than a few steps."""
    ring = Ring(
        scheduler_with(None, num_pages=2001, max_num_seqs=40, max_num_batched_tokens=512), check=False
    )
    lengths = {rid: 20 + rid for rid in range(40)} | dict.fromkeys(range(40, 80), 30)
    for rid, length in lengths.items():
        ring.add(generate(rid, prompt_of(4, rid), max_tokens=length, ignore_eos=True))
    ring.run()
    for rid, length in lengths.items():
        assert_answered(ring, rid, prompt_of(4, rid), max_tokens=length, ignore_eos=True)
    prefills = [
        (i, len(unpack(step.prefill_slots))) for i, step in enumerate(ring.steps) if step.prefill_slots
    ]
    assert prefills[0] == (0, 40)
    full = [count for i, count in prefills[1:] if len(unpack(ring.steps[i].decode_slots)) > 32]
    assert sum(full) > 20 and min(full[1:]) >= 4, full
