"""The ops around a decode round's forward pass, each one launch on a GPU; a part of `tokenspeed.kernels`.

B requests, N nodes of each one's tree, W = depth of the deepest node that can be kept, plus 1. No host sync.
"""

from torch import Tensor

from tokenspeed.kernels.registry import Op

_read_slots = Op("read_slots")
_place_nodes = Op("place_nodes")
_accept = Op("accept")
_commit = Op("commit")
_keep_aux = Op("keep_aux")


def read_slots(
    slots: Tensor, last_tokens: Tensor, lengths: Tensor, block_table: Tensor, aux: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Where B requests stand, from the state of all.

    Args:
        slots: int64 [B]. last_tokens, lengths: int64 [S]. block_table: int32 [S, P]. aux: [S, A] or None.

    Returns:
        last_tokens int64 [B], the last one's index (length - 1) as int64 [B] and as int32 [B], block_table
        int32 [B, P], aux [B, A] or None.
    """
    return _read_slots[slots.device.type](slots, last_tokens, lengths, block_table, aux)


def place_nodes(
    last_indices: Tensor, depths: Tensor, table: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the nodes of B trees stand.

    Args:
        last_indices: int64 [B], the root's index. depths: int64 [B, N], rows next to one another.
        table: int32 [B, P], the last column at the dummy page.

    Returns:
        Position of each node (index of the root plus depth), the position after it, and the slot of its K/V (node j
        takes the place of the token j behind the root; in the dummy page where there is no page): int64 [B, N] each.
    """
    return _place_nodes[depths.device.type](last_indices, depths, table, page_size)


def accept(
    tokens: Tensor, parents: Tensor, depths: Tensor, mask: Tensor, sampled: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Walks B trees along the target's draws, as spec.verify.accept says.

    Args:
        tokens, parents, depths, mask, sampled: int64 [B, N], N <= 64; of a DraftTree, and the draw at each node,
            negative where it failed. width: W, more than the deepest node's depth.

    Returns:
        path int64 [B, W] of kept nodes, from the last on that one again; count int64 [B] of these; int64 [B, W] the
        draws at the path's nodes, 0 for one that failed; bool [B], whether the last one did.
    """
    return _accept[tokens.device.type](tokens, parents, depths, mask, sampled, width)


def commit(
    slots: Tensor,
    last_indices: Tensor,
    table: Tensor,
    kv_slots: Tensor,
    path: Tensor,
    count: Tensor,
    tokens: Tensor,
    last_tokens: Tensor,
    lengths: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Writes what B requests have become: last_tokens and lengths; the length of the last slot, the dummy, stays 2.

    Args:
        slots, last_indices, table, kv_slots: see read_slots and place_nodes. path, count, tokens: see accept.
        last_tokens, lengths: int64 [S], written.

    Returns:
        int64 [B, W] each: where K/V of the path's nodes lie, and where they belong (the same place beyond `count`);
        index of each emitted token, and the slot of its K/V, 0 beyond `count`.
    """
    return _commit[slots.device.type](
        slots, last_indices, table, kv_slots, path, count, tokens, last_tokens, lengths, page_size
    )


def keep_aux(
    aux: Tensor,
    slots: Tensor,
    path: Tensor,
    count: Tensor,
    target: Tensor,
    slot_aux: Tensor,
    page_aux: Tensor,
    page_size: int,
) -> Tensor:
    """Aux states of the kept nodes, also where later rounds look for them.

    Args:
        aux: [B, N, A]. slots: int64 [B]. path, count: see accept. target: int64 [B, W] slots of the path's nodes.
        slot_aux: [S, A], gets those of each request's last kept node.
        page_aux: [pages, A], gets those of kept nodes that stand last in a page; page 0 gets anything.

    Returns:
        [B, W, A], contiguous.
    """
    return _keep_aux[aux.device.type](aux, slots, path, count, target, slot_aux, page_aux, page_size)
