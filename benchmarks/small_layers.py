"""Chains of SmolLM2-135M's 30 layers for few rows, whose time is launches; no attention.

    python benchmarks/small_layers.py [--rows 1,8,16,32] [--tbps 4.3] [--name small_layers]

The vendor's products, those of few rows (`linears.py`), and the ops of small layers (norm and product, product and
addition) by tile, without and with programmatic dependent launch (PDL); then each product of the last two, 30 times
with a weight of its own. Each is a captured graph; 212 MB of weights are in no cache. A layer's time is also given over
its weights' bytes at --tbps. It exits with 1 where a result is far from the vendor's, or where PDL changes its bits.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from linears import DEVICE, DTYPE, EPS, normal, replay_us
from torch import Tensor

from tokenspeed.bench.report import document, write_json
from tokenspeed.cli.args import Parser, positives
from tokenspeed.kernels.triton import small_layer
from tokenspeed.kernels.triton.activation import silu_and_mul
from tokenspeed.kernels.triton.few_rows import gate_up_silu, linear_rows, linear_sums
from tokenspeed.kernels.triton.norm import add_partials_rms_norm, add_rms_norm
from tokenspeed.kernels.triton.pdl import has_pdl
from tokenspeed.layers.linear import sums
from tokenspeed.layers.parameter import Placement

RESULTS = Path(__file__).parent / "results"
SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
LAYERS = 30
EARLY = (False, True) if has_pdl() else (False,)

Step = Callable[
    [str, Tensor, Tensor], Tensor
]  # a product's name, its input, its weight -> the next one's input


class Variant(NamedTuple):
    """A way to run a layer.

    Args:
        how: its name. step: of the residual stream, the norm's weight, and whether kernels start early (PDL).
    """

    how: str
    step: Callable[[Tensor, Tensor, bool], Step]


def vendor(stream: Tensor, gain: Tensor, _pdl: bool) -> Step:
    def step(name: str, x: Tensor, weight: Tensor) -> Tensor:
        if name == "qkv":
            return F.linear(x, weight)
        if name == "gate_up":
            return silu_and_mul(F.linear(x, weight))
        return add_rms_norm(sums(Placement(DEVICE, DTYPE))(x, weight, None), stream, gain, EPS)

    return step


def few_rows(stream: Tensor, gain: Tensor, pdl: bool) -> Step:
    def step(name: str, x: Tensor, weight: Tensor) -> Tensor:
        if name == "qkv":
            return linear_rows(x, weight, pdl=pdl)
        if name == "gate_up":
            return gate_up_silu(x, weight, pdl=pdl)
        return add_partials_rms_norm(linear_sums(x, weight, pdl=pdl), stream, gain, EPS, pdl)

    return step


def small(rows: int | None, depth: int, stream: Tensor, gain: Tensor, pdl: bool) -> Step:
    """rows: of a weight, a program. depth: of K, a warp. None: the kernels' own choice."""

    def step(name: str, x: Tensor, weight: Tensor) -> Tensor:
        tile = rows and small_layer.SmallTile(rows, small_layer.block_k(weight.shape[1]) // depth)
        if name == "qkv":
            return small_layer.norm_linear(stream, gain, EPS, weight, tile, pdl)
        if name == "gate_up":
            return small_layer.norm_gate_up_silu(stream, gain, EPS, weight, tile, pdl)
        small_layer.linear_add(x, weight, stream, tile, pdl)
        return stream

    return step


VARIANTS = [
    Variant("few rows, 6 launches", few_rows),
    Variant("small, 4 launches", partial(small, None, 0)),
    *(
        Variant(f"small, 4 launches, {rows} weight rows, {depth} of K a warp", partial(small, rows, depth))
        for depth in (128, 256)
        for rows in (16, 32)
    ),
]


class Bench:
    """o reads a slice of what qkv wrote."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.found, self.wrong = args, [], []
        self.gain = 1 + normal(576) / 8
        self.weights = {
            name: [normal(*shape).mul_(shape[1] ** -0.5) for _ in range(LAYERS)]
            for name, shape in SHAPES.items()
        }
        self.floor = sum(w[0].nbytes for w in self.weights.values()) / args.tbps / 1e6  # us a layer

    def run(self) -> None:
        for count in self.args.rows:
            start = normal(count, 576).float()
            want = self._chain(start, Variant("vendor", vendor), False)
            for variant in VARIANTS:
                got = [self._chain(start, variant, pdl) for pdl in EARLY]
                off = ((got[0] - want).norm() / want.norm()).item()
                if not off < 5e-2 or not torch.equal(got[0], got[-1]):
                    self.wrong.append(f"{count} rows, {variant.how}: off by {off:.3g}, or PDL changes bits")
                    print(f"WRONG: {self.wrong[-1]}", flush=True)
            for name, variant in itertools.product(SHAPES, VARIANTS):
                x, step = normal(count, SHAPES[name][1]), variant.step(start.clone(), self.gain, EARLY[-1])
                calls = [partial(step, name, x, weight) for weight in self.weights[name]]
                self._report(name, count, variant.how, EARLY[-1], calls, len(calls))

    def _chain(self, start: Tensor, variant: Variant, pdl: bool) -> Tensor:
        """Times it, and returns the residual stream after one pass from `start`."""
        stream, first = start.clone(), F.rms_norm(start, (576,), None, EPS).to(DTYPE) * self.gain
        step = variant.step(stream, self.gain, pdl)

        def layers() -> None:
            x = first
            for layer, name in itertools.product(range(LAYERS), SHAPES):
                x = step(name, x[:, : SHAPES[name][1]], self.weights[name][layer])

        layers()
        end = stream.clone()
        self._report("layer", len(start), variant.how, pdl, [layers], LAYERS)
        return end

    def _report(self, name: str, count: int, how: str, pdl: bool, calls: list[Callable], each: int) -> None:
        us, spread = replay_us(calls, each)
        row = {"product": name, "rows": count, "how": how, "pdl": pdl}
        self.found.append(row | {"us": round(us, 2), "spread_us": round(spread, 2)})
        over = f"{us / self.floor:.2f} of the floor" if name == "layer" else ""
        print(f"{name:8} {count:3}  {us:8.2f} us  {how}{', PDL' * pdl}  {over}", flush=True)


def main() -> None:
    args = _parse()
    torch.manual_seed(0)
    bench = Bench(args)
    try:
        with torch.inference_mode():
            bench.run()
    finally:
        write_json(
            RESULTS / f"{args.name}.json",
            document("small_layers", bench.found, tbps=args.tbps, wrong=bench.wrong),
        )
    sys.exit(bool(bench.wrong))


def _parse() -> argparse.Namespace:
    parser = Parser(prog="small_layers.py", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=positives, default=[1, 8, 16, 32])
    parser.add_argument("--tbps", type=float, default=4.3, help="terabytes per second of the floor")
    parser.add_argument("--name", default="small_layers", help="of the file in benchmarks/results")
    return parser.parse(sys.argv[1:])


if __name__ == "__main__":
    main()
