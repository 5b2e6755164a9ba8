"""Where the microseconds of a captured round go: its kernels, by name, as the profiler sees them on the GPU.

    python benchmarks/anatomy.py MODEL [--draft D] [--shapes 8/4/16,5/4/16] [--batch 1] [--context 256] [--name anatomy]

The round runs on made-up requests of equal length, replayed as in serving; a plain round comes first. Kernels overlap,
so a kernel's own time says little: what it adds is the time from the last end of a kernel before it to its own end.
These add up to the round. --timeline prints them in order; --trace keeps a trace of them for a viewer such as Perfetto.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tokenspeed.bench.report import document, write_json
from tokenspeed.cli.args import Parser, positive
from tokenspeed.config import Config
from tokenspeed.launch import resolve
from tokenspeed.spec.options import parse_shape
from tokenspeed.worker.calibrate import requests
from tokenspeed.worker.graph import GraphSet
from tokenspeed.worker.setup import build

RESULTS = Path(__file__).parent / "results"
REPLAYS = 9


def main() -> None:
    args = _parse()
    config = Config(model=args.model, spec="eagle4", draft=args.draft, spec_shape=str(args.shapes[0]),
                    enforce_eager=True, kv_cache_tokens=args.kv_cache_tokens, max_num_seqs=args.batch)  # fmt: skip
    engine = build(resolve(config, lambda *_: None), lambda *_: None).runner.engine
    rows = []
    for shape in (None, *args.shapes):
        graphs = GraphSet(engine, {args.batch: (shape,)})
        graphs.capture(lambda *_: None)
        found = _round(engine, graphs, shape, args)
        rows.append({"shape": str(shape or "plain"), "batch": args.batch, "context": args.context, **found})
        _print(rows[-1])
    write_json(RESULTS / f"{args.name}.json", document("anatomy", rows, model=args.label or args.model))


def _round(engine, graphs: GraphSet, shape, args: argparse.Namespace) -> dict:
    """Medians would hide nothing here: a replay does the same work each time, so sums are divided by replays."""
    slots = list(range(args.batch))
    with torch.inference_mode(), requests(engine, slots, args.context) as fits:
        assert fits, "more --kv-cache-tokens are needed"
        for _ in range(3):
            graphs.replay(slots, shape)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(REPLAYS):
            graphs.replay(slots, shape)
        torch.cuda.synchronize()
        wall = (time.perf_counter() - started) / REPLAYS * 1e6
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(REPLAYS):
                graphs.replay(slots, shape)
            torch.cuda.synchronize()
    if args.trace:
        name = str(shape or "plain").replace("/", "-")
        profiler.export_chrome_trace(str(RESULTS / f"{args.name}_{name}.trace.json.gz"))
    timeline = _timeline(profiler)
    launches, adds = defaultdict(int), defaultdict(float)
    for name, added in timeline:
        launches[name] += 1
        adds[name] += added
    kernels = [{"kernel": name, "launches": launches[name], "adds_us": round(adds[name], 1)} for name in adds]
    kernels.sort(key=lambda row: -row["adds_us"])
    if args.timeline:
        for i, (name, added) in enumerate(timeline):
            print(f"{i:5} {added:8.2f} us  {name}")
    return {"us": round(wall, 1), "profiled_us": round(sum(adds.values()), 1), "launches": len(timeline),
            "kernels": kernels}  # fmt: skip


def _timeline(profiler: profile) -> list[tuple[str, float]]:
    """The kernels of a round in the order of their starts, each with the us that it adds: medians of the replays."""
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    each = len(events) // REPLAYS
    assert each * REPLAYS == len(events), "a replay is not like the others"
    end, added = events[0].time_range.start, []
    for event in events:
        added.append(max(0.0, event.time_range.end - end))
        end = max(end, event.time_range.end)
    return [(_short(event.name), statistics.median(added[i::each])) for i, event in enumerate(events[:each])]


def _short(name: str) -> str:
    """A kernel's name without its template arguments beyond the first words."""
    return name.replace("void ", "")[:90]


def _print(row: dict) -> None:
    print(
        f"\n{row['shape']}, {row['batch']} x {row['context']} tokens: {row['us']} us, {row['launches']} launches"
    )
    for kernel in row["kernels"][:40]:
        print(f"{kernel['adds_us']:9.1f} us {kernel['launches']:5}  {kernel['kernel']}")


def _shapes(text: str) -> list:
    return [parse_shape(shape) for shape in text.split(",")]


def _parse() -> argparse.Namespace:
    parser = Parser(prog="anatomy.py", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--shapes", type=_shapes, default="8/4/16", metavar="S/K/N,...")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--context", type=positive, default=256)
    parser.add_argument("--kv-cache-tokens", type=positive, default=65536)
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--trace", action="store_true", help="of a few replays, in benchmarks/results")
    parser.add_argument("--label")
    parser.add_argument("--name", default="anatomy", help="of the file in benchmarks/results")
    return parser.parse(sys.argv[1:])


if __name__ == "__main__":
    main()
