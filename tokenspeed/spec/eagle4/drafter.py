"""The drafter of every EAGLE method: appends K/V rows of committed tokens, and drafts a tree each round."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from tokenspeed import kernels
from tokenspeed.attention.base import Attention, TreeRows
from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.config import Shape
from tokenspeed.spec.base import DraftTree, Frontier
from tokenspeed.spec.eagle4.head import CandidateHead, FullHead
from tokenspeed.spec.eagle4.model import LAYER, DraftModel
from tokenspeed.spec.eagle4.tree import Expansion, Lanes, build_tree, check_shape

# (pool, rows, cos_sin, windows, scale, first=, tail=(k, v) | None, tail_start=) -> attention of a draft step
TreeAttentionMaker = Callable[..., Attention]


class EagleDrafter:
    """Implements spec.base.Drafter.

    A row of index t has RoPE position t - 1, and its K/V lie in the draft layer's pages at the slot of index
    t, where every later row finds them; index 0 has no row. Lanes of a tree keep their K/V in a side buffer
    of (S - 1) K rows a request, which one round uses and forgets, so committed rows are only ever appended.

    Args:
        model: draft layer. head: its output head.
        cos_sin: float32 [P, D] RoPE table, P at least the served context plus the deepest tree.
        attention: makes the attention of a draft step.
        num_bytes: memory of the draft's own weights.
    """

    def __init__(
        self,
        model: DraftModel,
        head: FullHead | CandidateHead,
        cos_sin: Tensor,
        attention: TreeAttentionMaker,
        num_bytes: int = 0,
    ):
        self.model, self.head, self.num_bytes = model, head, num_bytes
        self.aux_layers, self.aux_size = model.config.aux_layers, model.config.aux_size
        self._cos_sin, self._attention = cos_sin, attention
        self._scale = model.config.head_dim**-0.5
        self._pool: KvPool | None = None

    def bind(self, pool: KvPool) -> None:
        """Gives the drafter its K/V, a pool of one layer with the target's pages, before anything else."""
        self._pool = pool

    def append(self, tokens: Tensor, aux: Tensor, indices: Tensor, slots: Tensor) -> None:
        """Writes K/V of committed tokens, as spec.base.Drafter.append says; page 0 may get anything."""
        k, v = self.model.kv(tokens, self.model.features(aux))
        k_cache, v_cache = self._pool.layer(LAYER)
        nothing = k[:, :0]  # there are no queries to rotate
        kernels.rope_store_kv(nothing, k, v, self._cos_sin, self._rope(indices), k_cache, v_cache, slots)

    def propose(self, frontier: Frontier, shape: Shape) -> DraftTree:
        """Drafts a tree of N nodes for each of B requests, as spec.base.Drafter.propose says."""
        check_shape(shape, self.head.num_tokens)
        batch, k = frontier.last_tokens.shape[0], shape.topk
        growth = Expansion(shape)

        prefix_lens, at_root, indices, positions, places = kernels.draft_rows(
            frontier.last_indices, shape.steps, k, self._cos_sin.shape[0]
        )
        root = frontier.last_indices[:, None]
        rows = self._rows(frontier, root, at_root, prefix_lens, root)  # without a tail a mask says nothing
        attn = self._attend(rows, None, 0)
        out, state = self.model.layer(frontier.last_tokens, self.model.features(frontier.aux), attn)
        lanes = self._grow(growth, out, frontier, 1)

        buffer = self._side_buffer(batch, shape, out)
        for step in range(1, shape.steps):
            mask = self._near(lanes.mask, step, k)
            i = step - 1
            rows = self._rows(frontier, indices[i], positions[i], prefix_lens, mask, places[i])
            attn = self._attend(rows, buffer, i * k)
            out, state = self.model.layer(lanes.tokens.flatten(), state, attn, lanes.parents)
            lanes = self._grow(growth, out, frontier, step + 1)
        tokens, scores, parents = growth.finish()
        return build_tree(frontier.last_tokens, tokens, scores, parents, shape.nodes)

    def _grow(self, growth: Expansion, out: Tensor, frontier: Frontier, depth: int) -> Lanes | None:
        """Adds the rows' children, which stand at `depth` in the tree."""
        draw = None if frontier.draw is None else replace(frontier.draw, depth=depth)
        return growth.grow(self.head.candidates(out, growth.shape.topk, draw), draw)

    def _rows(
        self,
        frontier: Frontier,
        indices: Tensor,
        positions: Tensor,
        prefix_lens: Tensor,
        mask: Tensor,
        places: Tensor | None = None,
    ) -> TreeRows:
        """Rows of one step, R of each request. prefix_lens: int32 [B]; the others int64 [B, R]."""
        return TreeRows(
            positions=positions.flatten(),
            slots=None,
            block_table=frontier.block_table,
            prefix_lens=prefix_lens,
            mask=mask,
            indices=indices,
            max_prefix=frontier.max_len,
            tail_slots=None if places is None else places.flatten(),
        )

    def _near(self, mask: Tensor, step: int, k: int) -> Tensor:
        """Lane masks of a step without the lanes `window` steps back; rows of step i begin at (i - 1) k."""
        forgotten = step - (self.model.config.window or step)  # steps 1..forgotten
        return mask if forgotten <= 0 else mask & -(1 << forgotten * k)

    def _attend(self, rows: TreeRows, buffer: tuple[Tensor, Tensor] | None, start: int) -> Attention:
        window = (self.model.config.window,)
        return self._attention(
            self._pool, rows, self._cos_sin, window, self._scale, first=1, tail=buffer, tail_start=start
        )

    def _side_buffer(self, batch: int, shape: Shape, like: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the lanes, [B, (S - 1) K, Hkv, D] each."""
        attention = self.model.attention
        size = (batch, (shape.steps - 1) * shape.topk, attention.num_kv_heads, attention.head_dim)
        return like.new_empty(size), like.new_empty(size)

    def _rope(self, indices: Tensor) -> Tensor:
        """RoPE position of each index; padding rows may stand anywhere, the table's ends catch them."""
        return (indices - 1).clamp(0, self._cos_sin.shape[0] - 1)
