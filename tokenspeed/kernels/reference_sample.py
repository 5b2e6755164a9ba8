"""Sampling in plain torch, made fast for a CPU: only tokens that can win are sorted, and only they draw noise."""

import torch
from torch import Tensor

from tokenspeed.kernels.philox import gumbel, token_words, vocab_words

GREEDY_BELOW = 1e-5
NUM_CANDIDATES = 1024
_HUGE = 3e38
_MAX_NOISE = 22.88  # Gumbel noise of the word 0: -log(2^-33) = 22.874


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """See `tokenspeed.kernels.sample`."""
    logits = logits.nan_to_num(nan=-torch.inf, posinf=_HUGE, neginf=-torch.inf)
    tokens = logits.argmax(-1)  # the first of equal values
    empty = logits.gather(1, tokens[:, None])[:, 0] == -torch.inf
    rows = ((temperature >= GREEDY_BELOW) & ~empty).nonzero()[:, 0]
    if len(rows) == len(tokens):
        return _draw(logits, temperature, top_k, top_p, min_p, seeds, positions)
    if len(rows):
        settings = (t[rows] for t in (temperature, top_k, top_p, min_p, seeds, positions))
        tokens[rows] = _draw(logits[rows], *settings)
    return tokens.masked_fill_(empty, -1)


def _draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Samples rows that are not greedy and not empty."""
    scaled = (logits * temperature.reciprocal()[:, None]).clamp_(max=_HUGE)
    values, ids = scaled.topk(min(NUM_CANDIDATES, scaled.shape[1]), dim=-1)
    cut = _cut(scaled, values, top_k, top_p, min_p)
    tokens, best = _pick(values, ids, cut, gumbel(token_words(seeds, positions, ids)))
    if ids.shape[1] == scaled.shape[1]:
        return tokens
    # Outside the candidates: below the cut, or too low to win with the largest noise there is.
    last = values[:, -1]
    open_rows = ((last >= cut) & (last + _MAX_NOISE >= best)).nonzero()[:, 0]
    if len(open_rows):
        noise = _shared_noise(seeds[open_rows], positions[open_rows], scaled.shape[1])
        scores = (scaled[open_rows] + noise).masked_fill_(
            scaled[open_rows] < cut[open_rows, None], -torch.inf
        )
        tokens[open_rows] = scores.argmax(-1)
    return tokens


def _cut(scaled: Tensor, values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest scaled logit each row keeps, float32 [R]; `values` are the row's largest, in descending order."""
    vocab = scaled.shape[1]
    cut = _min_p_cut(values[:, 0], min_p)
    for row in ((top_k > 0) | (top_p < 1)).nonzero()[:, 0].tolist():
        k, p = int(top_k[row]), float(top_p[row])
        k = k if 0 < k < vocab else vocab
        ranked = values[row]
        if k > len(ranked) and k < vocab:
            ranked = scaled[row].sort(descending=True).values
        limit = ranked[k - 1] if k < vocab else ranked.new_tensor(-torch.inf)
        if p < 1:
            kept = scaled[row] if k == vocab else scaled[row][scaled[row] >= limit]
            limit = torch.maximum(limit, _nucleus_cut(kept, ranked, p))
        cut[row] = torch.maximum(cut[row], limit)
    return cut


def _nucleus_cut(kept: Tensor, ranked: Tensor, p: float) -> Tensor:
    """Value of the last token needed for a mass of p of `kept` [any]; `ranked` [C] are its largest, descending."""
    wanted = (kept - ranked[0]).exp_().sum() * p
    mass = (ranked - ranked[0]).exp_().cumsum(0)
    if mass[-1] < wanted and len(ranked) < len(kept):
        ranked = kept.sort(descending=True).values
        mass = (ranked - ranked[0]).exp_().cumsum(0)
    needed = int(torch.searchsorted(mass, wanted))
    return ranked[min(needed, len(kept) - 1, len(ranked) - 1)]


def _min_p_cut(largest: Tensor, min_p: Tensor) -> Tensor:
    return largest + min_p.log()  # log(0) = -inf: keeps all


def _pick(values: Tensor, ids: Tensor, cut: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The winner of each row (the lowest id on ties) and its score."""
    scores = (values + noise).masked_fill_(values < cut[:, None], -torch.inf)
    best = scores.max(-1, keepdim=True).values
    winners = ids.masked_fill(scores < best, torch.iinfo(torch.int64).max)
    return winners.min(-1).values, best[:, 0]


def _shared_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Noise [R, vocab]; rows of one seed and position, as the siblings of a tree have, draw it once."""
    pairs, inverse = torch.stack((seeds, positions), 1).unique(dim=0, return_inverse=True)
    noise = gumbel(vocab_words(pairs[:, 0], pairs[:, 1], vocab))
    return noise if len(noise) == len(seeds) == 1 else noise[inverse]
