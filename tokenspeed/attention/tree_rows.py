"""What follows from a tree's rows: which nodes a window leaves, and which slots hold a node's path."""

import torch
from torch import Tensor

from tokenspeed.attention.base import TreeRows


def own_tail_mask(rows: TreeRows, window: int | None) -> Tensor:
    """rows.mask, int64 [B, N], less the ancestors outside a node's window; the tail is the rows' own."""
    if window is None or window >= rows.mask.shape[1]:  # no path is as long as that
        return rows.mask
    near = rows.indices[:, None, :] > rows.indices[:, :, None] - window
    bits = torch.ones((), dtype=torch.int64, device=near.device) << torch.arange(
        near.shape[2], device=near.device
    )
    return rows.mask & (near * bits).sum(-1)


def path_slots(rows: TreeRows) -> Tensor:
    """Slots of each row's ancestors by depth, itself last: int64 [B, N, N], 0 beyond. For a target's rows.

    Raises:
        ValueError: a tree of several nodes comes without its depths.
    """
    if rows.path_slots is not None:
        return rows.path_slots
    batch, nodes = rows.mask.shape
    slots = rows.slots.view(batch, 1, nodes)
    if nodes == 1:
        return slots
    if rows.depths is None:
        raise ValueError("paths need the depths of a tree's nodes")
    bits = (rows.mask[..., None] >> torch.arange(nodes, device=rows.mask.device)) & 1
    # Nodes off the path go to a column that is cut off.
    depth = torch.where(bits.bool(), rows.depths[:, None, :], nodes)
    paths = slots.new_zeros((batch, nodes, nodes + 1))
    return paths.scatter_(2, depth, slots.expand(-1, nodes, -1))[..., :nodes].contiguous()
