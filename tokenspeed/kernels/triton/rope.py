"""RoPE of q and k and the store of k and v into their pages, in one Triton launch."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.pdl import has_pdl, launch_options

_BLOCK_H = 8  # heads a program


@triton.jit
def rope_store_kv_kernel(
    q,
    k,
    v,
    cos_sin,
    positions,
    k_cache,
    v_cache,
    slots,
    stride_q,
    stride_k,
    stride_v,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    STORE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    DIM: tl.constexpr = 2 * HALF
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Whatever needs no other load comes before what does, and all loads before the first store: two waits in all.
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    half = tl.arange(0, BLOCK_D)
    position = tl.load(positions + row)
    if block < Q_BLOCKS:
        heads = block * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (heads < NUM_HEADS)[:, None] & (half < HALF)[None, :]
        at = q + row * stride_q + heads[:, None] * DIM + half[None, :]
        first, second = tl.load(at, inside, 0.0), tl.load(at + HALF, inside, 0.0)
        first, second = _rotate(first, second, cos_sin, position, half, HALF)
        tl.store(at, first, inside)
        tl.store(at + HALF, second, inside)
    else:
        heads = (block - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (heads < NUM_KV_HEADS)[:, None] & (half < HALF)[None, :]
        offset = heads[:, None] * DIM + half[None, :]
        at = k + row * stride_k + offset
        first, second = tl.load(at, inside, 0.0), tl.load(at + HALF, inside, 0.0)
        if STORE:
            target = tl.load(slots + row) * (NUM_KV_HEADS * DIM) + offset
            source = v + row * stride_v + offset
            value, other = tl.load(source, inside, 0.0), tl.load(source + HALF, inside, 0.0)
        first, second = _rotate(first, second, cos_sin, position, half, HALF)
        tl.store(at, first, inside)
        tl.store(at + HALF, second, inside)
        if STORE:
            tl.store(k_cache + target, first.to(k_cache.dtype.element_ty), inside)
            tl.store(k_cache + target + HALF, second.to(k_cache.dtype.element_ty), inside)
            tl.store(v_cache + target, value.to(v_cache.dtype.element_ty), inside)
            tl.store(v_cache + target + HALF, other.to(v_cache.dtype.element_ty), inside)


@triton.jit
def _rotate(first, second, cos_sin, position, half, HALF: tl.constexpr):
    """Both halves of heads [heads, HALF], rotated."""
    cos = tl.load(cos_sin + position * (2 * HALF) + half, half < HALF, 0.0)[None, :]
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + half, half < HALF, 0.0)[None, :]
    return _turn(first, second, cos, -sin), _turn(second, first, cos, sin)


@triton.jit
def _turn(x, partner, cos, sin):
    """x * cos + partner * sin in x's dtype. The fused product is asked for: so all kernels give the same bits."""
    return tl.fma(x.to(tl.float32), cos, partner.to(tl.float32) * sin).to(x.dtype)


@triton.jit
def load_rotated(heads, dims, positions, cos_sin, inside, HALF: tl.constexpr):
    """Heads as rope_store_kv leaves them: a tile of rows by dims, or of dims by rows.

    heads: pointers to the rows' first elements, [R, 1] or [1, R]; positions int64 likewise; dims: the other axis.
    """
    low = dims < HALF
    angles = cos_sin + positions * (2 * HALF) + tl.where(low, dims, dims - HALF)
    x = tl.load(heads + dims, inside, 0.0)
    partner = tl.load(heads + tl.where(low, dims + HALF, dims - HALF), inside, 0.0)
    cos, sin = tl.load(angles, inside, 0.0), tl.load(angles + HALF, inside, 0.0)
    return _turn(x, partner, cos, tl.where(low, -sin, sin))


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
    """See `tokenspeed.kernels.rope_store_kv`."""
    rows, num_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    if not rows:
        return
    if any(t.stride(1) != dim or t.stride(2) != 1 for t in (q, k, v)):
        raise ValueError("rope_store_kv needs the heads of a row next to one another")
    pdl = has_pdl()
    blocks = triton.cdiv(num_heads, _BLOCK_H) + triton.cdiv(num_kv_heads, _BLOCK_H)
    rope_store_kv_kernel[(rows, blocks)](
        q,
        k,
        v,
        cos_sin,
        positions,
        k_cache,
        v_cache,
        positions if slots is None else slots,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=dim // 2,
        STORE=slots is not None,
        PDL=pdl,
        BLOCK_H=_BLOCK_H,
        BLOCK_D=triton.next_power_of_2(dim // 2),
        num_warps=2,
        **launch_options(pdl),
    )
