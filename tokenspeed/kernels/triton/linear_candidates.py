"""The low-rank scores with the first pass over them in Triton: one launch reads the weight and scans what comes out
(candidates.py has the second pass).

As in few_rows.py the weight's rows are the M side of the MMA and the rows of x its N side. All of K, the rank, is one
tile, which a program asks for before it waits (pdl.py): so the weights come while the kernel before still runs.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.rows import Draw
from tokenspeed.kernels.triton.candidates import COLDEST, new_scan, noise_arguments, select
from tokenspeed.kernels.triton.noise import gumbel_of, philox_words, token_noise
from tokenspeed.kernels.triton.pdl import early_options

_TILE = 16384  # values of the weight a program has: 128 rows of a rank up to 128, fewer of a larger one


@triton.jit(do_not_specialize=["depth", "rows"])
def linear_scan_kernel(
    x,
    weight,
    scores,
    maxima,
    partial,
    temperature,
    seeds,
    slots,
    positions,
    token_ids,
    depth,
    group,
    rows,
    size,
    num_blocks,
    stride_x,
    stride_w,
    RANK: tl.constexpr,
    DRAWN: tl.constexpr,
    MAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of BLOCK_V tokens, maxima of their blocks, and a (maximum, sum of exponentials) of them a row."""
    first = tl.program_id(0) * BLOCK_V
    token, k = first + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_K)
    # Tokens beyond the end read the last row, and are not stored.
    w_at = weight + tl.minimum(token, size - 1).to(tl.int64)[:, None] * stride_w + k[None, :]
    w = tl.load(w_at, (k < RANK)[None, :], 0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside, real = t < rows, token < size
    x_at = x + t.to(tl.int64)[None, :] * stride_x + k[:, None]
    v = tl.load(x_at, inside[None, :] & (k < RANK)[:, None], 0.0)
    rounded = tl.dot(w, v, input_precision="ieee").to(scores.dtype.element_ty)
    at = t.to(tl.int64)[None, :] * size + token[:, None]
    tl.store(scores + at, rounded, inside[None, :] & real[:, None])
    values = rounded.to(tl.float32)
    if DRAWN:
        slot = tl.load(slots + t // group, inside, 0)
        heat = tl.load(temperature + slot, inside, 0.0)
        if tl.max(heat, 0) >= COLDEST:
            seed = tl.load(seeds + slot, inside, 0)[None, :]
            position = (tl.load(positions + t // group, inside, 0) + depth)[None, :]
            if MAPPED:
                names = tl.load(token_ids + token, real, 0)[:, None] + tl.zeros((1, BLOCK_T), tl.int64)
                noise = token_noise(names, seed, position)
            else:
                noise = _run_noises(first, seed, position, BLOCK_V, BLOCK_T)
            values = tl.where((heat >= COLDEST)[None, :], values + heat[None, :] * noise, values)
    values = tl.where(real[:, None], values, float("-inf"))
    known = tl.where(values == values, values, float("-inf"))
    best = tl.max(known.reshape(BLOCK_V // BLOCK, BLOCK, BLOCK_T), 1)
    block = tl.program_id(0) * (BLOCK_V // BLOCK) + tl.arange(0, BLOCK_V // BLOCK)
    at = t.to(tl.int64)[None, :] * num_blocks + block[:, None]
    tl.store(maxima + at, best, inside[None, :] & (block < num_blocks)[:, None])
    peak = tl.max(best, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    out = partial + (t.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(out, peak, inside)
    tl.store(out + 1, tl.sum(tl.exp(values - base[None, :]), 0), inside)  # a NaN stays one


@triton.jit
def _run_noises(first, seed, position, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Noise [SIZE, ROWS] of tokens first, first + 1, ..., as run_noise; seed, position: int64 [1, ROWS]."""
    blocks = (first // 4 + tl.arange(0, SIZE // 4))[:, None] + tl.zeros((1, ROWS), tl.int32)
    a, b, c, d = philox_words(blocks, seed, position)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return gumbel_of(tl.reshape(tl.permute(words, (0, 2, 3, 1)), (SIZE, ROWS)))


def linear_candidates(
    x: Tensor, weight: Tensor, count: int, draw: Draw | None = None, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `tokenspeed.kernels.linear_candidates`."""
    rows, (size, rank) = x.shape[0], weight.shape
    block_k = max(16, triton.next_power_of_2(rank))
    block_t = min(64, max(8, triton.next_power_of_2(rows)))
    block_v = max(16, _TILE // max(block_k, 128))
    scores = x.new_empty((rows, size))
    scan = new_scan(scores, count, block_v)
    noise, flags = noise_arguments(draw, token_ids, rows, scan)
    linear_scan_kernel[(triton.cdiv(size, block_v), triton.cdiv(rows, block_t))](
        x,
        weight,
        scores,
        scan.maxima,
        scan.partial,
        *noise,
        rows,
        size,
        scan.maxima.shape[1],
        x.stride(0),
        weight.stride(0),
        RANK=rank,
        **flags,
        BLOCK=scan.block,
        BLOCK_V=block_v,
        BLOCK_K=block_k,
        BLOCK_T=block_t,
        num_warps=4 if block_t <= 16 else 8,
        **early_options(),
    )
    return select(scores, scan, count, noise, flags)
