"""Keeps what the long tests of exactness measure, in benchmarks/results/exactness_cpu.json, one section a test."""

import datetime
import json
from pathlib import Path
from typing import Any

from tokenspeed.versions import versions

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "exactness_cpu.json"
COMMAND = "make test-long PYTEST_ARGS=tests/engine"


def note(section: str, key: str, value: dict[str, Any]) -> None:
    """Adds an entry, with the date and the versions it was measured with."""
    data = json.loads(FILE.read_text()) if FILE.exists() else {}
    data["command"], data["device"] = COMMAND, "CPU, float32"
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    data.setdefault(section, {})[key] = {**value, "date": now, "versions": versions()}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(data, indent=1) + "\n")
