"""Growing and building draft trees in Triton: one program a request, one launch a draft step and one a tree.

A step ranks the candidates of its rows, whose best are children, and picks the next lanes of the children.

Lanes are few, so they are picked one by one. A tree's nodes are the best of many candidates (select.py), which are
then ranked by counting who comes before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.rows import Draw
from tokenspeed.kernels.triton.noise import token_noise
from tokenspeed.kernels.triton.pdl import early_options, wait_early
from tokenspeed.kernels.triton.select import best_of, sort_keys, threshold_of

_LOW = tl.constexpr(-1e30)  # stands for -inf and NaN
_TAKEN = tl.constexpr(-(2**63))  # below every sortable score
_COLDEST = tl.constexpr(1e-5)  # temperatures below it mean the best token
_COUNTS = (
    128,
    256,
    1024,
    8192,
)  # candidates of a tree that kernels are compiled for; the most are 64 + 64 * 64
_FILTERED = tl.constexpr(10.0)  # taken off a candidate that the request's filters would drop


@triton.jit
def _sortable(x, place):
    """Whole numbers that sort as float32 `x` does, equal ones by the lower place first; x has no NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # one zero
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _drawn_scores(
    x,
    ids,
    scores,
    heat,
    most,
    nucleus,
    floor,
    seed,
    position,
    rows,
    count,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Scores x [BLOCK_R, BLOCK_C] with the noise of their tokens, less 10 where the filters would drop one if there
    were no tokens but these.
    """
    row, column = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    lost = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for r in range(rows):  # each [C, C], which is too much for all at once
        cool = tl.load(scores + r * count + column, column < count, float("-inf")) / heat
        peak = tl.max(cool, 0)
        mass = tl.exp(cool - peak)
        above = cool[None, :] > cool[:, None]  # [i, j]: j is better than i
        dropped = (most > 0) & (tl.sum(above.to(tl.int32), 1) >= most)
        before = tl.sum(tl.where(above, mass[None, :], 0.0), 1)
        limit = tl.where(nucleus < 1.0, nucleus * tl.sum(mass, 0), float("inf"))
        dropped = dropped | (before >= limit) | (cool < peak + tl.log(floor))
        lost = tl.where(row[:, None] == r, tl.where(dropped, _FILTERED, 0.0)[None, :], lost)
    return x + (heat * token_noise(ids, seed, position) - lost)


@triton.jit(do_not_specialize=["total", "step", "k", "rows", "last", "depth"])
def grow_tree_kernel(
    scores,
    ids,
    share,
    lanes,
    lane_scores,
    lane_mask,
    all_tokens,
    all_scores,
    all_parents,
    next_tokens,
    next_rows,
    next_mask,
    next_lanes,
    next_scores,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    slots,
    positions,
    depth,
    total,
    step,
    k,
    rows,
    count,
    last,
    DRAWN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Picks the k best candidates of each row as its children, records them, and picks of them all k lanes.

    A candidate stays where it was loaded, and learns of its rank and its lane: who has one stores itself.
    """
    wait_early(PDL)
    request = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    own = request * rows + row
    real = row < rows
    later = real & (step > 0)  # rows that are lanes
    valid = real[:, None] & (column < count)[None, :]
    at = own[:, None] * count + column[None, :]
    x = tl.load(scores + at, valid, float("-inf"))
    token = tl.load(ids + at, valid, 0)
    mass = tl.load(share + own, real, 0.0)
    above = tl.load(lane_scores + own, later, 0.0)
    parent = tl.load(lanes + own, later, -1)
    mask = tl.load(lane_mask + own, later, 0)
    if DRAWN:
        slot = tl.load(slots + request)
        heat = tl.load(temperature + slot)
        if heat >= _COLDEST:
            most, nucleus, floor = tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)
            seed, position = tl.load(seeds + slot), tl.load(positions + request) + depth
            mine = scores + request * rows * count
            x = _drawn_scores(
                x, token, mine, heat, most, nucleus, floor, seed, position, rows, count, BLOCK_R, BLOCK_C
            )

    value = tl.where(x == x, tl.maximum(x, _LOW), _LOW)
    peak = tl.max(value, 1)
    norm = mass - peak - tl.log(tl.sum(tl.exp(x - peak[:, None]), 1))  # a NaN reaches it
    key = tl.where(valid, _sortable(value, column[None, :]), _TAKEN)
    rank = tl.full((BLOCK_R, BLOCK_C), -1, tl.int32)
    for i in range(k):
        best = valid & (key == tl.max(key, 1)[:, None])
        rank = tl.where(best, i, rank)
        key = tl.where(best, _TAKEN, key)

    child = rank >= 0
    logprob = tl.where(value > _LOW, value + norm[:, None], _LOW)
    logprob = tl.where(logprob == logprob, tl.minimum(tl.maximum(logprob, _LOW), 0.0), _LOW)
    value = tl.maximum(logprob + above[:, None], _LOW)
    score = tl.where(value <= _LOW, float("-inf"), value)
    base = tl.where(step == 0, 0, k + (step - 1) * k * k)
    flat = row[:, None] * k + rank
    out = request * total + base + flat
    tl.store(all_tokens + out, token, child)
    tl.store(all_scores + out, score, child)
    tl.store(all_parents + out, tl.broadcast_to(parent[:, None], (BLOCK_R, BLOCK_C)), child)
    if last == 0:
        key = tl.where(child, _sortable(value, flat), _TAKEN)
        lane = tl.full((BLOCK_R, BLOCK_C), -1, tl.int32)
        for i in range(k):
            best = child & (key == tl.max(tl.max(key, 1), 0))
            lane = tl.where(best, i, lane)
            key = tl.where(best, _TAKEN, key)
        picked = lane >= 0
        bit = tl.full((BLOCK_R, BLOCK_C), 1, tl.int64) << tl.where(picked, step * k + lane, 0).to(tl.int64)
        to = request * k + lane
        tl.store(next_tokens + to, token, picked)
        tl.store(next_rows + to, tl.broadcast_to(row[:, None], (BLOCK_R, BLOCK_C)).to(tl.int64), picked)
        tl.store(next_mask + to, mask[:, None] | bit, picked)
        tl.store(next_lanes + to, (base + flat).to(tl.int64), picked)
        tl.store(next_scores + to, score, picked)


@triton.jit(do_not_specialize=["total", "nodes"])
def build_tree_kernel(
    root,
    all_tokens,
    all_scores,
    all_parents,
    ranks,
    scratch,
    tokens,
    parents,
    depths,
    mask,
    nan,
    total,
    nodes,
    COUNT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keeps a request's nodes - 1 best candidates, ranks them, and numbers them depth-first."""
    wait_early(PDL)
    request = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, COUNT)
    mine = tl.load(all_scores + request * total + every, every < total, float("-inf"))
    tl.store(nan + request, tl.max(((mine == float("-inf")) & (every < total)).to(tl.int32), 0) != 0)
    kept = scratch + request * 3 * BLOCK_N  # candidates by rank; then masks and parents, for others to read
    masks, ups = kept + BLOCK_N, kept + 2 * BLOCK_N
    lowest = -4294967296  # below the key of -inf, which candidates may have
    keys = tl.where(every < total, sort_keys(mine + 0.0, False), lowest)  # one zero
    low = tl.min(tl.where(every < total, keys, -lowest), 0)
    chosen = best_of(keys, threshold_of(keys, low, tl.max(keys, 0), nodes - 1), nodes - 1)
    tl.store(masks + tl.cumsum(chosen.to(tl.int32), 0) - 1, every.to(tl.int64), chosen)
    tl.debug_barrier()
    spot = tl.arange(0, BLOCK_N)
    held = spot < nodes - 1
    number = tl.load(masks + spot, held, 0)
    value = tl.load(all_scores + request * total + number, held, float("-inf"))
    tl.store(ups + spot, value.to(tl.int32, bitcast=True).to(tl.int64))
    tl.debug_barrier()
    others_value = tl.load(ups + spot).to(tl.int32).to(tl.float32, bitcast=True)
    tie = (others_value[None, :] == value[:, None]) & (spot[None, :] < spot[:, None])
    before = ((others_value[None, :] > value[:, None]) | tie) & held[None, :]
    rank = tl.sum(before.to(tl.int32), 1)
    ranks += request * total
    tl.store(ranks + number, rank + 1, held)  # the root has 0; a candidate is kept with its parent
    tl.store(kept + 1 + rank, number, held)
    tl.debug_barrier()

    node = tl.arange(0, BLOCK_N)
    real = node < nodes
    candidate = tl.load(kept + node, real & (node > 0), 0)
    above = tl.load(all_parents + request * total + candidate, real & (node > 0), -1)
    above = tl.load(ranks + above, above >= 0, 0)
    line = tl.full((BLOCK_N,), 1, tl.int64) << node.to(tl.int64)  # bit j: node j (by rank) is an ancestor
    up = above
    for _ in tl.static_range(5):  # twice as far up each time
        tl.store(masks + node, line)
        tl.store(ups + node, up.to(tl.int64))
        tl.debug_barrier()
        line |= tl.load(masks + up)
        up = tl.load(ups + up).to(tl.int32)
        tl.debug_barrier()

    lineage = ((line[:, None] >> node.to(tl.int64)[None, :]) & 1) * (real[:, None] & real[None, :]).to(
        tl.int64
    )
    sizes = tl.sum(lineage, 0)
    tl.store(masks + node, sizes)
    tl.store(ups + node, above.to(tl.int64))
    tl.debug_barrier()
    other_sizes, other_above = tl.load(masks + node), tl.load(ups + node)
    # Depth-first, a node comes after its ancestors and all subtrees of their, and its own, better siblings.
    better = (above[:, None] == other_above[None, :]) & (node[None, :] < node[:, None]) & (node[None, :] > 0)
    before = tl.sum(tl.where(better, other_sizes[None, :], 0), 1) + (node > 0).to(tl.int64)
    tl.debug_barrier()
    tl.store(masks + node, before)
    tl.debug_barrier()
    place = tl.sum(lineage * tl.load(masks + node)[None, :], 1)
    tl.debug_barrier()
    tl.store(ups + node, place)
    tl.debug_barrier()
    others = tl.load(ups + node)
    out = request * nodes + place
    token = tl.load(all_tokens + request * total + candidate, real & (node > 0), 0)
    tl.store(tokens + out, tl.where(node == 0, tl.load(root + request), token), real)
    tl.store(parents + out, tl.load(ups + above), real)
    tl.store(depths + out, tl.sum(lineage, 1) - 1, real)
    tl.store(mask + out, tl.sum(lineage << others[None, :], 1), real)


def grow_tree(
    scores: Tensor,
    ids: Tensor,
    share: Tensor,
    k: int,
    lanes: tuple[Tensor, Tensor, Tensor] | None,
    candidates: tuple[Tensor, Tensor, Tensor],
    step: int,
    last: bool,
    draw: Draw | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """See `tokenspeed.kernels.grow_tree`."""
    batch, count, device = candidates[0].shape[0], scores.shape[1], scores.device
    rows = len(scores) // batch
    found = None
    if not last:
        numbers = [torch.empty((batch, k), dtype=torch.int64, device=device) for _ in range(4)]
        found = (*numbers, torch.empty((batch, k), dtype=torch.float32, device=device))
    nothing = (candidates[2], candidates[1], candidates[2])  # neither read nor written
    noise = (share, ids, share, share, ids, ids, ids, 0)
    if draw is not None:
        settings = (draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.seeds)
        noise = (*settings, draw.slots, draw.positions, draw.depth)
    block_r = 4 if rows <= 4 else triton.next_power_of_2(max(rows, 16))  # few sizes, few kernels to compile
    block_c = triton.next_power_of_2(count)
    grow_tree_kernel[(batch,)](
        scores.contiguous(),
        ids.contiguous(),
        share,
        *(x.contiguous() for x in lanes or nothing),
        *candidates,
        *(found or (candidates[2],) * 4 + (candidates[1],)),
        *noise,
        candidates[0].shape[1],
        step,
        k,
        rows,
        count,
        int(last),
        DRAWN=draw is not None,
        BLOCK_R=block_r,
        BLOCK_C=block_c,
        num_warps=1 if draw is None and block_r * block_c <= 256 else 4,  # within one warp nothing waits
        **early_options(),
    )
    return found


def build_tree(
    root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `tokenspeed.kernels.build_tree`."""
    batch, total = tokens.shape
    block = 16 if nodes <= 16 else 64
    ranks = torch.empty((batch, total), dtype=torch.int32, device=root.device)
    scratch = torch.empty((batch, 3, block), dtype=torch.int64, device=root.device)
    found = [torch.empty((batch, nodes), dtype=torch.int64, device=root.device) for _ in range(4)]
    found.append(torch.empty(batch, dtype=torch.bool, device=root.device))
    build_tree_kernel[(batch,)](
        root,
        tokens,
        scores,
        parents,
        ranks,
        scratch,
        *found,
        total,
        nodes,
        COUNT=next(size for size in _COUNTS if total <= size),
        BLOCK_N=block,
        num_warps=4,
        **early_options(),
    )
    return tuple(found)
