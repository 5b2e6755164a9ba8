"""The ops around a decode round's forward pass in plain torch: where its rows stand, what is kept, what is written.

Shapes and meanings are in `tokenspeed.kernels`.
"""

import torch
from torch import Tensor


def read_slots(
    slots: Tensor, last_tokens: Tensor, lengths: Tensor, block_table: Tensor, aux: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    last = lengths[slots] - 1
    found = None if aux is None else aux[slots]
    return last_tokens[slots], last, last.to(torch.int32), block_table[slots], found


def place_nodes(
    last_indices: Tensor, depths: Tensor, table: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    positions = last_indices[:, None] + depths
    nodes = torch.arange(depths.shape[1], device=depths.device)
    return positions, positions + 1, page_slots(table, last_indices[:, None] + nodes, page_size)


def page_slots(table: Tensor, indices: Tensor, page_size: int) -> Tensor:
    """Slots of tokens in the pages: int32 [B, P], int64 [B, n] indices >= 0 -> int64 [B, n].

    Those past the table's width stand in its last column, which a worker keeps at the dummy page.
    """
    columns = (indices // page_size).clamp(max=table.shape[1] - 1)
    return table.gather(1, columns).long() * page_size + indices % page_size


def accept(
    tokens: Tensor, parents: Tensor, depths: Tensor, mask: Tensor, sampled: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, num_nodes = tokens.shape
    nodes = torch.arange(num_nodes, device=sampled.device)
    drawn = sampled.gather(1, parents)
    matches = (tokens == drawn) & (drawn >= 0)
    # An earlier sibling with the same token takes the match.
    same = (parents[:, :, None] == parents[:, None]) & matches[:, :, None] & matches[:, None]
    first = ~(same & (nodes[None, :] < nodes[:, None]) & (nodes > 0)).any(2)
    matches = (matches & first) | (nodes == 0)
    # Kept: every ancestor matches, the node too. Bit j of `matched` says that node j does.
    bits = torch.ones_like(nodes) << nodes
    matched = torch.where(matches, bits, 0).sum(1, keepdim=True)
    kept = (mask & ~matched) == 0
    # At most one node of a depth is kept; the others go to a spare place.
    places = torch.where(kept, depths.clamp(max=width), width)
    path = torch.zeros(batch, width + 1, dtype=torch.int64, device=sampled.device)
    path = path.scatter_(1, places, nodes.expand(batch, -1))[:, :width].cummax(1).values
    emitted = sampled.gather(1, path)
    return path, kept.sum(1), emitted.clamp(min=0), emitted[:, -1] < 0


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
    steps = torch.arange(path.shape[1], device=path.device)
    valid = steps < count[:, None]
    source = kv_slots.gather(1, path)
    target = torch.where(valid, kv_slots[:, : path.shape[1]], source)
    indices = last_indices[:, None] + 1 + steps
    places = torch.where(valid, page_slots(table, indices, page_size), 0)
    last_tokens[slots] = tokens[:, -1]
    lengths[slots] += count
    lengths[-1:].fill_(2)
    return source, target, indices, places


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
    rows = torch.arange(len(path), device=path.device)
    kept = aux.gather(1, path[:, :, None].expand(-1, -1, aux.shape[2]))
    slot_aux[slots] = kept[rows, count - 1]
    valid = torch.arange(path.shape[1], device=path.device) < count[:, None]
    pages = torch.where(valid & (target % page_size == page_size - 1), target // page_size, 0)
    page_aux[pages.flatten()] = kept.flatten(0, 1)
    return kept
