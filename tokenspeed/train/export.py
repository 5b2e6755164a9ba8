"""A trained run as a draft that the engine loads: config.json, model.safetensors, and where it came from."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from tokenspeed import __version__
from tokenspeed.errors import ConfigError
from tokenspeed.hub.cache import BUILDING
from tokenspeed.spec.eagle4.checkpoint import CANDIDATE_TENSORS, check_tensors, read_headers
from tokenspeed.spec.eagle4.formats import parse_draft
from tokenspeed.train.checkpoint import load_state, unwritable
from tokenspeed.train.run import CONFIG, DRAFT, HEAD, read_run

PROVENANCE = "training.json"
_PARAM = "param."
_PATHS = ("model", "data", "start_from")  # of the machine that trained, which is nobody's business


@dataclass(frozen=True)
class Exported:
    """What was written."""

    num_bytes: int  # of the weights
    rank: int | None  # of the candidate head, None without one
    finished: bool  # the training had come to its end


def export_draft(run_dir: Path, output: Path, dtype: torch.dtype = torch.bfloat16) -> Exported:
    """Writes the draft of a run directory, which may still be in training, into `output`.

    Args:
        output: does not exist, or is an empty directory; it is whole afterwards or not there.

    Raises:
        ConfigError: `run_dir` is no run, has no state yet, or `output` can't be written.
    """
    run = read_run(run_dir)
    if not (run_dir / DRAFT).exists():
        raise ConfigError(f"{run_dir} has no {DRAFT} yet; go on with the training (--resume)")
    tensors, draft_facts = load_state(run_dir / DRAFT)
    weights = _params(tensors)
    config: dict[str, Any] = {**run["draft"], "torch_dtype": str(dtype).removeprefix("torch.")}
    stages, rank = {"draft": draft_facts}, None
    if (run_dir / HEAD).exists():
        tensors, stages["head"] = load_state(run_dir / HEAD)
        head = _params(tensors)
        weights |= dict(zip(CANDIDATE_TENSORS, (head["up"], head["down"]), strict=True))
        rank = head["down"].shape[0]
        config["candidate_head"] = {"rank": rank, "num_candidates": run["options"]["num_candidates"]}
    wants_head = bool(run["options"].get("head_steps") or run["options"].get("head_seconds"))
    finished = all(facts["finished"] for facts in stages.values()) and (rank is not None) == wants_head
    provenance = {
        "made_by": f"tokenspeed {__version__}",
        "torch": run["torch"],
        "finished": finished,
        "options": {
            name: Path(value).name if name in _PATHS and value else value
            for name, value in run["options"].items()
        },
        "data": run["data"],
        "stages": {name: facts["last"] for name, facts in stages.items()},
    }
    data = save(
        {name: tensor.to(dtype).contiguous() for name, tensor in sorted(weights.items())},
        {"format": "pt", "provenance": json.dumps(provenance)},
    )
    _write(output, config, data, provenance)
    return Exported(len(data), rank, finished)


def _params(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_PARAM): t for name, t in tensors.items() if name.startswith(_PARAM)}


def _write(output: Path, config: dict[str, Any], data: bytes, provenance: dict[str, Any]) -> None:
    """Makes everything in a directory beside `output`, checks it, and renames it."""
    building = output.with_name(f"{output.name}.{os.getpid()}{BUILDING}")
    try:
        building.mkdir()
        (building / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        (building / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")
        (building / "model.safetensors").write_bytes(data)
        check_tensors(parse_draft(config, "eagle4", building), read_headers(building), building)
        os.rename(building, output)
    except OSError as error:
        raise unwritable(output, error) from None
    finally:
        shutil.rmtree(building, ignore_errors=True)  # gone already if all went well
