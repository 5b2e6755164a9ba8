"""The worker process: steps in, results out, as many under way as the scheduler sends."""

import gc
from collections import deque

from tokenspeed.ipc.channel import Pull, Push, address
from tokenspeed.ipc.messages import ToScheduler, ToWorker
from tokenspeed.ipc.process import Child
from tokenspeed.worker.runner import Launched, Runner
from tokenspeed.worker.setup import build


def run(child: Child) -> None:
    """Builds the engine, reports Ready, then serves steps for ever."""
    run_dir = child.resolved.run_dir
    steps = Pull(address(run_dir, "worker"), ToWorker)
    built = build(child.resolved, child.progress)
    child.ready(**built.info)
    gc.freeze()  # weights and code never die: keep them out of collections
    serve_steps(built.runner, steps, Push(address(run_dir, "scheduler"), ToScheduler))


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
