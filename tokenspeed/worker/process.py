"""The worker process: steps in, results out, as many under way as the scheduler sends."""

from collections import deque

import torch

from tokenspeed.errors import ConfigError
from tokenspeed.ipc.channel import Pull, Push, address
from tokenspeed.ipc.messages import ToScheduler, ToWorker
from tokenspeed.ipc.process import Child
from tokenspeed.worker.runner import Launched, Runner
from tokenspeed.worker.setup import Built, build


def run(child: Child) -> None:
    """Builds the engine, reports Ready, then serves steps for ever."""
    run_dir = child.resolved.run_dir
    steps = Pull(address(run_dir, "worker"), ToWorker)
    built = _build(child)
    child.ready(**built.info)
    serve_steps(built.runner, steps, Push(address(run_dir, "scheduler"), ToScheduler))


def _build(child: Child) -> Built:
    """Raises ConfigError, also for memory that ran out in spite of the plan."""
    try:
        return build(child.resolved, child.progress)
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = str(error).split(". ")[0] or "no memory"
        raise ConfigError(
            f"memory ran out at start-up ({reason}); free memory, or give less to the KV pool with "
            "--gpu-memory-utilization or --kv-cache-tokens"
        ) from None


def serve_steps(runner: Runner, steps: Pull, results: Push) -> None:
    """Launches each step as it comes, and between them sends the results that have become ready, in order."""
    under_way: deque[Launched] = deque()
    while True:
        waits = None if not under_way else 0
        step = steps.recv(waits)
        if step is not None:
            under_way.append(runner.launch(step))
        if under_way and (under_way[0].ready() or (step is None and len(under_way) > 1)):
            results.send(runner.result(under_way.popleft()))
