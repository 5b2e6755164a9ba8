"""Ops made of other ops, where no kernel joins them."""

from collections.abc import Callable

from torch import Tensor

from tokenspeed.kernels import attention_ops as ops


def rope_tree_attention(*args, **options) -> Tensor:
    """See `tokenspeed.kernels.rope_tree_attention`."""
    return composed(ops.rope_store_kv, ops.tree_attention, *args, **options)


def composed(
    rope_store_kv: Callable[..., None],
    tree_attention: Callable[..., Tensor],
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
    *rest,
    **options,
) -> Tensor:
    """`tokenspeed.kernels.rope_tree_attention` by the two ops given."""
    target = (k_cache, v_cache) if tail is None else tail
    rope_store_kv(q, k, v, cos_sin, positions, *target, slots)
    count = 0 if slots is None else tail_start + mask.shape[1]  # nothing has been written behind
    whole = (k.unflatten(0, mask.shape), v.unflatten(0, mask.shape)) if tail is None else tail
    tail_k, tail_v = (t[:, :count] for t in whole)
    out = tree_attention(
        q.unflatten(0, mask.shape),
        k_cache,
        v_cache,
        tail_k,
        tail_v,
        block_table,
        prefix_lens,
        mask,
        *rest,
        **options,
    )
    return out.flatten(0, 1)
