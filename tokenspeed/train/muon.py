"""Optimisers whose whole state is tensors that change in place, so that a step can be captured and saved.

Muon (Jordan et al. 2024) takes the matrices: momentum, made orthogonal by a Newton-Schulz iteration. AdamW
(Loshchilov and Hutter 2019) takes the rest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)  # of Jordan et al.: fast, and near one is enough
_ITERATIONS = 5
_UPDATE_RMS = 0.2  # of AdamW's updates, so that one learning rate suits both


class Muon:
    """p -= lr * (0.2 sqrt(longer side) * orthogonal(Nesterov momentum) + weight_decay * p), for matrices."""

    def __init__(self, params: Sequence[Tensor], momentum: float = 0.95, weight_decay: float = 0.01):
        self._params, self._momentum, self._decay = list(params), momentum, weight_decay
        self._buffers = [torch.zeros_like(p, requires_grad=False) for p in self._params]

    def state(self) -> dict[str, Tensor]:
        return {f"momentum.{i}": buffer for i, buffer in enumerate(self._buffers)}

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], lr: Tensor) -> None:
        """grads in the order of the parameters. lr: float32 scalar on their device."""
        for p, buffer, grad in zip(self._params, self._buffers, grads, strict=True):
            buffer.lerp_(grad, 1 - self._momentum)
            update = orthogonal(grad.lerp(buffer, self._momentum))
            p.mul_(1 - lr * self._decay)
            p.sub_(update.to(p.dtype) * (lr * (_UPDATE_RMS * max(p.shape) ** 0.5)))


class AdamW:
    """AdamW with its step counter on the device."""

    def __init__(
        self,
        params: Sequence[Tensor],
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        eps: float = 1e-8,
    ):
        self._params, self._betas, self._decay, self._eps = list(params), betas, weight_decay, eps
        self._means = [torch.zeros_like(p, requires_grad=False) for p in self._params]
        self._squares = [torch.zeros_like(p, requires_grad=False) for p in self._params]
        device = self._params[0].device
        self._count = torch.zeros((), dtype=torch.float32, device=device)

    def state(self) -> dict[str, Tensor]:
        means = {f"mean.{i}": mean for i, mean in enumerate(self._means)}
        squares = {f"square.{i}": square for i, square in enumerate(self._squares)}
        return means | squares | {"count": self._count}

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], lr: Tensor) -> None:
        """As Muon.step."""
        first, second = self._betas
        self._count.add_(1)
        scale = lr / (1 - first**self._count)
        correction = (1 - second**self._count).sqrt()
        for p, mean, square, grad in zip(self._params, self._means, self._squares, grads, strict=True):
            mean.lerp_(grad, 1 - first)
            square.lerp_(grad * grad, 1 - second)
            p.mul_(1 - lr * self._decay)
            p.sub_(scale * mean / (square.sqrt() / correction + self._eps))


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with its singular values moved to about one, in bfloat16 on a GPU."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.t()
    x = x / (x.norm() + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        square = x @ x.t()
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.t() if tall else x


def clip(grads: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Gradients scaled so that their common norm is at most `limit`; no host sync."""
    norms = torch.stack([grad.float().norm() for grad in grads])
    scale = (limit / (norms.norm() + 1e-6)).clamp(max=1.0)
    return [grad * scale for grad in grads]
