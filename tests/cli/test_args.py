"""Options made from Config: values, aliases, suffixes, other engines' spellings, one-line errors."""

from dataclasses import fields

import pytest

from tokenspeed.cli.args import arguments, overrides, parse_config, parse_int
from tokenspeed.config import Config
from tokenspeed.errors import ConfigError


@pytest.mark.parametrize(
    ("argv", "changed"),
    [
        ("", {}),
        ("m", {"model": "m"}),
        ("--model m", {"model": "m"}),
        ("--model-path m", {"model": "m"}),
        ("m --model m", {"model": "m"}),
        ("--port 9000 m --spec eagle4", {"model": "m", "port": 9000, "spec": "eagle4"}),
        ("m --max-model-len 16k", {"model": "m", "max_model_len": 16000}),
        ("m --context-length 16K", {"model": "m", "max_model_len": 16384}),
        ("m --max_model_len=25.6k", {"model": "m", "max_model_len": 25600}),
        ("--max-model-len auto", {}),
        ("--max-model-len -1", {}),
        ("--max-total-tokens 1m", {"kv_cache_tokens": 1000000}),
        ("--served-model-name a,b --served-model-name c", {"served_model_name": ("a", "b", "c")}),
        ("--cudagraph-capture-sizes 1,2,4", {"cudagraph_capture_sizes": (1, 2, 4)}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--disable-radix-cache", {"enable_prefix_caching": False}),
        ("--disable-radix-cache --enable-prefix-caching", {}),
        ("--disable-cuda-graph", {"enforce_eager": True}),
        ("--enforce-eager", {"enforce_eager": True}),
        ("--enable-metrics", {}),
        ("--speculative-draft-tensor-parallel-size 1", {}),
        ("--speculative-accept-threshold-single 1 --speculative-accept-threshold-acc=1.0", {}),
        ("-tp 2 -pp 3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}),
        ("-dp 4", {"data_parallel_size": 4}),
        ("--tp-size 2", {"tensor_parallel_size": 2}),
        ("--gpu-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
        ("--speculative-draft-model-path d", {"draft": "d"}),
        ("--draft-head full", {"draft_head": "full"}),
        ('-sc {"method":"eagle3"}', {"speculative_config": '{"method":"eagle3"}'}),
        ("--speculative-algorithm EAGLE3 --speculative-num-steps 3",
         {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}),
        ("--seed -5", {"seed": -5}),
        ("--random-seed 7", {"seed": 7}),
        ("--max-running-requests 8", {"max_num_seqs": 8}),
        ("--chunked-prefill-size 2K", {"max_num_batched_tokens": 2048}),
    ],
)  # fmt: skip
def test_values(argv, changed):
    config = parse_config(argv.split())
    assert config == Config(**changed)
    assert overrides(config) == changed
    assert parse_config(arguments(config)) == config


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--max-modle-len 3", "unknown option --max-modle-len; did you mean --max-model-len?"),
        ("--spec_shap=8/4/16", "unknown option --spec-shap; did you mean --spec-shape?"),
        ("--zzzzzz", "unknown option --zzzzzz; see tokenspeed serve --help"),
        ("a b", "unexpected argument 'b'"),
        ("a --model b", "two models are given: a and --model b"),
        ("--port x", "argument --port: must be an integer, not 'x'"),
        ("--port 1.5k --port 1.5", "argument --port: must be an integer"),
        ("--port 70000", "--port must be from 0 to 65535, not 70000"),
        ("--port", "expected one argument"),
        ("--gpu-memory-utilization 1.5", "--gpu-memory-utilization must be from 0.05 to 1.0, not 1.5"),
        ("--gpu-memory-utilization nan", "--gpu-memory-utilization must be from 0.05 to 1.0, not nan"),
        ("--gpu-memory-utilization x", "must be a number, not 'x'"),
        ("--max-num-seqs 0", "--max-num-seqs must be at least 1, not 0"),
        ("--cudagraph-capture-sizes 1,0", "--cudagraph-capture-sizes must be at least 1, not 0"),
        ("--page-size 17", "--page-size must be one of 16, 32, 64, not 17"),
        ("--spec eagle5", "--spec must be one of none, eagle, eagle3, eagle4, not eagle5"),
        ("--dtype int8", "--dtype must be one of auto, float32, bfloat16, float16, not int8"),
        (
            "--mem-fraction-static 0.8",
            "--mem-fraction-static counts weights and KV only in SGLang; use",
        ),
        (
            "--trust-remote-code",
            "--trust-remote-code is not offered: tokenspeed runs no code from a checkpoint",
        ),
        ("--speculative-draft-tensor-parallel-size 2", "must be 1, not 2: the draft runs where"),
        ("--speculative-accept-threshold-single 0.9", "must be 1, not 0.9: acceptance is exact"),
        ("--speculative-accept-threshold-acc x", "invalid float value: 'x'"),
        ("--speculative-token-map f.pt", "--speculative-token-map is not offered: a draft brings"),
        (
            "--speculative-attention-mode decode",
            "--speculative-attention-mode is not offered: draft and target",
        ),
        ("--speculative-draft-model-revision a", "give the directory of that revision"),
    ],
)
def test_mistakes_are_one_line(argv, words):
    with pytest.raises(ConfigError) as caught:
        parse_config(argv.split())
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("2k", 2000), ("2K", 2048), ("1.5k", 1500), ("1m", 10**6), ("1M", 2**20), ("-3", -3)],
)
def test_integers(text, value):
    assert parse_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.0001k", "1g", "x", "0x10", "1 k k", "infk"])
def test_not_integers(text):
    with pytest.raises((ValueError, OverflowError)):
        parse_int(text)


def test_every_field_has_an_option_and_a_default_in_the_help(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for f in fields(Config):
        assert "--" + f.name.replace("_", "-") in text
        for name in f.metadata["names"]:
            assert name in text
    for heading in ("model:", "speculation:", "memory:", "execution:", "server:"):
        assert heading in text
    assert "(default: 8000)" in text and "--no-enable-prefix-caching" in text


def test_api_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("TOKENSPEED_API_KEY", "from-env")
    assert parse_config([]).api_key == "from-env"
    assert parse_config(["--api-key", "given"]).api_key == "given"


def test_bounds_hold_for_programs_too():
    with pytest.raises(ConfigError, match="--max-num-seqs must be at least 1"):
        Config(max_num_seqs=0)
    with pytest.raises(ConfigError, match="must be a number"):
        Config(max_num_seqs="8")
    with pytest.raises(ConfigError, match="must be one of"):
        Config(spec="eagle5")
