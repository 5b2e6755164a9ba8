"""Rounds counted from finished answers are the rounds that decoding made; the draft's heads in the engine."""

import itertools

import pytest
from engine.harness import InProcessEngine, greedy

from tokenspeed.params import SamplingParams
from tokenspeed.spec.eagle4.head import CandidateHead, FullHead
from tokenspeed.worker.replay import CHUNK, pool_tokens, replay

PROMPTS = [[5, 9, 17, 33, 2, 71], [11], list(range(40, 75)), [7, 7, 7, 8], [90, 3], [66] * 20]


@pytest.fixture(scope="module")
def engine_of(tiny_model_dir, tiny_draft_dir):
    def make(method="eagle4", **options) -> InProcessEngine:
        target = tiny_model_dir("llama")
        draft = str(tiny_draft_dir(target, method))
        return InProcessEngine(target, spec=method, draft=draft, **options)

    return make


def check(engine, prompts, answers, params=()) -> int:
    """Compares every answer's account with its replay. Returns the tokens that the drafts got right."""
    accepted = 0
    (shape,) = engine.resolved.shapes
    for prompt, answer, sampled in itertools.zip_longest(prompts, answers, params):
        rounds = replay(engine.runner.engine, prompt, answer.token_ids, shape, sampled)
        kept = [r.accepted for r in rounds]
        told = answer.finished
        assert (len(kept), sum(kept)) == (told.num_rounds, told.num_accepted)
        depths = [sum(k > d for k in kept) for d in range(max(kept, default=0))]
        assert depths == told.accepted_per_depth
        accepted += told.num_accepted
    return accepted


@pytest.mark.parametrize("method", ["eagle", "eagle3", "eagle4"])
@pytest.mark.parametrize("shape", ["1/1/2", "5/1/6", "3/2/6", "8/4/16"])
def test_replayed_rounds_are_those_of_decoding(engine_of, method, shape):
    engine = engine_of(method, spec_shape=shape, enable_prefix_caching=False)
    lengths = [greedy(n) for n in (40, 1, 13, 2, 31, 24)]  # some end in the middle of a round
    assert check(engine, PROMPTS, engine.generate(PROMPTS, lengths)) > 10


def test_sampled_answers_and_stop_tokens_too(engine_of):
    engine = engine_of(spec_shape="4/4/16", enable_prefix_caching=False)
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=30) for i in range(len(PROMPTS))]
    answers = engine.generate(PROMPTS, params)
    stops = [SamplingParams(temperature=0.7, seed=i, max_tokens=30, stop_token_ids=tuple(a.token_ids[9:12]))
             for i, a in enumerate(answers)]  # fmt: skip
    stopped = engine.generate(PROMPTS, stops)
    assert all(a.finished.reason == "stop" for a in stopped)
    check(engine, PROMPTS, answers, params)
    assert check(engine, PROMPTS, stopped, stops) > 0


def test_a_text_of_several_chunks(engine_of):
    engine = engine_of(spec_shape="3/2/6", max_num_batched_tokens=100)
    prompt = [(7 * i) % 300 + 3 for i in range(CHUNK + 70)]
    check(engine, [prompt], engine.generate([prompt], greedy(30)))


def test_pool_holds_the_text():
    assert pool_tokens(1, 16) == 64 and pool_tokens(65, 16) == 80 and pool_tokens(80, 16) == 80


def test_the_full_head_takes_the_place_of_the_candidates(engine_of):
    """Other scores, the same answers; the low-rank tensors are then known and not loaded."""
    candidates, full = engine_of(spec_shape="3/2/6"), engine_of(spec_shape="3/2/6", draft_head="full")
    heads = [engine.runner.engine.drafter.head for engine in (candidates, full)]
    assert [type(head) for head in heads] == [CandidateHead, FullHead]
    assert full.info["memory_draft"] < candidates.info["memory_draft"]
    found, others = (engine.generate(PROMPTS, greedy()) for engine in (candidates, full))
    assert [a.token_ids for a in found] == [a.token_ids for a in others]
    assert sum(a.finished.num_accepted for a in others) > 10
