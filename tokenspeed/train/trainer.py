"""The loop that both stages share: learning rate, captured step, log, state on disk, interruption."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenspeed.errors import ConfigError
from tokenspeed.train.checkpoint import load_state, restore, save_state
from tokenspeed.train.packing import Packer, Position
from tokenspeed.train.target import Inputs

SAVE_SECONDS = 60.0
WARM_UP, FLOOR = 0.03, 0.02  # share of the schedule, share of the learning rate
EAGER_STEPS = 3  # before capture: kernels are compiled and libraries set up
MAX_STEPS_AHEAD = 2  # that the host may be ahead of the device


class Stage(Protocol):
    """What is trained, and how."""

    name: str
    base_lr: float
    lr: Tensor  # float32 scalar on the device, set before each step

    def state(self) -> dict[str, Tensor]:
        """Everything that a step changes and that decides later steps, by name; changed in place."""
        ...

    def begin(self, inputs: Inputs) -> None:
        """Before the first step of all, with its inputs."""
        ...

    def step(self, inputs: Inputs) -> None:
        """One update, without a host sync and in fixed memory."""
        ...

    def report(self) -> dict[str, Any]:
        """Means since the last report, as JSON has them; has `loss`. Waits for the device."""
        ...


@dataclass(frozen=True)
class Budget:
    """How long a stage goes on: steps, or seconds."""

    steps: int | None = None
    seconds: float | None = None

    def fraction(self, step: int, elapsed: float) -> float:
        """Done before `step` (counted from 0), `elapsed` seconds after the start: 1 or more is the end."""
        return step / self.steps if self.steps is not None else elapsed / self.seconds


def schedule(fraction: float) -> float:
    """Share of the learning rate: linear warm-up, then a cosine down to FLOOR."""
    if fraction < WARM_UP:
        return max(fraction / WARM_UP, FLOOR)
    rest = min((fraction - WARM_UP) / (1 - WARM_UP), 1.0)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * rest))


class Interrupt:
    """`with Interrupt() as stop:` Ctrl-C sets `stop.asked`, once; a second one ends at once."""

    def __enter__(self) -> "Interrupt":
        self.asked = False
        self._before = None
        if threading.current_thread() is threading.main_thread():  # elsewhere signals can't be taken
            self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class Loop:
    """Runs one stage to the end of its budget.

    Args:
        path: the stage's state; read where it exists.
        log: gets a record each `log_every` steps and at the end.
        progress: text, done, total. capture: put the step into a CUDA graph.
    """

    def __init__(
        self,
        stage: Stage,
        packer: Packer,
        budget: Budget,
        device: torch.device,
        path: Path,
        log: Callable[[dict[str, Any]], None],
        progress: Callable[[str, int, int], None],
        capture: bool,
        log_every: int,
    ):
        self.stage, self.budget, self.path = stage, budget, path
        self._log, self._progress, self._log_every = log, progress, log_every
        self._packer, self._inputs = packer, Inputs(packer.shape, device)
        self._device, self._capture = device, capture and device.type == "cuda"
        self.done, self.elapsed, self.position = 0, 0.0, Position(0, 0)
        self.last: dict[str, Any] = {}
        if path.exists():
            tensors, facts = load_state(path)
            restore(stage.state(), tensors, path)
            self.done, self.elapsed = facts["step"], facts["seconds"]
            self.position, self.last = Position(*facts["position"]), facts["last"]

    def finished(self) -> bool:
        return self.budget.fraction(self.done, self.elapsed) >= 1.0

    def run(self, interrupt: Interrupt) -> bool:
        """True at the end of the budget, False if interrupted; the state is saved in both cases.

        Raises:
            ConfigError: the loss is no number any more, or the state can't be saved.
        """
        if self.finished():
            return True
        if self._device.type != "cuda":
            return self._run(interrupt)
        stream = torch.cuda.Stream(self._device)  # a graph can't be captured on the default one
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            finished = self._run(interrupt)
        torch.cuda.current_stream().wait_stream(stream)
        return finished

    def _run(self, interrupt: Interrupt) -> bool:
        begun, clock = time.perf_counter() - self.elapsed, Clock(self._packer.shape)
        batches = self._packer.stream(self.position)
        last_saved, last_logged = time.perf_counter(), self.done
        do_step = self._stepper()
        while not interrupt.asked:
            fraction = self.budget.fraction(self.done, time.perf_counter() - begun)
            if fraction >= 1.0:
                break
            self._set_up(batches, fraction)
            if not self.done:
                self.stage.begin(self._inputs)
            next(do_step)
            self.done += 1
            self.elapsed = time.perf_counter() - begun
            if self.done - last_logged >= self._log_every or self.done == 1:
                self._report(clock, self.done - last_logged)
                last_logged = self.done
            if time.perf_counter() - last_saved >= SAVE_SECONDS:
                self.save()
                last_saved = time.perf_counter()
        if self.done > last_logged:
            self._report(clock, self.done - last_logged)
        self.elapsed = time.perf_counter() - begun
        self.save()
        return not interrupt.asked

    def _set_up(self, batches: Iterator, fraction: float) -> None:
        self.position, batch = next(batches)
        self._inputs.load(batch)
        self.stage.lr.fill_(self.stage.base_lr * schedule(fraction))

    def _stepper(self) -> Iterator[None]:
        """Makes a step each time it is asked; the host stays a few steps ahead of the device."""
        if self._device.type != "cuda":
            while True:
                self.stage.step(self._inputs)
                yield
        events: list[torch.cuda.Event] = []
        graph = None
        while True:
            if graph is not None:
                graph.replay()
            else:
                self.stage.step(self._inputs)
            events.append(torch.cuda.Event())
            events[-1].record()
            yield
            if len(events) >= MAX_STEPS_AHEAD:
                events.pop(0).synchronize()
            if self._capture and graph is None and self.done >= EAGER_STEPS:
                graph = self._captured()

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The step as a graph. Capturing computes nothing, so it is no step of its own."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self.stage.step(self._inputs)
        return graph

    def _report(self, clock: "Clock", steps: int) -> None:
        found = self.stage.report()
        if not math.isfinite(found["loss"]):
            raise ConfigError(
                f"the loss is {found['loss']} at step {self.done}; the state of before is in {self.path}: "
                "train anew with a smaller --lr"
            )
        self.last = {
            "stage": self.stage.name,
            "step": self.done,
            "seconds": round(self.elapsed, 2),
            "epoch": self.position.epoch,
            **found,
            **clock.rates(steps),
        }
        self._log(self.last)
        budget = self.budget
        if budget.steps is not None:
            self._progress(f"training the {self.stage.name}", min(self.done, budget.steps), budget.steps)
        else:
            done = min(int(self.elapsed), int(budget.seconds))
            self._progress(f"training the {self.stage.name}", done, max(int(budget.seconds), 1))

    def save(self) -> None:
        """Writes the state. Raises ConfigError."""
        facts = {
            "stage": self.stage.name,
            "step": self.done,
            "seconds": self.elapsed,
            "position": list(self.position),
            "last": self.last,
            "finished": self.finished(),
        }
        save_state(self.path, self.stage.state(), facts)


class Clock:
    """Rates since it was last asked."""

    def __init__(self, shape: Any):
        self._shape, self._last = shape, time.perf_counter()

    def rates(self, steps: int) -> dict[str, float]:
        now = time.perf_counter()
        per_second = steps / max(now - self._last, 1e-9)
        self._last = now
        starts = self._shape.num_rows * self._shape.num_starts
        return {
            "padded_tokens_per_s": round(per_second * self._shape.num_tokens),
            "starts_per_s": round(per_second * starts),
        }
