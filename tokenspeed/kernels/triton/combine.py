"""The partial softmaxes of programs that share one tile's keys: how many there are, and their combination in Triton."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.flash import head_block, num_processors
from tokenspeed.kernels.triton.pdl import has_pdl, launch_options

_MIN_KEYS = 128  # keys below which a split is not worth its combination
_MAX_SPLITS = 64
_CHUNK = 32  # splits combined at a time
_MERGED = 16  # parts of a row on their way at a time, where the last program combines
_WAVES = 2


@triton.jit
def arrives_last(counter, programs):
    """Whether this is the last of so many programs to come here. It sees what all of them stored, and leaves a zero.

    The counter is touched after PDL's wait only, so a launch finds what the one before has left.
    """
    tl.debug_barrier()  # all threads have stored before one of them says so
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    tl.debug_barrier()  # and none reads before that one knows
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def merge_parts(
    part_acc,
    part_peak,
    part_total,
    first,
    present,
    used,
    DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Softmax of whole rows, float32 [R, D], of parts first [R] and the used - 1 behind it. CHUNK changes no bits."""
    splits, dims = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    # By L2, where other multiprocessors' stores are: L1 may hold something older.
    peaks = tl.load(
        part_peak + first[:, None] + splits[None, :],
        present[:, None] & (splits < used)[None, :],
        float("-inf"),
        cache_modifier=".cg",
    )
    peak = tl.max(peaks, 1)
    # Below, peaks and totals are read for each dim, and values one by one, so that all three have one layout: else a
    # row's weight would go by shared memory, and every part wait for the one before at a barrier.
    parts = first[:, None] + tl.zeros_like(dims)[None, :]
    base = tl.where(peak == float("-inf"), 0.0, peak)[:, None] + tl.zeros([1, BLOCK_D], tl.float32)
    total = tl.zeros_like(base)
    acc = tl.zeros_like(base)
    tile = present[:, None] & (dims < DIM)[None, :]
    for start in range(0, used, CHUNK):
        for i in tl.static_range(CHUNK):
            part, there = parts + start + i, tile & (start + i < used)
            weight = tl.exp2(tl.load(part_peak + part, there, float("-inf"), cache_modifier=".cg") - base)
            total += tl.load(part_total + part, there, 0.0, cache_modifier=".cg") * weight
            at = tl.max_contiguous(part * DIM + dims[None, :], [1, 1])
            acc += tl.load(part_acc + at, there, 0.0, cache_modifier=".cg") * weight
    return acc / tl.where(total > 0.0, total, 1.0)


@triton.jit
def combine_kernel(
    part_acc,
    part_peak,
    part_total,
    out,
    num_splits,
    DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds the parts of a row in their order. Those that saw nothing have a total of 0 and perhaps no acc."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.program_id(0).to(tl.int64) * num_splits
    splits, dims = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_D)
    peaks = tl.load(part_peak + first + splits, splits < num_splits, float("-inf"))
    totals = tl.load(part_total + first + splits, splits < num_splits, 0.0)
    peak = tl.max(peaks, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(peaks - base) * totals, 0)
    used = tl.max(tl.where(totals != 0.0, splits + 1, 0), 0)  # NaN counts: it must come through
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, used, CHUNK):
        some = start + tl.arange(0, CHUNK)
        weights = tl.exp2(tl.load(part_peak + first + some, some < used, float("-inf")) - base)
        holds = tl.load(part_total + first + some, some < used, 0.0) != 0.0
        at = part_acc + (first + some)[:, None] * DIM + dims[None, :]
        part = tl.load(at, holds[:, None] & (dims < DIM)[None, :], 0.0)
        acc += tl.sum(part * weights[:, None], 0)
    result = acc / tl.where(total > 0.0, total, 1.0)
    row = tl.program_id(0).to(tl.int64) * DIM
    tl.store(out + row + dims, result.to(out.dtype.element_ty), dims < DIM)


def num_splits(programs: int, longest: int, device: torch.device) -> int:
    """Programs that share the keys of one tile: two waves of the GPU, of _MIN_KEYS keys or more each."""
    wanted = triton.cdiv(_WAVES * num_processors(device), programs)
    return max(1, min(wanted, triton.cdiv(longest, _MIN_KEYS), _MAX_SPLITS))


def merge_chunk(block_rows: int) -> int:
    """Parts on their way at a time where a program combines a tile: they are all in registers."""
    return max(1, min(_MERGED, 64 // block_rows))


@functools.cache
def arrivals(device: torch.device) -> Tensor:
    """A GPU's counters of programs that have arrived: int32 zeros, one for each tile that is split (see num_splits).

    All launches share them, so those that use them must come one after another, by one stream or one graph at a time.

    Raises:
        RuntimeError: it is a graph's capture that asks first; zeros would be there when the graph is replayed.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("attention must have run once before it is captured in a CUDA graph")
    return torch.zeros(_WAVES * num_processors(device), dtype=torch.int32, device=device)


def combine(acc: Tensor, peak: Tensor, total: Tensor, out: Tensor, splits: int) -> None:
    """Writes the softmax of whole rows.

    Args:
        acc, peak, total: float32, of each row and split in turn: D, 1 and 1 numbers; acc of a split that saw nothing
            (total 0) is not read. out: [T, H, D], contiguous, T * H rows.
    """
    dim, pdl, block_splits = out.shape[-1], has_pdl(), triton.next_power_of_2(splits)
    combine_kernel[(out.shape[0] * out.shape[1],)](
        acc,
        peak,
        total,
        out,
        splits,
        DIM=dim,
        BLOCK_SPLITS=block_splits,
        CHUNK=min(_CHUNK, block_splits),
        BLOCK_D=head_block(dim),
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
