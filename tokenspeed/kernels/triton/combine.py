"""The partial softmaxes of programs that share one tile's keys: how many there are, and their combination in Triton."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenspeed.kernels.triton.flash import head_block, num_processors
from tokenspeed.kernels.triton.pdl import has_pdl, launch_options, wait_early

_MIN_KEYS = 128  # keys below which a split is not worth its combination
_MAX_SPLITS = 64
_CHUNK = 16  # splits that a program has on the way at a time


class Parts(NamedTuple):
    """What attention leaves of T rows of H heads.

    out: [T, H, D], contiguous; with one split it is there, with more it is for `combine` to fill.
    acc, peak, total: float32 [T, H, splits, ...] of D, 1 and 1 numbers, flat. used: int32 [T, H], flat: the splits that
    were written, at least one and the first ones.
    """

    out: Tensor
    acc: Tensor
    peak: Tensor
    total: Tensor
    used: Tensor
    splits: int


@triton.jit
def fold_splits(
    part_acc,
    part_peak,
    part_total,
    row,
    start,
    readable,
    used,
    dims,
    num_splits,
    peak,
    total,
    acc,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Folds splits start.. of rows into their running softmax, one after another.

    row, readable, used [P]: a row's number, and how many of its splits may be read and count (none: the row is not
    there). dims [D]. peak, total [P] and acc [P, D] as in flash.softmax_step. Peaks are whole numbers, so that weights
    and rescaling are exact, and the result does not depend on CHUNK.
    """
    first = row * num_splits + start
    highest = peak
    for i in tl.static_range(CHUNK):
        value = tl.load(part_peak + first + i, start + i < readable, float("-inf"))
        highest = tl.maximum(highest, tl.where(start + i < used, value, float("-inf")))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    decay = tl.exp2(peak - base)
    total, acc = total * decay, acc * decay[:, None]
    for i in tl.static_range(CHUNK):
        read, counts = start + i < readable, start + i < used
        value = tl.load(part_peak + first + i, read, float("-inf"))
        weight = tl.exp2(tl.where(counts, value, float("-inf")) - base)
        total += tl.where(counts, tl.load(part_total + first + i, read, 0.0), 0.0) * weight
        at = part_acc + (first + i)[:, None] * DIM + dims[None, :]
        part = tl.load(at, read[:, None] & (dims < DIM)[None, :], 0.0)
        acc += tl.where(counts[:, None], part, 0.0) * weight[:, None]
    return highest, total, acc


@triton.jit
def combine_kernel(
    part_acc,
    part_peak,
    part_total,
    part_used,
    out,
    num_splits,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds the parts of a row in their order."""
    wait_early(PDL)
    row, dims = tl.program_id(0).to(tl.int64) + tl.arange(0, 1), tl.arange(0, BLOCK_D)
    used = tl.load(part_used + row)
    peak = tl.full([1], float("-inf"), tl.float32)
    total, acc = tl.zeros([1], tl.float32), tl.zeros([1, BLOCK_D], tl.float32)
    for start in range(0, tl.max(used, 0), CHUNK):
        peak, total, acc = fold_splits(
            part_acc,
            part_peak,
            part_total,
            row,
            start,
            used,
            used,
            dims,
            num_splits,
            peak,
            total,
            acc,
            DIM,
            CHUNK,
        )
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    at = out + row[:, None] * DIM + dims[None, :]
    tl.store(at, result.to(out.dtype.element_ty), (dims < DIM)[None, :])


def num_splits(programs: int, longest: int, device: torch.device) -> int:
    """Programs that share the keys of one tile: two waves of the GPU, of _MIN_KEYS keys or more each."""
    wanted = triton.cdiv(2 * num_processors(device), programs)
    return max(1, min(wanted, triton.cdiv(longest, _MIN_KEYS), _MAX_SPLITS))


def combine(parts: Parts) -> Tensor:
    """The softmax of whole rows: parts.out."""
    out, acc, peak, total, used, splits = parts
    if splits > 1:
        pdl, dim = has_pdl(), out.shape[-1]
        combine_kernel[(out.shape[0] * out.shape[1],)](
            acc,
            peak,
            total,
            used,
            out,
            splits,
            DIM=dim,
            CHUNK=min(_CHUNK, triton.next_power_of_2(splits)),
            BLOCK_D=head_block(dim),
            PDL=pdl,
            num_warps=1,
            **launch_options(pdl),
        )
    return out
