"""Stage 2: the candidate head, two factors of rank r that learn the full head's distribution over the draft's
outputs at every depth. The draft itself is frozen."""

from typing import Any

import torch
from torch import Tensor

from tokenspeed.train.loss import matmul, row_loss, scores
from tokenspeed.train.model import TrainableDraft
from tokenspeed.train.muon import AdamW
from tokenspeed.train.options import TrainOptions
from tokenspeed.train.packing import Shape
from tokenspeed.train.stage1 import StepSums, outputs_used
from tokenspeed.train.target import Inputs, Target

_ROWS = 8192  # outputs a step
_CHUNK = 4096  # rows of logits at a time
_LR = 2e-3


class HeadStage:
    """Implements trainer.Stage. The loss is KL(full || low-rank), a mean over outputs; top1 is the recall of the
    full head's best token among the candidates, by depth.

    Args:
        draft: trained. options: rank and num_candidates.
    """

    name = "candidate head"
    base_lr = _LR

    def __init__(self, target: Target, draft: TrainableDraft, options: TrainOptions):
        self.target, self.draft, self.candidates = target, draft, options.num_candidates
        device = draft.device
        self.lr = torch.zeros((), device=device)
        self.up, self.down = svd_start(target.head, options.rank)
        self._adamw = AdamW([self.up, self.down])
        self._sums = StepSums(options.unroll, device)

    def state(self) -> dict[str, Tensor]:
        found = {"param.up": self.up, "param.down": self.down}
        return found | {f"adamw.{name}": t for name, t in self._adamw.state().items()}

    @torch.no_grad()
    def step(self, inputs: Inputs) -> None:
        _, aux = self.target.read(inputs)
        out = self.draft.unroll(inputs, aux)
        valid, _ = outputs_used(inputs, out.shape[1])
        weight = (valid / valid.sum().clamp(min=1)).flatten()
        loss, recalled, grads = low_rank_loss(
            out.flatten(0, 2), weight, self.target.head, self.up, self.down, self.candidates
        )
        self._adamw.step(grads, self.lr)
        self._sums.add(loss, recalled.view(valid.shape), valid)

    def report(self) -> dict[str, Any]:
        loss, recall, starts = self._sums.take()
        return {"loss": loss, "recall": recall, "starts_used": starts}


def head_shape(shape: Shape) -> Shape:
    """Stage 2 takes fewer starts from as many texts."""
    starts = max(1, min(_ROWS // (shape.num_rows * shape.unroll), shape.num_starts))
    return Shape(shape.num_rows, shape.length, starts, shape.unroll)


@torch.no_grad()
def svd_start(head: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """up [V, r] and down [r, H], float32, whose product is the best approximation of `head` [V, H].

    The right factors are eigenvectors of the small head^T head, which spares the decomposition of [V, H].
    """
    wide = head.float()
    gram = (wide.t() @ wide).double()
    values, vectors = torch.linalg.eigh(gram)  # ascending
    values, right = values[-rank:].clamp(min=0).flip(0), vectors[:, -rank:].flip(1)
    scale = values.sqrt().sqrt().clamp(min=1e-12)  # the root of a singular value for each factor
    down = (right * scale).t().float().contiguous()
    up = (wide @ (right / scale).float()).contiguous()
    return up, down


@torch.no_grad()
def low_rank_loss(
    out: Tensor, weight: Tensor, head: Tensor, up: Tensor, down: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """KL(full || low-rank) over rows, summed by weight, with its gradient.

    Args:
        out: [n, H]. weight: float32 [n]. head: [V, H] in out's dtype, which is that of products.
        up: float32 [V, r]. down: float32 [r, H].

    Returns:
        The sum; bool [n], whether the full head's best token is a candidate; gradients of up and down.
    """
    u, d = up.to(head.dtype), down.to(head.dtype)
    grad_up, grad_down = torch.zeros_like(up), torch.zeros_like(down)
    total, recalled = torch.zeros((), device=out.device), []
    for x, share in zip(out.split(_CHUNK), weight.split(_CHUNK), strict=True):
        z = x @ d.t()
        full, low = scores(x, head), scores(z, u)
        rows = torch.arange(len(x), device=x.device)
        found = row_loss(low, full, rows, share.contiguous(), torch.ones_like(share), 0.0, head.dtype)
        grad_up += matmul(found.grad.t(), z)
        grad_down += matmul((found.grad @ u).t(), x)
        total += (found.loss - found.entropy).sum()
        best = low.gather(1, full.argmax(-1, keepdim=True))
        recalled.append((low > best).sum(-1) < num_candidates)
    return total, torch.cat(recalled), [grad_up, grad_down]
