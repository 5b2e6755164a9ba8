"""The tensors of a draft checkpoint: what its files hold, by one set of names, and what its config calls for.

No torch: only safetensors headers are read, so a start-up check costs milliseconds. Spellings that are
accepted: `midlayer.*` or `layers.0.*`, each with or without the prefix `model.`.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.errors import ConfigError
from tokenspeed.spec.eagle4.formats import DraftConfig

_FLOATS = ("BF16", "F16", "F32")
CANDIDATE_TENSORS = ("efficient_lm_head.weight", "efficient_lm_head_down_proj.weight")
_MAX_HEADER = 100 << 20  # the safetensors library's own bound


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and what it is."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: BF16, F32, I64, ...


@dataclass(frozen=True)
class Parameter:
    """What the model asks of one tensor."""

    shape: tuple[int, ...]
    required: bool = True


def read_headers(draft_dir: Path) -> dict[str, TensorInfo]:
    """Canonical name -> tensor, over the safetensors files of the directory that hold its weights.

    Raises:
        ConfigError: no safetensors there (.bin files name the command that converts them), a broken header,
            or two tensors with the same canonical name.
    """
    single = draft_dir / "model.safetensors"
    files = [single] if single.exists() else sorted(draft_dir.glob("*.safetensors"))
    if not files:
        if any(draft_dir.glob("*.bin")):
            raise ConfigError(
                f"{draft_dir} holds only pickled .bin weights, which tokenspeed does not load; convert them: "
                f"tokenspeed draft convert {draft_dir}"
            )
        raise ConfigError(f"{draft_dir} has no *.safetensors; give the directory of a draft checkpoint")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, entry in _header(file).items():
            key = canonical(name)
            if key in tensors:
                raise ConfigError(f"{draft_dir} holds {key} twice, as {tensors[key].name} and {name}")
            tensors[key] = TensorInfo(file, name, tuple(entry["shape"]), entry["dtype"])
    return tensors


def canonical(name: str) -> str:
    """One spelling for each parameter: no `model.` prefix, `layers.0.` for `midlayer.`."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def parameters(config: DraftConfig, present: frozenset[str]) -> dict[str, Parameter]:
    """Every tensor that may reach the model: canonical name -> what is asked of it.

    Args:
        present: names in the checkpoint; an embedding or a head that is left out may be the target's.
    """
    c, h = config, config.hidden_size
    width, layer = (2 * h if c.wide else h), "layers.0."
    out = {
        layer + "self_attn.q_proj.weight": Parameter((c.num_heads * c.head_dim, width)),
        layer + "self_attn.k_proj.weight": Parameter((c.num_kv_heads * c.head_dim, width)),
        layer + "self_attn.v_proj.weight": Parameter((c.num_kv_heads * c.head_dim, width)),
        layer + "self_attn.o_proj.weight": Parameter((h, c.num_heads * c.head_dim)),
        layer + "mlp.gate_proj.weight": Parameter((c.intermediate_size, h)),
        layer + "mlp.up_proj.weight": Parameter((c.intermediate_size, h)),
        layer + "mlp.down_proj.weight": Parameter((h, c.intermediate_size)),
        layer + "post_attention_layernorm.weight": Parameter((h,)),
    }
    if c.wide:
        out["fc.weight"] = Parameter((h, c.aux_size))
        out |= {layer + n: Parameter((h,)) for n in ("input_layernorm.weight", "hidden_norm.weight")}
        out["norm.weight"] = Parameter((h,))
    else:
        out["fc.weight"] = Parameter((h, 2 * h))
    if c.fc_norm:
        out |= {f"fc_norm.{i}.weight": Parameter((c.target_hidden_size,)) for i in range(c.num_aux)}
    if c.norm_before_fc:
        out["input_norm.weight"] = Parameter((c.aux_size,))
    if c.rank is not None:
        shapes = ((c.draft_vocab_size, c.rank), (c.rank, h))
        out |= {name: Parameter(shape) for name, shape in zip(CANDIDATE_TENSORS, shapes, strict=True)}
    return out | _biases(c) | _vocabulary(c, present)


def _biases(c: DraftConfig) -> dict[str, Parameter]:
    # EAGLE-1/2 configs do not say which biases there are, so for them the tensors do.
    out, attn = {}, "layers.0.self_attn."
    old = c.method == "eagle"
    if c.attention_bias or old:
        sizes = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
        for name, heads in sizes.items():
            out[f"{attn}{name}_proj.bias"] = Parameter((heads * c.head_dim,), required=not old)
        out[attn + "o_proj.bias"] = Parameter((c.hidden_size,), required=False)
    if old:
        out["fc.bias"] = Parameter((c.hidden_size,), required=False)
    return out


def _vocabulary(c: DraftConfig, present: frozenset[str]) -> dict[str, Parameter]:
    out = {}
    if not c.tie_embed:  # older formats leave the target's embedding out without a word
        out["embed_tokens.weight"] = Parameter((c.vocab_size, c.hidden_size), required=c.method == "eagle4")
    if not c.tie_lm_head:
        reduced = c.draft_vocab_size < c.vocab_size
        own_embed = c.tie_word_embeddings and "embed_tokens.weight" in present
        required = reduced or (c.method == "eagle4" and not own_embed)
        out["lm_head.weight"] = Parameter((c.draft_vocab_size, c.hidden_size), required=required)
    if c.method != "eagle":
        reduced = c.draft_vocab_size < c.vocab_size
        out["d2t"] = Parameter((c.draft_vocab_size,), required=reduced)
        out["t2d"] = Parameter((c.vocab_size,), required=False)  # the inverse of d2t: known, not used
    return out


def check_tensors(config: DraftConfig, tensors: dict[str, TensorInfo], where: Path) -> None:
    """Raises ConfigError for a tensor that is missing, unreachable, or of another shape or dtype."""
    wanted = parameters(config, frozenset(tensors))
    for name, parameter in wanted.items():
        if name not in tensors:
            if parameter.required:
                raise ConfigError(f"{where} lacks tensor {name}{_tie_hint(name)}")
            continue
        info = tensors[name]
        if info.shape != parameter.shape:
            raise ConfigError(
                f"tensor {info.name} of {where} is {list(info.shape)}, its config.json calls for "
                f"{list(parameter.shape)}"
            )
        if name not in ("d2t", "t2d") and info.dtype not in _FLOATS:
            raise ConfigError(
                f"tensor {info.name} of {where} is {info.dtype}; supported: {', '.join(_FLOATS)}"
            )
    if unreachable := sorted(set(tensors) - set(wanted)):
        raise ConfigError(
            f"tensor {tensors[unreachable[0]].name} of {where} reaches no parameter of a "
            f"{config.method} draft with this config.json"
        )


def _tie_hint(name: str) -> str:
    keys = {"embed_tokens.weight": "tie_embed_to_target", "lm_head.weight": "tie_lm_head_to_target"}
    return f" (if it is the target's, set {keys[name]} in its config.json)" if name in keys else ""


def check_d2t(tensors: dict[str, TensorInfo], config: DraftConfig, where: Path) -> None:
    """Raises ConfigError when draft id i maps to a target id i + d2t[i] that does not exist."""
    if "d2t" not in tensors:
        return
    from safetensors import safe_open

    info = tensors["d2t"]
    if info.dtype not in ("I64", "I32"):
        raise ConfigError(f"tensor d2t of {where} is {info.dtype}, not integers")
    with safe_open(info.file, framework="numpy") as file:
        offsets = file.get_tensor(info.name).tolist()
    for draft_id, offset in enumerate(offsets):
        if not 0 <= draft_id + offset < config.vocab_size:
            raise ConfigError(
                f"d2t of {where} maps draft token {draft_id} to {draft_id + offset}, outside the target's "
                f"vocabulary of {config.vocab_size}"
            )


def _header(file: Path) -> dict[str, dict]:
    try:
        with open(file, "rb") as f:
            (size,) = struct.unpack("<Q", f.read(8))
            if size > _MAX_HEADER:
                raise ValueError(f"header of {size} bytes")
            header = json.loads(f.read(size))
            end = max((t["data_offsets"][1] for k, t in header.items() if k != "__metadata__"), default=0)
            if 8 + size + end > file.stat().st_size:
                raise ValueError(f"{file.stat().st_size} bytes where {8 + size + end} are due")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{file} is not a whole safetensors file: {error}") from None
    header.pop("__metadata__", None)
    return header
