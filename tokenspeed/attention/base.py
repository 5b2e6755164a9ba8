"""What a model asks of attention: one object a forward pass, which knows where K/V go and
what each row may see.

KV memory is paged. A *slot* is a token's place in it: page * page_size + offset. Page 0 is the dummy page:
padding rows write there and nothing reads it. K and V of a layer are [num_pages, page_size, num_kv_heads,
head_dim].
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """Attention of every layer in one forward pass. T rows in all."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotates q and k, stores k and v at the rows' slots, attends.

        Args:
            layer: index into the KV pool.
            q: [T, num_heads, head_dim], overwritten. k, v: [T, num_kv_heads, head_dim], k overwritten.

        Returns:
            [T, num_heads, head_dim].
        """
        ...


@dataclass
class PrefillRows:
    """Chunks of C prompts, rows one after another. A row sees its request's keys up to its own position.

    Padding is a chunk of n rows that starts at -n: none of them sees a key, whatever their RoPE position is.
    """

    positions: Tensor  # int64 [T] position of each row, which is its RoPE position too
    slots: Tensor  # int64 [T] where the row's K/V go
    block_table: Tensor  # int32 [C, P] pages of each request
    starts: Tensor  # int32 [C] position of each chunk's first row
    cu_rows: Tensor  # int32 [C + 1] row offsets of the chunks
    chunks: list[tuple[int, int]]  # (start, count) on the host; a GPU takes only the longest count from it


@dataclass
class TreeRows:
    """N tree nodes of each of B requests: plain decode is N = 1, a draft step N = K lanes.

    A row sees the keys in slots first <= s < prefix_lens[b] of its request (by index in the block table,
    within the window) and those tail keys j whose bit is set in its mask.
    """

    positions: Tensor  # int64 [B * N] RoPE position of each row
    slots: Tensor | None  # int64 [B * N] where the rows' K/V go in the pages; None: nowhere (draft lanes)
    block_table: Tensor  # int32 [B, P]
    prefix_lens: Tensor  # int32 [B] keys in pages that all rows may see end here
    mask: Tensor  # int64 [B, N] bit j: the row attends to tail key j
    indices: Tensor  # int64 [B, N] the row's own index in its request's key sequence, for the window
    max_prefix: int | None = None  # host bound on prefix_lens (None: the block table's width)
    parents: Tensor | None = None  # int64 [B, N] of target trees, for backends that follow paths
    depths: Tensor | None = None  # int64 [B, N]
    path_slots: Tensor | None = (
        None  # int64 [B, N, depth] slots of the row's path by depth, for batch invariance
    )
    tail_slots: Tensor | None = (
        None  # int64 [B * N] rows of all requests' side buffers, one after another, that the
    )
    # rows' K/V go to; None: to be worked out
