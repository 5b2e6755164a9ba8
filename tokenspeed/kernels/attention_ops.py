"""The ops of attention over paged K/V, and of RoPE before it. Letters are those of `tokenspeed.kernels`."""

from torch import Tensor

from tokenspeed.kernels.registry import Op
from tokenspeed.kernels.rows import ChunkRows

_rope_store_kv = Op("rope_store_kv")
_prefill_attention = Op("prefill_attention")
_tree_attention = Op("tree_attention")
_rope_tree_attention = Op("rope_tree_attention")
_tree_attention_invariant = Op("tree_attention_invariant")


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
    """Rotates q and k by RoPE (the two halves of a head form the pairs; Su et al. 2021), then stores k and v.

    Args:
        q: [T, Hq, D], overwritten. k: [T, Hkv, D], overwritten. v: [T, Hkv, D].
        cos_sin: float32 [P, D], the D/2 cosines of a position, then its D/2 sines.
        positions: int64 [T].
        k_cache, v_cache: [pages, page_size, Hkv, D], contiguous, written at `slots`.
        slots: int64 [T], or None to store nothing.
    """
    _rope_store_kv[q.device.type](q, k, v, cos_sin, positions, k_cache, v_cache, slots)


def prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: ChunkRows, scale: float, window: int | None
) -> Tensor:
    """Causal attention of prompt chunks over their requests' pages, which hold the chunks' own keys already.

    Args:
        q: [T, Hq, D], rotated. k_cache, v_cache: [pages, page_size, Hkv, D].
        rows: which chunk each row is of. scale: factor on q.k.
        window: a row at position p sees positions p - window < s <= p; None: all before.

    Returns:
        [T, Hq, D]. A row's bits do not depend on how its prompt was cut into chunks.
        Zeros where a chunk starts at minus its count, and so sees no keys.
    """
    return _prefill_attention[q.device.type](q, k_cache, v_cache, rows, scale, window)


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
    """Attention of N tree nodes a request over its pages and a tail of M keys.

    A row sees page keys first <= s < prefix_lens[b] with s > indices[b, i] - window, and the tail keys j
    whose bit is set in its mask. A row that sees nothing gives zeros.

    Args:
        q: [B, N, Hq, D], rotated. k_cache, v_cache: [pages, page_size, Hkv, D].
        tail_k, tail_v: [B, M, Hkv, D], M <= 64; M may be 0.
        block_table: int32 [B, P], 0 where unused. prefix_lens: int32 [B].
        mask: int64 [B, N]. indices: int64 [B, N], each row's own index in its sequence.
        first: the first key that exists, 0 in target layers and 1 in the draft's.
        max_prefix: host bound on prefix_lens (None: the block table's width); it changes no result.

    Returns:
        [B, N, Hq, D]. No host sync; shapes depend on no data.
    """
    return _tree_attention[q.device.type](
        q,
        k_cache,
        v_cache,
        tail_k,
        tail_v,
        block_table,
        prefix_lens,
        mask,
        indices,
        first,
        scale,
        window,
        max_prefix,
    )


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
    """rope_store_kv of the B * N rows, then tree_attention with their own K and V in the tail.

    Args:
        q: [B * N, Hq, D]. k, v: [B * N, Hkv, D]. q and k: not rotated, perhaps overwritten.
        cos_sin: float32 [P, D]. positions: int64 [B * N]. Both as in rope_store_kv.
        k_cache, v_cache: [pages, page_size, Hkv, D], contiguous.
        tail: (K, V), [B, M, Hkv, D] each, contiguous: the rows are keys tail_start <= j < tail_start + N of their
            requests' tails and those before are there, rotated; None: the rows alone are the tail, tail_start is 0.
        slots: int64 [B * N], where the rows' K and V are stored: rows of the flattened tail, or where there is none
            slots of the pages, of no key of the prefix. None: nowhere, and no row sees any tail.
        block_table, prefix_lens, mask, indices, first, scale, window, max_prefix: as in tree_attention.

    Returns:
        [B * N, Hq, D].
    """
    return _rope_tree_attention[q.device.type](
        q,
        k,
        v,
        cos_sin,
        positions,
        k_cache,
        v_cache,
        tail,
        tail_start,
        slots,
        block_table,
        prefix_lens,
        mask,
        indices,
        first,
        scale,
        window,
        max_prefix,
    )


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
    """Tree attention whose bits, for a row, depend on its keys alone: not on B, N or where the keys lie.

    The row of index i sees keys 0..i of its own path: key s < prefix_lens[b] in the pages by the block
    table, a later one in slot path_slots[b, n, s - prefix_lens[b]] (its ancestors by depth, then itself),
    stored beforehand.

    Args:
        q: [B, N, Hq, D], rotated. k_cache, v_cache: [pages, page_size, Hkv, D].
        block_table: int32 [B, P]. prefix_lens: int32 [B]. indices: int64 [B, N].
        path_slots: int64 [B, N, depth], 0 where unused.
        max_prefix: host bound on prefix_lens (None: the block table's width).

    Returns:
        [B, N, Hq, D].
    """
    return _tree_attention_invariant[q.device.type](
        q, k_cache, v_cache, block_table, prefix_lens, indices, path_slots, scale, window, max_prefix
    )
