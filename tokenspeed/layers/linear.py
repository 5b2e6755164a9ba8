"""Linear layers as storage objects: they own a weight, say which checkpoint tensors fill it, and apply it.

Which matrix product a layer uses is settled when it is built. On a CPU the form matters for a few
rows: here for SmolLM2's four matrices x 30 layers, a Xeon with AMX, torch 2.13, in ms.

    rows              1     2     4     8    16    32
    float32 rows     46    47    78   105    91   109      F.linear, weight stored [out, in], one thread
    float32 columns  40    49    62    83    94    91      F.linear, stored [in, out], seen transposed
    bfloat16 rows    19    17    18    19    17    20      F.linear, two threads
    bfloat16 packed  11    11    11    12    12    14      oneDNN's own layout, the same bits
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed import kernels
from tokenspeed.distributed.comm import all_reduce
from tokenspeed.layers import few_rows
from tokenspeed.layers.few_rows import most_rows
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.parameter import Param, Params, Placement

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]
PACKED_ROWS = 16  # oneDNN chooses its layout for about so many


def new_weight(out_features: int, in_features: int, place: Placement) -> Tensor:
    """An uninitialised [out, in] weight, stored by columns where that is faster (see above)."""
    if place.device.type == "cpu" and place.dtype == torch.float32 and not place.batch_invariant:
        return place.empty(in_features, out_features).t()
    return place.empty(out_features, in_features)


def sums(place: Placement) -> Matmul:
    """The product whose result stays as it was summed, in float32, where a device has it; else F.linear."""
    half = place.dtype in (torch.bfloat16, torch.float16)
    return _sums if half and place.device.type == "cuda" and torch.version.cuda else F.linear


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return y if bias is None else y + bias


class Linear:
    """x W^T + b.

    Where the CPU gains by it, the weight is packed once it is loaded (`place.finish`): then only `apply` can
    read it, and the plain weight is freed unless somebody else holds it.

    Args:
        weight: [out, in], filled later. bias: [out] or None. matmul: instead of what is best for `place`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, place: Placement, matmul: Matmul = F.linear):
        self.weight, self.bias = weight, bias
        self._matmul = kernels.linear_invariant if place.batch_invariant else matmul
        plain = self._matmul is F.linear and place.device.type == "cpu"
        if plain and place.dtype == torch.bfloat16 and can_pack():
            place.on_loaded.append(self._pack)

    def apply(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], contiguous."""
        return self._matmul(x, self.weight, self.bias)

    def _pack(self) -> None:
        self.weight, self._matmul = _packed(self.weight), _packed_linear


@cache
def can_pack() -> bool:
    """Whether this build of torch and this CPU have oneDNN's packed bfloat16 product."""
    try:
        x = torch.ones(1, 8, dtype=torch.bfloat16)
        return bool(_packed_linear(x, _packed(x), None) == 8)
    except (AttributeError, RuntimeError):
        return False


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)


def _packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class ColumnParallel:
    """One or more matrices with the same input, stacked by rows; each rank holds a share of each one's rows.

    Args:
        in_features: K.
        parts: checkpoint name -> rows of the whole matrix, in the order of stacking (q_proj, k_proj, v_proj).
        bias: every part has one. matmul: as in `Linear`.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        place: Placement,
        bias: bool = False,
        matmul: Matmul = F.linear,
    ):
        self.sizes = [place.tp.share(rows, name) for name, rows in parts.items()]  # rows on this rank
        self._place, self._parts, self._in_features = place, parts, in_features
        self._linear = Linear(
            new_weight(sum(self.sizes), in_features, place),
            place.empty(sum(self.sizes)) if bias else None,
            place,
            matmul,
        )

    @property
    def weight(self) -> Tensor:
        """[sum(sizes), K]."""
        return self._linear.weight

    def apply(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, sum(sizes)]."""
        return self._linear.apply(x)

    def norm_apply(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        """apply(norm.apply(residual)) in one launch, where `few_rows.small_rows` allows it."""
        return kernels.norm_linear(residual, norm.weight, norm.eps, self.weight)

    def last(self, num_parts: int) -> Linear:
        """The last parts alone, sharing this layer's weight. Ask before it is loaded."""
        first = sum(self.sizes[:-num_parts])
        weight, bias = self._linear.weight, self._linear.bias
        matmul = few_rows.linear(self._place, bias is not None)
        return Linear(weight[first:], None if bias is None else bias[first:], self._place, matmul)

    def params(self, prefix: str) -> Params:
        weight, bias = self._linear.weight, self._linear.bias
        found, row = {}, 0
        for (name, total), size in zip(self._parts.items(), self.sizes, strict=True):
            start = size * self._place.tp.rank
            rows = slice(row, row + size)
            found[f"{prefix}{name}.weight"] = Param(weight[rows], (total, self._in_features), 0, start)
            if bias is not None:
                found[f"{prefix}{name}.bias"] = Param(bias[rows], (total,), 0, start)
            row += size
        return found


class RowParallel:
    """One matrix whose input is split over the ranks; their results are summed, then the bias is added."""

    def __init__(self, name: str, in_features: int, out_features: int, place: Placement, bias: bool = False):
        self.bias = place.empty(out_features) if bias else None
        self._name, self._in_features, self._tp = name, in_features, place.tp
        weight = new_weight(out_features, place.tp.share(in_features, name), place)
        self._linear = Linear(weight, self.bias if place.tp.size == 1 else None, place, sums(place))
        self._few_rows = most_rows("linear_sums", place, bias)

    def apply(self, x: Tensor) -> Tensor:
        """x [T, K / size] -> what `RMSNorm.add_apply` adds to the residual stream.

        It is [T, N], float32 where `sums` can, or for few rows partial sums of that, [S, T, N].
        """
        if 0 < x.shape[0] <= self._few_rows:
            return kernels.linear_sums(x, self._linear.weight)
        y = self._linear.apply(x)
        if self._tp.size == 1:
            return y
        y = all_reduce(y, self._tp)
        return y if self.bias is None else y + self.bias

    def add_apply(self, x: Tensor, residual: Tensor) -> None:
        """residual [T, N] += apply(x) in one launch, where `few_rows.small_rows` allows it."""
        kernels.linear_add(x, self._linear.weight, residual)

    def params(self, prefix: str) -> Params:
        weight = self._linear.weight
        shape = (weight.shape[0], self._in_features)
        found = {f"{prefix}{self._name}.weight": Param(weight, shape, 1, weight.shape[1] * self._tp.rank)}
        if self.bias is not None:
            found[f"{prefix}{self._name}.bias"] = Param(self.bias, shape[:1])
        return found
