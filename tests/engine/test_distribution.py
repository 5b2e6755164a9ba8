"""What is sampled has exactly the target's distribution, whatever the draft says: chi-square over whole answers.

A made-up model of 16 tokens, a draft that is often wrong, trees on. Three tokens are drawn for every seed; the counts
of the 16^3 answers are compared with probabilities that transformers and float64 give (exact_distribution.py).
"""

import numpy as np
import pytest
from exact_distribution import ExactModel, chi_square
from exactness_results import note
from harness import InProcessEngine
from tiny import make_tiny_draft, make_tiny_model

from tokenspeed.params import SamplingParams
from tokenspeed.worker import engine as engine_module

VOCAB, LENGTH = 16, 3
SHAPE = "3/2/4"  # small, for with the noise the draft is right more often
LEAST_P = 1e-4
PROMPT = [5, 9, 3, 12, 9, 0, 7]
CASES = {
    "T 0.3": dict(temperature=0.3),
    "T 1": dict(temperature=1.0),
    "T 1.5": dict(temperature=1.5),
    "top_k": dict(temperature=1.5, top_k=4),
    "top_p": dict(temperature=1.0, top_p=0.8),
    "min_p": dict(temperature=1.5, min_p=0.15),
    "top_k top_p min_p": dict(temperature=1.5, top_k=9, top_p=0.85, min_p=0.05),
    "repetition": dict(temperature=1.0, repetition_penalty=1.7),
    "frequency": dict(temperature=1.0, frequency_penalty=1.3),
    "frequency below 0": dict(temperature=1.0, frequency_penalty=-2.0),
    "presence": dict(temperature=1.0, presence_penalty=-1.6),
    "logit_bias": dict(temperature=1.0, logit_bias={3: 1.5, 11: -2.0, 5: -100.0}),
    "allowed_token_ids": dict(temperature=1.5, allowed_token_ids=(1, 4, 9, 11, 15), top_k=4),
    "bad words": dict(
        temperature=1.5,
        bad_words_token_ids=(
            (2,),
            *((a, b) for a in range(16) for b in range(16) if (3 * a + b) % 4 == 0),
            *((a, a + 1, (5 * a) % 16) for a in range(15)),
        ),
    ),
    "all": dict(
        temperature=0.9,
        top_k=12,
        top_p=0.95,
        repetition_penalty=0.8,
        frequency_penalty=0.6,
        presence_penalty=0.7,
        logit_bias={2: 1.0, 14: -1.0},
    ),
}
IN_MAKE_TEST = {
    "T 1": 20_000,
    "top_k top_p min_p": 4_000,
    "allowed_token_ids": 4_000,
    "bad words": 4_000,
    "all": 4_000,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    path = tmp_path_factory.mktemp("target")
    return make_tiny_model(path, vocab_size=VOCAB, eos_token_id=None, **sizes, **heads)


@pytest.fixture(scope="module")
def exact(target):
    return ExactModel(target)


@pytest.fixture(scope="module")
def engine(tmp_path_factory, target):
    draft = make_tiny_draft(
        tmp_path_factory.mktemp("draft"), target, candidate_head={"rank": 8, "num_candidates": 8}
    )
    return InProcessEngine(
        target,
        spec="eagle4",
        draft=str(draft),
        spec_shape=SHAPE,
        max_model_len=64,
        max_num_seqs=1000,
        max_num_batched_tokens=1000 * len(PROMPT),
        kv_cache_tokens=100_000,
    )


def draw(engine: InProcessEngine, fields: dict, num: int, first_seed: int = 0) -> tuple[np.ndarray, float]:
    """How often each answer came, int64 [VOCAB ** LENGTH], and the share of answers with a draft token in them."""
    seeds = range(first_seed, first_seed + num)
    params = [SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=seed, **fields) for seed in seeds]
    answers = engine.generate([PROMPT] * num, params)
    cells = [int(np.ravel_multi_index(a.token_ids, (VOCAB,) * LENGTH)) for a in answers]
    accepted = sum(a.finished.num_accepted > 0 for a in answers) / num
    return np.bincount(cells, minlength=VOCAB**LENGTH), accepted


def check(engine: InProcessEngine, exact: ExactModel, name: str, num: int) -> dict:
    """Returns the figures of the case."""
    counts, accepted = draw(engine, CASES[name], num)
    assert 0.2 < accepted < 0.98, "the draft must be right and wrong"
    p = chi_square(counts, exact.sequences(PROMPT, LENGTH, SamplingParams(**CASES[name])))
    assert p > LEAST_P, f"{name}: p = {p:.2g} of {num} draws"
    return {"draws": num, "p": round(p, 4), "answers_with_draft_tokens": round(accepted, 3)}


@pytest.mark.parametrize("name", IN_MAKE_TEST)
def test_distribution(engine, exact, name):
    check(engine, exact, name, IN_MAKE_TEST[name])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_distribution_of_many_draws(engine, exact, name):
    note("distribution", name, check(engine, exact, name, 200_000))


def take_the_first_child(monkeypatch):
    """The root's first child is kept whatever the target drew."""
    accept = engine_module.accept

    def wrong(tree, sampled, steps=None):
        sampled = sampled.clone()
        sampled[:, 0] = tree.tokens[:, 1]
        return accept(tree, sampled, steps)

    monkeypatch.setattr(engine_module, "accept", wrong)


def draw_all_positions_alike(monkeypatch):
    """The noise of a request is the same at every position."""
    sample = engine_module.kernels.sample

    def wrong(*args):
        *settings, positions, slots = args
        return sample(*settings, positions * 0, slots)

    monkeypatch.setattr(engine_module.kernels, "sample", wrong)


def leave_out_the_path(monkeypatch):
    """Penalties and bad words know what is emitted, but not what stands above a node in its own tree."""
    apply = engine_module.LogitEdits.apply

    def wrong(self, logits, slots, tokens, mask, *rest):
        return apply(self, logits, slots, tokens, mask & 1, *rest)

    monkeypatch.setattr(engine_module.LogitEdits, "apply", wrong)


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        (take_the_first_child, "T 1"),
        (draw_all_positions_alike, "T 1"),
        (leave_out_the_path, "frequency below 0"),
        (leave_out_the_path, "bad words"),
    ],
)
def test_a_mistake_is_noticed(monkeypatch, engine, exact, mistake, name):
    mistake(monkeypatch)
    counts, _ = draw(engine, CASES[name], 2000)
    p = chi_square(counts, exact.sequences(PROMPT, LENGTH, SamplingParams(**CASES[name])))
    assert p < 1e-12


@pytest.mark.parametrize("speculative", [False, True])
def test_a_temperature_is_never_ignored(target, engine, speculative):
    """B16: twenty answers without a seed are not one answer, on whatever device this runs."""
    one = engine if speculative else InProcessEngine(target, max_model_len=64)
    answers = one.generate([PROMPT] * 20, SamplingParams(max_tokens=5, temperature=1.5, ignore_eos=True))
    assert len({tuple(a.token_ids) for a in answers}) >= 8
    assert speculative == any(a.finished.num_rounds for a in answers)


def test_chi_square_is_calibrated():
    """p-values of counts drawn from the very distribution are uniform: its own tails are as rare as they say."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(400, 0.3))
    p = [chi_square(rng.multinomial(2000, probs), probs) for _ in range(400)]
    assert 0.45 < np.mean(p) < 0.55 and 0.05 < np.mean(np.array(p) < 0.1) < 0.15
    shifted = probs * rng.uniform(0.8, 1.2, len(probs))
    assert chi_square(rng.multinomial(20_000, shifted / shifted.sum()), probs) < 1e-6
