"""A target's config.json as a typed, checked value. No torch: the launcher and the server read it too."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenspeed.errors import ConfigError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. kind: default, linear, llama3 or yarn, with the numbers that kind needs."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder: RMSNorm, GQA with RoPE, SwiGLU."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # sliding window of each layer
    dtype: str = "bfloat16"  # of the checkpoint
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_bytes_per_token(self) -> int:
        """In 2-byte elements, all layers, K and V."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 2


def load_model_config(path: str | Path) -> ModelConfig:
    """Reads `path`/config.json (and generation_config.json for the end-of-sequence ids).

    Raises:
        ConfigError: there is no config.json, it is no JSON object, its architecture is not supported, a value
            is missing, contradicts another or is out of range, or it names code to run (auto_map).
    """
    path = Path(path)
    raw = _read_json(path / "config.json")
    if "auto_map" in raw:
        raise ConfigError(f"{path}/config.json names code to run (auto_map), which tokenspeed never does")
    architectures = raw.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else "(none)"
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ConfigError(
            f"architecture {architecture} of {path} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    try:
        config = _parse(raw, architecture, ARCHITECTURES[architecture])
        eos_token_ids = _eos_ids(raw.get("eos_token_id") if eos is None else eos, config.vocab_size)
    except ValueError as error:
        raise ConfigError(f"{path}/config.json can't be used: {error}") from None
    return replace(config, eos_token_ids=eos_token_ids)


def _parse(raw: dict[str, Any], architecture: str, family: str) -> ModelConfig:
    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    layers = _positive(raw, "num_hidden_layers")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']} is not supported, only silu")
    if raw.get("quantization_config"):
        raise ValueError("quantized checkpoints are not supported yet")
    if raw.get("head_dim") is None and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = _positive(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ValueError(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    bias = bool(raw.get("attention_bias", False)) and architecture != "MistralForCausalLM"
    max_position = _positive(raw, "max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=parse_rope(raw, max_position),
        max_position_embeddings=max_position,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=True if family == "qwen2" else bias,
        o_bias=bias if family != "qwen2" else False,
        mlp_bias=bool(raw.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=family == "qwen3",
        windows=_windows(raw, architecture, layers),
        dtype=_dtype(raw),
    )


def parse_rope(raw: dict[str, Any], max_position: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it).

    Raises:
        ValueError: a kind that is not supported, or numbers that are missing or make no sense.
    """
    p = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(p, dict) or any(isinstance(value, dict) for value in p.values()):
        raise ValueError("rope_parameters must be one object of numbers, the same for every layer")
    kind = p.get("rope_type") or p.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ValueError(f"rope type {kind} is not supported (default, linear, llama3, yarn)")
    if p.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    original = _positive(p, "original_max_position_embeddings", max_position)
    if kind == "default":
        factor = 1.0
    elif kind == "yarn" and p.get("factor") is None:
        factor = max_position / original
    else:
        factor = _number(p, "factor")
    rope = RopeConfig(
        theta=_number(p, "rope_theta", _number(raw, "rope_theta", 10000.0)),
        kind=kind,
        factor=factor,
        low_freq_factor=_number(p, "low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=_number(p, "high_freq_factor", None if kind == "llama3" else 4.0),
        original_max_position=original,
        beta_fast=_number(p, "beta_fast", 32.0),
        beta_slow=_number(p, "beta_slow", 1.0),
        attention_factor=None if p.get("attention_factor") is None else _number(p, "attention_factor"),
        mscale=p.get("mscale"),
        mscale_all_dim=p.get("mscale_all_dim"),
        truncate=bool(p.get("truncate", True)),
    )
    if kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ValueError("high_freq_factor must be greater than low_freq_factor")
    return rope


def _windows(raw: dict[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """As transformers reads them: none in Llama, 4096 in Mistral by default, Qwen's if use_sliding_window."""
    qwen = ARCHITECTURES[architecture] in ("qwen2", "qwen3")
    if architecture == "LlamaForCausalLM" or (qwen and not raw.get("use_sliding_window", False)):
        return (None,) * layers
    window = raw.get("sliding_window", 4096)
    if window is not None:
        _positive(raw, "sliding_window", 4096)
    if not qwen:
        return (window,) * layers
    if kinds := raw.get("layer_types"):
        if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise ValueError("layer_types must name full_attention or sliding_attention for each layer")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    full_below = raw.get("max_window_layers", 28)
    return tuple(window if i >= full_below else None for i in range(layers))


def _dtype(raw: dict[str, Any]) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {dtype} is not supported (float32, bfloat16, float16)")
    return dtype


def _eos_ids(eos: Any, vocab_size: int) -> tuple[int, ...]:
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"eos_token_id {token!r} is no token of the vocabulary of {vocab_size}")
    return tuple(ids)


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """raw[key], or the default where it is missing or null. Raises ValueError without a default."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        return default
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} must be a positive integer, not {value!r}")
    return value


def _number(raw: dict[str, Any], key: str, default: float | None = None) -> float:
    """A positive number, like `_positive`."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"{key} is missing")
        return default
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{key} must be a positive number, not {value!r}")
    return float(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        message = f"{path.parent} has no {path.name}; give a Hugging Face checkpoint directory"
        raise ConfigError(message) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return raw
