"""The four products of a layer for few rows, weights cold: the vendor's against ours, by tile, and whole layers.

    python benchmarks/linears.py [--rows 1,4,8,16,32,64] [--seconds 55] [--tbps 4.3] [--name linears]

The weights have Llama-3.1-8B's shapes; calls take 8 copies of them (3.5 GB) in turns, so that none is in a cache.
All calls are captured in one CUDA graph and replayed: launches from the host are not measured, the gaps between kernels
are. A time is of a product and what comes with it (SwiGLU, or the residual and its norm). `ratio` is over the weight's
bytes at --tbps. `csrc` is the same in CUDA C++, where it is built. Tiles that --seconds leaves no time for are skipped,
many rows first. The last table is of 8 layers (norm, qkv, o, norm, gate-up, down; no attention) in a row, without and
with programmatic dependent launch (PDL).
It exits with 1 where a result is wrong, or where PDL changes its bits.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.bench.report import document, write_json
from tokenspeed.cli.args import Parser, positive, positives
from tokenspeed.kernels import cuda_few_rows
from tokenspeed.kernels.triton.activation import silu_and_mul
from tokenspeed.kernels.triton.few_rows import Tile, gate_up_silu, linear_rows, linear_sums
from tokenspeed.kernels.triton.norm import add_partials_rms_norm, add_rms_norm
from tokenspeed.kernels.triton.pdl import has_pdl
from tokenspeed.layers.linear import sums
from tokenspeed.layers.parameter import Placement

RESULTS = Path(__file__).parent / "results"
DEVICE, DTYPE, EPS = torch.device("cuda"), torch.bfloat16, 1e-5
HIDDEN, HEADS, QKV, INNER = 4096, 4096, 6144, 14336
COPIES, TURNS, REPLAYS, SAMPLES = 8, 4, 3, 5
AHEAD = (0, 128, 256, 512)  # of K, prefetched under PDL

TILES = {  # weight rows, depth, buffers, warps, split; the kernel's own choice first
    "qkv": [Tile(32, 256, 5), Tile(32, 128, 6), Tile(16, 256, 6), Tile(32, 256, 3), Tile(64, 128, 6)],
    "o": [
        Tile(64, 128, 6, split=4),
        Tile(64, 128, 3, split=4),
        Tile(32, 256, 5, split=2),
        Tile(32, 256, 5, split=1),
        Tile(16, 256, 6, split=1),
    ],
    "gate_up": [
        Tile(128, 64, 6),
        Tile(128, 128, 3),
        Tile(128, 64, 6, warps=8),
        Tile(64, 128, 3),
        Tile(128, 64, 3),
    ],
    "down": [
        Tile(64, 128, 6, split=4),
        Tile(64, 256, 3, split=4),
        Tile(128, 64, 6, split=8),
        Tile(64, 64, 10, split=4),
        Tile(64, 128, 3, split=4),
        Tile(16, 256, 6, split=1),
    ],
}


@dataclass
class Rows:
    """What T rows read and write, beside the weights."""

    hidden: Tensor  # [T, HIDDEN], read by qkv and gate-up
    heads: Tensor  # [T, HEADS], read by o
    inner: Tensor  # [T, INNER], read by down
    residual: Tensor  # float32 [T, HIDDEN]
    gain: Tensor  # [HIDDEN]

    @classmethod
    def make(cls, count: int) -> "Rows":
        hidden, heads, inner = (normal(count, size) for size in (HIDDEN, HEADS, INNER))
        return cls(hidden, heads, inner, normal(count, HIDDEN).float(), normal(HIDDEN))

    def input(self, name: str) -> Tensor:
        return {"o": self.heads, "down": self.inner}.get(name, self.hidden)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def weights() -> dict[str, list[Tensor]]:
    shapes = {
        "qkv": (QKV, HIDDEN),
        "o": (HIDDEN, HEADS),
        "gate_up": (2 * INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }
    return {
        name: [normal(*shape).mul_(shape[1] ** -0.5) for _ in range(COPIES)] for name, shape in shapes.items()
    }


def vendor(name: str, x: Tensor, weight: Tensor, rows: Rows) -> Tensor:
    """cuBLAS, then the kernel that comes after it: what layers do without ours."""
    if name == "qkv":
        return F.linear(x, weight)
    if name == "gate_up":
        return silu_and_mul(F.linear(x, weight))
    y = sums(Placement(DEVICE, DTYPE))(x, weight, None)
    return add_rms_norm(y, rows.residual, rows.gain, EPS)


def ours(name: str, x: Tensor, weight: Tensor, rows: Rows, tile: Tile, pdl: bool) -> Tensor:
    if name == "qkv":
        return linear_rows(x, weight, tile, pdl)
    if name == "gate_up":
        return gate_up_silu(x, weight, tile, pdl)
    return add_partials_rms_norm(linear_sums(x, weight, tile, pdl), rows.residual, rows.gain, EPS, pdl)


def csrc(name: str, x: Tensor, weight: Tensor, rows: Rows, pdl: bool) -> Tensor:
    """As `ours`, the products in CUDA C++."""
    if name == "qkv":
        return cuda_few_rows.linear_rows(x, weight, pdl)
    if name == "gate_up":
        return cuda_few_rows.gate_up_silu(x, weight, pdl)
    sums = cuda_few_rows.linear_sums(x, weight, pdl)
    return add_partials_rms_norm(sums, rows.residual, rows.gain, EPS, pdl)


def replay_us(calls: list[Callable[[], object]], each: int) -> tuple[float, float]:
    """Median and spread (largest less smallest) of the microseconds of a captured pass over `calls`, over `each`."""
    calls[0]()  # compiles, and lets the vendor's library choose
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for sample in range(SAMPLES + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        if sample:  # the first one warms up
            times.append(start.elapsed_time(end) * 1e3 / REPLAYS / each)
    return statistics.median(times), max(times) - min(times)


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.started = args, time.perf_counter()
        self.weights, self.found, self.wrong = weights(), [], []
        self.best: dict[tuple[str, int], Tile] = {}  # by product and rows
        self.csrc_rows = cuda_few_rows.MOST_ROWS if cuda_few_rows.ready() else 0

    def run(self) -> None:
        for count in self.args.rows:
            rows = Rows.make(count)
            for name in TILES:
                self._product(name, count, rows)
        for count in self.args.chain_rows:
            self._chain(count)

    def _product(self, name: str, count: int, rows: Rows) -> None:
        x = rows.input(name)
        self._time(name, count, "vendor", lambda w: vendor(name, x, w, rows))
        product = sums(Placement(DEVICE, DTYPE)) if name in ("o", "down") else F.linear
        self._time(name, count, "vendor, product alone", lambda w: product(x, w, None))
        times = {}
        for index, tile in enumerate(TILES[name]):
            if index and time.perf_counter() - self.started > self.args.seconds:
                print(f"{name:8} {count:3}  no time for {len(TILES[name]) - index} more tiles")
                break
            call = lambda w, tile=tile: ours(name, x, w, rows, tile, False)  # noqa: E731
            times[tile] = self._time(name, count, "ours", call, tile)
        best = self.best[name, count] = min(times, key=times.get)
        if name in ("o", "down"):
            self._time(name, count, "ours, product alone", lambda w: linear_sums(x, w, best), best)
        self._check(name, rows, lambda w, pdl: ours(name, x, w, rows, best, pdl), f"{name} {best}")
        if has_pdl():
            self._time(name, count, "ours, PDL", lambda w: ours(name, x, w, rows, best, True), best)
        if count <= self.csrc_rows:
            self._time(name, count, "csrc", lambda w: csrc(name, x, w, rows, False))
            self._check(name, rows, lambda w, pdl: csrc(name, x, w, rows, pdl), f"{name} csrc")
            self._time(name, count, "csrc, PDL", lambda w: csrc(name, x, w, rows, True))

    def _time(self, name: str, count: int, how: str, call: Callable, tile: Tile | None = None) -> float:
        calls = [lambda w=w: call(w) for w in self.weights[name]] * TURNS
        us, spread = replay_us(calls, len(calls))
        floor = self.weights[name][0].nbytes / self.args.tbps / 1e6
        row = {"product": name, "rows": count, "how": how, "tile": tile and tile._asdict(), "us": round(us, 2),
               "spread_us": round(spread, 2), "ratio": round(us / floor, 3)}  # fmt: skip
        self.found.append(row)
        about = "" if tile is None else " ".join(f"{k}={v}" for k, v in tile._asdict().items())
        print(f"{name:8} {count:3}  {how:21} {us:8.2f} us  {us / floor:6.3f}  {about}", flush=True)
        return us

    def _check(self, name: str, rows: Rows, product: Callable, label: str) -> None:
        """product(weight, pdl) is near float32 arithmetic, and the same bits with PDL, many times over."""
        x, weight = rows.input(name), self.weights[name][0]
        residual = normal(*rows.residual.shape).float()

        def once(pdl: bool) -> Tensor:
            rows.residual.copy_(residual)
            return product(weight, pdl)

        want = x.float() @ weight.float().t()
        if name == "gate_up":
            want = F.silu(want[:, :INNER]) * want[:, INNER:]
        elif name in ("o", "down"):
            want += residual
            want = F.rms_norm(want, (HIDDEN,), None, EPS) * rows.gain
        got = once(False)
        if not torch.allclose(got.float(), want, atol=3e-2, rtol=3e-2):
            self._say(f"{label}: off by {(got - want).abs().max():.3g}")
        if has_pdl() and not all(torch.equal(once(True), got) for _ in range(20)):
            self._say(f"{label}: PDL changes the result")

    def _say(self, wrong: str) -> None:
        self.wrong.append(wrong)
        print(f"WRONG: {wrong}", flush=True)

    def _chain(self, count: int) -> None:
        """Whole layers: the vendor's products, ours, ours with PDL, and the faster of the two for each product."""
        self._time_chain(count, "vendor", {}, False)
        tiles = {name: self.best.get((name, count), TILES[name][0]) for name in TILES}
        want = self._time_chain(count, "ours", tiles, False)
        if not has_pdl():
            return
        for ahead in AHEAD:
            ahead_tiles = {name: tile._replace(ahead=ahead) for name, tile in tiles.items()}
            got = self._time_chain(count, f"ours, PDL, {ahead} ahead", ahead_tiles, True)
            if not torch.equal(got, want):
                self._say(f"{count} rows, {ahead} ahead: PDL changes the result of a chain")
        if count <= self.csrc_rows:
            want = self._time_chain(count, "csrc", {}, False, csrc)
            if not torch.equal(self._time_chain(count, "csrc, PDL", {}, True, csrc), want):
                self._say(f"{count} rows, csrc: PDL changes the result of a chain")
        thin = {name: tile._replace(buffers=min(tile.buffers, 3)) for name, tile in tiles.items()}
        self._time_chain(count, "ours, PDL, room for the next kernel", thin, True)
        fused = {name: tile for name, tile in tiles.items() if name != "qkv"}
        self._time_chain(count, "ours but qkv, PDL", fused, True)
        self._time_chain(count, "ours: gate-up, PDL", {"gate_up": tiles["gate_up"]}, True)

    def _time_chain(
        self, count: int, how: str, tiles: dict[str, Tile], pdl: bool, fn: Callable | None = None
    ) -> Tensor:
        """Returns the residual stream after all passes, from the same start each time. fn: csrc, for all products."""
        torch.manual_seed(0)
        rows = Rows.make(count)

        def product(name: str, x: Tensor, layer: int) -> Tensor:
            weight, tile = self.weights[name][layer], tiles.get(name)
            if fn is not None:
                return fn(name, x, weight, rows, pdl)
            return vendor(name, x, weight, rows) if tile is None else ours(name, x, weight, rows, tile, pdl)

        def layers() -> Tensor:
            x = rows.hidden
            for layer in range(COPIES):
                x = product("o", product("qkv", x, layer)[:, :HEADS], layer)
                x = product("down", product("gate_up", x, layer), layer)
            return x

        us, spread = replay_us([layers] * 2, 2 * COPIES)
        floor = sum(found[0].nbytes for found in self.weights.values()) / self.args.tbps / 1e6
        self.found.append({"product": "layer", "rows": count, "how": how, "us": round(us, 2),
                           "spread_us": round(spread, 2), "ratio": round(us / floor, 3),
                           "tiles": {name: tile._asdict() for name, tile in tiles.items()}})  # fmt: skip
        print(f"{'layer':8} {count:3}  {us:8.2f} us  {us / floor:6.3f}  {how}", flush=True)
        return rows.residual


def main() -> None:
    args = _parse()
    torch.manual_seed(0)
    bench = Bench(args)
    try:
        with torch.inference_mode():
            bench.run()
    finally:
        about = {"tbps": args.tbps, "copies": COPIES, "wrong": bench.wrong}
        write_json(RESULTS / f"{args.name}.json", document("linears", bench.found, **about))
    sys.exit(bool(bench.wrong))


def _parse() -> argparse.Namespace:
    parser = Parser(prog="linears.py", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=positives, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--chain-rows", type=positives, default=[1, 16, 32, 64])
    parser.add_argument("--seconds", type=positive, default=55, help="after so many, no more tiles are tried")
    parser.add_argument("--tbps", type=float, default=4.3, help="terabytes per second of the floor")
    parser.add_argument("--name", default="linears", help="of the file in benchmarks/results")
    return parser.parse(sys.argv[1:])


if __name__ == "__main__":
    main()
