"""Growing and building draft trees in Triton: one program a request, one launch a draft step and one a tree.

Numbers of nodes are small, so the best are picked one by one, or ranked by counting who comes before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.triton.pdl import early_options, wait_early

_LOW = tl.constexpr(-1e30)  # stands for -inf among what can still be picked; -inf is what was picked


@triton.jit(do_not_specialize=["total", "step", "k", "rows", "last"])
def grow_tree_kernel(
    tokens,
    logprobs,
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
    total,
    step,
    k,
    rows,
    last,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Records the k children of each of the rows, and picks of them all the k best as lanes."""
    wait_early(PDL)
    request = tl.program_id(0).to(tl.int64)
    row, child = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    own = request * rows + row
    mine = (row < rows)[:, None] & (child < k)[None, :]
    at = own[:, None] * k + child[None, :]
    value = tl.load(logprobs + at, mine, 0.0)
    value = tl.where(value == value, tl.minimum(tl.maximum(value, _LOW), 0.0), _LOW)
    value += tl.load(lane_scores + own, (row < rows) & (step > 0), 0.0)[:, None]
    value = tl.maximum(value, _LOW)
    token = tl.load(tokens + at, mine, 0)
    parent = tl.load(lanes + own, (row < rows) & (step > 0), -1)
    base = tl.where(step == 0, 0, k + (step - 1) * k * k)
    flat = row[:, None] * k + child[None, :]
    out = request * total + base + flat
    tl.store(all_tokens + out, token, mine)
    tl.store(all_scores + out, tl.where(value <= _LOW, float("-inf"), value), mine)
    tl.store(all_parents + out, tl.broadcast_to(parent[:, None], (BLOCK_R, BLOCK_K)), mine)
    if last == 0:
        value = tl.where(mine, value, float("-inf"))
        picked = tl.zeros((BLOCK_K,), tl.int32)
        score = tl.zeros((BLOCK_K,), tl.float32)
        for i in range(k):
            top = tl.max(tl.max(value, 1), 0)
            where = tl.min(tl.min(tl.where(value == top, flat, BLOCK_R * BLOCK_K * BLOCK_K), 1), 0)
            picked = tl.where(child == i, where, picked)
            score = tl.where(child == i, top, score)
            value = tl.where(flat == where, float("-inf"), value)
        inside = child < k
        parents = picked // k  # rows of this step
        mask = tl.load(lane_mask + request * rows + parents, inside & (step > 0), 0)
        bit = tl.full((BLOCK_K,), 1, tl.int64) << (step * k + child).to(tl.int64)
        to = request * k + child
        tl.store(next_tokens + to, tl.load(tokens + request * rows * k + picked, inside, 0), inside)
        tl.store(next_rows + to, parents.to(tl.int64), inside)
        tl.store(next_mask + to, mask | bit, inside)
        tl.store(next_lanes + to, (base + picked).to(tl.int64), inside)
        tl.store(next_scores + to, tl.where(score <= _LOW, float("-inf"), score), inside)


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
    """Ranks a request's candidates, keeps nodes - 1 of them, and numbers these depth-first."""
    wait_early(PDL)
    request = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, COUNT)
    scores = all_scores + request * total
    mine = tl.load(scores + every, every < total, float("-inf"))
    tl.store(nan + request, tl.max(((mine == float("-inf")) & (every < total)).to(tl.int32), 0) != 0)
    rank = tl.zeros((COUNT,), tl.int32)  # how many candidates come before
    for start in range(0, COUNT, 16):
        other = start + tl.arange(0, 16)
        value = tl.load(scores + other, other < total, float("-inf"))
        tie = (value[None, :] == mine[:, None]) & (other[None, :] < every[:, None])
        rank += tl.sum(((value[None, :] > mine[:, None]) | tie).to(tl.int32), 1)
    kept = scratch + request * 3 * BLOCK_N  # candidates by rank; then masks and parents, for others to read
    masks, ups = kept + BLOCK_N, kept + 2 * BLOCK_N
    ranks += request * total
    tl.store(ranks + every, tl.where(rank < nodes - 1, rank + 1, 0), every < total)  # the root has 0
    tl.store(kept + 1 + rank, every.to(tl.int64), (rank < nodes - 1) & (every < total))
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


def _block(size: int) -> int:
    """Few sizes of blocks, so that few kernels are compiled."""
    return 4 if size <= 4 else triton.next_power_of_2(max(size, 16))


def grow_tree(
    tokens: Tensor,
    logprobs: Tensor,
    lanes: tuple[Tensor, Tensor, Tensor] | None,
    candidates: tuple[Tensor, Tensor, Tensor],
    step: int,
    last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """See `tokenspeed.kernels.grow_tree`."""
    batch, rows, k = tokens.shape
    numbers = (
        [] if last else [torch.empty((batch, k), dtype=torch.int64, device=tokens.device) for _ in range(4)]
    )
    found = None if last else (*numbers, torch.empty((batch, k), dtype=torch.float32, device=tokens.device))
    nothing = (candidates[2], candidates[1], candidates[2])  # neither read nor written
    grow_tree_kernel[(batch,)](
        tokens.contiguous(),
        logprobs.contiguous(),
        *(x.contiguous() for x in lanes or nothing),
        *candidates,
        *(found or (candidates[2],) * 4 + (candidates[1],)),
        candidates[0].shape[1],
        step,
        k,
        rows,
        int(last),
        BLOCK_R=_block(rows),
        BLOCK_K=_block(k),
        num_warps=4,
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
        COUNT=128 if total <= 128 else 1024,
        BLOCK_N=block,
        num_warps=4,
        **early_options(),
    )
    return tuple(found)
