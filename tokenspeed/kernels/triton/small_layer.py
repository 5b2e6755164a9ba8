"""Products of few rows and small K in Triton, for layers whose time is launches: with the norm before them, or the
addition to the residual stream after them.

A program has a few weight rows and the whole of K, padded to a power of two, as one tile. With PDL (pdl.py) it loads
the tile into registers before it waits, so that the weights come while the kernel before still runs; then it reads the
rows, and its warps share K: each has a part of the sums, which are added at the end. So a row is summed in one order
whatever is beside it, and no two programs write one value.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.few_rows_ops import SMALL_K
from tokenspeed.kernels.triton.pdl import has_pdl, launch_options

BLOCK_T = 8  # rows of x, the least that an MMA takes
_BLOCK_K = 128  # at least


class SmallTile(NamedTuple):
    """How a product is cut. rows: weight rows of a program (gate's and up's together). warps: parts of K."""

    rows: int
    warps: int


def small_tile(size: int, gated: bool) -> SmallTile:
    """The choice for a K. A warp has 256 of it, not less than 128: so all threads stand along K, and a row's mean
    square is summed in one order whatever the rows beside it.
    """
    block = block_k(size)
    return SmallTile(32 if gated and block <= 1024 else 16, max(1, block // 256))


def block_k(size: int) -> int:
    return max(_BLOCK_K, triton.next_power_of_2(size))


@triton.jit
def weight_tile(
    weight,
    num_out,
    stride_w,
    GATED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K]: rows n of this program, and with GATED rows num_out + n behind them."""
    COLS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    lane = tl.arange(0, BLOCK_N)
    # Rows beyond the end read the last one, and are not stored.
    row = tl.minimum(tl.program_id(0) * COLS + lane % COLS, num_out - 1) + lane // COLS * num_out
    k = tl.arange(0, BLOCK_K)
    return tl.load(weight + row.to(tl.int64)[:, None] * stride_w + k[None, :], (k < SIZE)[None, :], 0.0)


@triton.jit
def row_tile(
    x, rows, stride, SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr
):
    """[BLOCK_R, BLOCK_K]: rows of x, zeros beyond them."""
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    return tl.load(
        x + t.to(tl.int64)[:, None] * stride + k[None, :], (t < rows)[:, None] & (k < SIZE)[None, :], 0.0
    )


@triton.jit
def product(w, x, PARTS: tl.constexpr, BLOCK_T: tl.constexpr):
    """w [N, K] and x [R, K], R = 1 or BLOCK_T -> float32 [N, BLOCK_T]: PARTS sums over parts of K, then their sum."""
    N: tl.constexpr = w.shape[0]
    DEPTH: tl.constexpr = w.shape[1] // PARTS
    x = tl.broadcast_to(x, [BLOCK_T, w.shape[1]])
    w = w.reshape(N, PARTS, DEPTH).permute(1, 0, 2)
    x = x.reshape(BLOCK_T, PARTS, DEPTH).permute(1, 2, 0)
    return tl.sum(tl.dot(w, x, input_precision="ieee"), 0)


@triton.jit(do_not_specialize=["rows"])
def norm_linear_kernel(
    residual,
    norm_weight,
    weight,
    out,
    rows,
    num_out,
    stride_residual,
    stride_w,
    eps,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One tile of out [rows, num_out]: products with rows of the residual stream that are normed first."""
    HALF: tl.constexpr = BLOCK_N // 2
    COLS: tl.constexpr = HALF if GATED else BLOCK_N
    w = weight_tile(weight, num_out, stride_w, GATED, SIZE, BLOCK_N, BLOCK_K)
    k = tl.arange(0, BLOCK_K)
    gain = tl.load(norm_weight + k, k < SIZE, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    values = row_tile(residual, rows, stride_residual, SIZE, BLOCK_R, BLOCK_T, BLOCK_K).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1) / SIZE + eps)
    normed = (values * scale[:, None]).to(residual.dtype.element_ty).to(tl.float32)
    acc = product(w, (normed * gain[None, :]).to(w.dtype), PARTS, BLOCK_T)
    if GATED:
        gate, up = tl.split(acc.reshape(2, HALF, BLOCK_T).permute(1, 2, 0))
        acc = gate / (1.0 + tl.exp(-gate)) * up
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    at = out + t.to(tl.int64)[None, :] * num_out + col[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), (t < rows)[None, :] & (col < num_out)[:, None])


@triton.jit(do_not_specialize=["rows"])
def linear_add_kernel(
    x,
    weight,
    residual,
    rows,
    num_out,
    stride_x,
    stride_w,
    stride_residual,
    PDL: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Adds one tile of the product to residual [rows, num_out]."""
    w = weight_tile(weight, num_out, stride_w, False, SIZE, BLOCK_N, BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = residual + t.to(tl.int64)[None, :] * stride_residual + col[:, None]
    inside = (t < rows)[None, :] & (col < num_out)[:, None]
    before = tl.load(at, inside, 0.0).to(tl.float32)
    acc = product(w, row_tile(x, rows, stride_x, SIZE, BLOCK_T, BLOCK_T, BLOCK_K), PARTS, BLOCK_T)
    tl.store(at, (before + acc).to(residual.dtype.element_ty), inside)


def norm_linear(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    tile: SmallTile | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """See `tokenspeed.kernels.norm_linear`. pdl: started early; None: where the GPU can."""
    return _norm_linear(residual, norm_weight, eps, weight, False, tile, pdl)


def norm_gate_up_silu(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    tile: SmallTile | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """See `tokenspeed.kernels.norm_gate_up_silu`. pdl: as in norm_linear."""
    return _norm_linear(residual, norm_weight, eps, weight, True, tile, pdl)


def _norm_linear(
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    gated: bool,
    tile: SmallTile | None,
    pdl: bool | None,
) -> Tensor:
    rows, num_out = residual.shape[0], weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((rows, num_out), dtype=weight.dtype, device=residual.device)
    if not rows:
        return out
    grid, constants = _launch(residual, weight, num_out, gated, tile, pdl)
    # One row is read once and repeated. Not in half precision, where it would be summed in another order (small_tile).
    one = rows == 1 and residual.dtype == torch.float32
    norm_linear_kernel[grid](
        residual,
        norm_weight,
        weight,
        out,
        rows,
        num_out,
        residual.stride(0),
        weight.stride(0),
        eps,
        GATED=gated,
        BLOCK_R=1 if one else BLOCK_T,
        **constants,
    )
    return out


def linear_add(
    x: Tensor, weight: Tensor, residual: Tensor, tile: SmallTile | None = None, pdl: bool | None = None
) -> None:
    """See `tokenspeed.kernels.linear_add`. pdl: as in norm_linear."""
    rows, num_out = residual.shape
    if not rows:
        return
    grid, constants = _launch(x, weight, num_out, False, tile, pdl)
    linear_add_kernel[grid](
        x, weight, residual, rows, num_out, x.stride(0), weight.stride(0), residual.stride(0), **constants
    )


def _launch(
    x: Tensor, weight: Tensor, num_out: int, gated: bool, tile: SmallTile | None, pdl: bool | None
) -> tuple[tuple[int, int], dict]:
    """The grid, and the constants and options that the kernels have in common."""
    pdl = has_pdl() if pdl is None else pdl
    rows, size = x.shape
    if size > SMALL_K:
        raise ValueError(f"{size} is too wide: these products are of rows up to {SMALL_K}")
    tile = tile or small_tile(size, gated)
    grid = triton.cdiv(num_out, tile.rows // 2 if gated else tile.rows), triton.cdiv(rows, BLOCK_T)
    constants = dict(PDL=pdl, SIZE=size, PARTS=tile.warps, BLOCK_N=tile.rows, BLOCK_K=block_k(size))
    return grid, constants | dict(BLOCK_T=BLOCK_T, num_warps=tile.warps) | launch_options(pdl)
