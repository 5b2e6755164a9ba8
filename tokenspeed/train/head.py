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
_SPREAD = 0.01  # of the outputs' mean square, added in every direction: a batch does not show all of them


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
        self.up, self.down = low_rank_start(target.head, options.rank)
        self.begun = False  # True where the factors are those of the draft that the run starts from
        self._adamw = AdamW([self.up, self.down])
        self._sums = StepSums(options.unroll, device)

    def state(self) -> dict[str, Tensor]:
        found = {"param.up": self.up, "param.down": self.down}
        return found | {f"adamw.{name}": t for name, t in self._adamw.state().items()}

    @torch.no_grad()
    def begin(self, inputs: Inputs) -> None:
        """Starts from the factors that fit the outputs of a first batch best, unless they are an existing draft's."""
        if self.begun:
            return
        out, valid = self._outputs(inputs)
        up, down = low_rank_start(self.target.head, len(self.down), out[valid])
        self.up.copy_(up)
        self.down.copy_(down)

    @torch.no_grad()
    def step(self, inputs: Inputs) -> None:
        out, valid = self._outputs(inputs)
        weight = (valid / valid.sum().clamp(min=1)).flatten()
        loss, recalled, grads = low_rank_loss(
            out.flatten(0, 2), weight, self.target.head, self.up, self.down, self.candidates
        )
        self._adamw.step(grads, self.lr)
        self._sums.add(loss, recalled.view(valid.shape), valid)

    def _outputs(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The draft's outputs [B, S, M, H], and which of them lie within their texts, bool [B, S, M]."""
        _, aux = self.target.read(inputs)
        out = self.draft.unroll(inputs, aux)
        return out, outputs_used(inputs, out.shape[1])[0]

    def report(self) -> dict[str, Any]:
        loss, recall, starts = self._sums.take()
        return {"loss": loss, "recall": recall, "starts_used": starts}


def head_shape(shape: Shape) -> Shape:
    """Stage 2 takes fewer starts from as many texts."""
    starts = max(1, min(_ROWS // (shape.num_rows * shape.unroll), shape.num_starts))
    return Shape(shape.num_rows, shape.length, starts, shape.unroll)


@torch.no_grad()
def low_rank_start(head: Tensor, rank: int, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """up [V, r] and down [r, H], float32, that come closest to `head` [V, H]: as matrices, or in the scores of `out`.

    Outputs lie in few directions, and those may be weak ones of `head`. So with C = mean of x x^T it is
    head C^1/2 whose best approximation is wanted, which C^-1/2 then leads back. Its right factors are eigenvectors of
    the small C^1/2 head^T head C^1/2, which spares the decomposition of [V, H].

    Args:
        out: [n, H] of the draft.
    """
    wide, size = head.float(), head.shape[1]
    root, back = (torch.eye(size, dtype=torch.float64, device=head.device) for _ in range(2))
    if out is not None and len(out):
        second = (out.float().t() @ out.float()).double() / len(out)
        second += _SPREAD * second.trace() / size * root
        values, vectors = torch.linalg.eigh(second)
        root, back = (vectors * values**power @ vectors.t() for power in (0.5, -0.5))
    values, vectors = torch.linalg.eigh(root @ (wide.t() @ wide).double() @ root)  # ascending
    values, right = values[-rank:].clamp(min=0).flip(0), vectors[:, -rank:].flip(1)
    scale = values.sqrt().sqrt().clamp(min=1e-12)  # the root of a singular value for each factor
    down = (back @ (right * scale)).t().float().contiguous()
    up = (wide @ (root @ (right / scale)).float()).contiguous()
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
