"""The noise of tokens in Triton: Gumbel of Philox-4x32-10, the numbers of `tokenspeed.kernels.philox`."""

import triton
import triton.language as tl


@triton.jit
def gumbel_of(word):
    """Gumbel noise of a 32-bit word, as tokenspeed.kernels.philox.gumbel gives it."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # log1p(-u): near 0 its series, since 1 - u loses u's digits.
    series = u * (1.0 + u * (0.5 + u * (0.33333333333 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(1.0 - u)))


@triton.jit
def philox_words(token_blocks, seed, position):
    """Four words of each block of four tokens: Philox-4x32-10, key = seed, counter = (block, position, 0)."""
    low = token_blocks.to(tl.uint32)
    zero = low * 0
    position_low = (position & 0xFFFFFFFF).to(tl.uint32) + zero
    position_high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero
    return tl.philox(seed, low, position_low, position_high, zero)


@triton.jit
def token_noise(tokens, seed, position):
    """Noise of each token, whichever they are."""
    a, b, c, d = philox_words(tokens >> 2, seed, position)
    word = tokens & 3
    return gumbel_of(tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d))))


@triton.jit
def run_noise(first, seed, position, SIZE: tl.constexpr):
    """Noise [SIZE] of tokens first, first + 1, ..., both multiples of 4: a quarter of the work."""
    a, b, c, d = philox_words(first // 4 + tl.arange(0, SIZE // 4), seed, position)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    return gumbel_of(tl.reshape(words, (SIZE,)))
