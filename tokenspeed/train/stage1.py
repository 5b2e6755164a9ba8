"""Stage 1: the draft layer learns the target's next-token distributions at every step of the unroll."""

from typing import Any

import torch
from torch import Tensor

from tokenspeed.train.loss import distil
from tokenspeed.train.model import TrainableDraft
from tokenspeed.train.muon import AdamW, Muon, clip
from tokenspeed.train.options import TrainOptions
from tokenspeed.train.target import Inputs, Target

_CLIP = 1.0


class DraftStage:
    """Implements trainer.Stage."""

    name = "draft"

    def __init__(self, target: Target, draft: TrainableDraft, options: TrainOptions):
        self.target, self.draft, self.base_lr = target, draft, options.lr
        self._tau, self._lk = options.tau, options.lk
        device = draft.device
        self.lr = torch.zeros((), device=device)
        self._matrices = [name for name, p in draft.params.items() if p.dim() == 2]
        self._vectors = [name for name, p in draft.params.items() if p.dim() == 1]
        self._muon = Muon([draft.params[name] for name in self._matrices])
        self._adamw = AdamW([draft.params[name] for name in self._vectors])
        weights = torch.tensor([options.decay**i for i in range(options.unroll)], device=device)
        self._weights = weights / weights.sum()
        self._sums = StepSums(options.unroll, device)

    def state(self) -> dict[str, Tensor]:
        found = {f"param.{name}": p for name, p in self.draft.params.items()}
        found |= {f"muon.{name}": t for name, t in self._muon.state().items()}
        return found | {f"adamw.{name}": t for name, t in self._adamw.state().items()}

    def begin(self, inputs: Inputs) -> None:
        """The first weights do not depend on data."""

    def step(self, inputs: Inputs) -> None:
        hidden, aux = self.target.read(inputs)
        out = self.draft.unroll(inputs, aux)
        valid, rows = outputs_used(inputs, out.shape[1])
        starts = (inputs.counts > 0).sum().clamp(min=1)
        weight = valid * (self._weights[:, None] / starts)
        tau = inputs.temperatures.clamp(min=self._tau)[:, None].expand_as(weight)
        loss, hit = distil(
            out.flatten(1, 2),
            hidden,
            rows.flatten(1),
            weight.flatten(1),
            self.target.head,
            tau.flatten(1),
            self._lk,
        )
        params = self.draft.params
        names = self._matrices + self._vectors
        grads = clip(torch.autograd.grad(loss, [params[name] for name in names]), _CLIP)
        count = len(self._matrices)
        self._muon.step(grads[:count], self.lr)
        self._adamw.step(grads[count:], self.lr)
        self._sums.add(loss.detach(), hit.view(valid.shape), valid)

    def report(self) -> dict[str, Any]:
        loss, share, starts = self._sums.take()
        return {"loss": loss, "top1": share, "starts_used": starts}


def outputs_used(inputs: Inputs, steps: int) -> tuple[Tensor, Tensor]:
    """Which outputs of an unroll lie within their texts, and the places whose states they should agree with.

    Returns:
        bool [B, S, M], and int64 [B, S, M] columns below L.
    """
    step = torch.arange(steps, device=inputs.device)[:, None]
    valid = step < inputs.counts[:, None]
    rows = inputs.starts[:, None] + 1 + step
    return valid, rows.clamp(max=inputs.shape.length - 1)


class StepSums:
    """Loss, and hits by step of the unroll, summed on the device until they are asked for."""

    def __init__(self, steps: int, device: torch.device):
        self._loss, self._updates = torch.zeros((), device=device), torch.zeros((), device=device)
        self._hits, self._counts = (
            torch.zeros(steps, dtype=torch.int64, device=device),
            torch.zeros(steps, dtype=torch.int64, device=device),
        )

    def add(self, loss: Tensor, hit: Tensor, valid: Tensor) -> None:
        """loss: scalar. hit, valid: bool [B, S, M]."""
        self._loss.add_(loss)
        self._updates.add_(1)
        self._hits.add_((hit & valid).sum((0, 2)))
        self._counts.add_(valid.sum((0, 2)))

    def take(self) -> tuple[float, list[float], int]:
        """Mean loss, share of hits by step, outputs of the first step; begins anew. Waits for the device."""
        updates = max(float(self._updates), 1.0)
        loss = float(self._loss) / updates
        share = (self._hits / self._counts.clamp(min=1)).tolist()
        starts = int(self._counts[0])
        for total in (self._loss, self._updates, self._hits, self._counts):
            total.zero_()
        return loss, [round(x, 4) for x in share], starts
