"""The demo model says what transformers makes of it; its draft is as good as when its accept lengths were stored."""

import json

import pytest
from harness import InProcessEngine, greedy
from make_references import FILE, NUM_GUARD_TOKENS, SHAPE, accept_length, digest, sampled


@pytest.fixture(scope="module")
def stored():
    return json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def prompts(stored):
    return [row["prompt_ids"] for row in stored["answers"]]


@pytest.fixture(scope="module")
def expected(stored):
    return [row["token_ids"] for row in stored["answers"]]


@pytest.fixture(scope="module")
def plain(demo_dir):
    return InProcessEngine(demo_dir, max_model_len=1024)


@pytest.fixture(scope="module")
def speculative(demo_dir, demo_draft_dir):
    draft = str(demo_draft_dir)
    return InProcessEngine(demo_dir, spec="eagle4", draft=draft, spec_shape=SHAPE, max_model_len=1024)


def alone(engine, prompts, expected):
    answers = [engine.generate([p], greedy(len(e)))[0] for p, e in zip(prompts, expected, strict=True)]
    return [a.token_ids for a in answers]


def batch(engine, prompts, expected):
    return [a.token_ids for a in engine.generate(prompts, [greedy(len(e)) for e in expected])]


def test_plain_alone(plain, prompts, expected):
    assert alone(plain, prompts, expected) == expected


def test_plain_in_a_batch(plain, prompts, expected):
    assert batch(plain, prompts, expected) == expected


def test_speculation_alone(speculative, prompts, expected):
    assert alone(speculative, prompts, expected) == expected


def test_the_accept_length_is_this_drafts(stored, demo_draft_dir):
    """Or the guard below would compare a draft with another one."""
    assert digest(demo_draft_dir) in stored["accept_length"]["draft"], "a new draft? run: make references"


def test_speculation_in_a_batch_and_its_accept_length(speculative, stored, prompts, expected):
    answers = speculative.generate(prompts, greedy(NUM_GUARD_TOKENS))
    got = [a.token_ids[: len(e)] for a, e in zip(answers, expected, strict=True)]
    assert got == expected
    guard = stored["accept_length"]
    assert (guard["device"], guard["shape"], guard["tokens"]) == ("cpu", SHAPE, NUM_GUARD_TOKENS)
    assert accept_length(answers) == pytest.approx(guard["value"], rel=0.02)


def test_the_accept_length_of_sampled_answers(speculative, stored, prompts):
    """The draft looks for what the target's noise will choose; test_noise_mutations.py says what it has without."""
    answers = speculative.generate(prompts, sampled(len(prompts), NUM_GUARD_TOKENS))
    assert accept_length(answers) == pytest.approx(stored["accept_length"]["sampled"], rel=0.02)
