"""Draft trees of fixed shape: which candidates become lanes, which are kept, how nodes are numbered.

The construction is EAGLE-2's (arXiv 2406.16858). Everything is a tensor operation of fixed shape without
host sync, so that it can be captured in a CUDA graph; every tie goes to the lower candidate id.
"""

from dataclasses import dataclass

from torch import Tensor

from tokenspeed import kernels
from tokenspeed.config import Shape
from tokenspeed.errors import ConfigError
from tokenspeed.kernels import Draw
from tokenspeed.spec.base import DraftTree
from tokenspeed.spec.eagle4.head import Candidates
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
    """The growing trees of B requests: fed the candidates of the roots, then of the lanes, step by step.

    Candidates are numbered in the order they are drafted: K of the root, then child c of lane l of step i as
    K + (i - 1) K^2 + l K + c. Lane rows of step i have rows (i - 1) K .. i K - 1 of the side buffer.
    """

    shape: Shape
    _step: int = 0
    _candidates: tuple[Tensor, Tensor, Tensor] | None = None  # see kernels.grow_tree
    _lanes: Tensor | None = None  # int64 [B, K] candidate number of each lane
    _lane_scores: Tensor | None = None  # float32 [B, K]
    _mask: Tensor | None = None  # int64 [B, K] of the last step's lanes

    def grow(self, found: Candidates, draw: Draw | None = None) -> Lanes | None:
        """Records the children of the last step's rows and picks the next step's lanes.

        Args:
            found: what the head gave for those rows: one a request (the root), then K (the lanes).
            draw: of the children's tokens.

        Returns:
            The lanes of the next step; None after the last.
        """
        step, self._step = self._step, self._step + 1
        if step + 1 == self.shape.steps:
            self._add(step, found, draw, last=True)
            return None
        return self._next(step, found, draw)

    def _next(self, step: int, found: Candidates, draw: Draw | None) -> Lanes:
        tokens, parents, self._mask, self._lanes, self._lane_scores = self._add(step, found, draw, last=False)
        return Lanes(tokens, parents, self._mask)

    def _add(self, step: int, found: Candidates, draw: Draw | None, last: bool) -> tuple[Tensor, ...] | None:
        if step == 0:
            size = (len(found.ids), num_candidates(self.shape))
            self._candidates = (
                found.ids.new_empty(size),
                found.scores.new_empty(size),
                found.ids.new_empty(size),
            )
        lanes = (self._lanes, self._lane_scores, self._mask) if step else None
        return kernels.grow_tree(*found, self.shape.topk, lanes, self._candidates, step, last, draw)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """All candidates [B, K + (S - 1) K^2]: tokens int64, scores float32, parents int64 (-1: the root)."""
        return self._candidates


def build_tree(root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int) -> DraftTree:
    """Keeps the best N - 1 candidates and numbers them depth-first, the best child first.

    So nodes 0, 1, 2, ... are the principal chain, whose acceptance moves no K/V.

    Args:
        root: int64 [B] the token at the root.
        tokens, scores, parents: [B, M] candidates; a parent has a lower number than its child and no lower
            score.
        nodes: N, with the root.
    """
    return DraftTree(*kernels.build_tree(root, tokens, scores, parents, nodes))
