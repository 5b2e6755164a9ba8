"""Tree attention whose bits depend on a row's keys alone, in Triton: for `--batch-invariant`.

Each row of each kv head is a tile of its own. Its keys are taken by absolute index in blocks of BLOCK_S, in
stretches of _STRETCH keys, and the stretches are combined one after another: neither B, N, the launch's
bound on the context nor a key's place (page or tree node) changes any sum's order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.triton.flash import (
    check_dense,
    check_layout,
    head_block,
    key_block,
    softmax_step,
)

_LOG2E = 1.4426950408889634
_STRETCH = 512


@triton.jit(do_not_specialize=["num_nodes", "depth", "window"])
def tree_attention_invariant_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    prefix_lens,
    indices,
    path_slots,
    part_acc,
    part_peak,
    part_total,
    scale,
    window,
    num_nodes,
    depth,
    stride_qb,
    stride_qn,
    stride_table,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, part = tl.program_id(1), tl.program_id(2)
    begin = part * STRETCH
    own = tl.load(indices + row).to(tl.int32)
    if begin > own:
        return  # the combination reads no stretch beyond the row's own index
    request = row // num_nodes
    heads, dims = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    present, in_head = heads < GROUP, dims < DIM
    tile = present[:, None] & in_head[None, :]
    q_at = request * stride_qb + row % num_nodes * stride_qn + (head * GROUP + heads) * DIM
    queries = tl.load(q + q_at[:, None] + dims[None, :], tile, 0.0)
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    prefix = tl.load(prefix_lens + request)
    table, path = block_table + request * stride_table, path_slots + row * depth
    for start in range(begin, tl.minimum(begin + STRETCH, own + 1), BLOCK_S):
        keys = start + tl.arange(0, BLOCK_S)
        inside = keys <= own
        visible = inside
        if WINDOWED:
            visible = inside & (keys > own - window)
        page = tl.load(table + keys // PAGE, inside & (keys < prefix), 0).to(tl.int64)
        node = tl.load(path + (keys - prefix), inside & (keys >= prefix) & (keys < prefix + depth), 0)
        slot = tl.where(keys < prefix, page * PAGE + keys % PAGE, node)
        offsets = (slot * NUM_KV_HEADS + head) * DIM
        k = tl.load(k_cache + offsets[None, :] + dims[:, None], inside[None, :] & in_head[:, None], 0.0)
        v = tl.load(v_cache + offsets[:, None] + dims[None, :], inside[:, None] & in_head[None, :], 0.0)
        seen = visible[None, :] & present[:, None]
        peak, total, acc = softmax_step(queries, k, v, seen, scale, peak, total, acc, PRECISION)
    at = (row * tl.num_programs(2) + part) * (NUM_KV_HEADS * GROUP) + head * GROUP + heads
    tl.store(part_acc + at[:, None] * DIM + dims[None, :], acc, tile)
    tl.store(part_peak + at, peak, present)
    tl.store(part_total + at, total, present)


@triton.jit(do_not_specialize=["num_parts"])
def combine_invariant_kernel(
    part_acc,
    part_peak,
    part_total,
    indices,
    out,
    num_parts,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < DIM
    acc = tl.zeros([BLOCK_D], tl.float32)
    peak, total = -float("inf"), 0.0
    used = (tl.load(indices + row).to(tl.int32) + STRETCH) // STRETCH
    for part in range(0, tl.minimum(used, num_parts)):
        at = (row * num_parts + part) * NUM_HEADS + head
        part_peak_value = tl.load(part_peak + at)
        new_peak = tl.maximum(peak, part_peak_value)
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        old, new = tl.exp2(peak - base), tl.exp2(part_peak_value - base)
        acc = acc * old + tl.load(part_acc + at * DIM + dims, in_head, 0.0) * new
        total = total * old + tl.load(part_total + at) * new
        peak = new_peak
    result = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out + (row * NUM_HEADS + head) * DIM + dims, result.to(out.dtype.element_ty), in_head)


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
    """See `tokenspeed.kernels.tree_attention_invariant`."""
    batch, num_nodes, num_heads, dim = q.shape
    _, page_size, num_kv_heads, _ = k_cache.shape
    check_layout(k_cache, q)
    check_dense(prefix_lens, indices, path_slots)
    out = torch.empty((batch, num_nodes, num_heads, dim), dtype=q.dtype, device=q.device)
    rows, depth = batch * num_nodes, path_slots.shape[-1]
    if not rows:
        return out
    longest = block_table.shape[1] * page_size if max_prefix is None else max_prefix
    num_parts = triton.cdiv(longest + depth, _STRETCH)
    parts = torch.empty(rows * num_parts * num_heads * (dim + 2), dtype=torch.float32, device=q.device)
    acc, peak, total = parts.split([rows * num_parts * num_heads * n for n in (dim, 1, 1)])
    group = num_heads // num_kv_heads
    shape = dict(DIM=dim, STRETCH=_STRETCH, BLOCK_D=head_block(dim))
    tree_attention_invariant_kernel[(rows, num_kv_heads, num_parts)](
        q,
        k_cache,
        v_cache,
        block_table,
        prefix_lens,
        indices,
        path_slots,
        acc,
        peak,
        total,
        scale * _LOG2E,
        window or 0,
        num_nodes,
        depth,
        *q.stride()[:2],
        block_table.stride(0),
        GROUP=group,
        NUM_KV_HEADS=num_kv_heads,
        PAGE=page_size,
        WINDOWED=window is not None,
        PRECISION="ieee",
        BLOCK_R=max(16, triton.next_power_of_2(group)),
        BLOCK_S=key_block(dim, q.dtype),
        num_warps=4,
        num_stages=2,
        **shape,
    )
    combine_invariant_kernel[(rows, num_heads)](
        acc, peak, total, indices, out, num_parts, NUM_HEADS=num_heads, num_warps=1, **shape
    )
    return out
