"""Moves K/V rows between slots for all layers in one Triton launch."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK_E = 256
_MAX_GROUP = 64


@triton.jit
def move_kv_kernel(
    kv, src, dst, stride, size, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    """One program reads all of a request's moves before it writes any; columns are independent."""
    layer = tl.program_id(0).to(tl.int64)
    moves = tl.arange(0, BLOCK_M)
    cols = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    at = tl.program_id(1) * GROUP + moves
    source = tl.load(src + at, moves < GROUP, 0)
    target = tl.load(dst + at, moves < GROUP, 0)
    moving = (source != target)[:, None] & (cols < size)[None, :]
    base = kv + layer * stride + cols[None, :]
    rows = tl.load(base + source[:, None] * size, moving)
    tl.debug_barrier()  # threads of other rows must have read before this one writes
    tl.store(base + target[:, None] * size, rows, moving)


def move_kv(kv: Tensor, src: Tensor, dst: Tensor, group: int | None = None) -> None:
    """See `tokenspeed.kernels.move_kv`."""
    layers, slots, size = kv.shape
    moves = src.numel()
    group = group or moves
    if not moves or not layers:
        return
    if not kv.is_contiguous() or moves % group:
        raise ValueError(
            f"move_kv needs contiguous K/V and whole groups, not {moves} moves in groups of {group}"
        )
    if group > _MAX_GROUP:  # too many rows for one program's registers: by way of a copy
        kv.index_copy_(1, dst, kv.index_select(1, src))
        return
    move_kv_kernel[(layers, moves // group, triton.cdiv(size, _BLOCK_E))](
        kv,
        src,
        dst,
        slots * size,
        size,
        GROUP=group,
        BLOCK_M=triton.next_power_of_2(group),
        BLOCK_E=_BLOCK_E,
        num_warps=4,
    )
