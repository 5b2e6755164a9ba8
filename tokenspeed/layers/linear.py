"""Linear layers as storage objects: they own a weight, say which checkpoint tensors fill it, and apply it.

Which matrix product a layer uses is settled when it is built. On a CPU the form matters for a few
rows: here for SmolLM2's four matrices x 30 layers, one thread of a Xeon with AMX, torch 2.13, in ms.

    rows              1     2     4     8    16    32
    float32 rows     46    47    78   105    91   109      F.linear, weight stored [out, in]
    float32 columns  40    49    62    83    94    91      F.linear, stored [in, out], seen transposed

bfloat16 takes F.linear: W x^T is faster, but not once its result has been copied back to rows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed import kernels
from tokenspeed.distributed.comm import all_reduce
from tokenspeed.layers.parameter import Param, Params, Placement

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def new_weight(out_features: int, in_features: int, place: Placement) -> Tensor:
    """An uninitialised [out, in] weight, stored by columns where that is faster (see above)."""
    if place.device.type == "cpu" and place.dtype == torch.float32 and not place.batch_invariant:
        return place.empty(in_features, out_features).t()
    return place.empty(out_features, in_features)


def choose_matmul(place: Placement) -> Matmul:
    """(x [T, in], weight [out, in], bias [out] | None) -> [T, out] contiguous, for layers built here."""
    if place.batch_invariant:
        return kernels.linear_invariant
    return F.linear


class ColumnParallel:
    """One or more matrices with the same input, stacked by rows; each rank holds a share of each one's rows.

    Args:
        in_features: K.
        parts: checkpoint name -> rows of the whole matrix, in the order of stacking (q_proj, k_proj, v_proj).
        bias: every part has one.
    """

    def __init__(self, in_features: int, parts: dict[str, int], place: Placement, bias: bool = False):
        self.sizes = [place.tp.share(rows, name) for name, rows in parts.items()]  # rows on this rank
        self.weight = new_weight(sum(self.sizes), in_features, place)  # [sum(sizes), K]
        self.bias = place.empty(sum(self.sizes)) if bias else None
        self._parts, self._rank, self._matmul = parts, place.tp.rank, choose_matmul(place)

    def apply(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, sum(sizes)]."""
        return self._matmul(x, self.weight, self.bias)

    def params(self, prefix: str) -> Params:
        found, row, columns = {}, 0, self.weight.shape[1]
        for (name, total), size in zip(self._parts.items(), self.sizes, strict=True):
            start = size * self._rank
            rows = slice(row, row + size)
            found[f"{prefix}{name}.weight"] = Param(self.weight[rows], (total, columns), 0, start)
            if self.bias is not None:
                found[f"{prefix}{name}.bias"] = Param(self.bias[rows], (total,), 0, start)
            row += size
        return found


class RowParallel:
    """One matrix whose input is split over the ranks; their results are summed, then the bias is added."""

    def __init__(self, name: str, in_features: int, out_features: int, place: Placement, bias: bool = False):
        self.weight = new_weight(out_features, place.tp.share(in_features, name), place)
        self.bias = place.empty(out_features) if bias else None
        self._name, self._in_features, self._tp = name, in_features, place.tp
        self._matmul = choose_matmul(place)

    def apply(self, x: Tensor) -> Tensor:
        """x [T, K / size] -> [T, N]."""
        if self._tp.size == 1:
            return self._matmul(x, self.weight, self.bias)
        y = all_reduce(self._matmul(x, self.weight, None), self._tp)
        return y if self.bias is None else y + self.bias

    def params(self, prefix: str) -> Params:
        rows, columns = self.weight.shape
        shape = (rows, self._in_features)
        found = {f"{prefix}{self._name}.weight": Param(self.weight, shape, 1, columns * self._tp.rank)}
        if self.bias is not None:
            found[f"{prefix}{self._name}.bias"] = Param(self.bias, (rows,))
        return found
