"""Philox-4x32-10 in torch, and the Exp(1) noise that sampling draws from it.

Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". Words are kept in int64,
where the product of two 32-bit words wraps modulo 2^64 and so keeps both of its halves.
"""

import torch
from torch import Tensor

_MUL0, _MUL1 = 0xD2511F53, 0xCD9E8D57
_KEY0, _KEY1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_BELOW_ONE = 1.0 - 2.0**-24  # largest float32 below 1: keeps e finite


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Ten rounds of Philox.

    Args:
        counter: four int64 tensors of 32-bit words, which broadcast. key: two of them.

    Returns:
        The four output words, int64 in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * _MUL0, c2 * _MUL1
        # The shift drags the sign along; the mask removes it, and the high half of c1 and c3 with it.
        c0 = ((right >> 32) ^ (c1 ^ k0)) & _LOW
        c2 = ((left >> 32) ^ (c3 ^ k1)) & _LOW
        c1, c3 = right, left
        k0, k1 = (k0 + _KEY0) & _LOW, (k1 + _KEY1) & _LOW
    return [c0, c1 & _LOW, c2, c3 & _LOW]


def token_words(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The 32-bit word of each token.

    Args:
        seeds, positions: int64 [R]. tokens: int64 [R, C] token ids.

    Returns:
        int64 [R, C] in [0, 2^32).
    """
    words = torch.stack(_blocks(seeds, positions, tokens >> 2), -1)
    return words.gather(-1, (tokens & 3).unsqueeze(-1)).squeeze(-1)


def vocab_words(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """The words of tokens 0..vocab-1: int64 [R, vocab]; four tokens share a Philox block."""
    counters = torch.arange((vocab + 3) // 4, device=seeds.device).unsqueeze(0)
    words = torch.stack(_blocks(seeds, positions, counters), -1)
    return words.view(len(seeds), -1)[:, :vocab]


def gumbel(words: Tensor) -> Tensor:
    """Words to float32 Gumbel noise g = -log(e), e = -log1p(-u), u = (word + 1/2) / 2^32."""
    u = words.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return u.neg_().log1p_().neg_().log_().neg_()


def _blocks(seeds: Tensor, positions: Tensor, counters: Tensor) -> list[Tensor]:
    """Four words of every counter [R or 1, C] under each row's seed and position."""
    seeds, positions = seeds.unsqueeze(1), positions.unsqueeze(1)
    zero = torch.zeros_like(positions)
    counter = (counters, positions & _LOW, (positions >> 32) & _LOW, zero)
    return philox4x32(counter, (seeds & _LOW, (seeds >> 32) & _LOW))
