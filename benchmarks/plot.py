"""Plots of benchmarks/results/*.json: output tokens per second by concurrency, one line a method.

    python benchmarks/plot.py [RESULT.json ...] [--out DIR]

writes RESULT.png beside each result (or into DIR).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tokenspeed.bench.report import check_plot, plot
from tokenspeed.errors import ConfigError

RESULTS = Path(__file__).parent / "results"


def series(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of a result file by method ("none", "eagle4", ...). Raises ConfigError for others."""
    rows = data.get("results")
    if not isinstance(rows, list) or not rows:
        raise ConfigError("holds no results")
    out: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "concurrency" not in row or "output_tokens_per_second" not in row:
            raise ConfigError("is not a throughput result")
        out.setdefault(row.get("spec", data.get("kind", "result")), []).append(row)
    return out


def title(data: dict[str, Any]) -> str:
    """What was measured, on what, and when."""
    gpu = (data.get("gpu") or ["CPU"])[0]
    return f"{data.get('model', '')}\n{gpu}, {data.get('date', '')[:10]}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Plots throughput results.")
    parser.add_argument("results", nargs="*", type=Path, help="default: all of benchmarks/results")
    parser.add_argument("--out", type=Path, help="folder for the PNG files (default: beside the results)")
    args = parser.parse_args()
    try:
        check_plot("")
    except ConfigError as error:
        print(f"plot: error: {error}", file=sys.stderr)
        return 2
    failed = False
    for path in args.results or sorted(RESULTS.glob("*.json")):
        try:
            data = json.loads(path.read_text())
            found = series(data)
        except (OSError, ValueError, AttributeError, ConfigError) as error:
            print(f"plot: {path}: {error}", file=sys.stderr)
            failed = True
            continue
        target = (args.out or path.parent) / f"{path.stem}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        plot(target, found, title(data))
        print(target)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
