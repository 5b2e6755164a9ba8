"""The config.json of a draft, in the layouts of EAGLE-1/2, EAGLE-3, EAGLE-4 and `speculators`, as one typed
value.

No torch: the launcher reads it too. Papers: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3
(2503.01840).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.config import Shape
from tokenspeed.errors import ConfigError
from tokenspeed.models.config import RopeConfig, parse_rope
from tokenspeed.spec.options import parse_shape

EAGLE4_ARCHITECTURES = ("LlamaForCausalLMEagle4",)
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
EAGLE_ARCHITECTURES = (
    "LlamaForCausalLMEagle",
    "EagleLlamaForCausalLM",
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
)

# Keys that say nothing about the draft's function; Hugging Face writes them.
_HARMLESS = frozenset(
    [
        "architectures",
        "model_type",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "_name_or_path",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "pretraining_tp",
        "max_position_embeddings",
        "use_sliding_window",
        "max_window_layers",
        "name",
    ]
)
_STRUCTURE = frozenset(
    [
        "num_hidden_layers",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "layer_types",
        "sliding_window",
    ]
)
_EAGLE3 = frozenset(
    [
        "draft_vocab_size",
        "target_hidden_size",
        "num_aux_hidden_states",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "fc_norm",
        "norm_output",
        "norm_before_fc",
        "norm_before_residual",
        "tie_embed_to_target",
        "tie_lm_head_to_target",
    ]
)
_KEYS = {
    "eagle": _HARMLESS | _STRUCTURE | {"bias", "tie_embed_to_target"},
    "eagle3": _HARMLESS | _STRUCTURE | _EAGLE3,
    "eagle4": _HARMLESS | _STRUCTURE | _EAGLE3 | {"candidate_head", "acceptance"},
}
# The nested layout: its own keys around `transformer_layer_config`, which is a Llama config.
_SPECULATORS = frozenset(
    [
        "architectures",
        "auto_map",
        "model_type",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "speculators_config",
        "speculators_version",
        "speculators_model_type",
        "transformer_layer_config",
        "has_no_defaults_at_init",
        "embed_requires_grad",
        "tie_word_embeddings",
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "eagle_aux_hidden_state_layer_ids",
    ]
)
# NVIDIA's sub-object: the only values under which the draft is the EAGLE-3 layer.
_EAGLE_CONFIG = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


@dataclass(frozen=True)
class DraftConfig:
    """One draft layer and what stands around it. `aux_layers` is empty until the target is known."""

    method: str  # eagle, eagle3 or eagle4
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    vocab_size: int  # of the target
    draft_vocab_size: int  # rows of the draft's lm_head
    target_hidden_size: int
    aux_layers: tuple[
        int, ...
    ]  # target layers whose outputs are the features; num_layers: the final norm's output
    num_aux: int
    window: int | None = None  # keys a row sees back, itself included
    attention_bias: bool = False
    fc_norm: bool = False  # an RMSNorm for each aux chunk before fc (EAGLE-3.1)
    norm_before_fc: bool = False  # one RMSNorm over all aux chunks
    norm_output: bool = False  # the next step is fed the normed output (EAGLE-3.1)
    norm_before_residual: bool = False  # the residual is hidden_norm(g), not g
    tie_embed: bool = False  # the target's embedding, by the checkpoint's word
    tie_lm_head: bool = False  # the target's lm_head, by the checkpoint's word
    tie_word_embeddings: bool = False
    rank: int | None = None  # of the candidate head
    num_candidates: int | None = None
    acceptance: tuple[
        tuple[Shape, tuple[float, ...]], ...
    ] = ()  # by depth, given the parent's, of some trees

    @property
    def aux_size(self) -> int:
        return self.num_aux * self.target_hidden_size

    @property
    def wide(self) -> bool:
        """The layer reads [embed; state], 2H wide (EAGLE-3 and 4), not fc([embed; state]) (EAGLE-1/2)."""
        return self.method != "eagle"


def method_of(raw: dict[str, Any], tensors: frozenset[str], where: Path | str) -> str:
    """Which method a draft was made for: eagle, eagle3 or eagle4.

    Args:
        raw: its config.json. tensors: canonical tensor names, which tell where old configs only say
            LlamaForCausalLM.

    Raises:
        ConfigError: it is no draft that tokenspeed can run.
    """
    if "speculators_model_type" in raw or "speculators_config" in raw:
        nested = raw.get("speculators_config")
        kind = raw.get("speculators_model_type") or (nested if isinstance(nested, dict) else {}).get(
            "algorithm"
        )
        if kind == "eagle3":
            return "eagle3"
        raise ConfigError(f"{where} is a speculators draft of type {kind}; supported: eagle3")
    names = raw.get("architectures") or ["(none)"]
    if not isinstance(names, list):
        raise ConfigError(f"draft architecture {names!r} of {where} must be a list of one name")
    architecture = names[0]
    if architecture in EAGLE4_ARCHITECTURES:
        return "eagle4"
    if architecture in EAGLE3_ARCHITECTURES:
        return "eagle3"
    if architecture in EAGLE_ARCHITECTURES:
        if raw.get("num_hidden_layers") != 1 or "fc.weight" not in tensors:
            raise ConfigError(
                f"{where} is no EAGLE draft: {architecture} with {raw.get('num_hidden_layers')} layers and "
                f"{'an' if 'fc.weight' in tensors else 'no'} fc.weight; a draft has one layer and fc.weight"
            )
        return "eagle3" if "draft_vocab_size" in raw or "layers.0.hidden_norm.weight" in tensors else "eagle"
    known = ", ".join(EAGLE4_ARCHITECTURES + EAGLE3_ARCHITECTURES + EAGLE_ARCHITECTURES[:2])
    raise ConfigError(f"draft architecture {architecture} of {where} is not supported; supported: {known}")


def parse_draft(raw: dict[str, Any], method: str, where: Path | str) -> DraftConfig:
    """The typed config of a draft whose method is known.

    Raises:
        ConfigError: a key is unknown, or a value is missing, contradicts another or is not supported.
    """
    try:
        if "transformer_layer_config" in raw or "speculators_config" in raw:
            raw = _flatten_speculators(raw)
        return _parse(_lift_eagle_config(raw), method)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{where}/config.json can't be used as {method} draft: {reason}") from None


def _parse(raw: dict[str, Any], method: str) -> DraftConfig:
    _refuse(raw, _KEYS[method])
    if raw["num_hidden_layers"] != 1:
        raise ValueError(f"num_hidden_layers is {raw['num_hidden_layers']}, a draft has 1")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {raw['hidden_act']} is not supported, only silu")
    if raw.get("mlp_bias"):
        raise ValueError("mlp_bias is not supported")
    hidden, heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    kv_heads = _positive(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    vocab = _positive(raw, "vocab_size")
    draft_vocab = _positive(raw, "draft_vocab_size", vocab)
    if draft_vocab > vocab:
        raise ValueError(f"draft_vocab_size {draft_vocab} is more than vocab_size {vocab}")
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or ()
    if not isinstance(ids, (list, tuple)):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids must be a list of layers, not {ids!r}")
    num_aux = 1 if method == "eagle" else _positive(raw, "num_aux_hidden_states", len(ids) or 3)
    if ids and len(ids) != num_aux:
        raise ValueError(
            f"num_aux_hidden_states is {num_aux}, eagle_aux_hidden_state_layer_ids names {len(ids)}"
        )
    if raw.get("fc_norm") and raw.get("norm_before_fc"):
        raise ValueError("fc_norm and norm_before_fc exclude each other")
    rank, candidates = _candidate_head(raw, draft_vocab)
    return DraftConfig(
        method=method,
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_positive(raw, "head_dim", hidden // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(raw, int(raw.get("max_position_embeddings") or 2048)),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        target_hidden_size=_positive(raw, "target_hidden_size", hidden),
        aux_layers=tuple(ids),
        num_aux=num_aux,
        window=_window(raw),
        attention_bias=bool(raw.get("attention_bias")),
        fc_norm=bool(raw.get("fc_norm")),
        norm_before_fc=bool(raw.get("norm_before_fc")),
        norm_output=bool(raw.get("norm_output")),
        norm_before_residual=bool(raw.get("norm_before_residual")),
        tie_embed=bool(raw.get("tie_embed_to_target")),
        tie_lm_head=bool(raw.get("tie_lm_head_to_target")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        rank=rank,
        num_candidates=candidates,
        acceptance=_acceptance(raw),
    )


def _flatten_speculators(raw: dict[str, Any]) -> dict[str, Any]:
    """The nested layout as a flat EAGLE-3 config. Its `auto_map` names code that is never run and is ignored.

    Its layer ids count inputs of layers (id i is the output of layer i - 1); ours count outputs.
    """
    _refuse(raw, _SPECULATORS)
    if "norm_before_residual" not in raw:
        raise KeyError("norm_before_residual")
    flat = dict(raw["transformer_layer_config"])
    for key in sorted(_EAGLE3 | {"tie_word_embeddings"}):
        if raw.get(key) is not None:
            flat[key] = raw[key]
    if ids := flat.get("eagle_aux_hidden_state_layer_ids"):
        if min(ids) < 1:
            raise ValueError(
                "eagle_aux_hidden_state_layer_ids names 0, the embedding's output, not supported"
            )
        flat["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in ids]
    return flat


def _lift_eagle_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Keys under `eagle_config` at the top level; a value that changes the layer is refused."""
    lifted = {k: v for k, v in raw.items() if k != "eagle_config"}
    for key, value in _object(raw, "eagle_config").items():
        if key in ("eagle_aux_hidden_state_layer_ids", "norm_before_fc"):
            lifted[key] = value
        elif key not in _EAGLE_CONFIG:
            raise ValueError(f"unknown key eagle_config.{key}")
        elif value is not None and value != _EAGLE_CONFIG[key]:
            raise ValueError(f"eagle_config.{key} = {value} is not supported, only {_EAGLE_CONFIG[key]}")
    return lifted


def _candidate_head(raw: dict[str, Any], draft_vocab: int) -> tuple[int | None, int | None]:
    head = _object(raw, "candidate_head")
    if not head:
        return None, None
    if unknown := sorted(set(head) - {"rank", "num_candidates"}):
        raise ValueError(f"unknown key candidate_head.{unknown[0]}")
    candidates = _positive(head, "num_candidates")
    if candidates > draft_vocab:
        raise ValueError(
            f"candidate_head.num_candidates {candidates} is more than the vocabulary {draft_vocab}"
        )
    return _positive(head, "rank"), candidates


def _acceptance(raw: dict[str, Any]) -> tuple[tuple[Shape, tuple[float, ...]], ...]:
    """What `tokenspeed calibrate --keep-in-draft` writes: {"8/4/16": [0.86, ...], ...}."""
    found = {}
    for name, prior in _object(raw, "acceptance").items():
        try:
            shape = parse_shape(name)
        except ConfigError:
            raise ValueError(f"acceptance: {name!r} is no tree STEPS/TOPK/NODES that can be built") from None
        if not isinstance(prior, list) or len(prior) != shape.steps:
            raise ValueError(
                f"acceptance of {name} must be a list of {shape.steps} numbers, one a step, not {prior!r}"
            )
        for p in prior:
            if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 < p < 1:
                raise ValueError(f"acceptance of {name} must be between 0 and 1 at each depth, not {p!r}")
        found[shape] = tuple(prior)
    return tuple(found.items())


def _window(raw: dict[str, Any]) -> int | None:
    if raw.get("use_sliding_window") is False or raw.get("sliding_window") is None:
        return None
    if (kinds := raw.get("layer_types")) and kinds[0] == "full_attention":
        return None
    return _positive(raw, "sliding_window")


def _refuse(raw: dict[str, Any], known: frozenset[str]) -> None:
    if unknown := sorted(set(raw) - known):
        raise ValueError(f"unknown key {unknown[0]}")


def _object(raw: dict[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be an object, not {value!r}")
    return value


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw[key] if default is None else raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a positive integer, not {value!r}")
    return value
