"""The ops of drafting in plain torch: candidates of a row, and the tree that grows from them.

Shapes and meanings are in `tokenspeed.kernels`. Every tie goes to the lower place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.philox import gumbel, token_words
from tokenspeed.kernels.reference import rms_norm
from tokenspeed.kernels.reference_sample import GREEDY_BELOW, vocab_noise
from tokenspeed.kernels.rows import Draw

FILTERED = 10.0  # taken off the score of a candidate that the request's filters would drop, as far as a draft can tell
DOUBLINGS = 5  # of a step upwards: a tree has at most 16 levels below its root


def draft_rows(
    last_indices: Tensor, steps: int, k: int, num_positions: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, device = len(last_indices), last_indices.device
    later = torch.arange(1, steps, device=device)[:, None, None]
    indices = (last_indices[:, None] + later).expand(-1, -1, k).contiguous()
    root, positions = ((x - 1).clamp(0, num_positions - 1) for x in (last_indices, indices))
    requests = torch.arange(batch, device=device)[:, None] * ((steps - 1) * k)
    lanes = torch.arange(k, device=device)
    return (last_indices + 1).to(torch.int32), root, indices, positions, requests + (later - 1) * k + lanes


def draft_input(
    tokens: Tensor,
    table: Tensor,
    state: Tensor,
    parents: Tensor | None,
    token_gain: Tensor,
    state_gain: Tensor,
    eps: float,
    normed: bool,
) -> tuple[Tensor, Tensor]:
    if parents is not None:
        rows = state.view(len(parents), -1, state.shape[1])
        state = rows.gather(1, parents[:, :, None].expand(-1, -1, state.shape[1])).flatten(0, 1)
    hidden = rms_norm(state, state_gain, eps)
    x = torch.cat([rms_norm(F.embedding(tokens, table), token_gain, eps), hidden], -1)
    return x, hidden if normed else state


def top_candidates(
    scores: Tensor, count: int, draw: Draw | None = None, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scores = scores.float()
    rows, heat, _, seeds, positions = _drawn_rows(draw, scores)
    if len(rows):
        size = scores.shape[1] if token_ids is None else int(token_ids.max()) + 1
        noise = vocab_noise(seeds, positions, size)
        noise = noise if token_ids is None else noise[:, token_ids]
        scores = scores.index_copy(0, rows, scores[rows] + heat[:, None] * noise)
    # At the edge of the candidates ties go as torch.topk has it.
    candidates = scores.topk(count, sorted=False).indices.sort(1).values
    return candidates, scores.gather(1, candidates).logsumexp(1) - scores.logsumexp(1)


def linear_candidates(
    x: Tensor, weight: Tensor, count: int, draw: Draw | None = None, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return top_candidates(F.linear(x, weight), count, draw, token_ids)


def row_dots(x: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    rows = F.embedding(indices, table)
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.bmm(rows, x[:, :, None], out_dtype=torch.float32).squeeze(2)
    return torch.bmm(rows.float(), x.float()[:, :, None]).squeeze(2)


def best_candidates(
    scores: Tensor, ids: Tensor, share: Tensor, k: int, draw: Draw | None = None
) -> tuple[Tensor, Tensor]:
    """The first half of `grow_tree`: each row's k best tokens int64 [R, k], and their log-probabilities float32."""
    rows, heat, slots, seeds, positions = _drawn_rows(draw, scores)
    if len(rows):
        warm, heat = scores[rows], heat[:, None]
        dropped = _dropped(warm / heat, *(x[slots, None] for x in (draw.top_k, draw.top_p, draw.min_p)))
        noise = gumbel(token_words(seeds, positions, ids[rows]))
        scores = scores.index_copy(0, rows, warm + heat * noise - FILTERED * dropped)
    logprobs = _clean(scores.log_softmax(1) + share[:, None])
    ranked = torch.nan_to_num(scores, nan=-torch.inf).sort(dim=1, descending=True, stable=True)
    picked = ranked.indices[:, :k]
    return ids.gather(1, picked), logprobs.gather(1, picked)


def _drawn_rows(draw: Draw | None, scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Which rows will be drawn with noise: their numbers, temperatures, slots, seeds, and the tokens' positions."""
    if draw is None:
        return (scores.new_empty(0, dtype=torch.int64),) * 5
    group = len(scores) // max(len(draw.slots), 1)
    slots, positions = (x.repeat_interleave(group) for x in (draw.slots, draw.positions + draw.depth))
    rows = (draw.temperature[slots] >= GREEDY_BELOW).nonzero()[:, 0]
    slots = slots[rows]
    return rows, draw.temperature[slots], slots, draw.seeds[slots], positions[rows]


def _dropped(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """bool [R, C]: what top-k, top-p and min-p drop if there is nothing but the candidates."""
    above = scores[:, None, :] > scores[:, :, None]  # [r, i, j]: j is better than i
    probs = scores.softmax(1)
    rank, mass = above.sum(2), (above * probs[:, None, :]).sum(2)
    floor = scores.amax(1, keepdim=True) + min_p.log()
    return ((top_k > 0) & (rank >= top_k)) | ((top_p < 1) & (mass >= top_p)) | (scores < floor)


def grow_tree(
    scores: Tensor,
    ids: Tensor,
    share: Tensor,
    k: int,
    lanes: tuple[Tensor, Tensor, Tensor] | None,
    candidates: tuple[Tensor, Tensor, Tensor],
    step: int,
    last: bool,
    draw: Draw | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    batch = len(candidates[0])
    tokens, scores = (x.view(batch, -1, k) for x in best_candidates(scores, ids, share, k, draw))
    return add_children(tokens, scores, lanes, candidates, step, last)


def add_children(
    tokens: Tensor,
    logprobs: Tensor,
    lanes: tuple[Tensor, Tensor, Tensor] | None,
    candidates: tuple[Tensor, Tensor, Tensor],
    step: int,
    last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """The second half of `grow_tree`, from each row's children: tokens, log-probabilities [B, R, K], best first."""
    batch, rows, k = tokens.shape
    scores = _clean(logprobs)
    if lanes is None:
        parents = torch.full_like(tokens, -1)
    else:
        numbers, lane_scores, mask = lanes
        scores = lane_scores[:, :, None] + scores
        parents = numbers[:, :, None].expand(-1, -1, k)
    base = k + (step - 1) * k * k if step else 0
    tokens, scores, parents = (x.reshape(batch, rows * k) for x in (tokens, scores, parents))
    for all_of_them, new in zip(candidates, (tokens, scores, parents), strict=True):
        all_of_them[:, base : base + rows * k] = new
    if last:
        return None
    best, picked = (x[:, :k] for x in scores.sort(dim=1, descending=True, stable=True))
    parents = picked // k if step else torch.zeros_like(picked)
    own = torch.ones_like(picked) << (step * k + torch.arange(k, device=picked.device))
    mask = own if lanes is None else own | mask.gather(1, parents)
    return tokens.gather(1, picked), parents, mask, base + picked, best


def build_tree(
    root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kept = scores.sort(dim=1, descending=True, stable=True).indices[:, : nodes - 1]  # parents come first
    rank = torch.zeros_like(tokens)  # of a candidate, counted from 1; the root has 0
    ranks = torch.arange(1, nodes, device=root.device).expand_as(kept)
    rank.scatter_(1, kept, ranks)
    above = parents.gather(1, kept)
    above = torch.where(above < 0, 0, rank.gather(1, above.clamp(min=0)))
    above = torch.cat([torch.zeros_like(root)[:, None], above], 1)  # parents of the N nodes by rank

    numbers = torch.arange(nodes, device=root.device)
    lineage = _lineage(above, numbers)  # [b, i, j]: 1 where j is an ancestor of i, or i
    sizes = lineage.sum(1)  # of the subtrees
    # Depth-first, a node comes after its ancestors and all subtrees of their, and its own, better siblings.
    better = (above[:, :, None] == above[:, None]) & (numbers[None, :] < numbers[:, None]) & (numbers > 0)
    before = torch.where(better, sizes[:, None], 0).sum(2) + (numbers > 0)
    place = (lineage * before[:, None]).sum(2)

    ordered = torch.cat([root[:, None], tokens.gather(1, kept)], 1)
    by_rank = (ordered, place.gather(1, above), lineage.sum(2) - 1, (lineage << place[:, None]).sum(2))
    return *(torch.empty_like(x).scatter_(1, place, x) for x in by_rank), scores.amin(1) == -torch.inf


def _lineage(parents: Tensor, numbers: Tensor) -> Tensor:
    """int64 [B, N, N] of 0 and 1: column j of row i says that node j is an ancestor of node i, or node i."""
    mask = (torch.ones_like(numbers) << numbers).expand_as(parents)
    for _ in range(DOUBLINGS):
        mask = mask | mask.gather(1, parents)
        parents = parents.gather(1, parents)
    return (mask[:, :, None] >> numbers) & 1


def _clean(logprobs: Tensor) -> Tensor:
    """Log-probabilities of at most 0; NaN as -inf."""
    return torch.nan_to_num(logprobs, nan=-torch.inf, neginf=-torch.inf, posinf=0.0).clamp(max=0.0)
