"""How a layer is built (device, dtype, ranks) and where a checkpoint's tensor goes in it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenspeed.distributed.groups import TensorParallel


@dataclass(frozen=True)
class Placement:
    """Where and how the layers of one model are built."""

    device: torch.device
    dtype: torch.dtype
    tp: TensorParallel = field(default_factory=TensorParallel)
    batch_invariant: bool = False  # matmuls whose bits for a row don't depend on the other rows
    on_loaded: list[Callable[[], None]] = field(default_factory=list)  # what layers do with loaded weights

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def finish(self) -> None:
        """Call when every parameter is loaded; `params` of the layers can't be used any more."""
        while self.on_loaded:
            self.on_loaded.pop()()


@dataclass(frozen=True)
class Param:
    """The place of one checkpoint tensor: `target` holds this rank's part of it, from index `start` of `dim`.

    A target may be longer than what there is (a padded vocabulary); the rest of it is left alone.
    """

    target: Tensor
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    dim: int = 0
    start: int = 0

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self.target.element_size()

    def load(self, source: Tensor) -> None:
        """Copies this rank's part of `source`, in the target's dtype and on its device.

        Raises:
            ValueError: source has another shape, or one of the two is an integer tensor and the other is not.
        """
        if tuple(source.shape) != self.shape:
            raise ValueError(f"has shape {list(source.shape)}, but the config asks for {list(self.shape)}")
        if source.is_floating_point() != self.target.is_floating_point():
            raise ValueError(f"has dtype {source.dtype}, which can't become {self.target.dtype}")
        count = min(self.target.shape[self.dim], source.shape[self.dim] - self.start)
        if count > 0:
            part = source.narrow(self.dim, self.start, count)
            self.target.narrow(self.dim, 0, count).copy_(part)


Params = dict[str, Param]  # checkpoint name -> place
