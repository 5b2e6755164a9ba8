"""Tensors and a few facts in one safetensors file that is replaced as a whole: a run's state."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tokenspeed.errors import ConfigError

_KEY = "state"  # of the header's metadata, which holds strings alone


def save_state(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Replaces `path`; until the new file is whole, the old one stays.

    Raises:
        ConfigError: it can't be written.
    """
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_whole(path, save(plain, {_KEY: json.dumps(facts)}))


def write_whole(path: Path, data: bytes) -> None:
    """Replaces `path` by `data` in one step. Raises ConfigError, naming what is in the way."""
    fresh = path.with_name(path.name + ".new")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # some file systems tell only now that the disk is full
        os.replace(fresh, path)
    except OSError as error:
        fresh.unlink(missing_ok=True)
        raise unwritable(path, error) from None


def unwritable(path: Path, error: OSError) -> ConfigError:
    """The message for a file that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"the disk of {path} is full; make room and go on with --resume")
    return ConfigError(f"{path} can't be written: {error.strerror or error}")


def load_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, on the CPU, and the facts of `save_state`. Raises ConfigError if the file is not whole."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            facts = json.loads((file.metadata() or {})[_KEY])
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{path} is no state of a training run, or damaged: {error}") from None


@torch.no_grad()
def restore(into: dict[str, Tensor], stored: dict[str, Tensor], path: Path) -> None:
    """Copies stored tensors into those of the same names. Raises ConfigError where the two do not match."""
    if into.keys() != stored.keys():
        odd = min(into.keys() ^ stored.keys())
        raise ConfigError(f"{path} is of another kind of run: it differs in {odd}")
    for name, tensor in into.items():
        if tensor.shape != stored[name].shape:
            raise ConfigError(f"{path} holds {name} of {list(stored[name].shape)}, not {list(tensor.shape)}")
        tensor.copy_(stored[name])
