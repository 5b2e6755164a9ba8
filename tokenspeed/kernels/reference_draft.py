"""The ops of drafting in plain torch: candidates of a row, and the tree that grows from them.

Shapes and meanings are in `tokenspeed.kernels`. Every tie goes to the lower place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.reference import rms_norm

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


def top_candidates(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    scores = scores.float()
    # At the edge of the candidates ties go as torch.topk has it.
    candidates = scores.topk(count, sorted=False).indices.sort(1).values
    return candidates, scores.gather(1, candidates).logsumexp(1) - scores.logsumexp(1)


def row_dots(x: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    rows = F.embedding(indices, table)
    if rows.is_cuda and rows.dtype != torch.float32:
        return torch.bmm(rows, x[:, :, None], out_dtype=torch.float32).squeeze(2)
    return torch.bmm(rows.float(), x.float()[:, :, None]).squeeze(2)


def best_candidates(scores: Tensor, ids: Tensor, share: Tensor, k: int) -> tuple[Tensor, Tensor]:
    logprobs = _clean(scores.log_softmax(1) + share[:, None])
    logprobs, picked = (x[:, :k] for x in logprobs.sort(dim=1, descending=True, stable=True))
    return ids.gather(1, picked), logprobs


def grow_tree(
    tokens: Tensor,
    logprobs: Tensor,
    lanes: tuple[Tensor, Tensor, Tensor] | None,
    candidates: tuple[Tensor, Tensor, Tensor],
    step: int,
    last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
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
