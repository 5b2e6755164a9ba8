"""The products of few rows and the norm that adds their sums in CUDA C++ (csrc), where a product has its shape.

Triton's kernels serve the rest: more than MOST_ROWS rows, small weights, sizes that no tile divides.
"""

import functools

import torch
from torch import Tensor

from tokenspeed.kernels import cuda, reference_few_rows
from tokenspeed.kernels.triton import few_rows, norm
from tokenspeed.kernels.triton.pdl import has_pdl

MOST_ROWS = 16
_DTYPES = {torch.float16: 1, torch.bfloat16: 2}
# As ops/few_rows.cu numbers and cuts them: weight rows, those of the output, and K of a tile.
_TILES = {"linear_rows": (0, 32, 256), "linear_sums": (1, 64, 128), "gate_up_silu": (2, 64, 128)}
_LEAST_BYTES = 2**23  # of a weight: below, all blocks together would not keep the memory busy
_LEAST_SIZE = 2048  # of a norm: below, one program a row is as fast
_NORM_PARTS, _MOST_SPLITS = 32, 4  # as add_partials_rms_norm.cuh cuts a row, and the sums it adds


@functools.cache
def ready() -> bool:
    """Whether these are built and give the reference's values on this GPU."""
    if not cuda.built():
        return False
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    for dtype in _DTYPES:
        for rows, (num_out, size) in ((1, (2048, 2048)), (7, (2112, 2304)), (16, (2048, 2304))):
            x, weight = normal(rows, size).to(dtype), (normal(2 * num_out, size) / size**0.5).to(dtype)
            residual, gain = normal(rows, size), normal(size).to(dtype)
            wanted, partials = residual.clone(), normal(4, rows, size)
            pairs = [(linear_sums(x, weight).sum(0), reference_few_rows.linear_sums(x, weight).sum(0))]
            pairs += [
                (fn(x, weight), getattr(reference_few_rows, fn.__name__)(x, weight))
                for fn in (linear_rows, gate_up_silu)
            ]
            normed = add_partials_rms_norm(partials, residual, gain, 1e-5)
            want = reference_few_rows.add_partials_rms_norm(partials, wanted, gain, 1e-5)
            pairs += [(normed, want), (residual, wanted)]
            if not all(torch.allclose(got.float(), want.float(), 2e-2, 2e-2) for got, want in pairs):
                return False
    return True


def linear_rows(x: Tensor, weight: Tensor, pdl: bool | None = None) -> Tensor:
    """See `tokenspeed.kernels.linear_rows`. pdl: started early; None: where the GPU can."""
    num_out, size = weight.shape
    if not _takes("linear_rows", x, weight, num_out):
        return few_rows.linear_rows(x, weight, pdl=pdl)
    out = torch.empty((x.shape[0], num_out), dtype=x.dtype, device=x.device)
    return _launch("linear_rows", x, weight, out, size, pdl)


def linear_sums(x: Tensor, weight: Tensor, pdl: bool | None = None) -> Tensor:
    """See `tokenspeed.kernels.linear_sums`; S is that of Triton's kernel. pdl: as above."""
    num_out, size = weight.shape
    if not _takes("linear_sums", x, weight, num_out):
        return few_rows.linear_sums(x, weight, pdl=pdl)
    span = few_rows.span_of(size, few_rows.sums_tile(num_out, size))
    out = torch.empty((-(-size // span), x.shape[0], num_out), dtype=torch.float32, device=x.device)
    return _launch("linear_sums", x, weight, out, span, pdl)


def gate_up_silu(x: Tensor, weight: Tensor, pdl: bool | None = None) -> Tensor:
    """See `tokenspeed.kernels.gate_up_silu`. pdl: as above."""
    num_out, size = weight.shape[0] // 2, weight.shape[1]
    if not _takes("gate_up_silu", x, weight, num_out):
        return few_rows.gate_up_silu(x, weight, pdl=pdl)
    out = torch.empty((x.shape[0], num_out), dtype=x.dtype, device=x.device)
    return _launch("gate_up_silu", x, weight, out, size, pdl)


def add_partials_rms_norm(
    partials: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool | None = None
) -> Tensor:
    """See `tokenspeed.kernels.add_partials_rms_norm`. pdl: as above."""
    splits, rows, size = partials.shape
    if not (
        0 < rows <= MOST_ROWS
        and splits <= _MOST_SPLITS
        and size >= _LEAST_SIZE
        and size % _NORM_PARTS == 0
        and residual.dtype == torch.float32
        and weight.dtype in _DTYPES
        and residual.stride(1) == 1
        and residual.stride(0) % 4 == 0
        and all(t.data_ptr() % 16 == 0 for t in (partials, residual, weight))
    ):
        return norm.add_partials_rms_norm(partials, residual, weight, eps, pdl)
    out = torch.empty((rows, size), dtype=weight.dtype, device=residual.device)
    with torch.cuda.device(residual.device):
        code = cuda.library().tokenspeed_add_partials_rms_norm(
            partials.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            splits,
            rows,
            size,
            residual.stride(0),
            eps,
            _DTYPES[weight.dtype],
            has_pdl() if pdl is None else pdl,
            torch.cuda.current_stream(residual.device).cuda_stream,
        )
    if code:
        raise RuntimeError(f"add_partials_rms_norm: CUDA error {code}")
    return out


def _takes(op: str, x: Tensor, weight: Tensor, num_out: int) -> bool:
    _, cols, depth = _TILES[op]
    return (
        0 < x.shape[0] <= MOST_ROWS
        and x.dtype == weight.dtype in _DTYPES
        and weight.nbytes >= _LEAST_BYTES
        and num_out % cols == 0
        and weight.shape[1] % depth == 0
        and all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight))
    )


def _launch(op: str, x: Tensor, weight: Tensor, out: Tensor, span: int, pdl: bool | None) -> Tensor:
    early = has_pdl() if pdl is None else pdl
    with torch.cuda.device(x.device):
        code = cuda.library().tokenspeed_few_rows(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            out.shape[-1],
            x.shape[1],
            span,
            x.stride(0),
            weight.stride(0),
            _TILES[op][0],
            _DTYPES[x.dtype],
            early,
            torch.cuda.current_stream(x.device).cuda_stream,
        )
    if code:
        raise RuntimeError(f"{op}: CUDA error {code}")
    return out
