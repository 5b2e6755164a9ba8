"""Attention with its output projection added to the residual stream, in Triton, for few rows of small layers.

Where the keys were split, the product's programs combine the splits themselves, each all of them, in place of a launch
that does so once: that costs less as long as they are few. With PDL (pdl.py) the weights are in registers before.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.combine import Parts, combine, fold_splits
from tokenspeed.kernels.triton.pdl import has_pdl, launch_options
from tokenspeed.kernels.triton.small_layer import (
    BLOCK_T,
    block_k,
    linear_add,
    product,
    small_tile,
    weight_tile,
)
from tokenspeed.kernels.triton.tree_attention import rope_attend

# Rows times splits up to which a program combines them: 8 reads one after another of as many as fit its registers.
MOST_PARTS = 64
_CHUNK = 8  # rows times splits that are read at a time


@triton.jit(do_not_specialize=["rows"])
def combine_linear_add_kernel(
    part_acc,
    part_peak,
    part_total,
    part_used,
    weight,
    residual,
    rows,
    num_out,
    num_splits,
    stride_w,
    stride_residual,
    PDL: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Adds one tile of the product of combined rows to residual [rows, num_out].

    Up to BLOCK_R rows; DIM is a power of two.
    """
    BLOCK_H: tl.constexpr = BLOCK_K // DIM
    w = weight_tile(weight, num_out, stride_w, False, NUM_HEADS * DIM, BLOCK_N, BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t, col = tl.arange(0, BLOCK_T), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = residual + t.to(tl.int64)[None, :] * stride_residual + col[:, None]
    inside = (t < rows)[None, :] & (col < num_out)[:, None]
    before = tl.load(at, inside, 0.0).to(tl.float32)

    lane, dims = tl.arange(0, BLOCK_R * BLOCK_H), tl.arange(0, DIM)
    present = (lane // BLOCK_H < rows) & (lane % BLOCK_H < NUM_HEADS)
    row = lane // BLOCK_H * NUM_HEADS + lane % BLOCK_H
    used = tl.load(part_used + row, present, 0)
    # The first splits are read before it is known whether they are used: nothing waits for `used` alone.
    readable = tl.where(present, num_splits, 0)
    peak = tl.full([BLOCK_R * BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R * BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_R * BLOCK_H, DIM], tl.float32)
    peak, total, acc = fold_splits(
        part_acc,
        part_peak,
        part_total,
        row,
        0,
        readable,
        used,
        dims,
        num_splits,
        peak,
        total,
        acc,
        DIM,
        CHUNK,
    )
    for start in range(CHUNK, tl.max(used, 0), CHUNK):
        peak, total, acc = fold_splits(
            part_acc,
            part_peak,
            part_total,
            row,
            start,
            used,
            used,
            dims,
            num_splits,
            peak,
            total,
            acc,
            DIM,
            CHUNK,
        )
    x = (acc / tl.where(total > 0.0, total, 1.0)[:, None]).to(w.dtype).reshape(BLOCK_R, BLOCK_K)
    tl.store(at, (before + product(w, x, PARTS, BLOCK_T)).to(residual.dtype.element_ty), inside)


def rope_tree_attention_add(weight: Tensor, residual: Tensor, *attention, **options) -> None:
    """See `tokenspeed.kernels.rope_tree_attention_add`."""
    combine_linear_add(rope_attend(*attention, **options), weight, residual)


def joins(parts: Parts) -> bool:
    """Whether `combine_linear_add` is one launch, and combines."""
    rows, _, dim = parts.out.shape
    few = 0 < rows <= BLOCK_T and rows * parts.splits <= MOST_PARTS
    return few and parts.splits > 1 and dim >= 16 and dim & (dim - 1) == 0


def combine_linear_add(parts: Parts, weight: Tensor, residual: Tensor, pdl: bool | None = None) -> None:
    """linear_add of combined rows, in one launch or, where that does not pay, in two, with the same bits.

    Args:
        parts: of T rows of H heads, H * D at most SMALL_K. weight: [N, H * D] of their dtype. residual: [T, N].
        pdl: started early; None: where the GPU can.
    """
    if not joins(parts):
        linear_add(combine(parts).flatten(1), weight, residual, pdl=pdl)
        return
    pdl = has_pdl() if pdl is None else pdl
    rows, num_heads, dim = parts.out.shape
    num_out, size = weight.shape
    tile, block_r = small_tile(size, False), triton.next_power_of_2(rows)
    combine_linear_add_kernel[(triton.cdiv(num_out, tile.rows),)](
        *parts[1:-1],
        weight,
        residual,
        rows,
        num_out,
        parts.splits,
        weight.stride(0),
        residual.stride(0),
        PDL=pdl,
        NUM_HEADS=num_heads,
        DIM=dim,
        CHUNK=max(1, _CHUNK // block_r),
        PARTS=tile.warps,
        BLOCK_N=tile.rows,
        BLOCK_K=block_k(size),
        BLOCK_R=block_r,
        BLOCK_T=BLOCK_T,
        num_warps=tile.warps,
        **launch_options(pdl),
    )
