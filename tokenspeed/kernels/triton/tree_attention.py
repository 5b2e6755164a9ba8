"""Attention of tree nodes over pages and a masked tail, in Triton: decode, drafting and verification.

Flash-decoding (Dao et al. 2023): the rows of all nodes and of all q heads of one kv head make one tile, so
K/V is read once for a whole tree; the keys are split among programs and a second kernel (combine.py) combines
their partial softmaxes. RoPE and the store of the rows' own K and V come with it where they are asked for: the
program that has a tile's tail rotates the keys there. No program reads what this launch stores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.combine import combine, num_splits
from tokenspeed.kernels.triton.flash import (
    check_dense,
    check_layout,
    head_block,
    key_block,
    page_offsets,
    softmax_step,
)
from tokenspeed.kernels.triton.pdl import has_pdl, launch_options
from tokenspeed.kernels.triton.rope import load_rotated

_LOG2E = 1.4426950408889634
_MAX_ROWS = 64  # rows a program
_MAX_TAIL = 64  # bits of a mask


@triton.jit(do_not_specialize=["num_nodes", "num_tail", "tail_start", "first_key", "window"])
def tree_attention_kernel(
    q,
    k,
    v,
    cos_sin,
    positions,
    slots,
    k_store,
    v_store,
    k_cache,
    v_cache,
    tail_k,
    tail_v,
    block_table,
    prefix_lens,
    mask,
    indices,
    out,
    part_acc,
    part_peak,
    part_total,
    scale,
    first_key,
    window,
    num_nodes,
    num_tail,
    tail_start,
    stride_q,
    stride_k,
    stride_v,
    stride_kb,
    stride_kn,
    stride_vb,
    stride_vn,
    stride_table,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    ROPE: tl.constexpr,
    BUFFER: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """ROPE: q is not rotated yet, and tail keys from tail_start on are the rows' own: k and v, rotated and stored here.
    BUFFER: tail keys before tail_start are in tail_k and tail_v.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row_blocks = tl.cdiv(num_nodes * GROUP, BLOCK_R)
    request, row_block = (tl.program_id(0) // row_blocks).to(tl.int64), tl.program_id(0) % row_blocks
    head, split, num_splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    prefix = tl.load(prefix_lens + request)
    rows = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    node, q_head = rows // GROUP, head * GROUP + rows % GROUP
    present = node < num_nodes
    row = request * num_nodes + node
    bits = tl.load(mask + row, present, 0)
    if ROPE:
        position = tl.load(positions + row, present, 0)
    low = first_key // BLOCK_S * BLOCK_S
    own = tl.full([BLOCK_R], 0, tl.int32)
    if WINDOWED:
        own = tl.load(indices + row, present, 2147483647).to(tl.int32)
        low = tl.maximum(first_key, tl.min(own, 0) - window + 1) // BLOCK_S * BLOCK_S
    # Keys of pages are shared out in whole blocks; the tail is the next program's, or the last one's too.
    span = tl.maximum(prefix - low, 0)
    share = tl.maximum(tl.cdiv(tl.cdiv(span, num_splits), BLOCK_S), 1) * BLOCK_S
    tail_split = tl.minimum(tl.cdiv(span, share), num_splits - 1)
    part = (row * (NUM_KV_HEADS * GROUP) + q_head) * num_splits + split
    if SPLIT and split > tail_split:  # a graph's launch is for the longest context
        tl.store(part_peak + part, float("-inf"), present)
        tl.store(part_total + part, 0.0, present)
        return

    # Pages are looked up a block ahead, the first time before q is waited for.
    table = block_table + request * stride_table
    begin = low + split * share
    keys = begin + tl.arange(0, BLOCK_S)
    inside = (keys >= first_key) & (keys < prefix)
    offsets = page_offsets(table, keys, inside, head, PAGE, NUM_KV_HEADS, DIM)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < DIM
    tile = present[:, None] & in_head[None, :]
    q_at = (q + row * stride_q + q_head * DIM)[:, None]
    if ROPE:
        queries = load_rotated(q_at, dims[None, :], position[:, None], cos_sin, tile, DIM // 2)
    else:
        queries = tl.load(q_at + dims[None, :], tile, 0.0)
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for _ in range(begin, tl.minimum(begin + share, prefix), BLOCK_S):
        key = tl.load(k_cache + offsets[None, :] + dims[:, None], inside[None, :] & in_head[:, None], 0.0)
        value = tl.load(v_cache + offsets[:, None] + dims[None, :], inside[:, None] & in_head[None, :], 0.0)
        visible = inside[None, :] & present[:, None]
        if WINDOWED:
            visible = visible & (keys[None, :] > own[:, None] - window)
        keys += BLOCK_S
        inside = keys < prefix
        offsets = page_offsets(table, keys, inside, head, PAGE, NUM_KV_HEADS, DIM)
        peak, total, acc = softmax_step(queries, key, value, visible, scale, peak, total, acc, PRECISION)

    if (ROPE or BUFFER) and split == tail_split:
        for start in tl.range(0, num_tail, BLOCK_T, num_stages=1):  # mostly one block
            members = start + tl.arange(0, BLOCK_T)
            exists = members < num_tail
            if BUFFER:
                before = exists & (members < tail_start)
                k_at = tail_k + request * stride_kb + members.to(tl.int64) * stride_kn + head * DIM
                tail_key = tl.load(k_at[None, :] + dims[:, None], before[None, :] & in_head[:, None], 0.0)
                v_at = tail_v + request * stride_vb + members.to(tl.int64) * stride_vn + head * DIM
                tail_value = tl.load(v_at[:, None] + dims[None, :], before[:, None] & in_head[None, :], 0.0)
            if ROPE:
                ours = exists & (members >= tail_start)
                source = request * num_nodes + members - tail_start
                place = tl.load(positions + source, ours, 0)
                slot = tl.load(slots + source, ours, 0)
                k_tile, v_tile = ours[None, :] & in_head[:, None], ours[:, None] & in_head[None, :]
                k_at = (k + source * stride_k + head * DIM)[None, :]
                own_k = load_rotated(k_at, dims[:, None], place[None, :], cos_sin, k_tile, DIM // 2)
                v_at = v + source * stride_v + head * DIM
                own_v = tl.load(v_at[:, None] + dims[None, :], v_tile, 0.0)
                to = slot * (NUM_KV_HEADS * DIM) + head * DIM
                first_block = row_block == 0
                tl.store(
                    k_store + to[None, :] + dims[:, None],
                    own_k.to(k_store.dtype.element_ty),
                    k_tile & first_block,
                )
                tl.store(
                    v_store + to[:, None] + dims[None, :],
                    own_v.to(v_store.dtype.element_ty),
                    v_tile & first_block,
                )
                if BUFFER:
                    tail_key = tl.where(ours[None, :], own_k, tail_key)
                    tail_value = tl.where(ours[:, None], own_v, tail_value)
                else:
                    tail_key, tail_value = own_k, own_v
            # The shift count is kept below 64, where it would be undefined.
            seen = (bits[:, None] >> tl.minimum(members, 63)[None, :].to(tl.int64)) & 1
            visible = (seen != 0) & exists[None, :]
            peak, total, acc = softmax_step(
                queries, tail_key, tail_value, visible, scale, peak, total, acc, PRECISION
            )

    if SPLIT:
        tl.store(part_acc + part[:, None] * DIM + dims[None, :], acc, tile)
        tl.store(part_peak + part, peak, present)
        tl.store(part_total + part, total, present)
    else:
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out + part[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), tile)


def _warps(block_r: int) -> int:
    return 8 if block_r == _MAX_ROWS else 4


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
    """See `tokenspeed.kernels.tree_attention`."""
    check_layout(k_cache, tail_k, tail_v)
    pages, seen = (k_cache, v_cache, block_table, prefix_lens), (mask, indices, first, window, max_prefix)
    count = tail_k.shape[1]
    out = _attend(q.flatten(0, 1), pages, seen, scale, (tail_k, tail_v) if count else None, count, count)
    return out.view(q.shape)


def rope_tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tail: tuple[Tensor, Tensor] | None,
    tail_start: int,
    slots: Tensor | None,
    block_table: Tensor,
    prefix_lens: Tensor,
    mask: Tensor,
    indices: Tensor,
    first: int,
    scale: float,
    window: int | None,
    max_prefix: int | None = None,
) -> Tensor:
    """See `tokenspeed.kernels.rope_tree_attention`."""
    check_layout(k_cache, k, v)
    check_dense(cos_sin, positions, *(tail or ()), *(() if slots is None else (slots,)))
    pages, seen = (k_cache, v_cache, block_table, prefix_lens), (mask, indices, first, window, max_prefix)
    count = 0 if slots is None else tail_start + mask.shape[1]
    target = (k_cache, v_cache) if tail is None else tail
    rows = (k, v, cos_sin, positions, positions if slots is None else slots, *target)
    return _attend(q, pages, seen, scale, tail if tail_start else None, tail_start, count, rows)


def _attend(
    q: Tensor,
    pages: tuple[Tensor, Tensor, Tensor, Tensor],
    seen: tuple[Tensor, Tensor, int, int | None, int | None],
    scale: float,
    tail: tuple[Tensor, Tensor] | None,
    tail_start: int,
    num_tail: int,
    rows: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """Launches both kernels.

    Args:
        q: [B * N, Hq, D]. pages: caches, block table, prefix lengths. seen: what rows see, from `mask` on.
        tail: (K, V) of the first tail_start of num_tail tail keys, where there are any.
        rows: the rest of the tail: k, v, cos_sin, positions and slots of the rows, K and V to store in. None: there is
            no rest, and q is rotated.
    """
    k_cache, v_cache, block_table, prefix_lens = pages
    mask, indices, first, window, max_prefix = seen
    (batch, num_nodes), (num_rows, num_heads, dim) = mask.shape, q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    check_layout(k_cache, q)
    check_dense(prefix_lens, mask, indices)
    if num_tail > _MAX_TAIL:
        raise ValueError(f"a tail has at most {_MAX_TAIL} keys, not {num_tail}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_rows:
        return out
    group = num_heads // num_kv_heads
    block_r = min(_MAX_ROWS, max(16, triton.next_power_of_2(num_nodes * group)))
    tiles = batch * triton.cdiv(num_nodes * group, block_r)
    longest = block_table.shape[1] * page_size if max_prefix is None else max_prefix
    splits = num_splits(tiles * num_kv_heads, longest, q.device)
    parts = torch.empty((num_rows * num_heads * splits, dim + 2), dtype=torch.float32, device=q.device)
    pdl = has_pdl()
    acc, peak, total = parts.flatten().split([parts.shape[0] * n for n in (dim, 1, 1)])
    nothing = (q, q, q, prefix_lens, prefix_lens, k_cache, v_cache)  # what no kernel built without ROPE reads
    k, v, *others = nothing if rows is None else rows
    tail_k, tail_v = (k_cache, v_cache) if tail is None else tail
    tree_attention_kernel[(tiles, num_kv_heads, splits)](
        q,
        k,
        v,
        *others,
        k_cache,
        v_cache,
        tail_k,
        tail_v,
        block_table,
        prefix_lens,
        mask,
        indices,
        out,
        acc,
        peak,
        total,
        scale * _LOG2E,
        first,
        window or 0,
        num_nodes,
        num_tail,
        tail_start,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *tail_k.stride()[:2],
        *tail_v.stride()[:2],
        block_table.stride(0),
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        PAGE=page_size,
        WINDOWED=window is not None,
        ROPE=rows is not None,
        BUFFER=tail is not None,
        SPLIT=splits > 1,
        PDL=pdl,
        PRECISION="ieee",
        BLOCK_R=block_r,
        BLOCK_S=key_block(dim, q.dtype),
        BLOCK_T=16 if num_tail <= 16 else 32,
        BLOCK_D=head_block(dim),
        num_warps=_warps(block_r),
        num_stages=2,
        **launch_options(pdl),
    )
    if splits > 1:
        combine(acc, peak, total, out, splits)
    return out
