"""The loss of a draft's scores against the target's, over the whole vocabulary, with its gradient.

For a row with the target's p = softmax(t / tau) and the draft's q = softmax(s):

    CE(p, q) + lk * (1 - sum min(p, q))

The second part is the chance that sampling rejects a token of q. Float32 logits of one packed row of texts are
in memory at a time.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RowLoss(NamedTuple):
    """Of n rows of scores."""

    grad: Tensor  # [n, V] of weight * loss, in the dtype of products
    loss: Tensor  # float32 [n], times the weight
    entropy: Tensor  # float32 [n] of p, times the weight: the least that the cross-entropy can be
    hit: Tensor  # bool [n]: both find the same token best


def scores(hidden: Tensor, head: Tensor) -> Tensor:
    """float32 [n, V] of hidden [n, H] and head [V, H], not rounded to their dtype in between."""
    return matmul(hidden, head.t())


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, whatever their common dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def row_loss(
    student: Tensor, teacher: Tensor, rows: Tensor, weight: Tensor, tau: Tensor, lk: float, dtype: torch.dtype
) -> RowLoss:
    """Loss of each row of `student` against its row of `teacher`.

    Args:
        student: float32 [n, V] s. teacher: float32 [m, V] t. rows: int64 [n] below m.
        weight: float32 [n]; the results of a row with weight 0 are 0. tau: float32 [n], above 0.
        dtype: of the gradient.
    """
    if student.is_cuda:
        from tokenspeed.train.loss_kernel import row_loss_kernel

        return RowLoss(*row_loss_kernel(student, teacher, rows, weight, tau, lk, dtype))
    return _row_loss(student, teacher, rows, weight, tau, lk, dtype)


def _row_loss(
    student: Tensor, teacher: Tensor, rows: Tensor, weight: Tensor, tau: Tensor, lk: float, dtype: torch.dtype
) -> RowLoss:
    """`row_loss` in plain torch."""
    log_p = (teacher[rows] / tau[:, None]).log_softmax(-1)
    log_q = student.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    losing = torch.where(q < p, q, 0.0)  # where min(p, q) follows q
    grad = q - p - lk * (losing - q * losing.sum(-1, keepdim=True))
    loss = -(p * log_q).sum(-1) + lk * (1 - torch.minimum(p, q).sum(-1))
    hit = student.argmax(-1) == teacher.argmax(-1)[rows]
    used = weight != 0
    return RowLoss(
        (grad * weight[:, None]).to(dtype), loss * weight, -(p * log_p).sum(-1) * weight, hit & used
    )


class _Distil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, hidden, rows, weight, head, tau, lk):
        grads, losses, hits = torch.empty_like(out), [], []
        for i in range(out.shape[0]):
            teacher, student = scores(hidden[i], head), scores(out[i], head)
            found = row_loss(student, teacher, rows[i], weight[i], tau[i], lk, head.dtype)
            torch.mm(found.grad, head, out=grads[i])
            losses.append(found.loss.sum())
            hits.append(found.hit)
        ctx.save_for_backward(grads)
        return torch.stack(losses).sum(), torch.stack(hits)

    @staticmethod
    def backward(ctx, grad_loss, grad_hits):
        (grads,) = ctx.saved_tensors
        return grads * grad_loss.to(grads.dtype), None, None, None, None, None, None


def distil(
    out: Tensor, hidden: Tensor, rows: Tensor, weight: Tensor, head: Tensor, tau: Tensor, lk: float
) -> tuple[Tensor, Tensor]:
    """Weighted loss of a batch; its gradient reaches `out` alone, and is there with the loss itself.

    Args:
        out: [B, n, H] of the draft. hidden: [B, L, H] of the target, both after their last norm.
        rows: int64 [B, n], the place in `hidden` that an output should agree with.
        weight, tau: float32 [B, n]. head: [V, H], in the dtype of out and hidden.

    Returns:
        The sum, float32, and bool [B, n]: whose best token is the target's, False where the weight is 0.
    """
    return _Distil.apply(out, hidden, rows, weight, head, tau, lk)
