"""A draft of pickled .bin weights, written anew as safetensors: same names, same types, same bits.

The files come from strangers. They are read with `weights_only`, which builds tensors and plain containers and
calls nothing that a file names, and what is written is checked as the engine would check it at start-up.
"""

import errno
import json
import os
import re
import shutil
import struct
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenspeed.errors import ConfigError
from tokenspeed.hub.cache import BUILDING
from tokenspeed.spec.eagle4.checkpoint import check_d2t, check_tensors, read_headers
from tokenspeed.spec.eagle4.config import detect_method
from tokenspeed.spec.eagle4.formats import parse_draft

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ZIP = b"PK\x03\x04"  # how files of torch.save begin since torch 1.6; older ones can't be mapped
LFS = b"version https://git-lfs"  # what `git clone` leaves in place of a large file
MAX_JSON_BYTES = 64 << 20  # a large tokenizer.json has half of that
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Converted:
    """What was written."""

    method: str  # eagle, eagle3 or eagle4
    num_tensors: int
    num_bytes: int


def convert_draft(
    source: Path,
    files: Mapping[Path, Collection[str]],
    output: Path,
    progress: Callable[[str, int, int], None],
) -> Converted:
    """Writes `output` with model.safetensors and the JSON files of `source`.

    All is made in a directory beside `output` that is renamed at the end, so `output` is whole or not there.

    Args:
        files: the pickled files of `source`, each with the names of tensors that must be in it.
        output: does not exist, or is an empty directory.
        progress: told what takes long: text, bytes done, bytes in all.

    Raises:
        ConfigError: a file can't be read, is refused or holds more than tensors, there is no room for
            `output`, it can't be written, or the result is no draft that tokenspeed can run.
    """
    texts = _read_json(source)
    tensors = _read(files)
    num_bytes = sum(_num_bytes(tensor) for tensor in tensors.values())
    building = output.with_name(f"{output.name}.{os.getpid()}{BUILDING}")
    try:
        if shutil.disk_usage(output.parent).free < num_bytes:
            raise OSError(errno.ENOSPC, "less is free than is needed")
        building.mkdir()
        for name, text in texts.items():
            (building / name).write_bytes(text)
        _write_safetensors(building / "model.safetensors", tensors, f"converting {source.name}", progress)
        method = _check(building, source)
        os.rename(building, output)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"no room for {output}, {num_bytes / 2**20:.1f} MiB; name a directory elsewhere with --output"
            ) from None
        raise ConfigError(
            f"{output} can't be written ({error.strerror or error}); name another directory with --output"
        ) from None
    finally:
        shutil.rmtree(building, ignore_errors=True)  # gone already if all went well
    return Converted(method, len(tensors), num_bytes)


def _read(files: Mapping[Path, Collection[str]]) -> dict[str, Tensor]:
    """Every tensor of the files, the larger types first, which keeps each aligned in a safetensors file."""
    limit = sum(file.stat().st_size for file in files)
    tensors: dict[str, Tensor] = {}
    for file, promised in files.items():
        state = _load(file)
        for name, value in state.items():
            if name in tensors:
                raise ConfigError(f"{file} holds {name}, which another file holds too; fetch them all again")
            if why_not := _why_not(name, value, limit):
                raise ConfigError(
                    f"{file} is not a plain state dict: {why_not}; only a dictionary of tensors is converted"
                )
            tensors[name] = value.detach()
        if lacking := sorted(set(promised) - set(state)):
            raise ConfigError(f"{file} lacks {lacking[0]}, which the index promises; fetch it again")
    if not tensors:
        raise ConfigError(f"{next(iter(files))} holds no tensors; fetch it again")
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def _load(file: Path) -> dict[Any, Any]:
    try:
        with file.open("rb") as opened:
            start = opened.read(len(LFS))
        if start == LFS:
            raise ConfigError(f"{file} is only a Git LFS pointer; fetch the file itself: git lfs pull")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what odd tensors are made of: they are refused anyway
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=start.startswith(ZIP))
    except ConfigError:
        raise
    except Exception as error:  # a broken or hostile file can fail in any way inside torch
        raise ConfigError(f"{file} {_refusal(error)}") from None
    if not isinstance(state, dict):
        raise ConfigError(
            f"{file} holds a {type(state).__name__}; only a dictionary of tensors (a state dict) is converted"
        )
    return state


def _refusal(error: Exception) -> str:
    """The end of a message: why torch did not read a file. Its own text tells to switch the guard off."""
    text = str(error)
    if found := re.search(r"GLOBAL (\S+)", text):
        return (
            f"is refused: it asks to run {found[1]}; only a dictionary of tensors (a state dict) is converted"
        )
    if type(error).__name__ == "UnpicklingError":  # of `pickle`, which this package does not import
        return "is damaged, or holds more than a dictionary of tensors (a state dict); fetch it again"
    reason = text.strip().splitlines()[0][:120] if text.strip() else type(error).__name__
    return f"can't be read ({reason}); fetch it again"


def _why_not(name: Any, value: Any, limit: int) -> str | None:
    """Why an entry can't be written as it is, or None.

    Args:
        limit: bytes of all files: a tensor of more repeats its storage, up to any size.
    """
    if not isinstance(name, str) or name == "__metadata__":
        return f"a name is {name!r}"
    if type(value) not in (Tensor, torch.nn.Parameter):
        return f"{name} is a {type(value).__name__}"
    if value.layout != torch.strided or value.device.type != "cpu" or value.dtype not in DTYPES:
        return f"{name} is {value.dtype}, {value.layout}, on {value.device}"
    if value.is_neg():
        return f"{name} is stored with its sign turned"
    if _num_bytes(value) > limit:
        return f"{name} of {list(value.shape)} is larger than the file"
    return None


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _read_json(source: Path) -> dict[str, bytes]:
    """Config and tokenizer by file name; not the index of the files that were."""
    names = [path for path in sorted(source.glob("*.json")) if not path.name.endswith(".index.json")]
    try:
        return {path.name: path.read_bytes() for path in names if path.stat().st_size <= MAX_JSON_BYTES}
    except OSError as error:
        raise ConfigError(f"{error.filename} can't be read: {error.strerror}") from None


def _write_safetensors(
    path: Path, tensors: dict[str, Tensor], label: str, progress: Callable[[str, int, int], None]
) -> None:
    """One tensor is in memory at a time. Tensors that share storage are written as often as they are named."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + _num_bytes(tensor)
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        for tensor in tensors.values():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            for at in range(0, len(flat), _CHUNK_BYTES):
                done += file.write(flat[at : at + _CHUNK_BYTES])
                progress(label, done, end)
        file.flush()
        os.fsync(file.fileno())  # some file systems tell only now that the disk is full


def _check(directory: Path, source: Path) -> str:
    """The method of the draft in `directory`. Raises ConfigError, in terms of `source`, if it can't be run."""
    try:
        method = detect_method(directory)
        raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = parse_draft(raw, method, directory)
        tensors = read_headers(directory)
        check_tensors(config, tensors, directory)
        check_d2t(tensors, config, directory)
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(directory), str(source))) from None
    return method
