"""The partial softmaxes of programs that share one tile's keys: how many there are, and their combination in Triton."""

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
    wanted = triton.cdiv(2 * num_processors(device), programs)
    return max(1, min(wanted, triton.cdiv(longest, _MIN_KEYS), _MAX_SPLITS))


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
