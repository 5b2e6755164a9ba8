"""The candidate head's scan of the vocabulary in Triton: the c best of each row, and exact logits of them.

The c best values of a row lie in the c blocks with the largest maxima. So one pass takes maxima, and a program a row
then looks at c blocks only (select.py makes both choices). A row that will be drawn at a temperature goes by its scores
and the noise of its tokens; the second pass makes that of its blocks once more.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.rows import Draw
from tokenspeed.kernels.triton.noise import run_noise, token_noise
from tokenspeed.kernels.triton.pdl import early_options, wait_early
from tokenspeed.kernels.triton.select import best_of, sort_keys, threshold_of

_SCAN = 2048  # values a program of the first pass reads
_BLOCK_H = 4096  # columns of row_dots that are on their way at once, at most
COLDEST = tl.constexpr(1e-5)  # temperatures below it mean the best token


@triton.jit(do_not_specialize=["depth"])
def candidate_scan_kernel(
    x,
    maxima,
    partial,
    temperature,
    seeds,
    slots,
    positions,
    token_ids,
    depth,
    group,
    size,
    stride,
    num_blocks,
    DRAWN: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Maxima of COUNT blocks of one row, and the programs' own (maximum, sum of exponentials)."""
    wait_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COUNT
    blocks = first + tl.arange(0, COUNT)
    at = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + row * stride + at, at < size, float("-inf")).to(tl.float32)
    if DRAWN:
        slot = tl.load(slots + row // group)
        heat = tl.load(temperature + slot)
        if heat >= COLDEST:
            seed, position = tl.load(seeds + slot), tl.load(positions + row // group) + depth
            if MAPPED:
                noise = token_noise(tl.load(token_ids + at, at < size, 0), seed, position)
            else:
                noise = tl.reshape(run_noise(first * BLOCK, seed, position, COUNT * BLOCK), (COUNT, BLOCK))
            values += heat * noise
    best = tl.max(tl.where(values == values, values, float("-inf")), 1)
    tl.store(maxima + row * num_blocks + blocks, best, blocks < num_blocks)
    peak = tl.max(best, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.sum(tl.exp(values - base), 1), 0)  # a NaN stays one
    out = partial + (row * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(out, peak)
    tl.store(out + 1, total)


@triton.jit(do_not_specialize=["depth"])
def candidate_select_kernel(
    x,
    maxima,
    partial,
    chosen,
    candidates,
    share,
    temperature,
    seeds,
    slots,
    positions,
    token_ids,
    depth,
    group,
    size,
    stride,
    num_blocks,
    num_partial,
    count,
    DRAWN: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    KEPT: tl.constexpr,
    PARTIAL: tl.constexpr,
    SHORT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: the `count` blocks with the largest maxima, then the `count` best values in them, by place."""
    wait_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    best = tl.load(maxima + row * num_blocks + blocks, blocks < num_blocks, float("-inf"))
    lowest = -65536 if SHORT else -4294967296  # below the key of -inf, which real blocks may have
    keys = tl.where(blocks < num_blocks, sort_keys(best, SHORT), lowest)
    low = tl.min(tl.where(blocks < num_blocks, keys, -lowest), 0)
    least = threshold_of(keys, low, tl.max(keys, 0), count)
    keep = best_of(keys, least, count)
    tl.store(chosen + row * KEPT + tl.cumsum(keep.to(tl.int32), 0) - 1, blocks, keep)
    tl.debug_barrier()  # another thread has stored what this one loads

    at = tl.arange(0, KEPT * BLOCK)
    block = tl.load(chosen + row * KEPT + at // BLOCK, at // BLOCK < count, 0)
    place = block * BLOCK + at % BLOCK
    real = (at // BLOCK < count) & (place < size)
    values = tl.load(x + row * stride + place, real, float("-inf")).to(tl.float32)
    # Each of the chosen blocks has a value as large as `least`, so there are enough of those.
    if DRAWN:
        slot = tl.load(slots + row // group)
        heat = tl.load(temperature + slot)
        if heat >= COLDEST:
            seed, position = tl.load(seeds + slot), tl.load(positions + row // group) + depth
            token = tl.load(token_ids + place, real, 0) if MAPPED else place
            values += heat * token_noise(token, seed, position)
            least = tl.min(
                tl.where(real, sort_keys(values, SHORT), -lowest), 0
            )  # a sum may be rounded otherwise here
    keys = tl.where(real, sort_keys(values, SHORT), lowest)
    keep = best_of(keys, threshold_of(keys, least, tl.max(keys, 0), count), count)
    tl.store(candidates + row * count + tl.cumsum(keep.to(tl.int32), 0) - 1, place.to(tl.int64), keep)

    parts = tl.arange(0, PARTIAL)
    pointer = partial + (row * num_partial + parts) * 2
    peaks = tl.load(pointer, parts < num_partial, float("-inf"))
    totals = tl.load(pointer + 1, parts < num_partial, 0.0)
    peak = tl.max(peaks, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(totals * tl.exp(peaks - base), 0)
    mine = tl.sum(tl.where(keep, tl.exp(values - base), 0.0), 0)
    tl.store(share + row, tl.log(mine) - tl.log(total))


@triton.jit
def row_dots_kernel(
    x,
    table,
    indices,
    out,
    stride,
    count,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """The dot of one row with one of its own rows of the table."""
    wait_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    mine = row * count + tl.program_id(1)
    own = tl.load(indices + mine)
    products = tl.zeros((BLOCK_H,), tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK_H):
        columns = start + tl.arange(0, BLOCK_H)
        # x is asked for first: it need not wait for the index.
        a = tl.load(x + row * stride + columns, columns < SIZE, 0.0).to(tl.float32)
        products += a * tl.load(table + own * SIZE + columns, columns < SIZE, 0.0).to(tl.float32)
    tl.store(out + mine, tl.sum(products, 0))


class Scan(NamedTuple):
    """What the first pass leaves of scores [R, V]: maxima of blocks, and sums of exponentials by parts."""

    block: int  # values a maximum is of
    maxima: Tensor  # float32 [R, V / block]
    partial: Tensor  # float32 [R, parts, 2]: largest value, sum of exponentials less that


def new_scan(scores: Tensor, count: int, span: int) -> Scan:
    """Empty ones. count: candidates of a row; of so many blocks at least. span: values that a program scans."""
    rows, size = scores.shape
    block = min(64, span)
    while triton.cdiv(size, block) < count:
        block //= 2
    maxima = scores.new_empty((rows, triton.cdiv(size, block)), dtype=torch.float32)
    return Scan(block, maxima, scores.new_empty((rows, triton.cdiv(size, span), 2), dtype=torch.float32))


def noise_arguments(draw: Draw | None, token_ids: Tensor | None, rows: int, nothing: Scan) -> tuple:
    """What both passes are given of the noise, and their constants."""
    ids = nothing.maxima if token_ids is None else token_ids
    flags = {"DRAWN": draw is not None, "MAPPED": token_ids is not None}
    if draw is None:
        return (nothing.maxima,) * 4 + (ids, 0, 1), flags  # not read
    settings = (draw.temperature, draw.seeds, draw.slots, draw.positions, ids, draw.depth)
    return (*settings, rows // len(draw.slots)), flags


def top_candidates(
    scores: Tensor, count: int, draw: Draw | None = None, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `tokenspeed.kernels.top_candidates`."""
    rows, size = scores.shape
    scan = new_scan(scores, count, _SCAN)
    noise, flags = noise_arguments(draw, token_ids, rows, scan)
    candidate_scan_kernel[(rows, scan.partial.shape[1])](
        scores,
        scan.maxima,
        scan.partial,
        *noise,
        size,
        scores.stride(0),
        scan.maxima.shape[1],
        **flags,
        BLOCK=scan.block,
        COUNT=_SCAN // scan.block,
        num_warps=4,
        **early_options(),
    )
    return select(scores, scan, count, noise, flags)


def select(scores: Tensor, scan: Scan, count: int, noise: tuple, flags: dict) -> tuple[Tensor, Tensor]:
    """The second pass: places int64 [R, count] and share float32 [R] of `top_candidates`."""
    rows, size = scores.shape
    kept, num_blocks, num_partial = triton.next_power_of_2(count), scan.maxima.shape[1], scan.partial.shape[1]
    chosen = scores.new_empty((rows, kept), dtype=torch.int32)
    candidates = scores.new_empty((rows, count), dtype=torch.int64)
    share = scores.new_empty((rows,), dtype=torch.float32)
    candidate_select_kernel[(rows,)](
        scores,
        scan.maxima,
        scan.partial,
        chosen,
        candidates,
        share,
        *noise,
        size,
        scores.stride(0),
        num_blocks,
        num_partial,
        count,
        **flags,
        BLOCK=scan.block,
        BLOCKS=triton.next_power_of_2(num_blocks),
        KEPT=kept,
        PARTIAL=triton.next_power_of_2(num_partial),
        SHORT=scores.dtype == torch.bfloat16,
        num_warps=8,
        **early_options(),
    )
    return candidates, share


def row_dots(x: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """See `tokenspeed.kernels.row_dots`."""
    rows, count = indices.shape
    out = x.new_empty((rows, count), dtype=torch.float32)
    row_dots_kernel[(rows, count)](
        x,
        table,
        indices,
        out,
        x.stride(0),
        count,
        SIZE=x.shape[1],
        BLOCK_H=min(_BLOCK_H, triton.next_power_of_2(x.shape[1])),
        num_warps=4,
        **early_options(),
    )
    return out
