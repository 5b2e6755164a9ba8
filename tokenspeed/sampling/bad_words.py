"""Token sequences that an answer may not hold: the last token of each is banned where the others stand before it."""

from collections.abc import Sequence

import torch
from torch import Tensor

_ANY, _NONE = -2, -1  # in place of a token: one that every token fits, and one that fits none


class BadWords:
    """Of one request. At a node of a tree, what stands before is the answer so far and the node's ancestors.

    W is the length of the longest sequence less one; the prompt does not count (as in vLLM).

    Args:
        sequences: P of them, none empty. output: the answer so far.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], output: Sequence[int], device):
        self._width = width = max(len(ids) for ids in sequences) - 1
        starts = [[_ANY] * (width + 1 - len(ids)) + list(ids[:-1]) for ids in sequences]
        self._starts = torch.tensor(starts, dtype=torch.int64, device=device).view(len(starts), width)
        self._ends = torch.tensor([ids[-1] for ids in sequences], device=device)  # int64 [P]
        padded = [_NONE] * width + list(output)
        self._recent = torch.tensor(padded[len(padded) - width :], dtype=torch.int64, device=device)  # [W]

    def ban(self, logits: Tensor, tokens: Tensor, mask: Tensor) -> None:
        """Sets what would complete a sequence to -inf, in place; no host sync, shapes depend on no data.

        Args:
            logits: float32 [N, V]. tokens: int64 [N] of the nodes; node 0 is in `output` already.
            mask: int64 [N], bit j of node i: node j is i or an ancestor of it.
        """
        before = self._before(tokens, mask)[:, None]  # [N, 1, W]
        completes = ((before == self._starts) | (self._starts == _ANY)).all(2)  # [N, P]
        most = torch.where(completes, float("-inf"), float("inf")).to(logits.dtype)
        logits.scatter_reduce_(1, self._ends.expand(len(tokens), -1), most, "amin")

    def extend(self, tokens: Tensor, count: Tensor) -> None:
        """The answer goes on by the first `count` (int64 scalar) of `tokens` (int64 [n])."""
        places = torch.arange(self._width, device=tokens.device) + count
        self._recent = torch.cat([self._recent, tokens])[places]

    def _before(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """int64 [N, W]: the last tokens up to and with each node, the node's own last."""
        width, num_nodes = self._width, len(tokens)
        columns = torch.arange(width, device=tokens.device)
        nodes = torch.arange(1, num_nodes, device=tokens.device)
        on_path = ((mask[:, None] >> nodes) & 1).bool()  # [N, N - 1]
        depths = on_path.sum(1)
        # The answer's last tokens, moved to the left by the node's depth; then the path's, each at its depth.
        padded = torch.cat([self._recent, tokens.new_full((1,), _NONE)])
        before = padded[(columns + depths[:, None]).clamp(max=width)]
        places = width - 1 - (depths[:, None] - depths[1:])
        places = torch.where(on_path & (places >= 0), places, width)
        spare = tokens.new_zeros(num_nodes, 1)
        return torch.cat([before, spare], 1).scatter_(1, places, tokens[1:].expand(num_nodes, -1))[:, :width]
