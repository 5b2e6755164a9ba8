"""Where a draft's rows stand and what its layer reads, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.triton.norm import num_warps
from tokenspeed.kernels.triton.pdl import early_options, wait_early

_BLOCK = 128


@triton.jit
def draft_rows_kernel(
    last_indices,
    prefix_lens,
    root_positions,
    indices,
    positions,
    places,
    batch,
    k,
    lanes,
    num_positions,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One request; `lanes` = (S - 1) K of it."""
    wait_early(PDL)
    request = tl.program_id(0).to(tl.int64)
    last = tl.load(last_indices + request)
    tl.store(prefix_lens + request, (last + 1).to(tl.int32))
    tl.store(root_positions + request, tl.minimum(tl.maximum(last - 1, 0), num_positions - 1))
    lane = tl.arange(0, BLOCK)
    inside, step = lane < lanes, lane // k
    index = last + 1 + step
    at = (step * batch + request) * k + lane % k
    tl.store(indices + at, index, inside)
    tl.store(positions + at, tl.minimum(tl.maximum(index - 1, 0), num_positions - 1), inside)
    tl.store(places + at, request * lanes + lane, inside)


@triton.jit
def draft_input_kernel(
    tokens,
    table,
    state,
    parents,
    token_gain,
    state_gain,
    out,
    residual,
    k,
    rows,
    eps,
    PARENTS: tl.constexpr,
    NORMED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, 0) takes the embedding, (row, 1) the state; `rows` of `state` a request."""
    wait_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    to = out + (2 * row + half) * SIZE + cols
    if half == 0:
        values = tl.load(table + tl.load(tokens + row) * SIZE + cols, inside, 0.0)
        gain = tl.load(token_gain + cols, inside, 0.0)
        tl.store(to, _rms_norm(values, gain, eps, SIZE), inside)
    else:
        source = row
        if PARENTS:
            source = row // k * rows + tl.load(parents + row)
        values = tl.load(state + source * SIZE + cols, inside, 0.0)
        gain = tl.load(state_gain + cols, inside, 0.0)
        normed = _rms_norm(values, gain, eps, SIZE)
        tl.store(to, normed, inside)
        if NORMED:
            tl.store(residual + row * SIZE + cols, normed, inside)
        else:
            tl.store(residual + row * SIZE + cols, values, inside)


@triton.jit
def _rms_norm(values, gain, eps, SIZE: tl.constexpr):
    """As rms_norm_kernel."""
    x = values.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / SIZE + eps)
    normed = (x * scale).to(values.dtype).to(tl.float32)
    return (normed * gain.to(tl.float32)).to(gain.dtype)


def draft_rows(
    last_indices: Tensor, steps: int, k: int, num_positions: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `tokenspeed.kernels.draft_rows`."""
    batch, device = len(last_indices), last_indices.device
    prefix_lens = torch.empty(batch, dtype=torch.int32, device=device)
    root = torch.empty(batch, dtype=torch.int64, device=device)
    found = torch.empty((3, steps - 1, batch, k), dtype=torch.int64, device=device).unbind()
    if (steps - 1) * k > _BLOCK:
        raise ValueError(f"a draft has at most {_BLOCK} lanes, not {(steps - 1) * k}")
    draft_rows_kernel[(batch,)](
        last_indices,
        prefix_lens,
        root,
        *found,
        batch,
        k,
        (steps - 1) * k,
        num_positions,
        BLOCK=_BLOCK,
        num_warps=4,
        **early_options(),
    )
    return prefix_lens, root, *found


def draft_input(
    tokens: Tensor,
    table: Tensor,
    state: Tensor,
    parents: Tensor | None,
    token_gain: Tensor,
    state_gain: Tensor,
    eps: float,
    normed: bool,
) -> tuple[Tensor, Tensor]:
    """See `tokenspeed.kernels.draft_input`."""
    count, size = len(tokens), state.shape[1]
    if not table.is_contiguous() or not state.is_contiguous():
        raise ValueError("draft_input needs contiguous rows")
    out = torch.empty((count, 2 * size), dtype=token_gain.dtype, device=state.device)
    kept = state_gain.dtype if normed else state.dtype
    residual = torch.empty((count, size), dtype=kept, device=state.device)
    block = triton.next_power_of_2(size)
    if count:
        draft_input_kernel[(count, 2)](
            tokens,
            table,
            state,
            tokens if parents is None else parents,
            token_gain,
            state_gain,
            out,
            residual,
            1 if parents is None else parents.shape[1],
            1 if parents is None else len(state) // len(parents),
            eps,
            PARENTS=parents is not None,
            NORMED=normed,
            SIZE=size,
            BLOCK=block,
            num_warps=num_warps(block),
            **early_options(),
        )
    return out, residual
