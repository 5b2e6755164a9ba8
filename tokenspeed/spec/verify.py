"""Which part of a draft tree the target's own samples agree with: every node is sampled, the match walked."""

from dataclasses import dataclass

from torch import Tensor

from tokenspeed import kernels
from tokenspeed.spec.base import DraftTree


@dataclass
class Accepted:
    """What a round of B requests keeps; W = depth of the deepest node that can be kept, plus 1."""

    path: Tensor  # int64 [B, W] kept nodes by depth, the root first; from `count` on the last kept node again
    count: Tensor  # int64 [B] emitted tokens, 1 to W: one for each kept node
    tokens: Tensor  # int64 [B, W] emitted tokens, the target's sample at each node of `path`; 0: a failed one
    failed: Tensor  # bool [B] the draw at the last kept node failed


def accept(tree: DraftTree, sampled: Tensor, steps: int | None = None) -> Accepted:
    """Keeps the nodes on the path that the samples follow; exact for greedy and for sampled decoding.

    A node is kept when its parent is and its token is the one the target drew at its parent. What is emitted
    is what the target drew at every kept node, so the tokens have the target's own distribution whatever was
    drafted (SpecInfer, arXiv 2305.09781, calls it naive sampling).

    Args:
        tree: B trees of N nodes, parents before children; siblings with equal tokens count once, the first.
        sampled: int64 [B, N] the target's draw at each node; negative (a failed row) matches nothing.
        steps: bound on the depth of the trees (None: N - 1), which sets W = min(steps, N - 1) + 1.

    Returns:
        Accepted. No host sync; shapes depend on no data.
    """
    num_nodes = tree.tokens.shape[1]
    width = min(num_nodes - 1 if steps is None else steps, num_nodes - 1) + 1
    found = kernels.accept(tree.tokens, tree.parents, tree.depths, tree.mask, sampled, width)
    return Accepted(*found)
