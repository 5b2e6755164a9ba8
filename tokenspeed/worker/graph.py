"""Decode rounds captured in CUDA graphs, one for each batch bucket and tree shape, replayed by slots."""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.config import Shape
from tokenspeed.worker.engine import Engine

# Those below max_num_seqs are captured, and max_num_seqs itself; above 256 only a wish for more captures any.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    slots: Tensor  # int64 [bucket], static input
    packed: Tensor  # static output, see RoundResult.packed


class GraphSet:
    """Captures every (bucket, shape) at start, the largest first, in one memory pool.

    Padding rows use the dummy slot. A round reads nothing from the host but the slots.

    Args:
        ladder: the shapes of each bucket; None is a plain round.
    """

    def __init__(self, engine: Engine, ladder: Mapping[int, Sequence[Shape | None]]):
        self.engine, self.buckets = engine, tuple(sorted(ladder))
        self._todo = [(bucket, shape) for bucket in reversed(self.buckets) for shape in ladder[bucket]]
        self._graphs: dict[tuple[int, Shape | None], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = (
            torch.cuda.Stream()
        )  # one for all captures: each stream has a cuBLAS workspace of its own

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int], None]) -> dict[str, int | float]:
        """Captures everything. Returns how many graphs, seconds, and bytes of GPU memory that they took."""
        started, before = time.perf_counter(), torch.cuda.memory_reserved()
        for done, (bucket, shape) in enumerate(self._todo):
            progress("capturing CUDA graphs", done, len(self._todo))
            self._graphs[bucket, shape] = self._capture(bucket, shape)
        progress("capturing CUDA graphs", len(self._todo), len(self._todo))
        seconds, size = time.perf_counter() - started, torch.cuda.memory_reserved() - before
        progress(f"captured {len(self._todo)} CUDA graphs in {seconds:.1f} s, {size / 2**30:.2f} GiB", 0, 0)
        return {"graphs": len(self._todo), "graph_seconds": round(seconds, 3), "graph_bytes": size}

    def covers(self, batch: int, shape: Shape | None) -> bool:
        return batch <= self.buckets[-1] and (self._bucket(batch), shape) in self._graphs

    def replay(self, slots: list[int], shape: Shape | None) -> Tensor:
        """Runs the round of `slots`. Returns a view of its RoundResult.packed, good until the next replay."""
        batch = len(slots)
        bucket = self._bucket(batch)
        captured = self._graphs[bucket, shape]
        padded = slots + [self.engine.state.dummy] * (bucket - batch)
        captured.slots.copy_(torch.tensor(padded).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.packed[:batch]

    def _bucket(self, batch: int) -> int:
        return self.buckets[bisect_left(self.buckets, batch)]

    def _capture(self, bucket: int, shape: Shape | None) -> _Captured:
        slots = torch.full((bucket,), self.engine.state.dummy, device=self.engine.state.device)
        # Outside the capture: kernels are compiled, libraries set up.
        self.engine.round(slots, [], shape, None).packed()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            packed = self.engine.round(slots, [], shape, None).packed()
        return _Captured(graph, slots, packed)
