"""RMSNorm (Zhang and Sennrich 2019), alone or fused with the residual addition before it."""

from torch import Tensor

from tokenspeed import kernels
from tokenspeed.layers.parameter import Param, Params, Placement


class RMSNorm:
    """weight * x / rms(x): float32 inside, rounded to x's dtype before the weight is applied."""

    def __init__(self, size: int, eps: float, place: Placement):
        self.weight, self.eps = place.empty(size), eps

    def apply(self, x: Tensor) -> Tensor:
        """x [T, H], or [T, heads, H] with any strides -> the same shape in the model's dtype."""
        return kernels.rms_norm(x, self.weight, self.eps)

    def add_apply(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual [T, H] += x, in place and in the residual's dtype, then the norm of it: [T, H]."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def params(self, prefix: str) -> Params:
        return {f"{prefix}weight": Param(self.weight, tuple(self.weight.shape))}
