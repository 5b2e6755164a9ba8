"""Passes captured in CUDA graphs: decode rounds, one for each batch bucket and tree shape, and prefills by size."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.config import Shape
from tokenspeed.worker.engine import Engine
from tokenspeed.worker.prefill import MAX_CHUNKS, Chunks, ChunkTensors

# Those below max_num_seqs are captured, and max_num_seqs itself; above 256 only a wish for more captures any.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)


@dataclass(frozen=True)
class _Round:
    bucket: int
    shape: Shape | None

    @property
    def num_rows(self) -> int:
        return self.bucket * (self.shape.nodes if self.shape else 1)


@dataclass(frozen=True)
class _Prefill:
    num_rows: int


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # int64, static: slots of a round [bucket], Chunks.pack of a prefill
    packed: Tensor  # static output: RoundResult.packed, PrefillResult.packed

    def replay(self, inputs: Tensor) -> Tensor:
        """inputs: on the host. Returns `packed`, good until the next replay."""
        self.inputs.copy_(inputs.pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.packed


class GraphSet:
    """Captures every (bucket, shape) and prefill size at start, those of most rows first, in one memory pool.

    Padding rows use the dummy slot. A pass reads nothing from the host but its one input.

    Args:
        ladder: the shapes of each bucket; None is a plain round.
        prefills: numbers of tokens of a prefill pass, each with room for `num_chunks` chunks.
    """

    def __init__(
        self, engine: Engine, ladder: Mapping[int, Sequence[Shape | None]], prefills: Iterable[int] = ()
    ):
        self.engine, self.buckets, self.prefills = engine, tuple(sorted(ladder)), tuple(sorted(prefills))
        self.num_chunks = min(MAX_CHUNKS, engine.state.num_slots)
        rounds = [_Round(bucket, shape) for bucket in self.buckets for shape in ladder[bucket]]
        self._todo = [*rounds, *map(_Prefill, self.prefills)]
        self._todo.sort(key=lambda kind: -kind.num_rows)
        self._graphs: dict[_Round | _Prefill, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = (
            torch.cuda.Stream()
        )  # one for all captures: each stream has a cuBLAS workspace of its own

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, int, int], None]) -> dict[str, int | float]:
        """Captures everything. Returns how many graphs, seconds, and bytes of GPU memory that they took."""
        started, before = time.perf_counter(), torch.cuda.memory_reserved()
        for done, kind in enumerate(self._todo):
            progress("capturing CUDA graphs", done, len(self._todo))
            capture = self._capture_prefill if isinstance(kind, _Prefill) else self._capture_round
            self._graphs[kind] = capture(kind)
        progress("capturing CUDA graphs", len(self._todo), len(self._todo))
        seconds, size = time.perf_counter() - started, torch.cuda.memory_reserved() - before
        progress(f"captured {len(self._todo)} CUDA graphs in {seconds:.1f} s, {size / 2**30:.2f} GiB", 0, 0)
        return {"graphs": len(self._todo), "graph_seconds": round(seconds, 3), "graph_bytes": size}

    def covers(self, batch: int, shape: Shape | None) -> bool:
        return batch <= self.buckets[-1] and _Round(self._bucket(batch), shape) in self._graphs

    def replay(self, slots: list[int], shape: Shape | None) -> Tensor:
        """Runs the round of `slots`. Returns a view of its RoundResult.packed, good until the next replay."""
        batch = len(slots)
        bucket = self._bucket(batch)
        padded = slots + [self.engine.state.dummy] * (bucket - batch)
        return self._graphs[_Round(bucket, shape)].replay(torch.tensor(padded))[:batch]

    def covers_prefill(self, chunks: Chunks) -> bool:
        fits = bool(self.prefills) and len(chunks.tokens) <= self.prefills[-1]
        return fits and len(chunks.slots) <= self.num_chunks

    def replay_prefill(self, chunks: Chunks) -> Tensor:
        """Runs a prefill pass. Returns a view of its PrefillResult.packed, good until the next replay."""
        size = self.prefills[bisect_left(self.prefills, len(chunks.tokens))]
        padded = chunks.padded(size, self.num_chunks, self.engine.state.dummy)
        return self._graphs[_Prefill(size)].replay(padded.pack())[: len(chunks.samples)]

    def _bucket(self, batch: int) -> int:
        return self.buckets[bisect_left(self.buckets, batch)]

    def _capture_round(self, kind: _Round) -> _Captured:
        slots = torch.full((kind.bucket,), self.engine.state.dummy, device=self.engine.state.device)
        return self._capture(slots, lambda: self.engine.round(slots, [], kind.shape, None).packed())

    def _capture_prefill(self, kind: _Prefill) -> _Captured:
        """Of padding alone: its chunk is as long as any can be, which is all that the host's numbers are good for."""
        nothing = Chunks(torch.zeros(0, dtype=torch.int64), [], [], [], [])
        chunks = nothing.padded(kind.num_rows, self.num_chunks, self.engine.state.dummy)
        inputs = chunks.pack().to(self.engine.state.device)
        return self._capture(inputs, lambda: self.engine.prefill(ChunkTensors(inputs, chunks), []).packed())

    def _capture(self, inputs: Tensor, run: Callable[[], Tensor]) -> _Captured:
        run()  # outside the capture: kernels are compiled, libraries set up
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            packed = run()
        return _Captured(graph, inputs, packed)
