"""What a benchmark found: percentiles, the table, the JSON file and the plot."""

import io
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tokenspeed.bench.client import Answer
from tokenspeed.errors import ConfigError
from tokenspeed.versions import gpu_names, versions

PERCENTILES = (50, 90, 99)
PNG_COLOURS = 64


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """{"p50": ..., "p90": ..., "p99": ...}, in the unit of `values`."""
    return {f"p{p}": percentile(values, p) for p in PERCENTILES}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and most of a figure that was measured several times, and all of them in order."""
    runs = [round(value, 4) for value in values]
    return {"median": percentile(runs, 50), "min": min(runs), "max": max(runs), "runs": runs}


def summarise(answers: Sequence[Answer], seconds: float, concurrency: int) -> dict[str, Any]:
    """One row of the results. Times in milliseconds; failed answers count only as failed."""
    good = [a for a in answers if a.error is None]
    tokens = sum(a.num_tokens for a in good)
    errors = sorted({a.error for a in answers if a.error is not None})
    speeds = [len(a.gaps) / sum(a.gaps) for a in good if sum(a.gaps) > 0]
    return {
        "concurrency": concurrency,
        "num_requests": len(answers),
        "num_failed": len(answers) - len(good),
        "errors": errors[:5],
        "seconds": seconds,
        "prompt_tokens": sum(a.num_prompt_tokens for a in good),
        "output_tokens": tokens,
        "tokens_counted_by_server": all(a.counted for a in good),
        "output_tokens_per_second": tokens / seconds if seconds > 0 else 0.0,
        "requests_per_second": len(good) / seconds if seconds > 0 else 0.0,
        "tokens_per_second_per_request": percentile(speeds, 50),
        "ttft_ms": percentiles([a.ttft * 1e3 for a in good]),
        "itl_ms": percentiles([gap * 1e3 for a in good for gap in a.gaps]),
        "latency_ms": percentiles([a.latency * 1e3 for a in good]),
        "acceptance": _acceptance(good),
    }


def _acceptance(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Summed over the answers whose server told it; None where no draft tree was used."""
    told = [a.spec for a in answers if a.spec and a.spec.get("num_rounds")]
    if not told:
        return None
    rounds, drafted, accepted = (
        sum(spec.get(name) or 0 for spec in told) for name in ("num_rounds", "num_drafted", "num_accepted")
    )
    categories = sorted({a.category for a in answers})
    return {
        "source": "spec_metrics",
        "accept_length": 1 + accepted / rounds,
        "accept_rate": accepted / drafted if drafted else None,
        "by_category": {name: _length(a.spec for a in answers if a.category == name) for name in categories},
    }


def _length(specs: Any) -> float | None:
    told = [spec for spec in specs if spec and spec.get("num_rounds")]
    rounds = sum(spec["num_rounds"] for spec in told)
    return 1 + sum(spec.get("num_accepted") or 0 for spec in told) / rounds if rounds else None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    head = (
        "conc",
        "requests",
        "failed",
        "tok/s",
        "tok/s/req",
        "TTFT ms p50/p90/p99",
        "ITL ms p50/p90/p99",
        "accept",
    )
    lines = [head]
    for row in rows:
        acceptance = row.get("acceptance") or {}
        lines.append(
            (
                str(row["concurrency"]),
                str(row["num_requests"]),
                str(row["num_failed"]),
                _number(row["output_tokens_per_second"], 1),
                _number(row["tokens_per_second_per_request"], 1),
                _triple(row["ttft_ms"], 1),
                _triple(row["itl_ms"], 2),
                _number(acceptance.get("accept_length"), 2),
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def document(kind: str, rows: Sequence[dict[str, Any]], **about: Any) -> dict[str, Any]:
    """The JSON file: how and where it was measured, and the rows. Of absolute paths the last part is kept."""
    return {
        "kind": kind,
        "command": command_line(sys.argv),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "gpu": gpu_names(),
        **_portable(about),
        "results": list(rows),
    }


def command_line(argv: Sequence[str]) -> str:
    """`argv` as typed, for the record: program and absolute paths by their last part, keys blanked out."""
    program = Path(argv[0]).name
    ours = program == "__main__.py" or not program.endswith(".py")
    words = ["tokenspeed" if ours else program, *argv[1:]]
    for i, word in enumerate(words):
        name = word.split("=")[0].replace("_", "-")
        if name == "--api-key":
            words[i] = word if "=" not in word else "--api-key=..."
            if "=" not in word and i + 1 < len(words):
                words[i + 1] = "..."
        option, equals, value = word.partition("=")
        if word.startswith("--") and equals and name != "--api-key":
            words[i] = f"{option}={_portable(value)}"
    return shlex.join([words[0], *map(_portable, words[1:])])


def _portable(value: Any) -> Any:
    """`value` without the folders of this machine."""
    if isinstance(value, str):
        return Path(value).name if value.startswith("/") else value
    if isinstance(value, dict):
        return {key: _portable(inner) for key, inner in value.items()}
    return [_portable(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def write_json(path: str | Path, data: dict[str, Any]) -> None:
    """Raises ConfigError where `path` can't be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error}") from None


def check_plot(path: str | None) -> None:
    """Raises ConfigError when `path` asks for a plot and matplotlib is missing: before the work."""
    import importlib.util

    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'tokenspeed[bench]'")


def plot(
    path: str | Path,
    series: dict[str, Sequence[dict[str, Any]]],
    title: str,
    beside: dict[str, Sequence[dict[str, Any]]] | None = None,
) -> None:
    """A PNG of output tokens per second by concurrency, both logarithmic. Needs matplotlib.

    Args:
        series: name -> rows: a line each, with its numbers.
        beside: the same for other engines: dashed, without numbers.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    ticks: set[int] = set()
    for name, rows in [*series.items(), *(beside or {}).items()]:
        ours = name in series
        points = sorted((row["concurrency"], row["output_tokens_per_second"]) for row in rows)
        ticks.update(x for x, _ in points)
        style = {"marker": "o"} if ours else {"marker": "x", "linestyle": "--"}
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, **style)
        for x, y in points if ours else ():
            axes.annotate(
                f"{y:.0f}", (x, y), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
    axes.set(xlabel="concurrent requests", ylabel="output tokens per second", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    save_figure(figure, path)


def save_figure(figure: Any, path: str | Path) -> None:
    """Writes and closes a figure of pyplot as a PNG of few colours, which is a third of the bytes."""
    from matplotlib import pyplot
    from PIL import Image  # comes with matplotlib

    whole = io.BytesIO()
    figure.savefig(whole, dpi=110)
    pyplot.close(figure)
    Image.open(whole).convert("RGB").quantize(PNG_COLOURS).save(path, optimize=True)


def _triple(values: dict[str, float | None], digits: int) -> str:
    return "/".join(_number(values[f"p{p}"], digits) for p in PERCENTILES)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
