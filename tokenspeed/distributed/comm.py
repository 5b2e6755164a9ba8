"""Collectives over a TensorParallel; each one is the identity at size 1."""

import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed.distributed.groups import TensorParallel


def all_reduce(x: Tensor, tp: TensorParallel) -> Tensor:
    """The sum of every rank's x, any shape. x itself is overwritten and returned."""
    if tp.size > 1:
        dist.all_reduce(x, group=tp.group)
    return x


def all_gather(x: Tensor, tp: TensorParallel) -> Tensor:
    """x [T, N] of every rank side by side in rank order: [T, size * N]."""
    if tp.size == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(tp.size)]
    dist.all_gather(parts, x.contiguous(), group=tp.group)
    return torch.cat(parts, dim=-1)


def broadcast(x: Tensor, tp: TensorParallel) -> Tensor:
    """Rank 0's x, any shape, written into every rank's x and returned."""
    if tp.size > 1:
        dist.broadcast(x, src=0 if tp.group is None else dist.get_global_rank(tp.group, 0), group=tp.group)
    return x
