"""Every op but sampling in plain torch: what runs on a CPU, and what the kernels are tested against.

Shapes and meanings are in `tokenspeed.kernels`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.parts import composed
from tokenspeed.kernels.reference_sample import sample
from tokenspeed.kernels.rows import ChunkRows

__all__ = [
    "add_rms_norm",
    "embed_rms_norm",
    "linear_invariant",
    "move_kv",
    "prefill_attention",
    "rms_norm",
    "rope_store_kv",
    "rope_tree_attention",
    "rotate",
    "sample",
    "silu_and_mul",
    "tree_attention",
    "tree_attention_invariant",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Without its weight F.rms_norm rounds before the product, as transformers' Llama does; with it, after.
    return (F.rms_norm(x, weight.shape[-1:], None, eps) * weight).to(weight.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(residual.add_(x), weight, eps)


def embed_rms_norm(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual = F.embedding(ids, table).float()
    return residual, rms_norm(residual, weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor | None,
) -> None:
    cos, sin = full_cos_sin(cos_sin, positions)
    q.copy_(rotate(q, cos, sin))
    k.copy_(rotate(k, cos, sin))
    if slots is not None:
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


def full_cos_sin(cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines over a whole head, float32 [T, 1, D]; the first half's sines are negated."""
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [T, heads, D] by `full_cos_sin`: float32 inside, the result in x's dtype."""
    wide = x.float()
    return (wide * cos).addcmul_(wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Softmax attention in float32: q [B, N, Hq, D] over k, v [B, S, Hkv, D] where `visible` [B, N, S]."""
    batch, num_rows, num_heads, dim = q.shape
    num_kv_heads = k.shape[2]
    grouped = q.float().view(batch, num_rows, num_kv_heads, num_heads // num_kv_heads, dim)
    scores = torch.einsum("bnhgd,bshd->bnhgs", grouped, k.float()) * scale
    visible = visible[:, :, None, None, :]
    # Softmax of a row that sees nothing is NaN; the second fill makes it zero.
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0.0)
    return torch.einsum("bnhgs,bshd->bnhgd", weights, v.float()).reshape(q.shape).to(q.dtype)


def prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: ChunkRows, scale: float, window: int | None
) -> Tensor:
    out, first = torch.empty_like(q), 0
    for chunk, (start, count) in enumerate(rows.chunks):
        keys = gather_pages(k_cache, rows.block_table[chunk : chunk + 1], start + count)
        values = gather_pages(v_cache, rows.block_table[chunk : chunk + 1], start + count)
        own = torch.arange(start, start + count, device=q.device)[:, None]
        key = torch.arange(start + count, device=q.device)[None, :]
        visible = key <= own if window is None else (key <= own) & (key > own - window)
        out[first : first + count] = attend(
            q[None, first : first + count], keys, values, visible[None], scale
        )[0]
        first += count
    return out


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tail_k: Tensor,
    tail_v: Tensor,
    block_table: Tensor,
    prefix_lens: Tensor,
    mask: Tensor,
    indices: Tensor,
    first: int,
    scale: float,
    window: int | None,
    max_prefix: int | None = None,
) -> Tensor:
    length = prefix_bound(block_table, k_cache.shape[1], max_prefix)
    keys = torch.cat((gather_pages(k_cache, block_table, length), tail_k), 1)
    values = torch.cat((gather_pages(v_cache, block_table, length), tail_v), 1)
    prefix = visible_prefix(prefix_lens, indices, first, length, window)
    visible = torch.cat((prefix, mask_bits(mask, tail_k.shape[1])), -1)
    # A weight of zero does not silence a NaN that someone left in the pages.
    values = values.masked_fill(~visible.any(1)[:, :, None, None], 0.0)
    return attend(q, keys, values, visible, scale)


def rope_tree_attention(*args, **options) -> Tensor:
    return composed(rope_store_kv, tree_attention, *args, **options)


def tree_attention_invariant(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    prefix_lens: Tensor,
    indices: Tensor,
    path_slots: Tensor,
    scale: float,
    window: int | None,
    max_prefix: int | None = None,
) -> Tensor:
    page_size, depth = k_cache.shape[1], path_slots.shape[-1]
    length = prefix_bound(block_table, page_size, max_prefix) + depth
    key = torch.arange(length, device=q.device)
    page = (key // page_size).clamp(max=block_table.shape[1] - 1)
    in_pages = (block_table.long()[:, page] * page_size + key % page_size)[:, None, :]
    behind = key - prefix_lens.long()[:, None, None]  # [B, 1, length]
    step = behind.clamp(0, depth - 1).expand(-1, q.shape[1], -1)
    slots = torch.where(behind < 0, in_pages, path_slots.gather(-1, step))
    visible = key <= indices[..., None]
    if window is not None:
        visible = visible & (key > indices[..., None] - window)
    flat_k, flat_v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    rows = slots.flatten(0, 1)
    out = attend(q.flatten(0, 1)[:, None], flat_k[rows], flat_v[rows], visible.flatten(0, 1)[:, None], scale)
    return out.view(q.shape)


def prefix_bound(block_table: Tensor, page_size: int, max_prefix: int | None) -> int:
    """How many keys to look at in pages: no more than the host's bound nor the block table's width."""
    width = block_table.shape[1] * page_size
    return width if max_prefix is None else min(max_prefix, width)


def gather_pages(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first `length` keys of each request: [B, length, Hkv, D] from [pages, page_size, Hkv, D]."""
    pages = -(-length // cache.shape[1])
    return cache[block_table[:, :pages].long()].flatten(1, 2)[:, :length]


def visible_prefix(
    prefix_lens: Tensor, indices: Tensor, first: int, length: int, window: int | None
) -> Tensor:
    """Which of the first `length` keys in pages each row sees: bool [B, N, length]."""
    key = torch.arange(length, device=indices.device)
    visible = (key >= first) & (key < prefix_lens[:, None])
    if window is None:
        return visible[:, None, :].expand(-1, indices.shape[1], -1)
    return visible[:, None, :] & (key > indices[..., None] - window)


def mask_bits(mask: Tensor, count: int) -> Tensor:
    """The low `count` bits of an int64 mask as bool, [..., count]."""
    return (mask.unsqueeze(-1) >> torch.arange(count, device=mask.device)).bitwise_and_(1).bool()


def move_kv(kv: Tensor, src: Tensor, dst: Tensor, group: int | None = None) -> None:
    kv.index_copy_(1, dst, kv.index_select(1, src))


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Row by row, so that no row's bits can depend on its neighbours: slow, and meant for tests."""
    return (
        torch.cat([F.linear(row, weight, bias) for row in x.split(1)])
        if len(x)
        else F.linear(x, weight, bias)
    )
