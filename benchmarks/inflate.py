"""Inflation: a bigger Llama with the same function, so that real text is measured at a bigger model's cost.

    python benchmarks/inflate.py MODEL_DIR OUT_DIR --shape llama-8b [--draft DRAFT_DIR]

writes OUT_DIR (and OUT_DIR/draft) as Hugging Face directories. With r = old hidden size / new hidden size:

- residual dimensions beyond the old ones stay zero, so a mean of squares shrinks by r: norm weights are
  multiplied by sqrt(r), eps by r;
- RoPE dimension i of d/2 goes where the new head dimension has the same frequency, and q is multiplied by
  sqrt(d_new / d_old), which the attention scale takes back;
- query head j goes to the kv group it had;
- spare rows hold random numbers wherever what reads them is zero;
- layers beyond the old ones add zero to the residual.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenspeed.errors import ConfigError

SHARD_BYTES = 4 * 10**9
NOISE_STD = 0.02
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "generation_config.json")  # fmt: skip
_NORMS = ("input_layernorm", "post_attention_layernorm", "hidden_norm", "norm", "fc_norm")


@dataclass(frozen=True)
class Dims:
    """The sizes of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Dims":
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
        )


SHAPES = {
    "llama-8b": Dims(4096, 32, 32, 8, 128, 14336),
    "llama-70b": Dims(8192, 80, 64, 8, 128, 28672),
    "smollm2-1.7b-deep": Dims(2048, 32, 32, 8, 64, 8192),
}


def inflated_config(config: dict[str, Any], new: Dims) -> dict[str, Any]:
    """The config.json of the inflated model (or of its draft, which keeps its own number of layers).

    Raises:
        ConfigError: `config` can't be inflated to `new`.
    """
    old = Dims.of(config)
    _check(config, old, new)
    out = dict(config)
    out.update(
        hidden_size=new.hidden,
        num_hidden_layers=max(old.layers, new.layers) if _is_target(config) else old.layers,
        num_attention_heads=new.heads,
        num_key_value_heads=new.kv_heads,
        head_dim=new.head_dim,
        intermediate_size=new.intermediate,
        rms_norm_eps=config["rms_norm_eps"] * old.hidden / new.hidden,
    )
    if "target_hidden_size" in config:
        out["target_hidden_size"] = new.hidden
    return out


def inflate(
    config: dict[str, Any],
    names: list[str],
    load: Callable[[str], Tensor],
    new: Dims,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the inflated model one by one, in the order of `names`, then those of the added layers.

    Args:
        config: config.json of the model or the draft. names: its tensors. load: gives a tensor by name.
        device: where the new tensors are made. seed: of the noise in spare rows.
    """
    old = Dims.of(config)
    _check(config, old, new)
    noise = torch.Generator(device=device).manual_seed(seed)
    plan = _Plan(old, new, torch.device(device), dtype, noise)
    for name in names:
        yield name, plan.tensor(name, load(name))
    if not _is_target(config):
        return
    first = [name for name in names if name.startswith("model.layers.0.")]
    for layer in range(old.layers, new.layers):
        for name in first:
            tensor = plan.tensor(name, load(name))
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
            yield name.replace("layers.0.", f"layers.{layer}.", 1), tensor


class _Plan:
    """Where each row and column of an old tensor goes, and what fills the rest."""

    def __init__(
        self, old: Dims, new: Dims, device: torch.device, dtype: torch.dtype, noise: torch.Generator
    ):
        self.old, self.new, self.device, self.dtype, self.noise = old, new, device, dtype, noise
        self.hidden = torch.arange(old.hidden, device=device)
        self.ffn = torch.arange(old.intermediate, device=device)
        half, ratio = old.head_dim // 2, new.head_dim // old.head_dim
        rotated = torch.arange(half, device=device) * ratio
        self.rotary_dims = torch.cat([rotated, rotated + new.head_dim // 2])
        self.value_dims = torch.arange(old.head_dim, device=device)
        heads = torch.arange(old.heads, device=device)
        old_group, new_group = old.heads // old.kv_heads, new.heads // new.kv_heads
        self.q_heads = heads // old_group * new_group + heads % old_group
        self.kv_heads = torch.arange(old.kv_heads, device=device)

    def tensor(self, name: str, value: Tensor) -> Tensor:
        """The new tensor for `name`. Raises ConfigError for one that no Llama and no EAGLE draft has."""
        value = value.to(self.device)
        if value.dtype.is_floating_point:
            value = value.to(self.dtype)
        parts = name.removesuffix(".weight").split(".")
        kind = parts[-2] if parts[-1].isdigit() else parts[-1]
        old, new = self.old, self.new
        if kind in _NORMS:
            return self._norm(value)
        if kind in ("q_proj", "k_proj", "v_proj"):
            return self._attention_in(kind, value)
        if kind == "o_proj":
            columns = self._rows(self.q_heads, self.value_dims)
            return self._place(value, (new.hidden, new.heads * new.head_dim), self.hidden, columns, fill=0.0)
        if kind in ("gate_proj", "up_proj"):
            return self._place(value, (new.intermediate, new.hidden), self.ffn, self.hidden)
        if kind == "down_proj":
            return self._place(value, (new.hidden, new.intermediate), self.hidden, self.ffn, fill=0.0)
        if kind == "embed_tokens":
            rows = torch.arange(value.shape[0], device=self.device)
            return self._place(value, (value.shape[0], new.hidden), rows, self.hidden, fill=0.0)
        if kind in ("lm_head", "efficient_lm_head_down_proj"):
            rows = torch.arange(value.shape[0], device=self.device)
            return self._place(value, (value.shape[0], new.hidden), rows, self.hidden)
        if kind == "fc":
            chunks = value.shape[1] // old.hidden
            columns = self._chunked(chunks)
            out = self._place(value, (new.hidden, chunks * new.hidden), self.hidden, columns)
            out[old.hidden :] = 0  # its output is a residual
            return out
        if kind in ("efficient_lm_head", "d2t", "t2d"):
            return value
        raise ConfigError(f"tensor {name} is not known; only Llama models and EAGLE drafts can be inflated")

    def _attention_in(self, kind: str, value: Tensor) -> Tensor:
        """q, k or v: columns are the hidden state, or for a draft the embedding beside the hidden state."""
        new = self.new
        chunks = value.shape[1] // self.old.hidden
        heads, total = (self.q_heads, new.heads) if kind == "q_proj" else (self.kv_heads, new.kv_heads)
        dims = self.value_dims if kind == "v_proj" else self.rotary_dims
        rows = self._rows(heads, dims)
        if kind == "q_proj":
            value = value * math.sqrt(new.head_dim / self.old.head_dim)
        shape = (total * new.head_dim, chunks * new.hidden)
        out = self._place(value, shape, rows, self._chunked(chunks))
        if kind == "q_proj":  # a used head scores with its own dimensions only, whatever k holds in others
            used = torch.zeros(total, new.head_dim, dtype=torch.bool, device=self.device)
            used[heads] = True
            used.view(-1)[rows] = False
            out[used.view(-1)] = 0
        return out

    def _norm(self, value: Tensor) -> Tensor:
        out = torch.ones(self.new.hidden, dtype=self.dtype, device=self.device)
        out[self.hidden] = value * math.sqrt(self.old.hidden / self.new.hidden)
        return out

    def _rows(self, heads: Tensor, dims: Tensor) -> Tensor:
        """Rows of (head, dimension) pairs in the old order."""
        return (heads[:, None] * self.new.head_dim + dims[None]).reshape(-1)

    def _chunked(self, chunks: int) -> Tensor:
        """Columns of `chunks` hidden states side by side."""
        return torch.cat([self.hidden + i * self.new.hidden for i in range(chunks)])

    def _place(
        self, value: Tensor, shape: tuple[int, int], rows: Tensor, columns: Tensor, fill: float | None = None
    ) -> Tensor:
        """`value` at (rows, columns) of a tensor filled with `fill`, or with noise."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        if fill is None:
            out.normal_(0.0, NOISE_STD, generator=self.noise)
        else:
            out.fill_(fill)
        out[rows[:, None], columns[None]] = value
        return out


def _is_target(config: dict[str, Any]) -> bool:
    return config["architectures"][0] == "LlamaForCausalLM" and "target_hidden_size" not in config


def _check(config: dict[str, Any], old: Dims, new: Dims) -> None:
    grown = (
        ("hidden size", old.hidden, new.hidden),
        ("layers", old.layers, new.layers),
        ("kv heads", old.kv_heads, new.kv_heads),
        ("query heads for a kv head", old.heads // old.kv_heads, new.heads // new.kv_heads),
        ("intermediate size", old.intermediate, new.intermediate),
    )
    for what, before, after in grown:
        if after < before:
            raise ConfigError(f"the new shape has {after} {what}, fewer than the model's {before}")
    if new.heads % new.kv_heads or new.head_dim % old.head_dim:
        raise ConfigError("heads must be a multiple of kv heads, and head_dim of the model's head_dim")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"rope type {kind} depends on the head dimension and can't be inflated")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ConfigError(f"a model with {key} can't be inflated")
    if not config["architectures"][0].startswith("Llama"):
        raise ConfigError(f"only Llama models can be inflated, not {config['architectures'][0]}")


def parse_dims(text: str) -> Dims:
    """A name of SHAPES, or HIDDEN/LAYERS/HEADS/KV_HEADS/HEAD_DIM/INTERMEDIATE. Raises ConfigError."""
    if text in SHAPES:
        return SHAPES[text]
    parts = text.split("/")
    if len(parts) != 6 or not all(part.isdigit() and int(part) for part in parts):
        known, numbers = ", ".join(SHAPES), "HIDDEN/LAYERS/HEADS/KV_HEADS/HEAD_DIM/INTERMEDIATE"
        raise ConfigError(f"--shape must be one of {known}, or {numbers}, not {text!r}")
    return Dims(*map(int, parts))


def inflate_directory(source: Path, target: Path, new: Dims, device: str = "cpu", seed: int = 0) -> int:
    """Writes the inflated copy of checkpoint `source`. Returns its size in bytes. Raises ConfigError."""
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source} has no config.json; give a Hugging Face checkpoint directory")
    config = json.loads((source / "config.json").read_text())
    out_config = inflated_config(config, new)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{source} has no *.safetensors")
    target.mkdir(parents=True, exist_ok=True)
    handles = [safe_open(file, framework="pt") for file in files]
    where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118
    tensors = inflate(config, list(where), lambda name: where[name].get_tensor(name), new, device, seed=seed)
    size = _write_shards(target, tensors)
    (target / "config.json").write_text(json.dumps(out_config, indent=1) + "\n")
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    return size


def _write_shards(target: Path, tensors: Iterator[tuple[str, Tensor]]) -> int:
    """Shards of at most SHARD_BYTES and their index. Returns the bytes written."""
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    held = total = 0

    def flush() -> None:
        save_file(shard, target / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > SHARD_BYTES:
            flush()
            held = 0
        shard[name] = tensor.cpu().contiguous()
        held, total = held + size, total + size
    flush()
    index = {}
    for number, names in enumerate(shards):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (target / f"part-{number}.safetensors").rename(target / file)
        index.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        (target / "model.safetensors.index.json").write_text(text + "\n")
    return total


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Pads a small Llama into a bigger one with the same function."
    )
    parser.add_argument("model", type=Path, help="checkpoint directory of a Llama")
    parser.add_argument("out", type=Path, help="directory to write; the draft goes to OUT/draft")
    parser.add_argument(
        "--shape", default="llama-8b", help=f"{', '.join(SHAPES)} or six numbers with slashes"
    )
    parser.add_argument("--draft", type=Path, help="checkpoint directory of the model's EAGLE draft")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the noise in spare rows")
    args = parser.parse_args()
    try:
        new = parse_dims(args.shape)
        size = inflate_directory(args.model, args.out, new, args.device, args.seed)
        print(f"{args.out}: {size / 1e9:.2f} GB")
        if args.draft is not None:
            size = inflate_directory(args.draft, args.out / "draft", new, args.device, args.seed)
            print(f"{args.out / 'draft'}: {size / 1e9:.3f} GB")
    except ConfigError as error:
        print(f"inflate: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
