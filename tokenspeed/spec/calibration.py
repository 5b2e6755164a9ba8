"""What rounds take on a machine and what trees bring on it, found by the worker or kept in a file. No torch."""

import hashlib
import json
import logging
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.config import Shape
from tokenspeed.errors import ConfigError
from tokenspeed.hub.cache import cache_root

log = logging.getLogger(__name__)
FORMAT = 1
Size = tuple[int, int, int]  # steps, top-k, nodes


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Raises ValueError (msgspec's ValidationError where it is decoded) for figures that can be none."""

    # Batch, tree (None: a plain round) and microseconds with no context to speak of.
    times: list[tuple[int, Size | None, float]]
    per_token: list[tuple[Size | None, float]] = []  # us for each token of context, of all rows together
    priors: list[tuple[Size, list[float]]] = []  # acceptance by depth, given the parent's
    padded: bool = True  # batches in between run as the next larger one (CUDA graphs)

    def __post_init__(self) -> None:
        if not self.times or not all(b >= 1 and 0 < us < math.inf for b, _, us in self.times):
            raise ValueError("times must be positive, and there must be some")
        plain = {b for b, size, _ in self.times if size is None}
        if plain != {b for b, _, _ in self.times}:
            raise ValueError("a batch without the time of a plain round")
        if not all(math.isfinite(us) for _, us in self.per_token):
            raise ValueError("times of context must be finite")
        for size, prior in self.priors:
            if len(prior) != size[0] or not all(0 < p < 1 for p in prior):
                raise ValueError(f"{prior} is no acceptance by depth of {size}")

    def ladder(self) -> dict[int, tuple[Shape, ...]]:
        """The trees that each batch was timed with."""
        found: dict[int, list[Shape]] = {}
        for batch, size, _ in self.times:
            found.setdefault(batch, []).extend([] if size is None else [Shape(*size)])
        return {batch: tuple(shapes) for batch, shapes in found.items()}


def encode(calibration: Calibration) -> str:
    return msgspec.json.encode(calibration).decode()


def decode(text: str) -> Calibration:
    return msgspec.json.decode(text, type=Calibration)


def size_of(shape: Shape | None) -> Size | None:
    return None if shape is None else (shape.steps, shape.topk, shape.nodes)


def path_of(key: dict[str, Any]) -> Path:
    """Where the file for `key` lies in the cache."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / "calibration" / f"{digest}.json"


def check_place(path: Path | None = None) -> None:
    """Raises ConfigError where `save` could write no file: before the minutes that its contents take."""
    folder = cache_root() / "calibration" if path is None else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from None


def save(key: dict[str, Any], calibration: Calibration, path: Path | None = None) -> Path:
    """Writes the file, whole or not at all. Raises ConfigError where that can't be."""
    path = path or path_of(key)
    text = {"format": FORMAT, "key": key, "calibration": msgspec.to_builtins(calibration)}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(text, indent=1) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise _unwritable(path, error) from None
    return path


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} can't be written: {error.strerror}; set TOKENSPEED_CACHE")


def load(key: dict[str, Any], path: Path | None = None) -> Calibration | None:
    """The calibration of `key`; None where there is none, or (with a warning) none that can be used."""
    path = path or path_of(key)
    try:
        raw = json.loads(path.read_bytes())
        if raw["format"] != FORMAT:
            raise ValueError(f"format {raw['format']}, not {FORMAT}")
        if raw["key"] != key:
            names = [name for name in key if raw["key"].get(name) != key[name]]
            raise ValueError(f"it was made with another {', '.join(names) or 'key'}")
        return msgspec.convert(raw["calibration"], Calibration)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is not used: %s; `tokenspeed calibrate` makes it anew", path, error)
        return None
