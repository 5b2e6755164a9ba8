"""SwiGLU's silu(gate) * up in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(gate_up, out, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    gate = tl.load(gate_up + row * stride + cols, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + cols, inside, 0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + cols, product.to(out.dtype.element_ty), inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `tokenspeed.kernels.silu_and_mul`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        silu_and_mul_kernel[(rows, triton.cdiv(size, _BLOCK))](
            gate_up, out, gate_up.stride(0), size, BLOCK=_BLOCK
        )
    return out
