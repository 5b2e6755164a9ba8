"""A GGUF file's metadata as the values of config.json."""

import math
from typing import Any

import numpy as np

from tokenspeed.errors import ConfigError

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Beside the file's own end token: tokens that end an answer in models with these pre-tokenizers
FURTHER_EOS = {"qwen2": ("<|endoftext|>",), "llama-bpe": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def model_config(fields: dict[str, Any], rope_freqs: np.ndarray | None) -> dict[str, Any]:
    """config.json, without `tie_word_embeddings`, which the tensors decide.

    Args:
        fields: the file's metadata, name -> value.
        rope_freqs: the tensor that scales the rotary frequencies (Llama 3), float32 [head_dim / 2], or None.

    Raises:
        ConfigError: something is not supported. KeyError: a value is missing.
    """
    arch = fields["general.architecture"]
    if arch not in ARCHITECTURES:
        raise ConfigError(f"architecture {arch} is not supported ({', '.join(ARCHITECTURES)})")
    if fields.get(f"{arch}.expert_count"):
        raise ConfigError("mixtures of experts are not supported")
    if fields.get(f"{arch}.attention.sliding_window"):
        raise ConfigError("sliding-window attention in a GGUF file is not supported")
    hidden, heads = fields[f"{arch}.embedding_length"], fields[f"{arch}.attention.head_count"]
    kv_heads = fields.get(f"{arch}.attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise ConfigError("a number of heads that differs by layer is not supported")
    dim = fields.get(f"{arch}.attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.get(f"{arch}.{name}", dim) != dim:
            raise ConfigError(f"{arch}.{name} {fields[f'{arch}.{name}']} differs from the head size {dim}")
    rope = {
        **_rope(fields, arch, dim, rope_freqs),
        "rope_theta": _decimal(fields.get(f"{arch}.rope.freq_base", 1e4)),
    }
    config = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields[f"{arch}.feed_forward_length"],
        "num_hidden_layers": fields[f"{arch}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields[f"{arch}.context_length"],
        "rms_norm_eps": _decimal(fields[f"{arch}.attention.layer_norm_rms_epsilon"]),
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    further = {"llama": {"attention_bias": False, "mlp_bias": False}, "qwen3": {"attention_bias": False}}
    config.update(further.get(arch, {}))
    if arch != "llama":
        config["use_sliding_window"] = False
    return config


def eos_token_ids(fields: dict[str, Any]) -> int | list[int]:
    """The ids that end an answer, for generation_config.json: one, or a list, the file's own first."""
    own = [fields["tokenizer.ggml.eos_token_id"]]
    own += [fields[k] for k in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id") if k in fields]
    names = FURTHER_EOS.get(fields.get("tokenizer.ggml.pre", ""), ())
    found = [i for i, token in enumerate(fields["tokenizer.ggml.tokens"]) if token in names] if names else []
    ids = list(dict.fromkeys(own + found))
    return ids[0] if len(ids) == 1 else ids


def llama3_scaling(rope_freqs: np.ndarray, theta: float) -> dict[str, Any]:
    """The parameters of Llama 3's rotary scaling from the divisors that a GGUF file stores.

    Only the factor varies among published models; the divisors are computed from it and must agree.

    Raises:
        ConfigError: they don't.
    """
    half = len(rope_freqs)
    factor = float(np.max(rope_freqs))
    wavelength = 2 * math.pi * theta ** (np.arange(half, dtype=np.float64) / half)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = np.clip((LLAMA3["original_max_position_embeddings"] / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(rope_freqs, expected, rtol=1e-3):
        raise ConfigError(
            "rope_freqs.weight holds a rotary scaling that is not Llama 3's; it is not supported"
        )
    return {"rope_type": "llama3", "factor": _decimal(factor), **LLAMA3}


def _rope(fields: dict[str, Any], arch: str, dim: int, rope_freqs: np.ndarray | None) -> dict[str, Any]:
    scaling = f"{arch}.rope.scaling."
    kind = fields.get(scaling + "type", "none")
    if rope_freqs is not None:
        if arch != "llama" or kind != "none" or len(rope_freqs) != dim // 2:
            raise ConfigError("rope_freqs.weight is supported in Llama 3 models only")
        return llama3_scaling(rope_freqs.astype(np.float64), fields.get("llama.rope.freq_base", 1e4))
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"rotary scaling {kind} is not supported (linear, yarn)")
    out = {"rope_type": kind, "factor": _decimal(fields[scaling + "factor"])}
    if kind == "yarn":
        out["original_max_position_embeddings"] = fields[scaling + "original_context_length"]
        for ours in ("beta_fast", "beta_slow"):
            if (value := fields.get(f"{scaling}yarn_{ours}")) is not None:
                out[ours] = _decimal(value)
        for name, neutral in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_ext_factor", 1.0)):
            if fields.get(scaling + name, neutral) != neutral:
                raise ConfigError(f"{scaling}{name} is not supported")
    return out


def _decimal(value: float) -> float:
    """A float32 as the decimal it was written from."""
    return float(f"{value:.6g}")
