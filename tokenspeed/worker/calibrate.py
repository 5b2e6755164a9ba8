"""How long rounds take on this machine: measured when the worker starts, and by `tokenspeed calibrate`."""

import hashlib
import json
import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from tokenspeed import __version__, kernels
from tokenspeed.config import Resolved, Shape
from tokenspeed.kernels import cuda
from tokenspeed.spec.calibration import Calibration, size_of
from tokenspeed.spec.options import trees_for
from tokenspeed.worker.engine import Engine
from tokenspeed.worker.graph import GraphSet

REPEATS, PATIENCE = 3, 0.5  # rounds timed of a kind; seconds after which one is enough
CPU_BATCHES = (1, 2, 4, 8)  # in between, times are interpolated
CONTEXT = 1024  # tokens a request, for what context costs
CONTEXT_BATCH = 64  # requests at most, for the same
CONTEXT_ROOM = CONTEXT + 256  # tokens of a pool that it takes for each of them

Ladder = Mapping[int, Sequence[Shape | None]]  # what is timed (or captured) for each batch
Progress = Callable[[str, int, int], None]


def ladder_for(
    batches: Iterable[int], shapes: tuple[Shape, ...], known: Calibration | None = None
) -> dict[int, tuple[Shape | None, ...]]:
    """The rounds of each batch, plain ones included: as calibrated, else `spec.options.trees_for`."""
    if known is None:
        return {batch: (None, *trees_for(batch, shapes)) for batch in sorted(batches)}
    trees = known.ladder()
    measured = sorted(trees)
    at = {batch: min(bisect_left(measured, batch), len(measured) - 1) for batch in sorted(batches)}
    return {batch: (None, *trees[measured[i]]) for batch, i in at.items()}


def key_of(resolved: Resolved, device: str, dtype: torch.dtype) -> dict[str, str | int | bool]:
    """What a calibration holds for: another machine, model, draft or version has other times."""
    config = resolved.config
    return {
        "device": device,
        "model": _fingerprint(resolved.model_dir),
        "draft": _fingerprint(resolved.draft_dir) if resolved.draft_dir else "",
        "draft_head": config.draft_head,
        "dtype": str(dtype).removeprefix("torch."),
        "tensor_parallel_size": config.tensor_parallel_size,
        "batch_invariant": config.batch_invariant,
        "graphs": not config.enforce_eager,
        "kernels": os.environ.get(kernels.registry.ENV, ""),
        "csrc": cuda.built(),
        "tokenspeed": __version__,
        "torch": torch.__version__,
    }


def _fingerprint(directory: str) -> str:
    """Of a checkpoint: its configuration, and its files' names and sizes. What trees bring was measured of it."""
    path = Path(directory)
    config = json.loads((path / "config.json").read_bytes())
    config.pop("acceptance", None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()[:16]


@torch.inference_mode()
def calibrate(
    engine: Engine,
    graphs: GraphSet | None,
    ladder: Ladder,
    progress: Progress,
    priors: Mapping[Shape, Sequence[float]] | None = None,
) -> Calibration:
    """Times each batch and tree of `ladder`, the least of a few rounds, and what context costs each tree.

    Must run before the first request: it uses slots and pages as if nothing lay there.

    Args:
        graphs: which holds all of `ladder`; None for eager rounds.
        ladder: with None (a plain round) for every batch.
        priors: acceptance by depth, as the draft states it of these or other trees.
    """
    run = _replay(graphs) if graphs else _eager(engine)
    todo = [(batch, shape) for batch, shapes in ladder.items() for shape in shapes]
    rounds = [partial(run, [engine.state.dummy] * batch, shape) for batch, shape in todo]
    times = _least(rounds, progress)
    per_token = {}
    for shape in dict.fromkeys(shape for _, shape in todo):
        batches = [batch for batch, shapes in ladder.items() if shape in shapes]
        batch = max((b for b in batches if b <= CONTEXT_BATCH), default=min(batches))
        per_token[shape] = _context_cost(engine, run, batch, shape)
    return Calibration(
        times=[(batch, size_of(shape), round(us, 1)) for (batch, shape), us in zip(todo, times, strict=True)],
        per_token=[(size_of(shape), us) for shape, us in per_token.items()],
        priors=[(size_of(shape), list(prior)) for shape, prior in (priors or {}).items()],
        padded=graphs is not None,
    )


def _replay(graphs: GraphSet) -> Callable[[list[int], Shape | None], None]:
    def run(slots: list[int], shape: Shape | None) -> None:
        graphs.replay(slots, shape)
        torch.cuda.synchronize()

    return run


def _eager(engine: Engine) -> Callable[[list[int], Shape | None], None]:
    device = engine.state.device

    def run(slots: list[int], shape: Shape | None) -> None:
        engine.round(torch.tensor(slots, device=device), [], shape, None)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def _least(rounds: Sequence[Callable[[], None]], progress: Progress | None = None) -> list[float]:
    """Microseconds of each, the least of a few runs. They take turns: a slow moment of the machine meets all alike."""
    least, spent = [math.inf] * len(rounds), [0.0] * len(rounds)
    turns = [i for _ in range(1 + REPEATS) for i in range(len(rounds))]
    for done, i in enumerate(turns):
        if progress:
            progress("timing rounds", done, len(turns))
        if spent[i] < PATIENCE:
            started = time.perf_counter()
            rounds[i]()
            elapsed = time.perf_counter() - started
            least[i], spent[i] = min(least[i], elapsed * 1e6), spent[i] + elapsed
    if progress:
        progress("timing rounds", len(turns), len(turns))
    return least


def _context_cost(engine: Engine, run: Callable, batch: int, shape: Shape | None) -> float:
    """Microseconds a round takes longer for each token of context, at least 0."""
    slots = list(range(min(batch, engine.state.num_slots)))

    def round_at(length: int) -> None:
        engine.state.lengths[slots] = length
        run(slots, shape)

    with requests(engine, slots, CONTEXT) as fits:
        if not fits:
            return 0.0
        short, long = _least([partial(round_at, length) for length in (2, CONTEXT)])
    return max(0.0, (long - short) / (len(slots) * (CONTEXT - 2)))


@contextmanager
def requests(engine: Engine, slots: list[int], length: int) -> Iterator[bool]:
    """As if requests of `length` tokens were in `slots`, each with pages of its own. Yields whether they fit."""
    state = engine.state
    room = length + REPEATS * 32  # rounds make them longer
    pages = -(-room // state.page_size)
    if pages > state.num_columns - 1 or pages * len(slots) >= engine.pool.num_pages:
        yield False
        return
    table = torch.arange(1, len(slots) * pages + 1, device=state.device, dtype=torch.int32)
    state.block_table[slots, :pages] = table.view(len(slots), pages)
    state.lengths[slots] = length
    try:
        yield True
    finally:
        state.block_table[slots] = 0
        state.lengths[slots] = 0
