"""`loss.row_loss` in Triton: one program a row, which reads both rows of scores three times.

A row of 49,152 float32 scores is 192 KiB; what the first pass has read lies in L2 for the others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit
def row_loss_kernel_(
    student,
    teacher,
    rows,
    weights,
    grad,
    losses,
    entropies,
    hits,
    taus,
    lk,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + i)
    cols = tl.arange(0, BLOCK)
    grad += i * SIZE
    if weight == 0.0:  # an unused row: its scores may be anything
        for first in range(0, SIZE, BLOCK):
            inside = first + cols < SIZE
            tl.store(grad + first + cols, tl.zeros([BLOCK], grad.dtype.element_ty), inside)
        tl.store(losses + i, 0.0)
        tl.store(entropies + i, 0.0)
        tl.store(hits + i, 0)
        return
    inv_tau = 1.0 / tl.load(taus + i)
    student += i * SIZE
    teacher += tl.load(rows + i) * SIZE
    peak_s, total_s, best_s = float("-inf"), 0.0, 0
    peak_t, total_t, best_t = float("-inf"), 0.0, 0
    for first in range(0, SIZE, BLOCK):
        inside = first + cols < SIZE
        s = tl.load(student + first + cols, inside, float("-inf"))
        t = tl.load(teacher + first + cols, inside, float("-inf")) * inv_tau
        top_s, top_t = tl.max(s, 0), tl.max(t, 0)
        best_s = tl.where(top_s > peak_s, tl.argmax(s, 0) + first, best_s)
        best_t = tl.where(top_t > peak_t, tl.argmax(t, 0) + first, best_t)
        new_s, new_t = tl.maximum(peak_s, top_s), tl.maximum(peak_t, top_t)
        total_s = total_s * tl.exp(peak_s - new_s) + tl.sum(tl.exp(s - new_s), 0)
        total_t = total_t * tl.exp(peak_t - new_t) + tl.sum(tl.exp(t - new_t), 0)
        peak_s, peak_t = new_s, new_t
    log_s, log_t = peak_s + tl.log(total_s), peak_t + tl.log(total_t)
    cross, entropy, common, losing = 0.0, 0.0, 0.0, 0.0
    for first in range(0, SIZE, BLOCK):
        inside = first + cols < SIZE
        log_q = tl.load(student + first + cols, inside, 0.0) - log_s
        log_p = tl.load(teacher + first + cols, inside, 0.0) * inv_tau - log_t
        p, q = tl.where(inside, tl.exp(log_p), 0.0), tl.where(inside, tl.exp(log_q), 0.0)
        cross -= tl.sum(p * log_q, 0)
        entropy -= tl.sum(p * log_p, 0)
        common += tl.sum(tl.minimum(p, q), 0)
        losing += tl.sum(tl.where(q < p, q, 0.0), 0)
    for first in range(0, SIZE, BLOCK):
        inside = first + cols < SIZE
        q = tl.exp(tl.load(student + first + cols, inside, 0.0) - log_s)
        p = tl.exp(tl.load(teacher + first + cols, inside, 0.0) * inv_tau - log_t)
        slope = q - p - lk * (tl.where(q < p, q, 0.0) - q * losing)
        tl.store(grad + first + cols, (slope * weight).to(grad.dtype.element_ty), inside)
    tl.store(losses + i, (cross + lk * (1.0 - common)) * weight)
    tl.store(entropies + i, entropy * weight)
    tl.store(hits + i, (best_s == best_t).to(tl.int8))


def row_loss_kernel(
    student: Tensor, teacher: Tensor, rows: Tensor, weight: Tensor, tau: Tensor, lk: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `loss.RowLoss`; arguments as there, all contiguous."""
    if not all(x.is_contiguous() for x in (student, teacher, rows, weight, tau)):
        raise ValueError("the loss kernel needs contiguous rows")
    count, size = student.shape
    grad = torch.empty(student.shape, dtype=dtype, device=student.device)
    loss, entropy = torch.empty_like(weight), torch.empty_like(weight)
    hit = torch.empty(count, dtype=torch.int8, device=student.device)
    row_loss_kernel_[(count,)](
        student,
        teacher,
        rows,
        weight,
        grad,
        loss,
        entropy,
        hit,
        tau,
        lk,
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return grad, loss, entropy, hit.bool()
