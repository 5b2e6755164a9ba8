"""Which ranks share the work of one layer, as a value that layers carry; no process-wide state of ours."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True)
class TensorParallel:
    """This process's place among the ranks that split a layer. Size 1 needs no process group."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None  # None at size 1

    def share(self, total: int, what: str) -> int:
        """`total` over the ranks. Raises ValueError, naming `what`, if it can't be split evenly."""
        if total % self.size:
            raise ValueError(f"{what} {total} can't be split over {self.size} ranks")
        return total // self.size


def join(rank: int, size: int, address: str, backend: str, timeout_s: float = 60.0) -> TensorParallel:
    """Meets the other ranks at `address` and returns this one's place. Blocks until all are there.

    Args:
        address: what torch.distributed calls init_method, for example file:///run/dir/tp or tcp://host:port.
        backend: nccl on GPUs, gloo on CPUs.

    Raises:
        RuntimeError (torch's DistBackendError or DistStoreError): a rank did not come in time.
    """
    if size == 1:
        return TensorParallel()
    dist.init_process_group(
        backend, init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    return TensorParallel(rank, size, dist.group.WORLD)


def leave(tp: TensorParallel) -> None:
    """Closes the group that `join` opened; every rank calls it."""
    if tp.size > 1:
        dist.destroy_process_group(tp.group)
