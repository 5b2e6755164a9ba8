"""RMSNorm, and the same after a residual add, in Triton: one program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenspeed.kernels.triton.pdl import has_pdl, launch_options


@triton.jit
def rms_norm_kernel(
    x,
    weight,
    out,
    inner,
    stride_outer,
    stride_inner,
    stride_weight,
    eps,
    PDL: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    gain = tl.load(weight + row % inner * stride_weight + cols, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(x + row // inner * stride_outer + row % inner * stride_inner + cols, inside, 0.0).to(
        tl.float32
    )
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / SIZE + eps)
    normed = (values * scale).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + cols, (normed * gain).to(out.dtype.element_ty), inside)


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, out, stride_x, stride_residual, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    added = tl.load(x + row * stride_x + cols, inside, 0.0).to(tl.float32)
    added += tl.load(residual + row * stride_residual + cols, inside, 0.0).to(tl.float32)
    kept = added.to(residual.dtype.element_ty)
    tl.store(residual + row * stride_residual + cols, kept, inside)
    values = kept.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / SIZE + eps)
    gain = tl.load(weight + cols, inside, 0.0).to(tl.float32)
    normed = (values * scale).to(residual.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + cols, (normed * gain).to(out.dtype.element_ty), inside)


@triton.jit
def add_partials_rms_norm_kernel(
    partials,
    residual,
    weight,
    out,
    stride_split,
    stride_residual,
    eps,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As add_rms_norm_kernel, of the sum of SPLITS partial sums, added in their order."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    gain = tl.load(weight + cols, inside, 0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = partials + row * SIZE + cols
    kept = tl.load(residual + row * stride_residual + cols, inside, 0.0)
    added = tl.load(at, inside, 0.0)
    for split in tl.static_range(1, SPLITS):
        added += tl.load(at + split * stride_split, inside, 0.0)
    kept = (added + kept.to(tl.float32)).to(residual.dtype.element_ty)
    tl.store(residual + row * stride_residual + cols, kept, inside)
    values = kept.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / SIZE + eps)
    normed = (values * scale).to(residual.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + cols, (normed * gain).to(out.dtype.element_ty), inside)


@triton.jit
def embed_rms_norm_kernel(ids, table, weight, residual, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < SIZE
    gain = tl.load(weight + cols, inside, 0.0).to(tl.float32)
    values = tl.load(table + tl.load(ids + row) * SIZE + cols, inside, 0.0).to(tl.float32)
    tl.store(residual + row * SIZE + cols, values, inside)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / SIZE + eps)
    tl.store(out + row * SIZE + cols, (values * scale * gain).to(out.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, pdl: bool | None = None) -> Tensor:
    """See `tokenspeed.kernels.rms_norm`. pdl: started early; None: where the GPU can."""
    pdl = has_pdl() if pdl is None else pdl
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    if not x.numel():
        return out
    size = x.shape[-1]
    inner, stride_inner = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(x.numel() // size,)](
        x,
        weight,
        out,
        inner,
        x.stride(0),
        stride_inner,
        weight.stride(0) if weight.dim() > 1 else 0,
        eps,
        PDL=pdl,
        SIZE=size,
        BLOCK=block,
        num_warps=num_warps(block),
        **launch_options(pdl),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `tokenspeed.kernels.add_rms_norm`."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=weight.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        add_rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            x.stride(0),
            residual.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            num_warps=num_warps(block),
        )
    return out


def add_partials_rms_norm(
    partials: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool | None = None
) -> Tensor:
    """See `tokenspeed.kernels.add_partials_rms_norm`. pdl: started early; None: where the GPU can."""
    pdl = has_pdl() if pdl is None else pdl
    splits, rows, size = partials.shape
    out = torch.empty((rows, size), dtype=weight.dtype, device=residual.device)
    if rows:
        block = triton.next_power_of_2(size)
        add_partials_rms_norm_kernel[(rows,)](
            partials,
            residual,
            weight,
            out,
            partials.stride(0),
            residual.stride(0),
            eps,
            SPLITS=splits,
            PDL=pdl,
            SIZE=size,
            BLOCK=block,
            num_warps=num_warps(block),
            **launch_options(pdl),
        )
    return out


def embed_rms_norm(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `tokenspeed.kernels.embed_rms_norm`."""
    rows, size = len(ids), table.shape[1]
    residual = torch.empty((rows, size), dtype=torch.float32, device=table.device)
    out = torch.empty((rows, size), dtype=weight.dtype, device=table.device)
    if not table.is_contiguous():
        raise ValueError("embed_rms_norm needs a contiguous table")
    if rows:
        block = triton.next_power_of_2(size)
        embed_rms_norm_kernel[(rows,)](
            ids, table, weight, residual, out, eps, SIZE=size, BLOCK=block, num_warps=num_warps(block)
        )
    return residual, out


def num_warps(block: int) -> int:
    return min(max(block // 512, 1), 16)
