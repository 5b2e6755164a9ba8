"""The CUDA C++ kernels of csrc, by ctypes: checks, and whether they may run on this GPU."""

import ctypes
import functools

import torch
from torch import Tensor

from tokenspeed.kernels import reference
from tokenspeed.kernels.build import ARCHITECTURES, library_path

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_MAX_VECTORS = 4096  # 16 bytes each: 4 a thread of 1024


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    pointer, wide = ctypes.c_void_p, ctypes.c_int64
    library.tokenspeed_add_rms_norm.argtypes = [
        *[pointer] * 4,
        *[wide] * 3,
        ctypes.c_int,
        ctypes.c_float,
        ctypes.c_int,
        pointer,
    ]
    library.tokenspeed_add_rms_norm.restype = ctypes.c_int
    return library


@functools.cache
def ready() -> bool:
    """Whether the library is built, has code for this GPU and gives the reference's values on it."""
    if torch.version.cuda is None or not torch.cuda.is_available() or not library_path().exists():
        return False
    major, minor = torch.cuda.get_device_capability()
    if f"{major}{minor}a" not in ARCHITECTURES:
        return False
    generator = torch.Generator().manual_seed(0)
    for dtype in _DTYPES:
        x, residual, weight = (torch.randn(n, 256, generator=generator).to(dtype) for n in (5, 5, 1))
        on_gpu = [t.cuda() for t in (x, residual, weight[0])]
        got = add_rms_norm(*on_gpu, 1e-5).cpu()
        want = reference.add_rms_norm(x, residual, weight[0], 1e-5)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        if not torch.equal(on_gpu[1].cpu(), residual) or not torch.allclose(got, want, tolerance, tolerance):
            return False
    return True


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `tokenspeed.kernels.add_rms_norm`.

    Raises:
        ValueError: a shape, dtype or alignment that the kernel does not take.
        RuntimeError: CUDA refused the launch.
    """
    rows, size = x.shape
    vector = 16 // x.dtype.itemsize
    if x.dtype not in _DTYPES or {residual.dtype, weight.dtype} != {x.dtype}:
        raise ValueError(f"add_rms_norm needs one dtype of {list(_DTYPES)}")
    if residual.shape != x.shape or weight.shape != (size,) or size % vector or size > _MAX_VECTORS * vector:
        raise ValueError(f"add_rms_norm takes no shapes {[*x.shape]}, {[*residual.shape]}, {[*weight.shape]}")
    if any(t.data_ptr() % 16 or t.stride(-1) != 1 or t.stride(0) % vector for t in (x, residual)):
        raise ValueError("add_rms_norm needs rows that start on 16 bytes")
    if (
        not weight.is_contiguous()
        or weight.data_ptr() % 16
        or len({t.device for t in (x, residual, weight)}) > 1
    ):
        raise ValueError("add_rms_norm needs an aligned weight on the device of x")
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    stream = torch.cuda.current_stream(x.device).cuda_stream
    with torch.cuda.device(x.device):
        code = _library().tokenspeed_add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            x.stride(0),
            residual.stride(0),
            size,
            eps,
            _DTYPES[x.dtype],
            stream,
        )
    if code:
        raise RuntimeError(f"add_rms_norm: CUDA error {code}")
    return out
