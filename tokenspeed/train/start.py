"""An existing draft as the beginning of a run: its weights in place of random ones."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tokenspeed.errors import ConfigError
from tokenspeed.spec.eagle4.checkpoint import CANDIDATE_TENSORS, check_tensors, read_headers
from tokenspeed.spec.eagle4.formats import parse_draft
from tokenspeed.train.head import HeadStage
from tokenspeed.train.model import TrainableDraft

_FREE = ("architectures", "torch_dtype", "max_position_embeddings", "candidate_head")  # may differ


def read_start(directory: Path, raw: dict[str, Any]) -> dict[str, Tensor]:
    """The float32 weights, by canonical name, of a draft to begin with.

    Args:
        raw: the config.json of the draft that is to be trained.

    Raises:
        ConfigError: `directory` holds no whole EAGLE-4 draft, or one of another shape; its MLP may be narrower.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--start-from {directory} has no config.json that can be read: {error}") from None
    for name, value in raw.items():
        if name == "intermediate_size" and 0 < config.get(name, 0) <= value:
            continue
        if name not in _FREE and config.get(name) != value:
            raise ConfigError(
                f"--start-from {directory} has {name} {config.get(name)}, this run {value}; give the same options"
            )
    tensors = read_headers(directory)
    check_tensors(parse_draft(config, "eagle4", directory), tensors, directory)
    found = {}
    for name, info in tensors.items():
        with safe_open(info.file, framework="pt") as file:
            found[name] = file.get_tensor(info.name).float()
    return found


@torch.no_grad()
def start_draft(draft: TrainableDraft, weights: dict[str, Tensor]) -> None:
    """Copies the weights of `read_start` into an untrained draft, which then computes what they did.

    Of a wider MLP the further rows keep their first weights, and nothing of theirs is added yet.
    """
    for name, parameter in draft.params.items():
        old = weights[name]
        if name.endswith("down_proj.weight"):
            parameter[:, old.shape[1] :] = 0
        parameter[tuple(map(slice, old.shape))] = old


@torch.no_grad()
def start_head(stage: HeadStage, weights: dict[str, Tensor]) -> None:
    """Copies the candidate head of `read_start`, where there is one of the same rank."""
    up, down = (weights.get(name) for name in CANDIDATE_TENSORS)
    if up is not None and up.shape == stage.up.shape:
        stage.up.copy_(up)
        stage.down.copy_(down)
        stage.begun = True
