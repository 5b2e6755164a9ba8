"""The CUDA C++ kernels of csrc, by ctypes: checks, and whether they may run on this GPU."""

import ctypes
import functools
import itertools

import torch
from torch import Tensor

from tokenspeed.kernels import reference
from tokenspeed.kernels.build import ARCHITECTURES, library_path

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_WIDTH = 8  # values a thread takes at a time, as add_rms_norm.cuh has it
_MAX_SIZE = 4 * 1024 * _WIDTH  # 4 times for each of 1024 threads


@functools.cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library_path()))
    pointer, wide, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    loaded.tokenspeed_add_rms_norm.argtypes = [
        *[pointer] * 4,
        *[wide] * 3,
        number,
        ctypes.c_float,
        *[number] * 3,
        pointer,
    ]
    loaded.tokenspeed_few_rows.argtypes = [*[pointer] * 3, *[number] * 4, *[wide] * 2, *[number] * 3, pointer]
    loaded.tokenspeed_add_partials_rms_norm.argtypes = [
        *[pointer] * 4,
        *[number] * 3,
        wide,
        ctypes.c_float,
        *[number] * 2,
        pointer,
    ]
    return loaded


def built() -> bool:
    """Whether the library is there, can be loaded, and has code for this process's GPU."""
    if torch.version.cuda is None or not torch.cuda.is_available() or not library_path().exists():
        return False
    try:
        library()
    except OSError:  # built for another system
        return False
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}a" in ARCHITECTURES


@functools.cache
def ready() -> bool:
    """Whether add_rms_norm is built and gives the reference's values on this GPU."""
    if not built():
        return False
    generator = torch.Generator().manual_seed(0)
    for dtype, of_x, of_residual in itertools.product(_DTYPES, *[(None, torch.float32)] * 2):
        x, residual, weight = (torch.randn(n, 256, generator=generator).to(dtype) for n in (5, 5, 1))
        x, residual = x.to(of_x or dtype), residual.to(of_residual or dtype)
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
    if weight.dtype not in _DTYPES or {x.dtype, residual.dtype} - {weight.dtype, torch.float32}:
        raise ValueError(
            f"add_rms_norm needs a weight of {list(_DTYPES)}, x and residual of its dtype or float32"
        )
    if residual.shape != x.shape or weight.shape != (size,) or size % _WIDTH or size > _MAX_SIZE:
        raise ValueError(f"add_rms_norm takes no shapes {[*x.shape]}, {[*residual.shape]}, {[*weight.shape]}")
    if any(t.data_ptr() % 16 or t.stride(-1) != 1 or t.stride(0) * t.itemsize % 16 for t in (x, residual)):
        raise ValueError("add_rms_norm needs rows that start on 16 bytes")
    if (
        not weight.is_contiguous()
        or weight.data_ptr() % 16
        or len({t.device for t in (x, residual, weight)}) > 1
    ):
        raise ValueError("add_rms_norm needs an aligned weight on the device of x")
    out = torch.empty((rows, size), dtype=weight.dtype, device=x.device)
    if not rows:
        return out
    stream = torch.cuda.current_stream(x.device).cuda_stream
    with torch.cuda.device(x.device):
        code = library().tokenspeed_add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            x.stride(0),
            residual.stride(0),
            size,
            eps,
            _DTYPES[weight.dtype],
            x.dtype == torch.float32,
            residual.dtype == torch.float32,
            stream,
        )
    if code:
        raise RuntimeError(f"add_rms_norm: CUDA error {code}")
    return out
