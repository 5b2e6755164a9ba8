"""Up to how many rows a layer takes the kernels for few rows in place of the vendor's product.

`benchmarks/linears.py` measures what wins; TOKENSPEED_KERNELS overrules the table for an op, e.g.
gate_up_silu=triton (on up to MOST_ROWS rows) or gate_up_silu=torch (off).
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
WINS: dict[tuple[int, int], dict[str, int]] = {
    (9, 0): {"linear_rows": 16, "linear_sums": 64, "gate_up_silu": 32},  # H200
}


def most_rows(op: str, place: Placement, bias: bool) -> int:
    """Up to how many rows `op` (linear_rows, linear_sums or gate_up_silu) serves a layer; 0: never.

    Never where the product is more than the op: with a bias, over several ranks, or batch-invariant. Nor in float32,
    where plain and speculative decoding agree by the vendor's products.
    """
    half = place.dtype in (torch.bfloat16, torch.float16)
    if bias or place.tp.size > 1 or place.batch_invariant or not half or place.device.type != "cuda":
        return 0
    forced = forced_names().get(op)
    if forced is not None:
        return 0 if forced == "torch" else MOST_ROWS
    if torch.version.cuda is None:
        return 0
    return WINS.get(torch.cuda.get_device_capability(place.device), {}).get(op, 0)


def linear(place: Placement, bias: bool) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A `Linear`'s product: kernels.linear_rows for few rows where it wins, else F.linear."""
    most = most_rows("linear_rows", place, bias)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return kernels.linear_rows(x, weight) if x.shape[0] <= most else F.linear(x, weight, bias)

    return product if most else F.linear
