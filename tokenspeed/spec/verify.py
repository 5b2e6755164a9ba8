"""Which part of a draft tree the target's own samples agree with: every node is sampled, the match walked."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.spec.base import DraftTree


@dataclass
class Accepted:
    """What a round of B requests keeps; W = depth of the deepest node that can be kept, plus 1."""

    path: Tensor  # int64 [B, W] kept nodes by depth, the root first; from `count` on the last kept node again
    count: Tensor  # int64 [B] emitted tokens, 1 to W: one for each kept node
    tokens: Tensor  # int64 [B, W] emitted tokens, the target's sample at each node of `path`
    last: Tensor  # int64 [B] the last emitted token


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
    batch, num_nodes = tree.tokens.shape
    nodes = torch.arange(num_nodes, device=sampled.device)
    drawn = sampled.gather(1, tree.parents)
    matches = (tree.tokens == drawn) & (drawn >= 0)
    # An earlier sibling with the same token takes the match.
    same = (tree.parents[:, :, None] == tree.parents[:, None]) & matches[:, :, None] & matches[:, None]
    first = ~(same & (nodes[None, :] < nodes[:, None]) & (nodes > 0)).any(2)
    matches = (matches & first) | (nodes == 0)
    # Kept: every ancestor matches, the node too. Bit j of `matched` says that node j does.
    bits = torch.ones_like(nodes) << nodes
    matched = torch.where(matches, bits, 0).sum(1, keepdim=True)
    kept = (tree.mask & ~matched) == 0
    count = kept.sum(1)

    width = min(num_nodes - 1 if steps is None else steps, num_nodes - 1) + 1
    # At most one node of a depth is kept; the others go to a spare place.
    places = torch.where(kept, tree.depths.clamp(max=width), width)
    path = torch.zeros(batch, width + 1, dtype=torch.int64, device=sampled.device)
    path = path.scatter_(1, places, nodes.expand(batch, -1))[:, :width].cummax(1).values
    tokens = sampled.gather(1, path)
    return Accepted(path, count, tokens, tokens[:, -1])
