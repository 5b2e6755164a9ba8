"""How long rounds take on this machine, measured when the worker starts."""

import json
import time
from collections.abc import Callable, Sequence

import torch

from tokenspeed.config import Shape
from tokenspeed.worker.engine import Engine

REPEATS, PATIENCE = 3, 0.5  # rounds timed of a kind; seconds after which one is enough
CPU_BATCHES = (1, 4, 8)  # in between, times are interpolated


@torch.inference_mode()
def round_times(
    engine: Engine,
    shapes: Sequence[Shape],
    batches: Sequence[int],
    progress: Callable[[str, int, int], None],
) -> str:
    """Microseconds of eager rounds with next to no context, the least of a few; for `spec.plan.plan_for`.

    Returns:
        JSON: a list of [batch, [S, K, N] or null for a plain round, microseconds].
    """
    todo = [(batch, shape) for batch in batches for shape in (None, *shapes)]
    found = []
    for done, (batch, shape) in enumerate(todo):
        progress("timing rounds", done, len(todo))
        slots = torch.full((batch,), engine.state.dummy, device=engine.state.device)
        times: list[float] = []
        while len(times) <= REPEATS and sum(times) < PATIENCE:
            started = time.perf_counter()
            engine.round(slots, [], shape, None)
            times.append(time.perf_counter() - started)
        size = None if shape is None else [shape.steps, shape.topk, shape.nodes]
        found.append([batch, size, round(min(times) * 1e6, 1)])
    progress("timing rounds", len(todo), len(todo))
    return json.dumps(found)
