"""The candidate head's scan of the vocabulary in Triton: the c best of each row, and exact logits of them.

The c best values of a row lie in the c blocks with the largest maxima. So one pass takes maxima, and a program a row
then looks at c blocks only. Both choices are by bisection of a threshold over the bits of the values, which needs
counts and no sorting. A row that will be drawn at a temperature goes by its scores and the noise of its tokens; the
second pass makes that of its blocks once more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.rows import Draw
from tokenspeed.kernels.triton.noise import run_noise, token_noise
from tokenspeed.kernels.triton.pdl import early_options, wait_early

_LOW = tl.constexpr(-1e30)  # stands for -inf and NaN among what can still be picked; -inf is what was picked
_SCAN = 2048  # values a program of the first pass reads
_BLOCK_H = 4096  # columns of row_dots that are on their way at once, at most
_COLDEST = tl.constexpr(1e-5)  # temperatures below it mean the best token
_FILTERED = tl.constexpr(10.0)  # taken off a candidate that the request's filters would drop


@triton.jit
def _keys(x, SHORT: tl.constexpr):
    """Whole numbers that sort as float32 `x` does, NaN as -inf; SHORT: `x` was bfloat16, 16 bits say it all."""
    bits = tl.where(x == x, x, float("-inf")).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if SHORT:
        keys = bits >> 16
    else:
        keys = bits.to(tl.int64)  # differences of two need more than 32 bits
    return keys


@triton.jit
def _threshold(keys, low, high, count):
    """The largest t in [low, high] with at least `count` keys >= t; there are that many >= low."""
    while low < high:
        # Three counts in one sum, 21 bits each: what takes time here is to add up over all threads.
        step = tl.maximum((high - low + 1) // 4, 1)
        a, b, c = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        over_b, over_c = (keys >= b).to(tl.int64) << 21, (keys >= c).to(tl.int64) << 42
        counts = tl.sum((keys >= a).to(tl.int64) + over_b + over_c, 0)
        fits_a, fits_b = (counts & 0x1FFFFF) >= count, ((counts >> 21) & 0x1FFFFF) >= count
        fits_c = (counts >> 42) >= count
        high = tl.where(fits_c, high, tl.where(fits_b, c - 1, tl.where(fits_a, b - 1, a - 1)))
        low = tl.where(fits_c, c, tl.where(fits_b, b, tl.where(fits_a, a, low)))
    return low


@triton.jit
def _chosen(keys, threshold, count):
    """Which keys are the `count` best: those over the threshold, then as many at it, the first ones."""
    above = keys > threshold
    level = keys == threshold
    room = count - tl.sum(above.to(tl.int32), 0)
    return above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))


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
        if heat >= _COLDEST:
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
    keys = tl.where(blocks < num_blocks, _keys(best, SHORT), lowest)
    low = tl.min(tl.where(blocks < num_blocks, keys, -lowest), 0)
    least = _threshold(keys, low, tl.max(keys, 0), count)
    keep = _chosen(keys, least, count)
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
        if heat >= _COLDEST:
            seed, position = tl.load(seeds + slot), tl.load(positions + row // group) + depth
            token = tl.load(token_ids + place, real, 0) if MAPPED else place
            values += heat * token_noise(token, seed, position)
            least = tl.min(
                tl.where(real, _keys(values, SHORT), -lowest), 0
            )  # a sum may be rounded otherwise here
    keys = tl.where(real, _keys(values, SHORT), lowest)
    keep = _chosen(keys, _threshold(keys, least, tl.max(keys, 0), count), count)
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


@triton.jit(do_not_specialize=["k", "depth"])
def best_candidates_kernel(
    scores,
    ids,
    share,
    best_ids,
    logprobs,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    slots,
    positions,
    depth,
    group,
    count,
    k,
    DRAWN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """The k best of one row's candidates, equal ones by place, and their log-probabilities."""
    wait_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    column, child = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    x = tl.load(scores + row * count + column, column < count, float("-inf"))
    if DRAWN:
        slot = tl.load(slots + row // group)
        heat = tl.load(temperature + slot)
        if heat >= _COLDEST:
            # What the filters drop if there are no tokens but these.
            cool = x / heat
            peak = tl.max(cool, 0)
            mass = tl.exp(cool - peak)
            above = cool[None, :] > cool[:, None]  # [i, j]: j is better than i
            nucleus, most = tl.load(top_p + slot), tl.load(top_k + slot)
            dropped = (most > 0) & (tl.sum(above.to(tl.int32), 1) >= most)
            before = tl.sum(tl.where(above, mass[None, :], 0.0), 1)
            limit = tl.where(nucleus < 1.0, nucleus * tl.sum(mass, 0), float("inf"))
            dropped = dropped | (before >= limit)
            dropped = dropped | (cool < peak + tl.log(tl.load(min_p + slot)))
            token = tl.load(ids + row * count + column, column < count, 0)
            position = tl.load(positions + row // group) + depth
            x += heat * token_noise(token, tl.load(seeds + slot), position) - tl.where(
                dropped, _FILTERED, 0.0
            )
    keys = tl.where(x == x, tl.maximum(x, _LOW), _LOW)
    peak = tl.max(keys, 0)
    norm = tl.load(share + row) - peak - tl.log(tl.sum(tl.exp(x - peak), 0))  # a NaN reaches it
    keys = tl.where(column < count, keys, float("-inf"))
    best = tl.zeros((BLOCK_K,), tl.float32)
    at = tl.zeros((BLOCK_K,), tl.int32)
    for i in range(k):
        top = tl.max(keys, 0)
        where = tl.min(tl.where(keys == top, column, BLOCK_C), 0)
        best = tl.where(child == i, top, best)
        at = tl.where(child == i, where, at)
        keys = tl.where(column == where, float("-inf"), keys)
    value = best + norm
    value = tl.where(value == value, tl.minimum(value, 0.0), float("-inf"))
    best = tl.where(best > _LOW, value, float("-inf"))
    tl.store(best_ids + row * k + child, tl.load(ids + row * count + at, child < k, 0), child < k)
    tl.store(logprobs + row * k + child, best, child < k)


def top_candidates(
    scores: Tensor, count: int, draw: Draw | None = None, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `tokenspeed.kernels.top_candidates`."""
    rows, size = scores.shape
    block = 64
    while triton.cdiv(size, block) < count:
        block //= 2
    num_blocks, per_program = triton.cdiv(size, block), _SCAN // block
    num_partial = triton.cdiv(num_blocks, per_program)
    kept = triton.next_power_of_2(count)
    maxima = scores.new_empty((rows, num_blocks), dtype=torch.float32)
    partial = scores.new_empty((rows, num_partial, 2), dtype=torch.float32)
    chosen = scores.new_empty((rows, kept), dtype=torch.int32)
    candidates = scores.new_empty((rows, count), dtype=torch.int64)
    share = scores.new_empty((rows,), dtype=torch.float32)
    stride = scores.stride(0)
    ids = candidates if token_ids is None else token_ids
    if draw is None:
        noise = (maxima, candidates, candidates, candidates, ids, 0, 1)  # not read
    else:
        noise = (
            draw.temperature,
            draw.seeds,
            draw.slots,
            draw.positions,
            ids,
            draw.depth,
            rows // len(draw.slots),
        )
    flags = {"DRAWN": draw is not None, "MAPPED": token_ids is not None}
    candidate_scan_kernel[(rows, num_partial)](
        scores,
        maxima,
        partial,
        *noise,
        size,
        stride,
        num_blocks,
        **flags,
        BLOCK=block,
        COUNT=per_program,
        num_warps=4,
        **early_options(),
    )
    candidate_select_kernel[(rows,)](
        scores,
        maxima,
        partial,
        chosen,
        candidates,
        share,
        *noise,
        size,
        stride,
        num_blocks,
        num_partial,
        count,
        **flags,
        BLOCK=block,
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


def best_candidates(
    scores: Tensor, ids: Tensor, share: Tensor, k: int, draw: Draw | None = None
) -> tuple[Tensor, Tensor]:
    """See `tokenspeed.kernels.best_candidates`."""
    rows, count = scores.shape
    best = torch.empty((rows, k), dtype=torch.int64, device=scores.device)
    logprobs = torch.empty((rows, k), dtype=torch.float32, device=scores.device)
    if draw is None:
        noise = (share, ids, share, share, ids, ids, ids, 0, 1)  # not read
    else:
        settings = (draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.seeds)
        noise = (*settings, draw.slots, draw.positions, draw.depth, rows // len(draw.slots))
    best_candidates_kernel[(rows,)](
        scores,
        ids,
        share,
        best,
        logprobs,
        *noise,
        count,
        k,
        DRAWN=draw is not None,
        BLOCK_C=triton.next_power_of_2(count),
        BLOCK_K=triton.next_power_of_2(max(k, 16)),
        num_warps=2,
        **early_options(),
    )
    return best, logprobs
