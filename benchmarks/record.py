"""Writes a result with what is needed to repeat it: command, date, versions, device."""

import datetime
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def record(path: Path, result: Any, info: dict[str, Any]) -> None:
    """result: JSON-able. info: what the engine reported (`LLM.info`)."""
    versions = {"python": platform.python_version()}
    for package in ("tokenspeed", "torch", "triton", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    data = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": info.get("device"),
        "versions": versions,
        "engine": info,
        "result": result,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")
