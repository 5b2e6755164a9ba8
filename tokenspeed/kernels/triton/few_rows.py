"""Products of few rows in Triton, bound by reading the weight once: y = x W^T, its partial sums, and SwiGLU of it.

The weight's rows are the M side of the MMA and the rows of x, padded to 8 or more, the N side: so a tile of 64 weight
rows costs one narrow instruction. What counts is how many bytes are on their way: a GPU of 4.3 TB/s needs some
32 KiB a multiprocessor to be busy, and twice that to be safe. All programs of a launch should fit the GPU at once.

With PDL (pdl.py) a program is set up, and may ask for its first weights to come into L2, while the kernel before it
still runs. It reads and writes nothing before that kernel has ended, so its bits are the same.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.pdl import has_pdl, launch_options

MAX_BLOCK_T = 64
_PROGRAMS = 132  # at least so many, where the shape gives them
_MAX_SPLIT = 4  # partial sums are read again by few programs
_SHARED = 110 * 1024  # bytes of shared memory: two programs a multiprocessor


class Tile(NamedTuple):
    """How a product is cut.

    Args:
        rows: weight rows of a program (gate's and up's together). depth: of K at a time. buffers: such pieces in
            shared memory, fewer where x is wide. split: programs that share K. ahead: of K, prefetched before PDL's
            wait, 0 or a power of two from 64 (on an H200 nothing is faster than 0: docs/performance.md).
    """

    rows: int
    depth: int
    buffers: int
    warps: int = 4
    split: int = 1
    ahead: int = 0

    def of(self, dtype: torch.dtype) -> "Tile":
        """The same for a dtype: float32 has no MMA, so less is unrolled, and it takes two times the bytes."""
        return self._replace(depth=32) if dtype == torch.float32 else self

    def stages(self, block_t: int) -> int:
        """num_stages for x of block_t rows: an MMA from registers has one buffer less than that, a wgmma as many."""
        piece = (self.rows + block_t) * self.depth * 2
        return max(2, min(self.buffers, _SHARED // piece)) + (block_t < 16 or self.rows < 64)


@triton.jit
def prefetch(at, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr):
    """Asks for AHEAD values of each of BLOCK_N rows at[:, 0], of two bytes and aligned to 16, to come into L2."""
    PARTS: tl.constexpr = 1 if BLOCK_N >= 128 else 128 // BLOCK_N  # a request for each of 128 threads
    SIZE: tl.constexpr = AHEAD // PARTS
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [(at + tl.arange(0, PARTS)[None, :] * SIZE).to(tl.int64), SIZE * 2],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x,
    weight,
    out,
    rows,
    num_out,
    size,
    span,
    stride_x,
    stride_w,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One tile of out [splits, rows, num_out]: weight rows n, and with GATED num_out + n, over `span` of K."""
    HALF: tl.constexpr = BLOCK_N // 2
    COLS: tl.constexpr = HALF if GATED else BLOCK_N
    split = tl.program_id(1)
    first = split * span
    lane = tl.arange(0, BLOCK_N)
    # Rows beyond the end read the last one, and are not stored.
    row = tl.minimum(tl.program_id(0) * COLS + lane % COLS, num_out - 1) + lane // COLS * num_out
    w_at = weight + row.to(tl.int64)[:, None] * stride_w
    if PDL:
        if AHEAD:
            prefetch(w_at + first, AHEAD, BLOCK_N)
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    x_at = x + t.to(tl.int64)[None, :] * stride_x
    inside = (t < rows)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(first, tl.minimum(first + span, size), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(w_at + k[None, :])
            v = tl.load(x_at + k[:, None], inside, 0.0)
        else:
            w = tl.load(w_at + k[None, :], (k < size)[None, :], 0.0)
            v = tl.load(x_at + k[:, None], inside & (k < size)[:, None], 0.0)
        acc = tl.dot(w, v, acc, input_precision="ieee")
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    at = out + (split.to(tl.int64) * rows + t)[None, :] * num_out + col[:, None]
    if GATED:
        gate, up = tl.split(acc.reshape(2, HALF, BLOCK_T).permute(1, 2, 0))
        acc = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(at, acc.to(out.dtype.element_ty), inside & (col < num_out)[:, None])


def linear_rows(x: Tensor, weight: Tensor, tile: Tile | None = None, pdl: bool | None = None) -> Tensor:
    """See `tokenspeed.kernels.linear_rows`."""
    rows, num_out = x.shape[0], weight.shape[0]
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, (tile or whole_tile(num_out)).of(x.dtype), False, pdl)
    return out


def linear_sums(x: Tensor, weight: Tensor, tile: Tile | None = None, pdl: bool | None = None) -> Tensor:
    """See `tokenspeed.kernels.linear_sums`."""
    rows, (num_out, size) = x.shape[0], weight.shape
    tile = (tile or sums_tile(num_out, size)).of(x.dtype)
    splits = triton.cdiv(size, span_of(size, tile))
    out = torch.empty((splits, rows, num_out), dtype=torch.float32, device=x.device)
    _launch(x, weight, out, tile, False, pdl)
    return out


def gate_up_silu(x: Tensor, weight: Tensor, tile: Tile | None = None, pdl: bool | None = None) -> Tensor:
    """See `tokenspeed.kernels.gate_up_silu`."""
    rows, num_out = x.shape[0], weight.shape[0] // 2
    out = torch.empty((rows, num_out), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, (tile or gated_tile(num_out)).of(x.dtype), True, pdl)
    return out


# The choices below depend on the weight alone, so that a row is summed in the same order whatever the rows beside it.


def whole_tile(num_out: int) -> Tile:
    """For linear_rows: as many weight rows as leave enough programs."""
    rows = next((rows for rows in (64, 32) if num_out // rows >= _PROGRAMS), 16)
    return Tile(rows, 128 if rows == 64 else 256, 5)


def sums_tile(num_out: int, size: int) -> Tile:
    """For linear_sums: 64 weight rows, and K shared by as many as make two programs a multiprocessor."""
    split = 2 * _PROGRAMS // triton.cdiv(num_out, 64)
    return Tile(64, 128, 6, split=max(1, min(_MAX_SPLIT, split, size // 512)))


def num_sums(num_out: int, size: int, dtype: torch.dtype) -> int:
    """S of linear_sums, for weights [num_out, size]."""
    return triton.cdiv(size, span_of(size, sums_tile(num_out, size).of(dtype)))


def gated_tile(num_out: int) -> Tile:
    """For gate_up_silu: 64 of gate and 64 of up where that makes enough programs, else fewer."""
    rows = next((rows for rows in (128, 64) if num_out // (rows // 2) >= _PROGRAMS), 32)
    return Tile(rows, 64 if rows == 128 else 128, 6)


def span_of(size: int, tile: Tile) -> int:
    """How much of K each program takes, a multiple of the tile's depth."""
    return triton.cdiv(size, tile.split * tile.depth) * tile.depth


def _launch(x: Tensor, weight: Tensor, out: Tensor, tile: Tile, gated: bool, pdl: bool | None) -> None:
    """pdl: started early; None: where the GPU can."""
    pdl = has_pdl() if pdl is None else pdl
    rows, size = x.shape
    num_out = out.shape[-1]
    if not rows:
        return
    block_t = min(MAX_BLOCK_T, max(8, triton.next_power_of_2(rows)))
    span = span_of(size, tile)
    splits = triton.cdiv(size, span)
    ahead = tile.ahead
    last = size - (splits - 1) * span
    if ahead > last or weight.itemsize != 2 or weight.data_ptr() % 16 or weight.stride(0) % 8:
        ahead = 0
    few_rows_kernel[
        triton.cdiv(num_out, tile.rows // 2 if gated else tile.rows), splits, triton.cdiv(rows, block_t)
    ](
        x,
        weight,
        out,
        rows,
        num_out,
        size,
        span,
        x.stride(0),
        weight.stride(0),
        GATED=gated,
        EVEN=size % tile.depth == 0,
        PDL=pdl,
        AHEAD=ahead if pdl else 0,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.depth,
        BLOCK_T=block_t,
        num_warps=tile.warps,
        num_stages=tile.stages(block_t),
        **launch_options(pdl),
    )
