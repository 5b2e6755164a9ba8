"""What surrounds a decode round's forward pass, in Triton: one launch in place of many small ones."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.triton.pdl import early_options, wait_early

_BLOCK = 1024  # elements of a row that a program copies


@triton.jit
def read_slots_kernel(
    slots,
    last_tokens,
    lengths,
    block_table,
    aux,
    tokens,
    indices,
    indices32,
    table,
    root_aux,
    num_columns,
    aux_size,
    stride_table,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_early(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    at = block * BLOCK + tl.arange(0, BLOCK)
    pages = tl.load(block_table + slot * stride_table + at, at < num_columns, 0)
    states = tl.load(aux + slot * aux_size + at, at < aux_size, 0.0)
    tl.store(table + row * num_columns + at, pages, at < num_columns)
    tl.store(root_aux + row * aux_size + at, states, at < aux_size)
    if block == 0:
        last = tl.load(lengths + slot) - 1
        tl.store(tokens + row, tl.load(last_tokens + slot))
        tl.store(indices + row, last)
        tl.store(indices32 + row, last.to(tl.int32))


@triton.jit
def _page_slot(table, row, indices, inside, page_size, num_columns):
    column = tl.minimum(indices // page_size, num_columns - 1)
    page = tl.load(table + row * num_columns + column, inside, 0).to(tl.int64)
    return page * page_size + indices % page_size


@triton.jit
def place_nodes_kernel(
    last_indices,
    depths,
    table,
    positions,
    next_positions,
    kv_slots,
    num_nodes,
    page_size,
    num_columns,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK_N)
    inside, at = node < num_nodes, row * num_nodes + node
    last = tl.load(last_indices + row)
    position = last + tl.load(depths + at, inside, 0)
    tl.store(positions + at, position, inside)
    tl.store(next_positions + at, position + 1, inside)
    tl.store(kv_slots + at, _page_slot(table, row, last + node, inside, page_size, num_columns), inside)


@triton.jit
def accept_kernel(
    tokens,
    parents,
    depths,
    mask,
    sampled,
    path,
    counts,
    emitted,
    failed,
    num_nodes,
    width,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    node, step = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_W)
    inside, first = node < num_nodes, row * num_nodes
    token = tl.load(tokens + first + node, inside, 0)
    parent = tl.load(parents + first + node, inside, 0)
    depth = tl.load(depths + first + node, inside, 0)
    line = tl.load(mask + first + node, inside, 0)
    draw = tl.load(sampled + first + node, inside, -1)
    drawn = tl.load(sampled + first + parent, inside, -1)
    matches = (token == drawn) & (drawn >= 0) & inside & (node > 0)
    # Of siblings with equal tokens the first takes the match.
    own = tl.where(matches, parent, -1)
    other = tl.arange(0, BLOCK_N)
    other_parent = tl.load(parents + first + other, other < num_nodes, 0)
    other_token = tl.load(tokens + first + other, other < num_nodes, 0)
    before = (other_parent[None, :] == own[:, None]) & (other_token[None, :] == token[:, None])
    before = before & (other[None, :] < node[:, None]) & (other[None, :] > 0)
    matches = (matches & (tl.sum(before.to(tl.int32), 1) == 0)) | (node == 0)
    bits = tl.where(matches, tl.full((BLOCK_N,), 1, tl.int64) << node.to(tl.int64), 0)
    kept = inside & ((line & ~tl.sum(bits, 0)) == 0)
    last = tl.max(tl.where(kept, node, 0), 0)
    number = tl.sum(kept.to(tl.int64), 0)
    final = tl.load(sampled + first + last)
    to = row * width
    tl.store(path + to + depth, node.to(tl.int64), kept)
    tl.store(emitted + to + depth, tl.maximum(draw, 0), kept)
    rest = (step >= number) & (step < width)
    tl.store(path + to + step, tl.zeros((BLOCK_W,), tl.int64) + last, rest)
    tl.store(emitted + to + step, tl.zeros((BLOCK_W,), tl.int64) + tl.maximum(final, 0), rest)
    tl.store(counts + row, number)
    tl.store(failed + row, final < 0)


@triton.jit
def commit_kernel(
    slots,
    last_indices,
    table,
    kv_slots,
    path,
    counts,
    tokens,
    last_tokens,
    lengths,
    source,
    target,
    indices,
    places,
    num_nodes,
    width,
    page_size,
    num_columns,
    dummy,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK_W)
    inside, at = step < width, row * width + step
    slot, last, number = tl.load(slots + row), tl.load(last_indices + row), tl.load(counts + row)
    node = tl.load(path + at, inside, 0)
    token = tl.load(tokens + row * width + width - 1)
    valid = inside & (step < number)
    here = tl.load(kv_slots + row * num_nodes + node, inside, 0)
    there = tl.load(kv_slots + row * num_nodes + step, valid, 0)
    index = last + 1 + step
    place = _page_slot(table, row, index, valid, page_size, num_columns)
    tl.store(source + at, here, inside)
    tl.store(target + at, tl.where(valid, there, here), inside)
    tl.store(indices + at, index, inside)
    tl.store(places + at, tl.where(valid, place, 0), inside)
    tl.store(last_tokens + slot, token)
    tl.store(lengths + slot, tl.where(slot == dummy, 2, last + 1 + number))


@triton.jit
def keep_aux_kernel(
    aux,
    slots,
    path,
    counts,
    target,
    slot_aux,
    page_aux,
    out,
    num_nodes,
    width,
    aux_size,
    page_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_early(PDL)
    at = tl.program_id(0).to(tl.int64)
    row, step = at // width, at % width
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < aux_size
    number, node, place = tl.load(counts + row), tl.load(path + at), tl.load(target + at)
    slot = tl.load(slots + row)
    states = tl.load(aux + (row * num_nodes + node) * aux_size + column, inside, 0.0)
    tl.store(out + at * aux_size + column, states, inside)
    tl.store(slot_aux + slot * aux_size + column, states, inside & (step == number - 1))
    full = (step < number) & (place % page_size == page_size - 1)
    tl.store(page_aux + place // page_size * aux_size + column, states, inside & full)


def read_slots(
    slots: Tensor, last_tokens: Tensor, lengths: Tensor, block_table: Tensor, aux: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """See `tokenspeed.kernels.read_slots`."""
    batch, columns = len(slots), block_table.shape[1]
    size = 0 if aux is None else aux.shape[1]
    tokens, indices = torch.empty((2, batch), dtype=torch.int64, device=slots.device)
    indices32 = torch.empty(batch, dtype=torch.int32, device=slots.device)
    table = torch.empty((batch, columns), dtype=torch.int32, device=slots.device)
    root_aux = None if aux is None else torch.empty((batch, size), dtype=aux.dtype, device=slots.device)
    read_slots_kernel[(batch, triton.cdiv(max(columns, size), _BLOCK))](
        slots,
        last_tokens,
        lengths,
        block_table,
        table if aux is None else aux,
        tokens,
        indices,
        indices32,
        table,
        table if aux is None else root_aux,
        columns,
        size,
        block_table.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
        **early_options(),
    )
    return tokens, indices, indices32, table, root_aux


def place_nodes(
    last_indices: Tensor, depths: Tensor, table: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `tokenspeed.kernels.place_nodes`."""
    batch, nodes = depths.shape
    found = torch.empty((3, batch, nodes), dtype=torch.int64, device=depths.device).unbind()
    place_nodes_kernel[(batch,)](
        last_indices,
        depths,
        table,
        *found,
        nodes,
        page_size,
        table.shape[1],
        BLOCK_N=_nodes(nodes),
        num_warps=1,
        **early_options(),
    )
    return found


def accept(
    tokens: Tensor, parents: Tensor, depths: Tensor, mask: Tensor, sampled: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `tokenspeed.kernels.accept`."""
    batch, nodes = tokens.shape
    path, emitted = torch.empty((2, batch, width), dtype=torch.int64, device=tokens.device)
    count = torch.empty(batch, dtype=torch.int64, device=tokens.device)
    failed = torch.empty(batch, dtype=torch.bool, device=tokens.device)
    accept_kernel[(batch,)](
        *(x.contiguous() for x in (tokens, parents, depths, mask, sampled)),
        path,
        count,
        emitted,
        failed,
        nodes,
        width,
        BLOCK_N=_nodes(nodes),
        BLOCK_W=_nodes(width),
        num_warps=4 if nodes > 16 else 1,
        **early_options(),
    )
    return path, count, emitted, failed


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
    """See `tokenspeed.kernels.commit`."""
    batch, width = path.shape
    found = torch.empty((4, batch, width), dtype=torch.int64, device=path.device).unbind()
    commit_kernel[(batch,)](
        slots,
        last_indices,
        table,
        kv_slots,
        path,
        count,
        tokens,
        last_tokens,
        lengths,
        *found,
        kv_slots.shape[1],
        width,
        page_size,
        table.shape[1],
        len(lengths) - 1,
        BLOCK_W=_nodes(width),
        num_warps=1,
        **early_options(),
    )
    return found


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
    """See `tokenspeed.kernels.keep_aux`."""
    batch, nodes, size = aux.shape
    width = path.shape[1]
    out = torch.empty((batch, width, size), dtype=aux.dtype, device=aux.device)
    keep_aux_kernel[(batch * width, triton.cdiv(size, _BLOCK))](
        aux,
        slots,
        path,
        count,
        target,
        slot_aux,
        page_aux,
        out,
        nodes,
        width,
        size,
        page_size,
        BLOCK=_BLOCK,
        num_warps=4,
        **early_options(),
    )
    return out


def _nodes(count: int) -> int:
    """Few sizes of blocks, so that few kernels are compiled."""
    return 16 if count <= 16 else 64
