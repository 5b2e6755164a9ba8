"""200 requests at random through the real engine, in a pool too small for them: aborts, preemption, equal tokens."""

import random

import pytest
from harness import InProcessEngine

from tokenspeed.params import SamplingParams

NUM_REQUESTS = 200
SHAPE = "4/4/16"
POOL = 112  # tokens: two requests of the longest kind do not fit together


@pytest.fixture(scope="module")
def target(tiny_model_dir):
    return tiny_model_dir("llama")


def random_request(rng: random.Random, stems: list[list[int]]) -> tuple[list[int], SamplingParams]:
    prompt = rng.choice(stems)[: rng.randint(0, 30)] + [
        rng.randrange(3, 300) for _ in range(rng.randint(1, 12))
    ]
    fields: dict = dict(max_tokens=rng.randint(1, 40), ignore_eos=rng.random() < 0.8)
    if rng.random() < 0.5:
        fields["temperature"] = 0.0
    else:
        fields |= dict(
            temperature=rng.choice([0.5, 1.0]), seed=rng.randrange(2**40), top_k=rng.choice([0, 20])
        )
    if rng.random() < 0.2:
        fields |= dict(frequency_penalty=0.8, repetition_penalty=1.2, logit_bias={7: 2.0})
    if rng.random() < 0.2:
        fields["stop_token_ids"] = tuple(rng.sample(range(300), 30))
    return prompt, SamplingParams(**fields)


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    stems = [[rng.randrange(3, 300) for _ in range(36)] for _ in range(5)]
    return [random_request(rng, stems) for _ in range(NUM_REQUESTS)]


@pytest.fixture(scope="module")
def expected(target, requests) -> list[list[int]]:
    """With all the room there is, without speculation, without a prefix cache."""
    engine = InProcessEngine(target, max_num_seqs=32, kv_cache_tokens=4096, enable_prefix_caching=False)
    answers = engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("rounds_in_flight", [1, 2])
def test_random_requests(target, tiny_draft_dir, requests, expected, rounds_in_flight):
    engine = InProcessEngine(
        target,
        spec="eagle4",
        draft=str(tiny_draft_dir(target)),
        spec_shape=SHAPE,
        kv_cache_tokens=POOL,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        max_model_len=128,
        rounds_in_flight=rounds_in_flight,
    )
    rng = random.Random(rounds_in_flight)
    rids: list[int] = []
    aborted: set[int] = set()
    while len(rids) < NUM_REQUESTS or not engine.scheduler.is_idle:
        if len(rids) < NUM_REQUESTS and rng.random() < 0.6:
            rids.append(engine.submit(*requests[len(rids)]))
        live = [rid for rid in rids if engine.answers[rid].finished is None]
        if live and rng.random() < 0.05:
            aborted.add(victim := rng.choice(live))
            engine.abort(victim)
            engine.scheduler.check()
        if not engine.scheduler.is_idle:
            engine.advance()  # checks the books
    counters = engine.scheduler.counters
    assert counters.num_preemptions > 20 and len(aborted) > 10 and sum(counters.accepted[1:]) > 100
    reasons = set()
    for rid, tokens in zip(rids, expected, strict=True):
        answer = engine.answers[rid]
        if rid in aborted:
            assert answer.finished.reason == "abort" and answer.token_ids == tokens[: len(answer.token_ids)]
        else:
            assert answer.token_ids == tokens
            assert answer.finished.num_output == len(tokens)
        reasons.add(answer.finished.reason)
    assert reasons == {"abort", "length", "stop"}
