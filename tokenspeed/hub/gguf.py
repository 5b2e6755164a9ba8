"""GGUF to a Hugging Face checkpoint directory: weights dequantised to bfloat16, configuration, tokenizer.

Architectures llama, qwen2 and qwen3. In `llama` the rows of q and k are stored in the order of interleaved
rotary pairs; they are put back into halves. Tensors are written one by one, so memory holds one at a time.
"""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize

from tokenspeed.errors import ConfigError
from tokenspeed.hub.cache import build_once, file_key
from tokenspeed.hub.checkpoint import is_whole
from tokenspeed.hub.gguf_config import eos_token_ids, model_config
from tokenspeed.hub.gguf_tokenizer import write_tokenizer

CONVERTER_VERSION = 1  # raise it when the output changes, so that cached conversions are made anew
TYPES = (
    Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1,
    Type.Q4_K, Type.Q5_K, Type.Q6_K,
)  # fmt: skip
CHUNK = 1 << 24  # elements dequantised at once
TIED_BELOW = (
    0.15  # relative difference of input and output embedding that is quantisation noise (seen: 0.04 to 0.07)
)
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class Source:
    """Where a tensor of the checkpoint comes from. `heads` > 0: rows in interleaved rotary order, to undo."""

    tensor: ReaderTensor
    shape: tuple[int, ...]
    heads: int = 0


def cached_conversion(path: Path, progress: Callable[[str, int, int], None]) -> Path:
    """The checkpoint directory of a GGUF file, converted at the first call.

    Raises:
        ConfigError: as `convert_gguf` and `build_once`.
    """
    reader = read_gguf(path)
    elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    name = f"{path.stem}-{file_key(path, CONVERTER_VERSION)}"

    def build(directory: Path) -> None:
        convert_gguf(path, directory, progress, reader)

    return build_once(name, build, 2 * elements + 64 * 2**20, is_whole)


def convert_gguf(
    path: Path, directory: Path, progress: Callable[[str, int, int], None], reader: GGUFReader | None = None
) -> None:
    """Writes model.safetensors (bfloat16), config.json, generation_config.json and the tokenizer's files.

    Raises:
        ConfigError: the file is cut or damaged, or holds an architecture, a tensor, a quantisation, a rotary
            scaling or a pre-tokenizer that is not supported. The message names it.
    """
    reader = reader or read_gguf(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    try:
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        freqs = tensors.pop(ROPE_FREQS, None)
        config = model_config(fields, None if freqs is None else _whole(freqs))
        sources = _sources(config, tensors)
        _write_json(directory / "config.json", config)
        ids = {name: config[name] for name in ("bos_token_id", "pad_token_id")}
        generation = {**ids, "eos_token_id": eos_token_ids(fields), "do_sample": False}
        _write_json(directory / "generation_config.json", generation)
        write_tokenizer(fields, config, directory)
        _write_safetensors(directory / "model.safetensors", sources, f"converting {path.name}", progress)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]} is missing; this GGUF file can't be used") from None


def read_gguf(path: Path) -> GGUFReader:
    """Opens a GGUF file and looks over its metadata. Raises ConfigError."""
    try:
        reader = GGUFReader(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, ZeroDivisionError) as error:
        if Type.__name__ in str(error):
            raise ConfigError(f"{path} holds a tensor type that is not known ({error})") from None
        raise ConfigError(
            f"{path} is not a GGUF file, or it is cut short or damaged; fetch it again"
        ) from None
    split = reader.fields.get("split.count")
    if split is not None and split.contents() > 1:
        raise ConfigError(f"{path} is one of {split.contents()} parts; merge them into one GGUF file first")
    for tensor in reader.tensors:
        if tensor.tensor_type not in TYPES:
            known = ", ".join(t.name for t in TYPES)
            raise ConfigError(
                f"{path}: {tensor.name} is of type {tensor.tensor_type.name}, not supported (only {known})"
            )
    return reader


def _sources(config: dict[str, Any], tensors: dict[str, ReaderTensor]) -> dict[str, Source]:
    """Every tensor of the checkpoint by its name there. Sets config["tie_word_embeddings"].

    Raises:
        ConfigError: a tensor is missing, of a wrong shape, or unknown.
    """
    hidden, heads, kv = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    dim, wide, vocab = config["head_dim"], config["intermediate_size"], config["vocab_size"]
    llama, qwen2, qwen3 = (config["model_type"] == m for m in ("llama", "qwen2", "qwen3"))
    if qwen2:
        del config["head_dim"]  # follows from the others
    left = dict(tensors)

    def take(name: str, *shape: int, rotary_heads: int = 0) -> Source:
        tensor = left.pop(name, None)
        if tensor is None:
            raise ConfigError(f"tensor {name} is missing")
        found = tuple(int(n) for n in reversed(tensor.shape))
        if found != shape:
            raise ConfigError(f"tensor {name} has the shape {list(found)}, expected {list(shape)}")
        return Source(tensor, shape, rotary_heads)

    out = {"model.embed_tokens.weight": take("token_embd.weight", vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        here, there = f"model.layers.{i}.", f"blk.{i}."
        out[here + "input_layernorm.weight"] = take(there + "attn_norm.weight", hidden)
        for letter, n in (("q", heads), ("k", kv), ("v", kv)):
            rotary = n if llama and letter != "v" else 0
            to, name = f"{here}self_attn.{letter}_proj.", f"{there}attn_{letter}."
            out[to + "weight"] = take(name + "weight", n * dim, hidden, rotary_heads=rotary)
            if qwen2:
                out[to + "bias"] = take(name + "bias", n * dim)
            if qwen3 and letter != "v":
                out[f"{here}self_attn.{letter}_norm.weight"] = take(f"{there}attn_{letter}_norm.weight", dim)
        out[here + "self_attn.o_proj.weight"] = take(there + "attn_output.weight", hidden, heads * dim)
        out[here + "post_attention_layernorm.weight"] = take(there + "ffn_norm.weight", hidden)
        for which, shape in (("gate", (wide, hidden)), ("up", (wide, hidden)), ("down", (hidden, wide))):
            out[f"{here}mlp.{which}_proj.weight"] = take(f"{there}ffn_{which}.weight", *shape)
    out["model.norm.weight"] = take("output_norm.weight", hidden)
    if "output.weight" in left:
        out["lm_head.weight"] = take("output.weight", vocab, hidden)
    if left:
        raise ConfigError(f"tensor {min(left)} is not one of a {config['model_type']} model")
    config["tie_word_embeddings"] = _tie(out)
    return out


def _tie(sources: dict[str, Source]) -> bool:
    """Whether the embeddings are tied. Some files hold both, quantised unlike: the better one is kept."""
    if "lm_head.weight" not in sources:
        return True
    pair = (sources["model.embed_tokens.weight"], sources["lm_head.weight"])
    embedding, output = (dequantize(s.tensor.data[:4096], s.tensor.tensor_type) for s in pair)
    if np.linalg.norm(embedding - output) >= TIED_BELOW * np.linalg.norm(output):
        return False
    sources["model.embed_tokens.weight"] = sources.pop("lm_head.weight")
    return True


def _whole(tensor: ReaderTensor) -> np.ndarray:
    return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _chunks(source: Source) -> Iterator[np.ndarray]:
    """The tensor as float32, some rows at a time."""
    tensor, shape = source.tensor, source.shape
    if source.heads:
        yield unpermute(_whole(tensor).reshape(shape), source.heads)
        return
    rows = max(1, CHUNK // (shape[1] if len(shape) > 1 else 1))
    for start in range(0, shape[0], rows):
        yield np.asarray(dequantize(tensor.data[start : start + rows], tensor.tensor_type), dtype=np.float32)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * d, in] of heads from rotary pairs (0, 1), (2, 3), ... to halves 0, 2, ... 1, 3, ..."""
    half = weight.shape[0] // heads // 2
    return np.ascontiguousarray(weight.reshape(heads, half, 2, -1).swapaxes(1, 2)).reshape(weight.shape)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of bfloat16 (uint16), rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype("<u2")


def _write_safetensors(
    path: Path, sources: dict[str, Source], label: str, progress: Callable[[str, int, int], None]
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, source in sources.items():
        begin, end = end, end + 2 * int(np.prod(source.shape))
        header[name] = {"dtype": "BF16", "shape": list(source.shape), "data_offsets": [begin, end]}
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        for source in sources.values():
            for chunk in _chunks(source):
                done += file.write(to_bfloat16(chunk).tobytes())
                progress(label, done, end)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
