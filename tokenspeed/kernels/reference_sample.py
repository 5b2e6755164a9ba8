"""Sampling in plain torch, made fast for a CPU: only tokens that can win are sorted and draw noise."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.philox import gumbel, token_words, vocab_words

GREEDY_BELOW = 1e-5
NUM_CANDIDATES = 64
_BLOCK = 64
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
    slots: Tensor | None = None,
) -> Tensor:
    """See `tokenspeed.kernels.sample`."""
    settings = [temperature, top_k, top_p, min_p, seeds]
    if slots is not None:
        of_rows = slots.repeat_interleave(len(logits) // max(len(slots), 1))
        settings = [t[of_rows] for t in settings]
    tokens = _argmax(logits)  # a NaN's place, where there is one
    best = logits.gather(1, tokens[:, None])[:, 0]
    failed = best.isnan() | (best == -torch.inf)
    rows = ((settings[0] >= GREEDY_BELOW) & ~failed).nonzero()[:, 0]
    if len(rows):
        every = len(rows) == len(tokens)
        args = [*settings, positions] if every else [t[rows] for t in (*settings, positions)]
        drawn = _draw((logits if every else logits[rows]).clamp(max=_HUGE), *args)
        tokens = drawn if every else tokens.index_copy_(0, rows, drawn)
    return tokens.masked_fill_(failed, -1)


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
    values, ids = _largest(scaled, min(NUM_CANDIDATES, scaled.shape[1]))
    cut = _cut(scaled, values, top_k, top_p, min_p)
    tokens, best = _pick(values, ids, cut, gumbel(token_words(seeds, positions, ids)))
    if ids.shape[1] == scaled.shape[1]:
        return tokens
    # Outside the candidates: below the cut, or too low to win with the largest noise there is.
    last = values[:, -1]
    open_rows = ((last >= cut) & (last + _MAX_NOISE >= best)).nonzero()[:, 0]
    if len(open_rows):
        kept = scaled if len(open_rows) == len(scaled) else scaled[open_rows]
        noise = vocab_noise(seeds[open_rows], positions[open_rows], scaled.shape[1])
        scores = (kept + noise).masked_fill_(kept < cut[open_rows, None], -torch.inf)
        tokens[open_rows] = _argmax(scores)
    return tokens


def _argmax(values: Tensor) -> Tensor:
    """The first largest of each row; NumPy's is ten times as fast as torch's on a CPU."""
    return torch.from_numpy(values.numpy().argmax(-1)) if values.device.type == "cpu" else values.argmax(-1)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Like values.topk(count): looks only into the blocks of the largest maxima."""
    vocab = values.shape[1]
    if vocab < 4 * count * _BLOCK:
        return values.topk(count, dim=-1)
    blocks = F.pad(values, (0, -vocab % _BLOCK), value=-torch.inf).unflatten(1, (-1, _BLOCK))
    chosen = blocks.amax(-1).topk(count, dim=-1).indices
    found, at = blocks.gather(1, chosen[..., None].expand(-1, -1, _BLOCK)).flatten(1).topk(count, dim=-1)
    return found, chosen.gather(1, at // _BLOCK) * _BLOCK + at % _BLOCK


def _cut(scaled: Tensor, values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest scaled logit each row keeps, float32 [R]; `values` are its largest, descending."""
    vocab = scaled.shape[1]
    cut = _min_p_cut(values[:, 0], min_p)
    for row in ((top_k > 0) | (top_p < 1)).nonzero()[:, 0].tolist():
        k, p = int(top_k[row]), float(top_p[row])
        k = k if 0 < k < vocab else vocab
        ranked = values[row]
        if len(ranked) < k < vocab:
            ranked = scaled[row].topk(k).values
        limit = ranked[k - 1] if k < vocab else ranked.new_tensor(-torch.inf)
        if p < 1:
            kept = scaled[row] if k == vocab else scaled[row][scaled[row] >= limit]
            limit = torch.maximum(limit, _nucleus_cut(kept, ranked, p))
        cut[row] = torch.maximum(cut[row], limit)
    return cut


def _nucleus_cut(kept: Tensor, ranked: Tensor, p: float) -> Tensor:
    """Value of the last token needed for a mass of p of `kept`; `ranked` are its largest, descending."""
    wanted = (kept - ranked[0]).exp_().sum() * p
    mass = (ranked - ranked[0]).exp_().cumsum(0)
    for more in (1024, len(kept)):
        if mass[-1] >= wanted or len(ranked) >= len(kept):
            break
        ranked = kept.topk(min(more, len(kept))).values
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


def vocab_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Noise [R, vocab]; rows of one seed and position, as the siblings of a tree have, draw it once."""
    pairs, inverse = torch.stack((seeds, positions), 1).unique(dim=0, return_inverse=True)
    # A row at a time: its counters fit into a CPU's cache.
    noise = [gumbel(vocab_words(pair[:1], pair[1:], vocab)) for pair in pairs]
    return noise[0] if len(seeds) == 1 else torch.cat(noise)[inverse]
