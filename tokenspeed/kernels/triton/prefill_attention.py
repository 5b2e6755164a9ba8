"""Causal attention of prompt chunks over paged K/V in Triton (FlashAttention-2, Dao 2023)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.rows import ChunkRows
from tokenspeed.kernels.triton.flash import check_layout, head_block, key_block, page_offsets, softmax_step

_BLOCK_R = 64  # rows a program
_LOG2E = 1.4426950408889634


@triton.jit
def prefill_attention_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    starts,
    cu_rows,
    out,
    scale,
    window,
    stride_q,
    stride_table,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row0 = tl.load(cu_rows + chunk).to(tl.int64)
    count = tl.load(cu_rows + chunk + 1) - row0
    if block * BLOCK_R >= count:
        return
    start = tl.load(starts + chunk)
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    dims = tl.arange(0, BLOCK_D)
    present, in_head = rows < count, dims < DIM
    tile = present[:, None] & in_head[None, :]
    queries = tl.load(q + (row0 + rows)[:, None] * stride_q + head * DIM + dims[None, :], tile, 0.0)
    own = start + rows
    table = block_table + chunk * stride_table
    peak = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    # Blocks of keys begin at multiples of BLOCK_S, so that a row's bits don't depend on its chunk.
    low = 0
    if WINDOWED:
        low = tl.maximum(start + block * BLOCK_R - window + 1, 0) // BLOCK_S * BLOCK_S
    high = (start + tl.minimum((block + 1) * BLOCK_R, count)).to(tl.int32)
    for first in range(low, high, BLOCK_S):
        keys = first + tl.arange(0, BLOCK_S)
        inside = keys < high
        offsets = page_offsets(table, keys, inside, head // GROUP, PAGE, NUM_KV_HEADS, DIM)
        k = tl.load(k_cache + offsets[None, :] + dims[:, None], inside[None, :] & in_head[:, None], 0.0)
        v = tl.load(v_cache + offsets[:, None] + dims[None, :], inside[:, None] & in_head[None, :], 0.0)
        visible = keys[None, :] <= own[:, None]
        if WINDOWED:
            visible = visible & (keys[None, :] > own[:, None] - window)
        peak, total, acc = softmax_step(queries, k, v, visible, scale, peak, total, acc, PRECISION)
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = out + ((row0 + rows)[:, None] * (NUM_KV_HEADS * GROUP) + head) * DIM + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), tile)


def prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: ChunkRows, scale: float, window: int | None
) -> Tensor:
    """See `tokenspeed.kernels.prefill_attention`."""
    num_rows, num_heads, dim = q.shape
    out = torch.empty((num_rows, num_heads, dim), dtype=q.dtype, device=q.device)
    check_layout(k_cache, q)
    longest = max((count for _, count in rows.chunks), default=0)
    if not longest:
        return out
    _, page_size, num_kv_heads, _ = k_cache.shape
    prefill_attention_kernel[(triton.cdiv(longest, _BLOCK_R), num_heads, len(rows.chunks))](
        q,
        k_cache,
        v_cache,
        rows.block_table,
        rows.starts,
        rows.cu_rows,
        out,
        scale * _LOG2E,
        window or 0,
        q.stride(0),
        rows.block_table.stride(0),
        GROUP=num_heads // num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        PAGE=page_size,
        WINDOWED=window is not None,
        PRECISION="ieee",
        BLOCK_R=_BLOCK_R,
        BLOCK_S=key_block(dim, q.dtype),
        BLOCK_D=head_block(dim),
        num_warps=4,
        num_stages=2,
    )
    return out
