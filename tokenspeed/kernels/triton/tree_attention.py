"""Attention of tree nodes over pages and a masked tail, in Triton: decode, drafting and verification.

Flash-decoding (Dao et al. 2023): the rows of all nodes and of all q heads of one kv head make one tile, so
K/V is read once for a whole tree; the keys are split among programs and a second kernel combines their
partial softmaxes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.flash import (
    check_dense,
    check_layout,
    head_block,
    key_block,
    num_processors,
    page_offsets,
    softmax_step,
)
from tokenspeed.kernels.triton.pdl import has_pdl, launch_options

_LOG2E = 1.4426950408889634
_MAX_ROWS = 64  # rows a program
_MIN_KEYS = 128  # keys below which a split is not worth its combination
_MAX_SPLITS = 64


@triton.jit(do_not_specialize=["num_nodes", "num_tail", "first_key", "window"])
def tree_attention_kernel(
    q,
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
    stride_qb,
    stride_qn,
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
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row_blocks = tl.cdiv(num_nodes * GROUP, BLOCK_R)
    request = (tl.program_id(0) // row_blocks).to(tl.int64)
    head, split, num_splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    rows = tl.program_id(0) % row_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    node, q_head = rows // GROUP, head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    present, in_head = node < num_nodes, dims < DIM
    tile = present[:, None] & in_head[None, :]
    q_at = request * stride_qb + node.to(tl.int64) * stride_qn + q_head * DIM
    queries = tl.load(q + q_at[:, None] + dims[None, :], tile, 0.0)
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)

    table = block_table + request * stride_table
    prefix = tl.load(prefix_lens + request)
    low = first_key // BLOCK_S * BLOCK_S
    own = tl.full([BLOCK_R], 0, tl.int32)
    if WINDOWED:
        own = tl.load(indices + request * num_nodes + node, present, 2147483647).to(tl.int32)
        low = tl.maximum(first_key, tl.min(own, 0) - window + 1) // BLOCK_S * BLOCK_S
    share = tl.cdiv(tl.cdiv(tl.maximum(prefix - low, 0), num_splits), BLOCK_S) * BLOCK_S
    begin = low + split * share
    for start in range(begin, tl.minimum(begin + share, prefix), BLOCK_S):
        keys = start + tl.arange(0, BLOCK_S)
        inside = (keys >= first_key) & (keys < prefix)
        offsets = page_offsets(table, keys, inside, head, PAGE, NUM_KV_HEADS, DIM)
        k = tl.load(k_cache + offsets[None, :] + dims[:, None], inside[None, :] & in_head[:, None], 0.0)
        v = tl.load(v_cache + offsets[:, None] + dims[None, :], inside[:, None] & in_head[None, :], 0.0)
        visible = inside[None, :] & present[:, None]
        if WINDOWED:
            visible = visible & (keys[None, :] > own[:, None] - window)
        peak, total, acc = softmax_step(queries, k, v, visible, scale, peak, total, acc, PRECISION)

    if split == num_splits - 1:
        bits = tl.load(mask + request * num_nodes + node, present, 0)
        for start in range(0, num_tail, BLOCK_S):
            keys = start + tl.arange(0, BLOCK_S)
            inside = keys < num_tail
            k_at = request * stride_kb + keys.to(tl.int64) * stride_kn + head * DIM
            v_at = request * stride_vb + keys.to(tl.int64) * stride_vn + head * DIM
            k = tl.load(tail_k + k_at[None, :] + dims[:, None], inside[None, :] & in_head[:, None], 0.0)
            v = tl.load(tail_v + v_at[:, None] + dims[None, :], inside[:, None] & in_head[None, :], 0.0)
            # The shift count is kept below 64, where it would be undefined.
            seen = (bits[:, None] >> tl.minimum(keys, 63)[None, :].to(tl.int64)) & 1
            visible = (seen != 0) & inside[None, :]
            peak, total, acc = softmax_step(queries, k, v, visible, scale, peak, total, acc, PRECISION)

    row_at = (request * num_nodes + node) * (NUM_KV_HEADS * GROUP) + q_head
    if SPLIT:
        part = row_at * num_splits + split
        tl.store(part_acc + part[:, None] * DIM + dims[None, :], acc, tile)
        tl.store(part_peak + part, peak, present)
        tl.store(part_total + part, total, present)
    else:
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(out + row_at[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), tile)


@triton.jit
def combine_kernel(
    part_acc,
    part_peak,
    part_total,
    out,
    num_splits,
    DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    inside, in_head = splits < num_splits, dims < DIM
    part = row * num_splits + splits
    peaks = tl.load(part_peak + part, inside, float("-inf"))
    peak = tl.max(peaks, 0)
    weights = tl.exp2(peaks - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights * tl.load(part_total + part, inside, 0.0), 0)
    acc = tl.load(part_acc + part[:, None] * DIM + dims[None, :], inside[:, None] & in_head[None, :], 0.0)
    result = tl.sum(acc * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * DIM + dims, result.to(out.dtype.element_ty), in_head)


def num_splits(programs: int, longest: int, device: torch.device) -> int:
    """Programs that share the keys of one tile: two waves of the GPU, of _MIN_KEYS keys or more each."""
    wanted = triton.cdiv(2 * num_processors(device), programs)
    return max(1, min(wanted, triton.cdiv(longest, _MIN_KEYS), _MAX_SPLITS))


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
    batch, num_nodes, num_heads, dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    check_layout(k_cache, q, tail_k, tail_v)
    check_dense(prefix_lens, mask, indices)
    if tail_k.shape[1] > 64:
        raise ValueError(f"a tail has at most 64 keys, not {tail_k.shape[1]}")
    out = torch.empty((batch, num_nodes, num_heads, dim), dtype=q.dtype, device=q.device)
    if not batch * num_nodes:
        return out
    group = num_heads // num_kv_heads
    block_r = min(_MAX_ROWS, max(16, triton.next_power_of_2(num_nodes * group)))
    tiles = batch * triton.cdiv(num_nodes * group, block_r)
    longest = block_table.shape[1] * page_size if max_prefix is None else max_prefix
    splits = num_splits(tiles * num_kv_heads, longest, q.device)
    parts = torch.empty(
        (batch * num_nodes * num_heads * splits, dim + 2), dtype=torch.float32, device=q.device
    )
    pdl = has_pdl()
    acc, peak, total = parts.flatten().split([parts.shape[0] * n for n in (dim, 1, 1)])
    tree_attention_kernel[(tiles, num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        tail_k if tail_k.numel() else k_cache,
        tail_v if tail_v.numel() else v_cache,
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
        tail_k.shape[1],
        *q.stride()[:2],
        *tail_k.stride()[:2],
        *tail_v.stride()[:2],
        block_table.stride(0),
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        PAGE=page_size,
        WINDOWED=window is not None,
        SPLIT=splits > 1,
        PDL=pdl,
        PRECISION="ieee",
        BLOCK_R=block_r,
        BLOCK_S=key_block(dim, q.dtype),
        BLOCK_D=head_block(dim),
        num_warps=4,
        num_stages=2,
        **launch_options(pdl),
    )
    if splits > 1:
        combine_kernel[(batch * num_nodes * num_heads,)](
            acc,
            peak,
            total,
            out,
            splits,
            DIM=dim,
            BLOCK_SPLITS=triton.next_power_of_2(splits),
            BLOCK_D=head_block(dim),
            PDL=pdl,
            num_warps=1,
            **launch_options(pdl),
        )
    return out
