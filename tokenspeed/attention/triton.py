"""Attention by the kernel ops: no host sync and no shape that depends on data (CUDA graphs)."""

import torch
from torch import Tensor

from tokenspeed import kernels
from tokenspeed.attention.base import PrefillRows, TreeRows
from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.attention.tree_rows import own_tail_mask, path_slots


class PrefillAttention:
    """Attention of prompt chunks.

    Args:
        pool: pages of all layers. rows: the chunks. cos_sin: float32 [P, D]. windows: window of each layer
            of the pool. scale: factor on q.k.
    """

    def __init__(
        self, pool: KvPool, rows: PrefillRows, cos_sin: Tensor, windows: tuple[int | None, ...], scale: float
    ):
        self.pool, self.rows, self.cos_sin, self.windows, self.scale = pool, rows, cos_sin, windows, scale

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.pool.layer(layer)
        rows = self.rows
        kernels.rope_store_kv(q, k, v, self.cos_sin, rows.positions, keys, values, rows.slots)
        return kernels.prefill_attention(q, keys, values, rows, self.scale, self.windows[layer])


class TreeAttention:
    """Attention of tree nodes: over their requests' pages and a tail.

    The tail is the rows' own K and V; or `tail`, side buffers in which the rows' own are written from
    `tail_start` on; or, for rows that have no slots and no buffers, nothing.

    Args:
        pool, rows, cos_sin, windows, scale: as in PrefillAttention.
        first: the first key that exists, 1 for a draft layer.
        tail: (K, V), each [B, M, Hkv, D], contiguous, M <= 64, for rows without slots. Windows do not apply
            to it.
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
        self.pool, self.rows, self.cos_sin, self.windows, self.scale = pool, rows, cos_sin, windows, scale
        self.first, self.tail, self.tail_start = first, tail, tail_start
        own = tail is None and rows.slots is not None
        self.masks = {w: own_tail_mask(rows, w) if own else rows.mask for w in set(windows)}
        self.slots = rows.slots if tail is None else rows.tail_slots
        if tail is not None and self.slots is None:
            batch, nodes = rows.mask.shape
            lane = torch.arange(tail_start, tail_start + nodes, device=rows.mask.device)
            base = torch.arange(batch, device=rows.mask.device)[:, None] * tail[0].shape[1]
            self.slots = (base + lane).flatten()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, window = self.rows, self.windows[layer]
        return kernels.rope_tree_attention(
            q,
            k,
            v,
            self.cos_sin,
            rows.positions,
            *self.pool.layer(layer),
            self.tail,
            self.tail_start,
            self.slots,
            rows.block_table,
            rows.prefix_lens,
            self.masks[window],
            rows.indices,
            self.first,
            self.scale,
            window,
            rows.max_prefix,
        )


class InvariantTreeAttention:
    """Attention of a target's tree nodes whose bits depend on a row's keys alone.

    Args:
        pool, rows, cos_sin, windows, scale: as in PrefillAttention. rows.slots must be there, and for trees
            of several nodes rows.depths or rows.path_slots.
    """

    def __init__(
        self, pool: KvPool, rows: TreeRows, cos_sin: Tensor, windows: tuple[int | None, ...], scale: float
    ):
        if rows.slots is None:
            raise ValueError("batch-invariant attention reads every key from the pages: rows need slots")
        self.paths = path_slots(rows)
        self.pool, self.rows, self.cos_sin, self.windows, self.scale = pool, rows, cos_sin, windows, scale

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.pool.layer(layer)
        rows = self.rows
        kernels.rope_store_kv(q, k, v, self.cos_sin, rows.positions, keys, values, rows.slots)
        out = kernels.tree_attention_invariant(
            q.unflatten(0, rows.mask.shape),
            keys,
            values,
            rows.block_table,
            rows.prefix_lens,
            rows.indices,
            self.paths,
            self.scale,
            self.windows[layer],
            rows.max_prefix,
        )
        return out.flatten(0, 1)
