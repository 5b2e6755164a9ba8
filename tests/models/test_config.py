"""config.json of targets: both generations of RoPE keys, the families' own defaults, and what is refused."""

import json

import pytest

from tokenspeed.errors import ConfigError
from tokenspeed.models.config import RopeConfig, load_model_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
OMIT = object()


def write(path, generation=None, **changes):
    raw = {key: value for key, value in {**LLAMA, **changes}.items() if value is not OMIT}
    (path / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def load(path, **changes):
    return load_model_config(write(path, **changes))


def test_defaults(tmp_path):
    config = load(tmp_path)
    assert (config.head_dim, config.rms_norm_eps, config.rope) == (
        16,
        1e-6,
        RopeConfig(original_max_position=512),
    )
    assert config.windows == (None,) * 4 and config.dtype == "bfloat16" and config.eos_token_ids == ()
    assert not (
        config.tie_word_embeddings or config.qkv_bias or config.o_bias or config.mlp_bias or config.qk_norm
    )
    assert load(tmp_path, num_key_value_heads=OMIT).num_kv_heads == 4
    assert config.kv_bytes_per_token == 4 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    "new, old",
    [
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 500000, "rope_scaling": None}),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            {"rope_scaling": {"type": "linear", "factor": 2}},
        ),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 128,
                },
            },
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128},
            {
                "rope_theta": 1e6,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            },
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 128, "factor": None},
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        ),
    ],
)
def test_both_generations_of_rope_keys(tmp_path, new, old):
    assert load(tmp_path, rope_parameters=new).rope == load(tmp_path, **old).rope


def test_families(tmp_path):
    qwen2 = load(tmp_path, architectures=["Qwen2ForCausalLM"], attention_bias=False)
    assert qwen2.qkv_bias and not qwen2.o_bias and not qwen2.qk_norm
    qwen3 = load(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=32, attention_bias=True)
    assert qwen3.qk_norm and qwen3.qkv_bias and qwen3.o_bias and qwen3.head_dim == 32
    llama = load(tmp_path, attention_bias=True, mlp_bias=True)
    assert llama.qkv_bias and llama.o_bias and llama.mlp_bias


def test_windows(tmp_path):
    def windows(architecture, **changes):
        return load(tmp_path, architectures=[f"{architecture}ForCausalLM"], **changes).windows

    assert windows("Llama", sliding_window=8) == (None,) * 4  # as transformers: Llama has no window
    assert windows("Mistral") == (4096,) * 4
    assert windows("Mistral", sliding_window=None) == (None,) * 4
    assert windows("Mistral", sliding_window=8) == (8,) * 4
    assert windows("Qwen2", sliding_window=8) == (None,) * 4
    upper = dict(sliding_window=8, use_sliding_window=True, max_window_layers=3)
    assert windows("Qwen2", **upper) == (None, None, None, 8)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows("Qwen3", **upper, layer_types=kinds) == (8, None, 8, None)
    assert windows(
        "Qwen3", sliding_window=None, use_sliding_window=False, layer_types=["full_attention"] * 4
    ) == ((None,) * 4)


def test_eos_comes_from_the_generation_config_first(tmp_path):
    assert load(tmp_path, eos_token_id=2).eos_token_ids == (2,)
    assert load_model_config(write(tmp_path, {}, eos_token_id=[2, 3])).eos_token_ids == (2, 3)
    assert load_model_config(write(tmp_path, {"eos_token_id": [5, 6]}, eos_token_id=2)).eos_token_ids == (
        5,
        6,
    )


@pytest.mark.parametrize("written", ["float16", "torch.float16"])
def test_dtype(tmp_path, written):
    assert load(tmp_path, torch_dtype=written).dtype == "float16"
    assert load(tmp_path, dtype="float32", torch_dtype=written).dtype == "float32"


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(architectures=["GPT2LMHeadModel"]),
            "GPT2LMHeadModel .* not supported; supported: LlamaForCausalLM",
        ),
        (dict(architectures=OMIT), "architecture \\(none\\)"),
        (dict(architectures=[]), "architecture \\(none\\)"),
        (dict(architectures=[{}]), "not supported"),
        (dict(auto_map={"AutoModel": "x.Y"}), "auto_map"),
        (dict(hidden_size=OMIT), "hidden_size is missing"),
        (dict(vocab_size="320"), "vocab_size must be a positive integer, not '320'"),
        (dict(num_hidden_layers=0), "num_hidden_layers must be a positive integer, not 0"),
        (dict(num_hidden_layers=True), "num_hidden_layers must be a positive integer, not True"),
        (dict(num_attention_heads=3), "num_attention_heads 3 .* num_key_value_heads 2"),
        (dict(num_attention_heads=6), "hidden_size 64 is not a multiple of num_attention_heads 6"),
        (dict(num_key_value_heads="2"), "num_key_value_heads must be"),
        (dict(head_dim=15), "head_dim 15 is odd"),
        (dict(rms_norm_eps="tiny"), "rms_norm_eps must be a positive number"),
        (dict(hidden_act="gelu"), "hidden_act gelu"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantized"),
        (dict(dtype="float64"), "dtype float64"),
        (dict(eos_token_id=320), "eos_token_id 320 is no token of the vocabulary of 320"),
        (dict(eos_token_id=["</s>"]), "eos_token_id '</s>'"),
        (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope type dynamic"),
        (dict(rope_scaling={"rope_type": "longrope"}), "rope type longrope"),
        (dict(rope_scaling={"type": "linear"}), "factor is missing"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor is missing"),
        (
            dict(
                rope_scaling={
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            ),
            "high_freq_factor must be greater",
        ),
        (dict(rope_scaling={"type": "linear", "factor": 0}), "factor must be a positive number, not 0"),
        (dict(rope_theta="big"), "rope_theta must be a positive number"),
        (dict(rope_parameters={"full_attention": {"rope_type": "default"}}), "the same for every layer"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (dict(architectures=["MistralForCausalLM"], sliding_window=0), "sliding_window must be"),
        (
            dict(architectures=["Qwen3ForCausalLM"], use_sliding_window=True, layer_types=["full_attention"]),
            "layer_types",
        ),
    ],
)
def test_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, **changes)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "has no config.json"),
        ("{", "can't be read"),
        ("[]", "not a JSON object"),
        ("\xff", "can't be read"),
    ],
)
def test_unreadable_file(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)
