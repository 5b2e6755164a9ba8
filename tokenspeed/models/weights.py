"""Fills a model from safetensors, tensor by tensor, and accounts for every tensor and every parameter."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tokenspeed.distributed.groups import TensorParallel
from tokenspeed.errors import ConfigError
from tokenspeed.layers.parameter import Params, Placement
from tokenspeed.models.config import ModelConfig
from tokenspeed.models.decoder import Decoder
from tokenspeed.models.registry import decoder_class

Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all)


def load_model(
    model_dir: str | Path,
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    batch_invariant: bool = False,
    tp: TensorParallel | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Builds the model and fills it. Beside the model itself, one tensor at a time is in memory.

    Raises:
        ConfigError: the layers can't be split over the ranks, or anything that `load_params` refuses.
    """
    place = Placement(torch.device(device), dtype, tp or TensorParallel(), batch_invariant)
    try:
        model = decoder_class(config.architecture)(config, place)
    except ValueError as error:  # TensorParallel.share
        raise ConfigError(f"--tensor-parallel-size does not fit {model_dir}: {error}") from None
    load_params(model_dir, model.params(), model.ignored, progress)
    params_bytes = sum(param.num_bytes for param in model.params().values())
    place.finish()
    model.num_bytes = params_bytes + model.head.packed_bytes
    return model


def load_params(
    model_dir: str | Path,
    params: Params,
    ignored: Iterable[str] = (),
    progress: Progress | None = None,
    rename: Callable[[str], str] | None = None,
) -> None:
    """Streams every tensor of a checkpoint directory into its parameter, in the parameter's dtype and device.

    Args:
        ignored: endings of checkpoint names to pass over.
        rename: checkpoint name -> name in `params`.

    Raises:
        ConfigError: no weights, a missing or damaged file, a tensor that reaches no parameter, has the wrong
            shape or comes twice, a parameter that got no tensor. The message names file or tensor.
    """
    files = weight_files(model_dir)
    total, done = sum(path.stat().st_size for path in files), 0
    missing, endings = dict(params), tuple(ignored)
    for path in files:
        start = done
        with _open(path) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (a handle is not iterable)
                name = rename(stored) if rename else stored
                if name not in params:
                    if stored.endswith(endings):
                        continue
                    raise ConfigError(f"{path}: tensor {stored} belongs to no parameter of this architecture")
                if name not in missing:
                    raise ConfigError(f"{path}: tensor {stored} comes twice in this checkpoint")
                tensor = _read(tensors, stored, path)
                try:
                    missing.pop(name).load(tensor)
                except ValueError as error:
                    raise ConfigError(f"{path}: tensor {stored} {error}") from None
                done += tensor.numel() * tensor.element_size()
                if progress:
                    progress(min(done, total), total)
        done = start + path.stat().st_size
    if missing:
        first = next(iter(missing))
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{model_dir} has no tensor {first}{more}; its config.json asks for it")
    if progress:
        progress(total, total)


def weight_files(model_dir: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of its index, else model.safetensors, else all there are.

    Raises:
        ConfigError: there are none, the index is damaged, or it names a file that is not there.
    """
    model_dir = Path(model_dir)
    index, single = model_dir / "model.safetensors.index.json", model_dir / "model.safetensors"
    if index.exists():
        files = [model_dir / name for name in _indexed(index)]
        for path in files:
            if path.parent != model_dir or not path.exists():
                raise ConfigError(f"{index} names {path.name}, which is not there; download it again")
        return files
    if single.exists():
        return [single]
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        others = any(model_dir.glob("*.bin")) or any(model_dir.glob("*.pt"))
        hint = "; its .bin or .pt files would run code, convert them to safetensors" if others else ""
        raise ConfigError(f"{model_dir} has no .safetensors file{hint}")
    return files


def _indexed(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        return sorted(str(name) for name in names)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{index} can't be read ({reason}); download it again") from None


def _open(path: Path):
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or cut short ({error}); download it again") from None


def _read(tensors, name: str, path: Path) -> torch.Tensor:
    try:
        return tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: tensor {name} can't be read ({error}); download it again") from None
