"""The best of a block of values in Triton, by bisection of a threshold over their bits: counts, and no sorting."""

import triton
import triton.language as tl


@triton.jit
def sort_keys(x, SHORT: tl.constexpr):
    """Whole numbers that sort as float32 `x` does, NaN as -inf; SHORT: `x` was bfloat16, 16 bits say it all."""
    bits = tl.where(x == x, x, float("-inf")).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if SHORT:
        keys = bits >> 16
    else:
        keys = bits.to(tl.int64)  # differences of two need more than 32 bits
    return keys


@triton.jit
def threshold_of(keys, low, high, count):
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
def best_of(keys, threshold, count):
    """Which keys are the `count` best: those over the threshold, then as many at it, the first ones."""
    above = keys > threshold
    level = keys == threshold
    room = count - tl.sum(above.to(tl.int32), 0)
    return above | (level & (tl.cumsum(level.to(tl.int32), 0) <= room))
