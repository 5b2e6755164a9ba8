"""Plots of benchmarks/results/*.json.

    python benchmarks/plot.py                                      those of docs/performance.md and the README
    python benchmarks/plot.py throughput RESULT.json [PEERS.json]  tokens per second by concurrency, a line a method
    python benchmarks/plot.py speedup RESULT.json ... [PEERS.json] speed-up over plain decoding by concurrency
    python benchmarks/plot.py round ANATOMY.json THROUGHPUT.json   rounds against the time that they can't undercut

with --out FILE.png (default: FIGURE.png here). RESULT.json comes from throughput.py, for speed-ups from plan.py too.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenspeed.bench.report import check_plot, plot, save_figure
from tokenspeed.cli.args import Parser
from tokenspeed.config import Shape
from tokenspeed.errors import ConfigError
from tokenspeed.spec.calibration import decode

RESULTS = Path(__file__).parent / "results"
FIGURES = {  # name of the PNG -> figure and the results that it shows
    "round_8b_h200": ("round", "anatomy_8b", "inflated_8b_h200"),
    "inflated_8b_h200": ("throughput", "inflated_8b_h200", "peers_h200"),
    "smollm2_h200": ("throughput", "smollm2_h200", "peers_h200"),
    "speedup_h200": ("speedup", "inflated_8b_h200", "smollm2_h200", "plan_8b_h200", "peers_h200"),
}
DRAWN = ("throughput", "serve", "offline", "plan", "anatomy", "peers")  # kinds of result files


def read(path: Path) -> dict[str, Any]:
    """A result file, with its `name`. Raises ConfigError for a file that is none, or of a kind not drawn."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in DRAWN:
        raise ConfigError(f"{path} is no result of a kind that is drawn ({', '.join(DRAWN)})")
    return {**data, "name": path.stem}


def series(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of a throughput result by method ("none", "eagle4", ...). Raises ConfigError for others."""
    rows = data.get("results")
    if not isinstance(rows, list) or not rows:
        raise ConfigError("holds no results")
    out: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "concurrency" not in row or "output_tokens_per_second" not in row:
            raise ConfigError("is not a throughput result")
        out.setdefault(row.get("spec", data.get("kind", "result")), []).append(row)
    return out


def peers(files: Sequence[dict[str, Any]], name: str) -> dict[str, list[dict[str, Any]]]:
    """Other engines' rows on the target of the result file `name`, by engine and method; middles of ranges."""
    out: dict[str, list[dict[str, Any]]] = {}
    for row in (row for data in files if data["kind"] == "peers" for row in data["results"]):
        if row["beside"] == name:
            middle = sum(row["output_tokens_per_second"]) / 2
            line = out.setdefault(f"{row['engine']}, {row['method']}", [])
            line.append({**row, "output_tokens_per_second": middle})
    return out


def title(data: dict[str, Any]) -> str:
    """What was measured, on what, and when."""
    gpu = (data.get("gpu") or ["CPU"])[0]
    return f"{data.get('model', '')}\n{gpu}, {data.get('date', '')[:10]}"


def throughput_figure(files: Sequence[dict[str, Any]], out: Path, args: argparse.Namespace) -> None:
    (data,) = _some(files, "throughput", "serve", "offline")[:1]
    plot(out, series(data), title(data), peers(files, data["name"]))


def speedup_figure(files: Sequence[dict[str, Any]], out: Path, args: argparse.Namespace) -> None:
    """Ours in full lines; peers' on the same target dashed; what others state of other machines dotted."""
    lines: list[tuple[str, str, list[tuple[int, float]]]] = []
    for data in _some(files, "throughput", "plan"):
        key = "speedup" if data["kind"] == "throughput" else "plan_over_none"
        points = [(row["concurrency"], row[key]) for row in data["results"] if key in row]
        lines.append((f"ours: {data['model']} ({data['name']})", "o-", points))
        found = peers(files, data["name"])
        for name, rows in found.items():
            plain = {
                row["concurrency"]: row["output_tokens_per_second"]
                for row in found.get(f"{rows[0]['engine']}, plain", [])
            }
            if rows[0]["method"] != "plain":
                ratios = [(r["concurrency"], r["output_tokens_per_second"] / plain[r["concurrency"]])
                          for r in rows]  # fmt: skip
                lines.append((f"{name} ({data['name']})", "x--", ratios))
    claims: dict[str, list[tuple[int, float]]] = {}
    for claim in (claim for data in files for claim in data.get("claims", ())):
        name = f"stated: {claim['engine']} {claim['method']}, {claim['model']}, {claim['gpu']}"
        claims.setdefault(name, []).append((claim["concurrency"], claim["speedup"]))
    lines += [(name, ".:", points) for name, points in claims.items()]
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 6.5), layout="constrained")
    for name, style, points in lines:
        axes.plot(*zip(*sorted(points), strict=True), style, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    _powers(axes.set_xticks, max(x for *_, points in lines for x, _ in points))
    axes.set(xlabel="concurrent requests", ylabel="tokens per second over those without speculation")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, ncols=1)
    save_figure(figure, out)


def round_figure(files: Sequence[dict[str, Any]], out: Path, args: argparse.Namespace) -> None:
    """Left, captured rounds of an anatomy over the reading of the target's weights; right, what the worker timed
    at its start for each batch and tree, over the roofline of the target's pass."""
    (anatomy,), (speeds,) = _some(files, "anatomy")[:1], _some(files, "throughput")[:1]
    engine = next((e for e in speeds["engines"].values() if "calibration" in e), None)
    if engine is None:
        raise ConfigError(f"{speeds['name']} holds no engine that timed its rounds")
    weights = engine["memory_target"]
    parameters = weights / (4 if engine["dtype"] == "float32" else 2)
    floor_ms = weights / args.tbps / 1e9
    row_ms = 2 * parameters / args.tflops / 1e9
    pyplot = _pyplot()
    figure, (bars, roof) = pyplot.subplots(1, 2, figsize=(9, 4.5), layout="constrained", width_ratios=(1, 2))
    rounds = anatomy["results"]
    names = [row["shape"] for row in rounds]
    times = [row["us"] / 1e3 for row in rounds]
    bars.bar(names, times, color="tab:orange", label="the rest")
    bars.bar(names, [floor_ms] * len(names), color="tab:blue", label=f"weights at {args.tbps:g} TB/s")
    for i, time in enumerate(times):
        bars.annotate(f"{time:.2f}", (i, time), ha="center", va="bottom")
    about = f"{rounds[0]['batch']} request, {rounds[0]['context']} tokens, {anatomy['date'][:10]}"
    bars.set(ylabel="ms a round", title=about)
    bars.set_ylim(top=1.2 * max(times))
    bars.legend(loc="upper left", fontsize=8)
    trees: dict[str, list[tuple[int, float]]] = {}
    for batch, size, us in decode(engine["calibration"]).times:
        name = "plain" if size is None else str(Shape(*size))
        trees.setdefault(name, []).append((batch * (1 if size is None else size[2]), us / 1e3))
    rows = sorted({x for points in trees.values() for x, _ in points})
    roof.plot(rows, [max(floor_ms, row_ms * x) for x in rows], "k-",
              label=f"target at {args.tbps:g} TB/s, {args.tflops:g} TFLOP/s")  # fmt: skip
    for name, points in trees.items():
        roof.plot(*zip(*sorted(points), strict=True), "o-", markersize=4, label=name)
    roof.set_xscale("log", base=2)
    roof.set_yscale("log", base=2)
    _powers(roof.set_xticks, max(rows))
    _powers(roof.set_yticks, max(y for points in trees.values() for _, y in points))
    roof.set_ylim(bottom=2 ** math.floor(math.log2(floor_ms)))
    roof.set(xlabel="rows of the target's pass (requests times nodes)", title=title(speeds))
    roof.grid(alpha=0.3)
    roof.legend(fontsize=8)
    save_figure(figure, out)


def _some(files: Sequence[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    """The files of these kinds. Raises ConfigError where there is none."""
    found = [data for data in files if data["kind"] in kinds]
    if not found:
        raise ConfigError(f"this figure needs a result of {' or '.join(kinds)}")
    return found


def _powers(set_ticks: Callable[..., Any], most: float) -> None:
    """Ticks at powers of two from 1 to `most`."""
    ticks = [2**i for i in range(int(math.log2(most)) + 1)]
    set_ticks(ticks, [str(tick) for tick in ticks])


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


DRAW = {"throughput": throughput_figure, "speedup": speedup_figure, "round": round_figure}


def run(argv: Sequence[str]) -> int:
    parser = Parser(prog="plot.py", description="Plots results; without a figure, those of the documents.")
    parser.add_argument("figure", nargs="?", choices=tuple(DRAW))
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULT.json")
    parser.add_argument("--out", type=Path, metavar="PNG", help="file (default: FIGURE.png)")
    parser.add_argument("--tbps", type=float, default=4.3, help="memory, terabytes a second (default: 4.3)")
    parser.add_argument("--tflops", type=float, default=790, help="products, TFLOP/s (default: 790)")
    args = parser.parse(argv)
    check_plot("")
    if args.figure is None:
        for name, (figure, *stems) in FIGURES.items():
            out = RESULTS / f"{name}.png"
            DRAW[figure]([read(RESULTS / f"{stem}.json") for stem in stems], out, args)
            print(out)
        return 0
    out = args.out or Path(f"{args.figure}.png")
    DRAW[args.figure]([read(path) for path in args.results], out, args)
    print(out)
    return 0


def main() -> int:
    try:
        return run(sys.argv[1:])
    except ConfigError as error:
        print(f"plot: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
