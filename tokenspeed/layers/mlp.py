"""SwiGLU feed-forward layer (Shazeer 2020): down(silu(gate(x)) * up(x))."""

from torch import Tensor

from tokenspeed import kernels
from tokenspeed.layers.few_rows import most_rows
from tokenspeed.layers.linear import ColumnParallel, RowParallel
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.parameter import Params, Placement


class GatedMLP:
    def __init__(self, hidden_size: int, intermediate_size: int, place: Placement, bias: bool = False):
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = ColumnParallel(hidden_size, parts, place, bias)
        self.down = RowParallel("down_proj", intermediate_size, hidden_size, place, bias)
        self._few_rows = most_rows("gate_up_silu", place, bias)

    def apply(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H], or partial sums of it (RowParallel.apply)."""
        if 0 < x.shape[0] <= self._few_rows:
            return self.down.apply(kernels.gate_up_silu(x, self.gate_up.weight))
        return self.down.apply(kernels.silu_and_mul(self.gate_up.apply(x)))

    def add_apply(self, residual: Tensor, norm: RMSNorm) -> None:
        """residual [T, H] += apply(norm.apply(residual)) in two launches, where `few_rows.small_rows` allows it."""
        x = kernels.norm_gate_up_silu(residual, norm.weight, norm.eps, self.gate_up.weight)
        self.down.add_apply(x, residual)

    def params(self, prefix: str) -> Params:
        return self.gate_up.params(prefix) | self.down.params(prefix)
