"""Where the microseconds of a captured round go: its kernels, by name, as the profiler sees them on the GPU.

    python benchmarks/anatomy.py MODEL [--draft D] [--shape 8/4/16] [--batch 1] [--context 256] [--name anatomy]

The round runs on made-up requests of equal length, replayed as in serving. `gaps` is the time between kernels.
"""

import argparse
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
REPLAYS = 10


def main() -> None:
    args = _parse()
    config = Config(model=args.model, spec="eagle4", draft=args.draft, spec_shape=args.shape, enforce_eager=True,
                    kv_cache_tokens=args.kv_cache_tokens, max_num_seqs=args.batch)  # fmt: skip
    engine = build(resolve(config, lambda *_: None), lambda *_: None).runner.engine
    rows = []
    for shape in (None, parse_shape(args.shape)):
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
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[_short(event.name)].append(event.device_time_total)
    kernels = [
        {"kernel": name, "launches": len(found) / REPLAYS, "us": round(sum(found) / REPLAYS, 1)}
        for name, found in times.items()
    ]
    kernels.sort(key=lambda row: -row["us"])
    busy = sum(row["us"] for row in kernels)
    return {"us": round(wall, 1), "busy_us": round(busy, 1), "gaps_us": round(wall - busy, 1),
            "launches": sum(row["launches"] for row in kernels), "kernels": kernels}  # fmt: skip


def _short(name: str) -> str:
    """A kernel's name without its template arguments beyond the first words."""
    return name.replace("void ", "")[:90]


def _print(row: dict) -> None:
    print(f"\n{row['shape']}, {row['batch']} x {row['context']} tokens: {row['us']} us, of them busy {row['busy_us']}, "
          f"{row['launches']:.0f} launches")  # fmt: skip
    for kernel in row["kernels"][:40]:
        print(f"{kernel['us']:9.1f} us {kernel['launches']:7.1f}  {kernel['kernel']}")


def _parse() -> argparse.Namespace:
    parser = Parser(prog="anatomy.py", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft")
    parser.add_argument("--shape", default="8/4/16")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--context", type=positive, default=256)
    parser.add_argument("--kv-cache-tokens", type=positive, default=65536)
    parser.add_argument("--label")
    parser.add_argument("--name", default="anatomy", help="of the file in benchmarks/results")
    return parser.parse(sys.argv[1:])


if __name__ == "__main__":
    main()
