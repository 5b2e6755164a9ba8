"""Speculation changes no token: every method, shape and batch against plain decoding, and that against transformers."""

import pytest
import torch
from harness import InProcessEngine, greedy
from tiny import make_tiny_draft

from tokenspeed.params import SamplingParams

PROMPTS = [
    [5, 9, 17, 33, 2, 71],
    [11],
    list(range(40, 75)),
    [7, 7, 7, 8],
    [90, 3],
    [1, 2, 3],
    [66] * 20,
    [12, 13],
]
SHAPES = ["1/1/2", "5/1/6", "3/2/6", "4/4/16", "8/4/16"]


@pytest.fixture(scope="module")
def target(tiny_model_dir):
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def plain(target):
    return InProcessEngine(target)


def draft_of(tmp_path_factory, target, method):
    return make_tiny_draft(tmp_path_factory.mktemp(method), target, method)


def test_plain_equals_transformers(target, plain):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    answers = plain.generate(PROMPTS, greedy(ignore_eos=True))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, min_new_tokens=24, do_sample=False
        )
        if (
            expected.shape[1] - len(prompt) == 24
            and reference.config.eos_token_id not in expected[0, len(prompt) :]
        ):
            assert answer.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("method", ["eagle", "eagle3", "eagle4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_unchanged(tmp_path_factory, target, plain, method, shape):
    draft = draft_of(tmp_path_factory, target, method)
    engine = InProcessEngine(target, spec=method, draft=str(draft), spec_shape=shape)
    expected = [a.token_ids for a in plain.generate(PROMPTS, greedy())]
    assert [a.token_ids for a in engine.generate(PROMPTS, greedy())] == expected
    assert [engine.generate([p], greedy())[0].token_ids for p in PROMPTS[:3]] == expected[:3]


PARAMETERS = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.2, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.7,
        "presence_penalty": -0.5,
    },
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 2.0},
    "negative penalties": {"temperature": 0.0, "presence_penalty": -2.0, "repetition_penalty": 1.5},
    "bias": {"temperature": 1.0, "logit_bias": {4: 5.0, 9: -100.0}},
    "allowed": {
        "temperature": 1.0,
        "allowed_token_ids": tuple(range(3, 320, 4)),
        "logit_bias": {7: 2.0, 8: 50.0},
    },
    "greedy allowed": {
        "temperature": 0.0,
        "allowed_token_ids": (5, 9, 40, 77, 112),
        "frequency_penalty": 0.5,
    },
    "min_tokens": {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": (3, 7, 9, 11, 20, 33, 40, 41, 42)},
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("batch", [1, 8])
def test_seeded_sampling_is_unchanged(tmp_path_factory, target, plain, name, batch):
    draft = draft_of(tmp_path_factory, target, "eagle4")
    engine = InProcessEngine(target, spec="eagle4", draft=str(draft), spec_shape="4/4/16")
    fields = PARAMETERS[name]
    params = [SamplingParams(max_tokens=20, seed=100 + i, **fields) for i in range(batch)]
    expected = [plain.generate([p], q)[0].token_ids for p, q in zip(PROMPTS, params, strict=False)]
    assert [a.token_ids for a in engine.generate(PROMPTS[:batch], params)] == expected


def test_parameters_have_an_effect(plain):
    """Equality above would hold too if a parameter were ignored on both sides."""
    base = plain.generate([PROMPTS[0]], SamplingParams(temperature=1.0, seed=3, max_tokens=20))[0].token_ids
    for name in ("top_k", "top_p", "penalties", "bias", "allowed"):
        fields = {**PARAMETERS[name], "temperature": 1.0}
        if name == "top_k":
            fields["top_k"] = 1
        if name == "top_p":
            fields["top_p"] = 0.01
        other = plain.generate([PROMPTS[0]], SamplingParams(seed=3, max_tokens=20, **fields))[0].token_ids
        assert other != base, name


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_come(tmp_path_factory, target, temperature):
    """At every node of a tree, and never a token that logit_bias alone would force."""
    engine = InProcessEngine(
        target, spec="eagle4", draft=str(draft_of(tmp_path_factory, target, "eagle4")), spec_shape="4/4/16"
    )
    allowed = tuple(range(0, 320, 7))
    params = SamplingParams(
        temperature=temperature, seed=5, max_tokens=40, ignore_eos=True, allowed_token_ids=allowed,
        logit_bias={1: 100.0},
    )  # fmt: skip
    answers = engine.generate(PROMPTS, params)
    assert {token for a in answers for token in a.token_ids} <= set(allowed)
    assert len({token for a in answers for token in a.token_ids}) > 1
    (only,) = engine.generate([PROMPTS[0]], greedy(5, ignore_eos=True, allowed_token_ids=(17,)))
    assert only.token_ids == [17] * 5
