"""Draft trees of fixed shape: which candidates become lanes, which are kept, how nodes are numbered.

The construction is EAGLE-2's (arXiv 2406.16858). Everything is a tensor operation of fixed shape without
host sync, so that it can be captured in a CUDA graph; every tie goes to the lower candidate id.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenspeed.config import Shape
from tokenspeed.errors import ConfigError
from tokenspeed.spec.base import DraftTree
from tokenspeed.spec.options import MAX_LANES, MAX_NODES, MAX_STEPS


def num_candidates(shape: Shape) -> int:
    """Candidates that a tree records: K of the root, K * K of each later step."""
    return shape.topk + (shape.steps - 1) * shape.topk**2


def check_shape(shape: Shape, vocab: int) -> None:
    """Raises ConfigError for a shape that can't be built from `vocab` distinct tokens a step."""
    s, k, n = shape.steps, shape.topk, shape.nodes
    if not 1 <= s <= MAX_STEPS or not 2 <= n <= MAX_NODES or k < 1 or (s - 1) * k > MAX_LANES:
        raise ConfigError(
            f"tree {shape} is out of bounds: steps 1 to {MAX_STEPS}, nodes 2 to {MAX_NODES}, "
            f"(steps - 1) * top-k at most {MAX_LANES}"
        )
    if n - 1 > num_candidates(shape):
        raise ConfigError(f"tree {shape} has at most {num_candidates(shape) + 1} nodes, not {n}")
    if k > vocab:
        raise ConfigError(f"tree {shape} asks for {k} tokens a step, the draft has {vocab}")


@dataclass
class Lanes:
    """The K rows that the next draft step computes for each of B requests: int64 [B, K] each."""

    tokens: Tensor
    parents: Tensor  # row of the step before that each continues; 0, the root, in the first step of lanes
    mask: Tensor  # bit j: the lane attends to row j of the side buffer; its own row is among them


@dataclass
class Expansion:
    """The growing trees of B requests: fed the draft's top K of the root, then of the lanes, step by step.

    Candidates are numbered in the order they are drafted: K of the root, then child c of lane l of step i as
    K + (i - 1) K^2 + l K + c. Lane rows of step i have rows (i - 1) K .. i K - 1 of the side buffer.
    """

    shape: Shape
    _tokens: list[Tensor] = field(default_factory=list)  # [B, K], then [B, K * K] a step
    _scores: list[Tensor] = field(default_factory=list)  # cumulative log-probabilities, float32
    _parents: list[Tensor] = field(default_factory=list)  # candidate numbers, -1: the root
    _lanes: Tensor | None = None  # int64 [B, K] candidate number of each lane
    _lane_scores: Tensor | None = None  # float32 [B, K]
    _mask: Tensor | None = None  # int64 [B, K] of the last step's lanes

    def grow(self, tokens: Tensor, logprobs: Tensor) -> Lanes | None:
        """Records the children of the last step's rows and picks the next step's lanes.

        Args:
            tokens: int64 [B, R, K], R = 1 (the root), then K (the lanes).
            logprobs: float32 [B, R, K], best first; clamped to at most 0, NaN counts as -inf.

        Returns:
            The lanes of the next step; None after the last.
        """
        batch, rows, k = tokens.shape
        step = len(self._tokens)
        scores = torch.nan_to_num(logprobs, nan=-torch.inf, neginf=-torch.inf, posinf=0.0).clamp(max=0.0)
        if step:
            scores = self._lane_scores[:, :, None] + scores
            parents = self._lanes[:, :, None].expand(-1, -1, k)
        else:
            parents = torch.full_like(tokens, -1)
        tokens, scores, parents = (x.reshape(batch, rows * k) for x in (tokens, scores, parents))
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._parents.append(parents)
        return self._next(step, tokens, scores) if step + 1 < self.shape.steps else None

    def _next(self, step: int, tokens: Tensor, scores: Tensor) -> Lanes:
        k = self.shape.topk
        self._lane_scores, picked = (x[:, :k] for x in scores.sort(dim=1, descending=True, stable=True))
        base = k + (step - 1) * k * k if step else 0
        self._lanes = base + picked
        parents = picked // k if step else torch.zeros_like(picked)
        own = torch.ones_like(picked) << (step * k + torch.arange(k, device=picked.device))
        self._mask = own | self._mask.gather(1, parents) if step else own
        return Lanes(tokens.gather(1, picked), parents, self._mask)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """All candidates [B, K + (S - 1) K^2]: tokens int64, scores float32, parents int64 (-1: the root)."""
        return torch.cat(self._tokens, 1), torch.cat(self._scores, 1), torch.cat(self._parents, 1)


def build_tree(root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int) -> DraftTree:
    """Keeps the best N - 1 candidates and numbers them depth-first, the best child first.

    So nodes 0, 1, 2, ... are the principal chain, whose acceptance moves no K/V.

    Args:
        root: int64 [B] the token at the root.
        tokens, scores, parents: [B, M] candidates; a parent has a lower number than its child and no lower
            score.
        nodes: N, with the root.
    """
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
    return DraftTree(*(torch.empty_like(x).scatter_(1, place, x) for x in by_rank))


def _lineage(parents: Tensor, numbers: Tensor) -> Tensor:
    """int64 [B, N, N] of 0 and 1: column j of row i says that node j is an ancestor of node i, or node i."""
    mask = (torch.ones_like(numbers) << numbers).expand_as(parents)
    for _ in range(MAX_STEPS.bit_length()):  # twice as far up each time
        mask = mask | mask.gather(1, parents)
        parents = parents.gather(1, parents)
    return (mask[:, :, None] >> numbers) & 1
