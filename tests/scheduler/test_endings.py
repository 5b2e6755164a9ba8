"""How requests leave the scheduler before their time, and what is told of them: preemption, aborts, stop
strings, failed rows, the account of speculation."""

from itertools import zip_longest

import pytest
from fake_ring import TREE, Ring, assert_answered, generate, prompt_of, scheduler_with

from tokenspeed.config import Shape
from tokenspeed.ipc.messages import StepDone, pack, unpack
from tokenspeed.scheduler.request import Status


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
@pytest.mark.parametrize("shape", [None, TREE, Shape(4, 4, 16)])
def test_preemption_loses_nothing(shape, rounds_in_flight):
    """A pool of 1.5 requests, 32 of them."""
    ring = Ring(scheduler_with(shape, num_pages=1 + 15, rounds_in_flight=rounds_in_flight, max_model_len=60))
    for rid in range(32):
        ring.add(generate(rid, prompt_of(10, rid), max_tokens=30, ignore_eos=True, logprobs=0))
    ring.run()
    assert ring.scheduler.counters.num_preemptions > 0
    for rid in range(32):
        assert_answered(ring, rid, prompt_of(10, rid), max_tokens=30, ignore_eos=True, logprobs=0)
        assert [entry.logprob for entry in ring.answers[rid].logprobs] == ring.answers[rid].tokens
    assert ring.scheduler.counters.prompt_tokens == 320
    assert ring.scheduler.counters.generation_tokens == 32 * 30


def test_preempted_request_keeps_prompt_and_front_place():
    ring = Ring(scheduler_with(num_pages=1 + 10, rounds_in_flight=1, max_num_batched_tokens=64))
    for rid in range(3):
        ring.add(generate(rid, prompt_of(10, rid), max_tokens=20, ignore_eos=True))
    while not ring.scheduler.counters.num_preemptions:
        ring.send()
        ring.answer()
    # 2 was never admitted. It would fit now, but must not overtake 1.
    assert [request.rid for request in ring.scheduler.waiting] == [1, 2]
    admits = len([a for step in ring.steps for a in step.admit])
    ring.run()
    again = [a for step in ring.steps for a in step.admit][admits:]
    first = next(a for a in again if unpack(a.input_ids)[:10] == prompt_of(10, 1))
    assert first.num_prompt == 10 and len(unpack(first.input_ids)) > 10
    for rid in range(3):
        assert_answered(ring, rid, prompt_of(10, rid), max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
def test_abort_at_every_moment(rounds_in_flight):
    """Waiting, prefilling, decoding, with steps in flight; another request goes on and takes the pages."""
    prompt, other = prompt_of(70), prompt_of(20, 5)
    for moment in range(14):
        ring = Ring(
            scheduler_with(TREE, rounds_in_flight=rounds_in_flight, num_pages=1 + 30, max_model_len=100)
        )
        ring.add(generate(1, prompt, max_tokens=20, ignore_eos=True))
        for event in range(moment):
            if event % 2 == 0 or not ring.sent:
                ring.send()
            else:
                ring.answer()
        ring.abort(1)
        ring.abort(1)
        ring.abort(77)
        ring.add(generate(2, other, max_tokens=30, ignore_eos=True))
        ring.add(generate(3, prompt, max_tokens=20, ignore_eos=True))
        ring.run()
        assert [f.reason for f in ring.answers[1].finished] == ["abort"]
        assert_answered(ring, 2, other, max_tokens=30, ignore_eos=True)
        assert_answered(ring, 3, prompt, max_tokens=20, ignore_eos=True)


def test_rid_used_again_gets_no_stale_tokens():
    """The answer in flight belongs to the request that was aborted, not to the new one of the same slot."""
    ring = Ring(scheduler_with(TREE, max_num_seqs=1))
    ring.add(generate(1, prompt_of(8), max_tokens=20, ignore_eos=True))
    ring.send()
    ring.send()
    ring.abort(1)
    ring.add(generate(1, prompt_of(9, 3), max_tokens=20, ignore_eos=True))
    ring.run()
    assert_answered(ring, 1, prompt_of(9, 3), max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize("kept", [1, 3, 6])
def test_stop_string(kept):
    ring = Ring(scheduler_with(TREE))
    prompt = prompt_of(8)
    ring.add(generate(1, prompt, max_tokens=50, ignore_eos=True))
    while len(ring.answers[1].tokens) < 6:
        ring.send()
        ring.answer()
    ring.stop_string(1, kept)
    ring.stop_string(1, kept)
    ring.stop_string(5, 1)
    ring.run()
    finished = ring.answers[1].finished
    assert [(f.reason, f.num_output, f.stop_token) for f in finished] == [("stop", kept, None)]
    assert ring.scheduler.cache.num_cached == (8 + kept - 1) // 4


def test_failed_row_ends_its_request_only_and_leaves_nothing_behind():
    ring = Ring(scheduler_with())
    ring.add(generate(1, prompt_of(9), max_tokens=5, ignore_eos=True))
    ring.add(generate(2, prompt_of(11, 3), max_tokens=5, ignore_eos=True))
    step = ring.send()
    done = ring.worker.run(ring.sent.popleft())
    failed = StepDone(done.step, done.counts, done.tokens, failed={0: "NaN logits"})
    ring.take(ring.scheduler.update(failed))
    assert len(unpack(step.prefill_slots)) == 2
    finished = ring.answers[1].finished[0]
    assert (finished.reason, finished.status, finished.message) == ("error", 500, "NaN logits")
    ring.run()
    assert_answered(ring, 2, prompt_of(11, 3), max_tokens=5, ignore_eos=True)
    assert ring.scheduler.counters.num_nan_aborted_requests == 1
    assert ring.scheduler.cache.num_cached == (11 + 5 - 1) // 4  # of the other one only


def test_failed_decode_row_leaves_only_what_was_shared_before():
    ring = Ring(scheduler_with(rounds_in_flight=1))
    ring.add(generate(1, prompt_of(9), max_tokens=30, ignore_eos=True))
    while len(ring.answers[1].tokens) < 10:
        ring.send()
        ring.answer()
    step = ring.send()
    ring.take(ring.scheduler.update(StepDone(step.step, pack([0]), b"", failed={0: "NaN logits"})))
    assert ring.answers[1].finished[0].reason == "error" and len(ring.answers[1].tokens) == 10
    assert ring.scheduler.cache.num_cached == 9 // 4  # the prompt's, not those of the output


def test_account_of_speculation():
    ring = Ring(scheduler_with(TREE), seed=3)
    requests = {rid: prompt_of(6, rid) for rid in range(3)}
    for rid, prompt in requests.items():
        ring.add(generate(rid, prompt, max_tokens=23, ignore_eos=True))
    ring.run()
    ends = [ring.answers[rid].finished[0] for rid in requests]
    for end in ends:
        assert end.num_drafted == end.num_rounds * (TREE.nodes - 1)
        assert end.num_accepted == sum(end.accepted_per_depth)
        assert end.accepted_per_depth == sorted(end.accepted_per_depth, reverse=True)
        assert len(end.accepted_per_depth) <= TREE.steps
        # One token from prefill, then accepted ones and one more a round; the last may be cut before its own.
        assert 0 <= 1 + end.num_rounds + end.num_accepted - 23 <= 1
    stats = ring.scheduler.stats()
    counters = stats.counters
    assert counters["spec_decode_num_drafts"] == sum(end.num_rounds for end in ends)
    assert counters["spec_decode_num_draft_tokens"] == sum(end.num_drafted for end in ends)
    assert counters["spec_decode_num_accepted_tokens"] == sum(end.num_accepted for end in ends)
    depths = zip_longest(*(end.accepted_per_depth for end in ends), fillvalue=0)
    assert stats.spec_accepted_per_pos == [sum(column) for column in depths]
    assert counters["generation_tokens"] == 69 and counters["prompt_tokens"] == 18
    assert counters["spec_decode_plain_rounds"] == 0
    assert counters["steps"] == len(ring.steps)


@pytest.mark.parametrize(("max_tokens", "accepted"), [(2, 1), (3, 2), (4, 3), (5, 3), (9, 3)])
def test_draft_tokens_past_the_end_are_not_counted(max_tokens, accepted):
    """A round that yields three draft tokens and one of the target's own, of which some are cut off."""
    scheduler = scheduler_with(TREE, rounds_in_flight=1)
    scheduler.add(generate(1, [1, 2], max_tokens=max_tokens))
    scheduler.update(StepDone(scheduler.schedule().step, pack([1]), pack([9])))
    scheduler.update(StepDone(scheduler.schedule().step, pack([4]), pack([9, 9, 9, 9])))
    counters = scheduler.counters.as_dict()
    assert counters["spec_decode_num_accepted_tokens"] == accepted
    assert counters["generation_tokens"] == min(max_tokens, 5)


def test_plain_rounds_are_counted():
    ring = Ring(scheduler_with(None))
    ring.add(generate(1, prompt_of(6), max_tokens=10, ignore_eos=True))
    ring.run()
    assert ring.scheduler.counters.spec_decode_plain_rounds == 9
    assert ring.answers[1].finished[0].num_rounds == 0


def test_slots_are_released_once_and_reused():
    ring = Ring(scheduler_with(max_num_seqs=2))
    for rid in range(7):
        ring.add(generate(rid, prompt_of(5, rid), max_tokens=4, ignore_eos=True))
    ring.run()
    admits = sum(len(step.admit) for step in ring.steps)
    releases = sum(len(unpack(step.release)) for step in ring.steps)
    assert admits == 7 and 5 <= releases <= 7  # the last slots are named with the next step, if one comes


def test_answers_that_do_not_fit_are_a_broken_invariant():
    for change in (dict(step=5), dict(counts=pack([1, 1])), dict(tokens=b"")):
        ring = Ring(scheduler_with())
        ring.add(generate(1, prompt_of(5), max_tokens=5))
        ring.send()
        done = ring.worker.run(ring.sent.popleft())
        wrong = {"step": done.step, "counts": done.counts, "tokens": done.tokens, **change}
        with pytest.raises(AssertionError):
            ring.scheduler.update(StepDone(**wrong))


def test_status_of_a_request():
    scheduler = scheduler_with()
    scheduler.add(generate(1, prompt_of(5), max_tokens=5))
    request = scheduler.waiting[0]
    assert request.status is Status.WAITING
    scheduler.schedule()
    assert request.status is Status.RUNNING and request.num_scheduled == 5 and request.num_computed == 0
    scheduler.abort(1)
    assert request.status is Status.FINISHED and not scheduler.running
