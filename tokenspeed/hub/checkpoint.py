"""Can this checkpoint directory be loaded? Looked at before a worker starts: names, headers, sizes."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from tokenspeed.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
PICKLED = ("*.bin", "*.pt", "*.pth")


def check_checkpoint(path: Path, pickled_hint: str) -> None:
    """Checks that config.json is there, and each safetensors header against its file. Reads no weights.

    Args:
        pickled_hint: what to do with a directory that holds only .bin or .pt files.

    Raises:
        ConfigError: naming the file at fault.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json; give a Hugging Face checkpoint directory")
    files = weight_files(path)
    if not files:
        pickled = sorted(p.name for pattern in PICKLED for p in path.glob(pattern))
        if pickled:
            raise ConfigError(f"{path} holds {pickled[0]} but no *.safetensors; {pickled_hint}")
        raise ConfigError(
            f"{path} holds no *.safetensors; give a Hugging Face checkpoint directory with its weights"
        )
    for file in files:
        check_safetensors(file)


def is_whole(path: Path) -> bool:
    """Whether a model that was converted into `path` can be used."""
    try:
        check_checkpoint(path, "")
    except ConfigError:
        return False
    return (path / "tokenizer.json").is_file()


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those its index names, else all.

    Raises:
        ConfigError: the index can't be read, or a file that it names is missing.
    """
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(path.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index} is not an index of safetensors files; fetch it again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
            raise ConfigError(f"{index} names {name}, which is not there; fetch the whole model")
    return [path / name for name in names]


def num_elements(path: Path) -> int:
    """Numbers that the weights of a checkpoint hold, by the headers of its files. Raises ConfigError."""
    return sum(math.prod(e["shape"]) for file in weight_files(path) for e in check_safetensors(file))


def check_safetensors(path: Path) -> list[dict[str, Any]]:
    """The tensors of a file as its header describes them: dtype, shape, data_offsets.

    Raises:
        ConfigError: it is cut, is no safetensors, or its header contradicts itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ConfigError(f"{path} is not a safetensors file, or damaged; fetch it again")
        if 8 + length > size:
            raise ConfigError(f"{path} is cut short ({size} bytes); fetch it again")
        data = file.read(length)
    try:
        header = json.loads(data)
        entries = [e for name, e in header.items() if name != "__metadata__"]
        end = _end(entries)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"the header of {path} is damaged; fetch it again") from None
    if 8 + length + end > size:
        raise ConfigError(
            f"{path} is cut short: {size} bytes, but its header speaks of {8 + length + end}; fetch it again"
        )
    return entries


def _end(entries: list[dict[str, Any]]) -> int:
    """Where the last tensor ends. Raises ValueError unless tensors fill the data without gap or overlap."""
    at = 0
    for entry in sorted(entries, key=lambda e: e["data_offsets"]):
        begin, end = entry["data_offsets"]
        width = ITEM_BYTES.get(entry["dtype"])
        if begin != at or end < begin:
            raise ValueError("tensors overlap")
        if width is not None and math.prod(entry["shape"]) * width != end - begin:
            raise ValueError("a shape contradicts its size")
        at = end
    return at
