"""The products of few rows and what adds their parts, in plain torch: what the kernels must equal."""

import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.reference import add_rms_norm, rms_norm


def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """See `tokenspeed.kernels.linear_rows`."""
    return F.linear(x, weight)


def linear_sums(x: Tensor, weight: Tensor) -> Tensor:
    """See `tokenspeed.kernels.linear_sums`."""
    return F.linear(x.float(), weight.float())[None]


def gate_up_silu(x: Tensor, weight: Tensor) -> Tensor:
    """See `tokenspeed.kernels.gate_up_silu`."""
    gate, up = F.linear(x.float(), weight.float()).chunk(2, -1)
    return (F.silu(gate) * up).to(x.dtype)


def add_partials_rms_norm(partials: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `tokenspeed.kernels.add_partials_rms_norm`."""
    total = partials[0]
    for part in partials[1:]:
        total = total + part
    return add_rms_norm(total, residual, weight, eps)


def norm_linear(residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """See `tokenspeed.kernels.norm_linear`."""
    return linear_rows(rms_norm(residual, norm_weight, eps), weight)


def norm_gate_up_silu(residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """See `tokenspeed.kernels.norm_gate_up_silu`."""
    return gate_up_silu(rms_norm(residual, norm_weight, eps), weight)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """See `tokenspeed.kernels.linear_add`."""
    residual.add_(F.linear(x.float(), weight.float()))
