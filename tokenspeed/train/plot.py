"""A picture of a run's log: loss and agreement with the target, by step of the unroll."""

import importlib.util
import json
from pathlib import Path
from typing import Any


def plot_log(log: Path, output: Path) -> bool:
    """Draws log.jsonl as a PNG. False, and nothing drawn, where matplotlib is not installed or nothing was
    logged."""
    if importlib.util.find_spec("matplotlib") is None or not log.exists():
        return False
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    stages = [(kind, found) for kind in ("top1", "recall") if (found := [r for r in records if kind in r])]
    if not stages:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4 * len(stages)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(stages), 2, squeeze=False)
    for row, (kind, found) in zip(axes, stages, strict=True):
        _draw(row[0], row[1], kind, found)
    figure.savefig(output, dpi=120)
    return True


def _draw(losses: Any, shares: Any, kind: str, records: list[dict[str, Any]]) -> None:
    steps = [r["step"] for r in records]
    stage = records[0]["stage"]
    losses.plot(steps, [r["loss"] for r in records])
    losses.set(title=f"{stage}: loss", xlabel="step", ylabel="loss")
    for depth in range(len(records[0][kind])):
        shares.plot(steps, [r[kind][depth] for r in records], label=str(depth + 1))
    what = "best token is the target's" if kind == "top1" else "full head's best token is a candidate"
    shares.set(title=f"{stage}: {what}", xlabel="step", ylabel="share")
    shares.legend(title="draft step", fontsize="small")
