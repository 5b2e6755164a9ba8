"""Spellings of speculation: ours, vLLM's JSON, SGLang's flags, and what contradicts what."""

import itertools
import json
import re

import pytest

from tokenspeed.config import Config, Shape
from tokenspeed.errors import ConfigError
from tokenspeed.spec.options import (
    CPU_SHAPES,
    GPU_SHAPES,
    check_shape,
    default_shapes,
    parse_shape,
    plain_above,
    speculation,
    trees_for,
)


def vllm(**keys) -> Config:
    return Config(speculative_config=json.dumps(keys))


def sglang(steps=None, topk=None, nodes=None, algorithm="EAGLE3", **more) -> Config:
    return Config(
        speculative_algorithm=algorithm,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        **more,
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), ("none", None, ())),
        (Config(spec="eagle4"), ("eagle4", None, default_shapes("auto"))),
        (Config(spec="eagle3", draft="d", spec_shape="12/4/16"), ("eagle3", "d", (Shape(12, 4, 16),))),
        (vllm(method="eagle3", model="d", num_speculative_tokens=2), ("eagle3", "d", (Shape(2, 1, 3),))),
        (
            vllm(method="eagle", model="d", num_speculative_tokens=16, draft_tensor_parallel_size=1),
            ("eagle", "d", (Shape(16, 1, 17),)),
        ),
        (vllm(method="eagle4"), ("eagle4", None, default_shapes("auto"))),
        (
            vllm(
                method="eagle4",
                quantization=None,
                disable_logprobs=False,
                acceptance_method="rejection_sampler",
            ),
            ("eagle4", None, default_shapes("auto")),
        ),
        (Config(spec="eagle3", speculative_config='{"model": "d"}'), ("eagle3", "d", default_shapes("auto"))),
        (sglang(5, 4, 8, draft="d"), ("eagle3", "d", (Shape(5, 4, 8),))),
        (sglang(3, 1, 4), ("eagle3", None, (Shape(3, 1, 4),))),
        (sglang(3), ("eagle3", None, (Shape(3, 1, 4),))),
        (sglang(nodes=4), ("eagle3", None, (Shape(3, 1, 4),))),
        (sglang(3, 4), ("eagle3", None, (Shape(3, 4, 13),))),
        (sglang(8, 9), ("eagle3", None, (Shape(8, 9, 64),))),
        (sglang(algorithm="EAGLE4"), ("eagle4", None, default_shapes("auto"))),
        (sglang(algorithm="eagle"), ("eagle", None, default_shapes("auto"))),
        (sglang(5, 4, 8, spec="eagle3", spec_shape="5/4/8"), ("eagle3", None, (Shape(5, 4, 8),))),
    ],
)
def test_spellings(config, expected):
    assert speculation(config) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(draft="d"), "--draft d needs a method"),
        (Config(spec_shape="8/4/16"), "--spec-shape 8/4/16 needs a method"),
        (Config(speculative_config="{"), "not valid JSON"),
        (Config(speculative_config="[1]"), "must be a JSON object"),
        (
            vllm(method="eagle3", quantization="fp8"),
            "'quantization' is not supported: a draft is run as it is",
        ),
        (vllm(method="eagle3", posterior_alpha=0.3), "'posterior_alpha' is not supported: what is accepted"),
        (vllm(method="eagle3", acceptance_method="typical_acceptance_sampler"), "nothing can be relaxed"),
        (vllm(method="eagle3", speculative_token_tree="[(0,)]"), "give --spec-shape S/K/N"),
        (vllm(method="eagle3", disable_logprobs=True), "log-probabilities are those of plain decoding"),
        (vllm(method="eagle3", max_model_len=4096), "a draft reaches as far as its target"),
        (vllm(method="eagle3", prompt_lookup_max=4), "the method ngram, which is not offered"),
        (vllm(method="eagle3", num_tokens=4), "key 'num_tokens' is not supported; keys: method, model"),
        (vllm(method="ngram"), "method 'ngram' is not supported"),
        (vllm(method="none"), "method 'none' is not supported"),
        (vllm(method=3), "method 3 is not supported"),
        (vllm(method="eagle3", model=3), "model must be"),
        (vllm(method="eagle3", num_speculative_tokens=0), "num_speculative_tokens must be from 1 to 16"),
        (vllm(method="eagle3", num_speculative_tokens=17), "num_speculative_tokens must be from 1 to 16"),
        (vllm(method="eagle3", num_speculative_tokens=True), "num_speculative_tokens"),
        (vllm(method="eagle3", draft_tensor_parallel_size=2), "draft_tensor_parallel_size must be 1, not 2"),
        (vllm(model="d"), "needs a method"),
        (sglang(algorithm="NEXTN"), "NEXTN is not supported; supported: EAGLE, EAGLE3, EAGLE4"),
        (sglang(algorithm="NGRAM"), "EAGLE, EAGLE3, EAGLE4"),
        (sglang(3, 1, 5), "must be 4"),
        (sglang(3, nodes=5), "must be 4"),
        (sglang(topk=4), "--speculative-num-steps is missing"),
        (sglang(topk=4, nodes=16), "--speculative-num-steps is missing"),
        (sglang(0), "steps must be from 1 to 16"),
        (sglang(2, 0), "top-k must be at least 1"),
        (sglang(spec="eagle4"), "--spec says eagle4, but --speculative-algorithm says eagle3"),
        (
            Config(spec="eagle4", speculative_config='{"method": "eagle3"}'),
            "--spec says eagle4, but --speculative-c",
        ),
        (
            Config(spec="eagle3", draft="a", speculative_config='{"model": "b"}'),
            "--draft says a, but --speculative-config model says b",
        ),
        (
            Config(spec="eagle3", spec_shape="8/4/16", speculative_config='{"num_speculative_tokens": 3}'),
            "--spec-shape says 8/4/16, but --speculative-config num_speculative_tokens says 3/1/4",
        ),
    ],
)
def test_mistakes_name_what_is_wrong(config, words):
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        speculation(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8", "STEPS/TOPK/NODES"),
        ("8/4", "STEPS/TOPK/NODES"),
        ("8/4/x", "STEPS/TOPK/NODES"),
        ("-1/4/16", "STEPS/TOPK/NODES"),
        ("²/4/16", "STEPS/TOPK/NODES"),
        ("0/4/16", "steps must be from 1 to 16"),
        ("17/1/16", "steps must be from 1 to 16"),
        ("8/0/16", "top-k must be at least 1"),
        ("8/10/60", "(steps - 1) * top-k must be at most 64, not 70"),
        ("8/4/1", "from 2 to 64"),
        ("8/4/65", "from 2 to 64"),
        ("1/4/6", "at most 5 nodes"),
        ("2/2/8", "at most 7 nodes"),
    ],
)
def test_shapes_that_can_not_be_built(text, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_shape(text)


def test_shape_bounds_agree_with_counting():
    """The number of nodes that S steps of top-k K can offer, counted level by level."""
    for steps, topk in itertools.product(range(1, 17), range(1, 9)):
        if (steps - 1) * topk > 64:
            continue
        offered = 1 + topk  # the root and the first step
        for _ in range(steps - 1):
            offered += topk * topk  # each step expands K lanes by K
        most = min(offered, 64)
        assert check_shape(Shape(steps, topk, most), "x") == Shape(steps, topk, most)
        with pytest.raises(ConfigError):
            check_shape(Shape(steps, topk, most + 1), "x")


def test_parse_and_print_agree():
    for shape in (Shape(8, 4, 16), Shape(1, 1, 2), Shape(16, 4, 64), *CPU_SHAPES, *GPU_SHAPES):
        assert parse_shape(str(shape)) == shape


BOTH = '{"method": "eagle4", "disable_by_batch_size": 4}'


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (Config(), None),
        (Config(spec="eagle4"), None),
        (Config(spec="eagle4", speculative_disable_by_batch_size=8), 8),
        (vllm(method="eagle4", disable_by_batch_size=4), 4),
        (Config(speculative_config=BOTH, speculative_disable_by_batch_size=4), 4),
    ],
)
def test_batch_size_limits(config, limit):
    assert plain_above(config) == limit


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(speculative_disable_by_batch_size=8), "--speculative-disable-by-batch-size 8 needs a method"),
        (vllm(method="eagle4", disable_by_batch_size=0), "disable_by_batch_size must be a whole number"),
        (vllm(method="eagle4", disable_by_batch_size=True), "disable_by_batch_size must be a whole number"),
        (vllm(method="eagle4", disable_by_batch_size="8"), "disable_by_batch_size must be a whole number"),
        (
            Config(speculative_config=BOTH, speculative_disable_by_batch_size=5),
            "says 5, but --speculative-config disable_by_batch_size says 4",
        ),
    ],
)
def test_wrong_batch_size_limits(config, words):
    with pytest.raises(ConfigError, match=words):
        plain_above(config)


@pytest.mark.parametrize(
    ("device", "found", "shape"),
    [
        ("cpu", "/dev/nvidiactl", CPU_SHAPES),
        ("cuda", None, tuple(GPU_SHAPES)),
        ("auto", None, CPU_SHAPES),
        ("auto", "/dev/nvidiactl", tuple(GPU_SHAPES)),
        ("auto", "/dev/kfd", tuple(GPU_SHAPES)),
    ],
)
def test_the_default_tree_follows_the_device(monkeypatch, device, found, shape):
    monkeypatch.setattr("os.path.exists", lambda path: path == found)
    assert default_shapes(device) == shape


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256])
def test_a_gpu_has_a_few_trees_for_each_batch(batch):
    trees = trees_for(batch, tuple(GPU_SHAPES))
    assert 1 <= len(trees) <= 4
    assert all(check_shape(shape, "table") is shape and batch * shape.nodes <= 1024 for shape in trees)


def test_a_pinned_tree_is_for_every_batch():
    shape = next(iter(GPU_SHAPES))
    assert all(trees_for(batch, (shape,)) == (shape,) for batch in (1, 64, 300))
    assert trees_for(8, CPU_SHAPES) == CPU_SHAPES and trees_for(8, ()) == ()
