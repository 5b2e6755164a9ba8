"""Attention in plain torch, for CPUs: what no layer changes is worked out once a forward pass."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.attention.base import PrefillRows, TreeRows
from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.attention.tree_rows import own_tail_mask
from tokenspeed.kernels.reference import full_cos_sin, mask_bits, prefix_bound, rotate, visible_prefix


class _Rows:
    """Rotation and storage of one forward pass's rows."""

    def __init__(self, pool: KvPool, positions: Tensor, slots: Tensor | None, cos_sin: Tensor):
        self.pool, self.slots = pool, slots
        self.cos, self.sin = full_cos_sin(cos_sin, positions)

    def rotate_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated q and k; k and v are in the pages."""
        both = rotate(torch.cat((q, k), 1), self.cos, self.sin)
        q, k = both.split((q.shape[1], k.shape[1]), 1)
        if self.slots is not None:
            keys, values = self.pool.slots(layer)
            keys.index_copy_(0, self.slots, k)
            values.index_copy_(0, self.slots, v)
        return q, k


class PrefillAttention:
    """Attention of prompt chunks, one after another.

    Args:
        pool: pages of all layers. rows: the chunks. cos_sin: float32 [P, D]. windows: window of each layer
            of the pool. scale: factor on q.k.
    """

    def __init__(
        self, pool: KvPool, rows: PrefillRows, cos_sin: Tensor, windows: tuple[int | None, ...], scale: float
    ):
        self.rows, self.windows, self.scale = _Rows(pool, rows.positions, rows.slots, cos_sin), windows, scale
        self.pool, self.chunks = pool, rows.chunks
        self.keys = [
            _KeySlots(_page_slots(rows.block_table[c : c + 1], pool.page_size, 0, start + count))
            for c, (start, count) in enumerate(rows.chunks)
        ]
        device = rows.positions.device
        self.masks = {w: [_causal_mask(chunk, w, device) for chunk in rows.chunks] for w in set(windows)}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, _ = self.rows.rotate_store(layer, q, k, v)
        out, first = [], 0
        for (_, count), slots, mask in zip(
            self.chunks, self.keys, self.masks[self.windows[layer]], strict=True
        ):
            keys, values = slots.gather(self.pool.slots(layer))
            chunk = q[None, first : first + count].transpose(1, 2)
            attended = F.scaled_dot_product_attention(
                chunk,
                keys.transpose(1, 2),
                values.transpose(1, 2),
                mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=True,
            )
            out.append(attended.transpose(1, 2)[0])
            first += count
        return out[0] if len(out) == 1 else torch.cat(out) if out else torch.empty_like(q)


class TreeAttention:
    """Attention of tree nodes: over their requests' pages and a tail.

    The tail is the rows' own K and V; or `tail`, side buffers in which the rows' own are written from
    `tail_start` on; or, for rows that have no slots and no buffers, nothing.

    Args:
        pool, rows, cos_sin, windows, scale: as in PrefillAttention.
        first: the first key that exists, 1 for a draft layer.
        tail: (K, V), each [B, M, Hkv, D], M <= 64. Windows do not apply to it.
    """

    def __init__(
        self,
        pool: KvPool,
        rows: TreeRows,
        cos_sin: Tensor,
        windows: tuple[int | None, ...],
        scale: float,
        first: int = 0,
        tail: tuple[Tensor, Tensor] | None = None,
        tail_start: int = 0,
    ):
        self.rows, self.windows, self.scale = _Rows(pool, rows.positions, rows.slots, cos_sin), windows, scale
        self.pool, self.shape = pool, tuple(rows.mask.shape)
        batch, nodes = self.shape
        self.tail = None if tail is None else tuple(t[:, : tail_start + nodes] for t in tail)
        self.tail_start = tail_start
        own = tail is None and rows.slots is not None
        self.num_tail = nodes if own else tail_start + nodes if tail is not None else 0
        length = prefix_bound(rows.block_table, pool.page_size, rows.max_prefix)
        if rows.prefix_lens.device.type == "cpu":
            length = min(length, int(rows.prefix_lens.max())) if batch else 0
        slots = _page_slots(rows.block_table, pool.page_size, first, length, rows.prefix_lens)
        self.keys = _KeySlots(torch.cat((slots, rows.slots.view(batch, nodes)), 1) if own else slots)
        self.masks = {w: self._mask(rows, w, first, length, own) for w in set(windows)}
        self.packed: dict[tuple, tuple[Tensor | None, Tensor | None]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, nodes = self.shape
        num_rows, num_heads, dim = q.shape
        q, k = self.rows.rotate_store(layer, q, k, v)
        num_kv_heads = k.shape[1]
        keys, values = self.keys.gather(self.pool.slots(layer))
        if self.tail is not None:
            keys, values = self._with_tail(keys, values, k, v)
        # All q heads of a kv head side by side: grouped-query attention becomes plain attention.
        packed = (
            q.unflatten(0, (batch, nodes))
            .unflatten(2, (num_kv_heads, -1))
            .permute(0, 2, 1, 3, 4)
            .flatten(2, 3)
        )
        mask, empty = self._packed_mask(self.windows[layer], num_heads // num_kv_heads, q.dtype)
        out = F.scaled_dot_product_attention(
            packed, keys.transpose(1, 2), values.transpose(1, 2), mask, scale=self.scale
        )
        out = out.unflatten(2, (nodes, -1))
        if empty is not None:
            out = out.masked_fill(empty, 0.0)
        return out.transpose(1, 2).reshape(num_rows, num_heads, dim)

    def _mask(
        self, rows: TreeRows, window: int | None, first: int, length: int, own: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Additive mask [B, N, keys], and rows that see nothing [B, 1, N, 1, 1]; None if they do nothing."""
        prefix = visible_prefix(rows.prefix_lens, rows.indices, first, length, window)[:, :, first:]
        bits = own_tail_mask(rows, window) if own else rows.mask
        visible = torch.cat((prefix, mask_bits(bits, self.num_tail)), -1)
        if bool(visible.all()) and visible.shape[-1]:
            return None, None
        additive = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)
        blind = ~visible.any(-1)
        return additive, blind[:, None, :, None, None] if bool(blind.any()) else None

    def _packed_mask(
        self, window: int | None, group: int, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """The window's mask as [B, 1, N * group, keys]: what the first layer asks for, the others find."""
        key = (window, group, dtype)
        if key not in self.packed:
            mask, empty = self.masks[window]
            if mask is not None:
                mask = mask.to(dtype).repeat_interleave(group, 1).unsqueeze(1)
            self.packed[key] = (mask, empty)
        return self.packed[key]

    def _with_tail(self, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the rows' K and V into the tail and puts it behind the pages' keys."""
        tail_k, tail_v = self.tail
        tail_k[:, self.tail_start :] = k.unflatten(0, self.shape)
        tail_v[:, self.tail_start :] = v.unflatten(0, self.shape)
        return torch.cat((keys, tail_k), 1), torch.cat((values, tail_v), 1)


class _KeySlots:
    """Which slots hold the keys of each request; a run of neighbours is read in place, without a copy."""

    def __init__(self, slots: Tensor):
        self.batch, self.count = slots.shape
        self.flat = slots.flatten()
        self.start: int | None = None
        if self.batch == 1 and self.count and self.flat.device.type == "cpu":
            start = int(self.flat[0])
            if torch.equal(self.flat, torch.arange(start, start + self.count)):
                self.start = start

    def gather(self, layer: Tensor) -> tuple[Tensor, Tensor]:
        """K and V, each [B, count, Hkv, D], of layer [2, num_slots, Hkv, D]."""
        if self.start is not None:
            found = layer[:, None, self.start : self.start + self.count]
        else:
            found = layer.index_select(1, self.flat).unflatten(1, (self.batch, self.count))
        return found[0], found[1]


def _page_slots(
    block_table: Tensor, page_size: int, first: int, length: int, lens: Tensor | None = None
) -> Tensor:
    """Slots of keys first..length-1: int64 [B, length - first].

    lens: int32 [B] keys that a request has. Those behind are masked, but a weight of zero does not silence a NaN
        that someone left there, so the last one's slot stands in for theirs.
    """
    keys = torch.arange(first, max(first, length), device=block_table.device)
    if lens is None or len(lens) == 1:
        return block_table.long()[:, keys // page_size] * page_size + keys % page_size
    keys = torch.minimum(keys, lens.long()[:, None] - 1).clamp(min=0)
    return block_table.long().gather(1, keys // page_size) * page_size + keys % page_size


def _causal_mask(chunk: tuple[int, int], window: int | None, device: torch.device) -> Tensor | None:
    """Bool [count, start + count] of a chunk; None where torch's own causal mask says the same."""
    start, count = chunk
    if window is not None and window >= start + count:
        window = None
    if start == 0 and window is None:
        return None
    own = torch.arange(start, start + count, device=device)[:, None]
    keys = torch.arange(start + count, device=device)
    return keys <= own if window is None else (keys <= own) & (keys > own - window)
