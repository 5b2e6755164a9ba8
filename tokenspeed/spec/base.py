"""What the worker asks of a drafter. Nothing here knows which drafter it is."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tokenspeed.config import Shape
from tokenspeed.kernels import Draw


@dataclass
class DraftTree:
    """B trees of N nodes. Node 0 is the root, the request's last token; parents come before children."""

    tokens: Tensor  # int64 [B, N]
    parents: Tensor  # int64 [B, N]; the root's is 0
    depths: Tensor  # int64 [B, N]; the root's is 0
    mask: Tensor  # int64 [B, N] bit j: node j is an ancestor of the node, or the node itself
    nan: Tensor | None = None  # bool [B] draft logits of the tree were NaN; None: nothing was drafted


@dataclass
class Frontier:
    """Where B requests stand: x_t is the last token (no target K/V yet), a_{t-1} the aux states it was sampled from."""

    last_tokens: Tensor  # int64 [B] x_t
    aux: Tensor  # [B, A] a_{t-1}, all aux layers side by side
    last_indices: Tensor  # int64 [B] t
    block_table: Tensor  # int32 [B, P]; draft rows 1..t are in the draft layer's pages
    max_len: int | None  # host bound on t + 1 (None: the block table's width)
    draw: Draw | None = None  # how the target samples behind x_t, t for positions; None: it takes the best


class Drafter(Protocol):
    """A draft model with its K/V layer. The slot of index t holds the row of (a_{t-1}, x_t)."""

    aux_layers: tuple[
        int, ...
    ]  # target layers whose outputs make up aux; num_layers means the final norm's output
    aux_size: int  # A

    def append(self, tokens: Tensor, aux: Tensor, indices: Tensor, slots: Tensor) -> None:
        """Writes the draft K/V of committed tokens.

        Args:
            tokens: int64 [T] x_t. aux: [T, A] a_{t-1}. indices: int64 [T] t. slots: int64 [T], 0..: dummy page for
            rows to drop.
        """
        ...

    def propose(self, frontier: Frontier, shape: Shape) -> DraftTree:
        """Drafts a tree for each request. No host sync, fixed shapes: it is captured in CUDA graphs."""
        ...
