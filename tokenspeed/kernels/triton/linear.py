"""A matrix product in Triton whose rows' bits don't depend on how many rows there are."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_M, _BLOCK_N, _BLOCK_K = 16, 64, 64


@triton.jit(do_not_specialize=["rows"])
def linear_invariant_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    num_out,
    size,
    stride_x,
    stride_w,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile, K from start to end in one accumulator: no split, and the same instruction for every row."""
    # Programs of one weight tile are neighbours, so that it is read from memory once.
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, size, BLOCK_K):
        at = start + inner
        a = tl.load(
            x + row[:, None] * stride_x + at[None, :], (row < rows)[:, None] & (at < size)[None, :], 0.0
        )
        b_at = weight + col[None, :] * stride_w + at[:, None]
        b = tl.load(b_at, (col < num_out)[None, :] & (at < size)[:, None], 0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + col, col < num_out, 0.0).to(tl.float32)[None, :]
    tile = (row < rows)[:, None] & (col < num_out)[None, :]
    tl.store(out + row[:, None] * num_out + col[None, :], acc.to(out.dtype.element_ty), tile)


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `tokenspeed.kernels.linear_invariant`."""
    rows, size = x.shape
    num_out = weight.shape[0]
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    if rows:
        linear_invariant_kernel[(triton.cdiv(rows, _BLOCK_M), triton.cdiv(num_out, _BLOCK_N))](
            x,
            weight,
            weight if bias is None else bias,
            out,
            rows,
            num_out,
            size,
            x.stride(0),
            weight.stride(0),
            HAS_BIAS=bias is not None,
            BLOCK_M=_BLOCK_M,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=_BLOCK_K,
            num_warps=4,
            num_stages=3,
        )
    return out
