"""Sampling in Triton: argmax by parts of a row, then, one program a row, exact top-k and top-p thresholds and
Gumbel-max with Philox for the rows that are not greedy.

Thresholds are searched over the logits' bits: as integers of the right order float32 values have 2^32 keys,
so 16 passes that each quarter the interval find the exact k-th largest value or the nucleus' edge without a
sort.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.triton.noise import gumbel_of, philox_words
from tokenspeed.kernels.triton.pdl import early_options, wait_early

_BLOCK = 4096


@triton.jit
def _load(row, cols, vocab, factor):
    """logits * factor of a row without NaN, with +inf as the largest finite value used."""
    x = tl.minimum(tl.load(row + cols, cols < vocab, float("-inf")), 3e38)
    return tl.minimum(x * factor, 3e38)


@triton.jit
def _ordered(x):
    """float32 to int32 keys of the same order."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weights(x, peak, MASS: tl.constexpr):
    if MASS:
        return tl.exp(x - peak)
    else:
        return tl.where(x == float("-inf"), 0.0, 1.0)


@triton.jit
def _sum_from(row, vocab, factor, peak, edge, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of weights of the tokens whose key is at least `edge`."""
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _load(row, start + tl.arange(0, BLOCK), vocab, factor)
        acc += tl.where(_ordered(x) >= edge, _weights(x, peak, MASS), 0.0)
    return tl.sum(acc, 0)


@triton.jit
def _search(row, vocab, factor, peak, low, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key whose tokens and those above weigh at least `wanted`; `low` is known to do."""
    low = low.to(tl.int64)
    high = _ordered(peak).to(tl.int64) + 1
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        a, b, c = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        sum_a, sum_b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        sum_c = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            x = _load(row, start + tl.arange(0, BLOCK), vocab, factor)
            key, weight = _ordered(x), _weights(x, peak, MASS)
            sum_a += tl.where(key >= a.to(tl.int32), weight, 0.0)
            sum_b += tl.where(key >= b.to(tl.int32), weight, 0.0)
            sum_c += tl.where(key >= c.to(tl.int32), weight, 0.0)
        fits_a, fits_b = tl.sum(sum_a, 0) >= wanted, tl.sum(sum_b, 0) >= wanted
        fits_c = tl.sum(sum_c, 0) >= wanted
        # `high` itself never fits: it lies above the largest token or has been seen not to.
        fits_b, fits_c = fits_a & fits_b & (b < high), fits_a & fits_b & fits_c & (b < high) & (c < high)
        new_low = tl.where(fits_c, c, tl.where(fits_b, b, tl.where(fits_a, a, low)))
        high = tl.where(fits_c, high, tl.where(fits_b, c, tl.where(fits_a, b, a)))
        low = new_low
    return low.to(tl.int32)


@triton.jit
def _draw(row, vocab, factor, edge, seed, position, BLOCK: tl.constexpr):
    """argmax of scaled logit + noise over the tokens whose key is at least `edge`."""
    QUARTER: tl.constexpr = BLOCK // 4
    best = tl.full([QUARTER], float("-inf"), tl.float32)
    token = tl.full([QUARTER], 2147483647, tl.int32)
    for start in range(0, vocab, BLOCK):
        blocks = start // 4 + tl.arange(0, QUARTER)
        words = philox_words(blocks, seed, position)
        for i in tl.static_range(4):
            cols = blocks * 4 + i
            x = _load(row, cols, vocab, factor)
            score = tl.where(_ordered(x) >= edge, x + gumbel_of(words[i]), float("-inf"))
            better = score > best  # blocks come in rising order: of equals the first stays
            best, token = tl.where(better, score, best), tl.where(better, cols, token)
    top = tl.max(best, 0)
    return tl.min(tl.where(best == top, token, 2147483647), 0)


@triton.jit
def sample_best_kernel(logits, part_peak, part_token, stride, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Largest logit of BLOCK of one row's, NaN if there is one, and the lowest token that has it."""
    wait_early(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + cols, cols < vocab, float("-inf"))
    nan = tl.max((x != x).to(tl.int32), 0) > 0
    x = tl.minimum(x, 3e38)
    top = tl.max(x, 0)
    out = row * tl.num_programs(1) + part
    tl.store(part_token + out, tl.min(tl.where(x == top, cols, 2147483647), 0))
    tl.store(part_peak + out, tl.where(nan, float("nan"), top))


@triton.jit
def sample_kernel(
    logits,
    part_peak,
    part_token,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    slots,
    out,
    stride,
    vocab,
    num_parts,
    group,
    BY_SLOT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_early(PDL)
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    slot = index
    if BY_SLOT:
        slot = tl.load(slots + index // group)
    part = tl.arange(0, PARTS)
    peaks = tl.load(part_peak + index * num_parts + part, part < num_parts, float("-inf"))
    tokens = tl.load(part_token + index * num_parts + part, part < num_parts, 0)
    failed = tl.max((peaks != peaks).to(tl.int32), 0) > 0
    top = tl.max(peaks, 0)
    choice = tl.min(tl.where(peaks == top, tokens, 2147483647), 0)
    heat = tl.load(temperature + slot)
    if (top == float("-inf")) | failed:
        choice = tl.full([], -1, tl.int32)
    elif heat >= 1e-5:
        factor = tl.div_rn(1.0, heat)
        peak = tl.minimum(top * factor, 3e38)
        edge = tl.full([], -2147483648, tl.int32)
        k, p = tl.load(top_k + slot), tl.load(top_p + slot)
        if (k > 0) & (k < vocab):
            # -inf weighs nothing, so with fewer than k finite logits the lowest key is the answer.
            edge = _search(row, vocab, factor, peak, edge, k.to(tl.float32), False, BLOCK)
        if p < 1.0:
            wanted = _sum_from(row, vocab, factor, peak, edge, True, BLOCK) * p
            edge = _search(row, vocab, factor, peak, edge, wanted, True, BLOCK)
        floor = peak + tl.log(tl.load(min_p + slot))
        edge = tl.maximum(edge, _ordered(floor))
        choice = _draw(row, vocab, factor, edge, tl.load(seeds + slot), tl.load(positions + index), BLOCK)
    tl.store(out + index, choice.to(tl.int64))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    slots: Tensor | None = None,
) -> Tensor:
    """See `tokenspeed.kernels.sample`."""
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        block = min(_BLOCK, max(16, triton.next_power_of_2(vocab)))
        parts = triton.cdiv(vocab, block)
        peaks = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
        tokens = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
        sample_best_kernel[(rows, parts)](
            logits,
            peaks,
            tokens,
            logits.stride(0),
            vocab,
            BLOCK=block,
            num_warps=4,
            **early_options(),
        )
        sample_kernel[(rows,)](
            logits,
            peaks,
            tokens,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            positions,
            positions if slots is None else slots,
            out,
            logits.stride(0),
            vocab,
            parts,
            1 if slots is None else rows // len(slots),
            BY_SLOT=slots is not None,
            PARTS=triton.next_power_of_2(parts),
            BLOCK=block,
            num_warps=8,
            **early_options(),
        )
    return out
