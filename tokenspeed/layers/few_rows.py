"""Up to how many rows a layer takes the kernels for few rows in place of the vendor's product.

`benchmarks/linears.py` measures what wins; TOKENSPEED_KERNELS overrules the table for an op, e.g.
gate_up_silu=triton (on up to MOST_ROWS rows) or gate_up_silu=torch (off). The ops of a small layer are taken together.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed import kernels
from tokenspeed.kernels.registry import forced_names
from tokenspeed.layers.parameter import Placement

MOST_ROWS = 64
# NVIDIA's compute capability -> op -> the most rows at which it was measured to win. What is not named is off.
WINS: dict[tuple[int, int] | None, dict[str, int]] = {
    (9, 0): {"linear_rows": 16, "linear_sums": 64, "gate_up_silu": 32, "linear_candidates": 64},  # H200
}
SMALL_OPS = ("norm_linear", "norm_gate_up_silu", "linear_add")
# NVIDIA's compute capability -> the most rows, and the largest K of a layer's products, at which these were measured to
# win (benchmarks/small_layers.py).
SMALL_WINS: dict[tuple[int, int] | None, tuple[int, int]] = {(9, 0): (8, 2048)}  # H200


def most_rows(op: str, place: Placement, bias: bool) -> int:
    """Up to how many rows `op` (one of WINS) serves a layer; 0: never.

    Never where the product is more than the op: with a bias, over several ranks, or batch-invariant. Nor in float32,
    where plain and speculative decoding agree by the vendor's products.
    """
    if not _fits(place, bias):
        return 0
    forced = forced_names().get(op)
    if forced is not None:
        return 0 if forced == "torch" else MOST_ROWS
    return WINS.get(_capability(place), {}).get(op, 0)


def small_rows(place: Placement, bias: bool, width: int) -> int:
    """Up to how many rows a layer whose largest K is `width` takes SMALL_OPS; 0: never, as for `most_rows`."""
    if width > kernels.SMALL_K or not _fits(place, bias):
        return 0
    forced = [forced_names().get(op) for op in SMALL_OPS]
    if "torch" in forced:
        return 0
    if all(forced):
        return MOST_ROWS
    rows, widest = SMALL_WINS.get(_capability(place), (0, 0))
    return rows if width <= widest else 0


def _fits(place: Placement, bias: bool) -> bool:
    half = place.dtype in (torch.bfloat16, torch.float16)
    return half and place.device.type == "cuda" and place.tp.size == 1 and not (bias or place.batch_invariant)


def _capability(place: Placement) -> tuple[int, int] | None:
    """None on other GPUs than NVIDIA's."""
    return torch.cuda.get_device_capability(place.device) if torch.version.cuda else None


def linear(place: Placement, bias: bool) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A `Linear`'s product: kernels.linear_rows for few rows where it wins, else F.linear."""
    most = most_rows("linear_rows", place, bias)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return kernels.linear_rows(x, weight) if x.shape[0] <= most else F.linear(x, weight, bias)

    return product if most else F.linear
