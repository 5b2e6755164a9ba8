"""The ops of products of few rows, bound by reading the weight: `layers.few_rows` says where they are used."""

from torch import Tensor

from tokenspeed.kernels.registry import Op

_linear_rows = Op("linear_rows")
_linear_sums = Op("linear_sums")
_gate_up_silu = Op("gate_up_silu")
_add_partials_rms_norm = Op("add_partials_rms_norm")
_norm_linear = Op("norm_linear")
_norm_gate_up_silu = Op("norm_gate_up_silu")
_linear_add = Op("linear_add")

SMALL_K = 2048  # the most that norm_linear, norm_gate_up_silu and linear_add take


def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for few rows, summed in float32.

    Args:
        x: [T, K]. weight: [N, K], of x's dtype.

    Returns:
        [T, N] of x's dtype.
    """
    return _linear_rows[x.device.type](x, weight)


def linear_sums(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for few rows, as sums over S consecutive parts of K, which `add_partials_rms_norm` adds.

    Args:
        x: [T, K]. weight: [N, K], of x's dtype.

    Returns:
        float32 [S, T, N], contiguous; S is the kernel's choice and depends on N and K alone.
    """
    return _linear_sums[x.device.type](x, weight)


def gate_up_silu(x: Tensor, weight: Tensor) -> Tensor:
    """silu_and_mul(x @ weight.T) for few rows, rounded once, at the end.

    Args:
        x: [T, K]. weight: [2 I, K] of x's dtype, gate's rows first.

    Returns:
        [T, I] of x's dtype.
    """
    return _gate_up_silu[x.device.type](x, weight)


def add_partials_rms_norm(partials: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """add_rms_norm of the sum of partial sums, which are added in their order.

    Args:
        partials: float32 [S, T, H], contiguous. residual: [T, H], overwritten. weight: [H].

    Returns:
        [T, H] of the weight's dtype.
    """
    return _add_partials_rms_norm[residual.device.type](partials, residual, weight, eps)


def norm_linear(residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """rms_norm(residual, norm_weight, eps) @ weight.T for few rows of small K, summed in float32.

    Args:
        residual: [T, K], float32 or of the weight's dtype. norm_weight: [K]. weight: [N, K]. K is at most SMALL_K.

    Returns:
        [T, N] of the weight's dtype.
    """
    return _norm_linear[residual.device.type](residual, norm_weight, eps, weight)


def norm_gate_up_silu(residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """silu_and_mul(rms_norm(residual, norm_weight, eps) @ weight.T) for few rows of small K, rounded once, at the end.

    Args:
        residual: [T, K], float32 or of the weight's dtype. norm_weight: [K]. weight: [2 I, K], gate's rows first. K is
            at most SMALL_K.

    Returns:
        [T, I] of the weight's dtype.
    """
    return _norm_gate_up_silu[residual.device.type](residual, norm_weight, eps, weight)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """residual += x @ weight.T for few rows of small K, in place, summed and added in float32.

    Args:
        x: [T, K], K at most SMALL_K. weight: [N, K], of x's dtype. residual: [T, N], float32 or of x's dtype.
    """
    _linear_add[x.device.type](x, weight, residual)
