"""RMSNorm (Zhang and Sennrich 2019), alone or fused with the residual addition before it."""

import torch
from torch import Tensor

from tokenspeed import kernels
from tokenspeed.layers.parameter import Param, Params, Placement


def add(x: Tensor, residual: Tensor) -> Tensor:
    """residual [T, H] += x, in place: [T, H], or partial sums of that, [S, T, H]."""
    return residual.add_(x if x.dim() == 2 else x.sum(0))


class RMSNorm:
    """weight * x / rms(x): float32 inside, rounded to x's dtype before the weight is applied.

    On a CPU a half-precision model's weight becomes float32 once it is loaded, and nothing is rounded before the
    result: for a row of 576, 20 us in place of 33.
    """

    def __init__(self, size: int, eps: float, place: Placement):
        self.weight, self.eps, self._dtype = place.empty(size), eps, place.dtype
        self._eps: Tensor | None = None  # where the weight has become float32
        if place.device.type == "cpu" and place.dtype != torch.float32:
            place.on_loaded.append(self._widen)

    def apply(self, x: Tensor) -> Tensor:
        """x [T, H], or [T, heads, H] with any strides -> the same shape in the model's dtype."""
        if self._eps is not None:
            return self._unrounded(x, self._eps)
        return kernels.rms_norm(x, self.weight, self.eps)

    def add_apply(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual [T, H] += x, in place and in the residual's dtype, then the norm of it: [T, H].

        x is [T, H], or float32 partial sums of that, [S, T, H].
        """
        if self._eps is not None:
            return self._unrounded(add(x, residual), self._eps)
        if x.dim() == 3:
            return kernels.add_partials_rms_norm(x, residual, self.weight, self.eps)
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)

    @property
    def rounded(self) -> bool:
        """Whether results are those of the ops of `kernels`."""
        return self._eps is None

    def params(self, prefix: str) -> Params:
        return {f"{prefix}weight": Param(self.weight, tuple(self.weight.shape))}

    def _widen(self) -> None:
        self.weight, self._eps = self.weight.float(), torch.tensor(self.eps)

    def _unrounded(self, x: Tensor, eps: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self.weight).to(self._dtype)
