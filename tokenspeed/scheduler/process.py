"""The scheduler process: takes messages, applies them, keeps the workers supplied with steps, and sends out
tokens."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from tokenspeed.errors import EngineDead
from tokenspeed.ipc.channel import Pull, Push, address
from tokenspeed.ipc.messages import (
    Abort,
    Generate,
    Output,
    StepDone,
    StopString,
    Tokens,
    ToScheduler,
    ToServer,
    ToTokenizer,
    ToWorker,
)
from tokenspeed.ipc.process import Child
from tokenspeed.scheduler.scheduler import Scheduler, SchedulerLimits
from tokenspeed.spec.plan import plan_for

STATS_SECONDS = 0.5
IDLE_MS = 1000  # nothing to do: how long to sleep between looks
BUSY_MS = 100  # a step is in flight: so often the watchdog looks


class Sender(Protocol):
    def send(self, message: msgspec.Struct) -> None: ...


class SchedulerLoop:
    """What the process does with messages. Sockets are handed in; tests hand in lists."""

    def __init__(
        self,
        scheduler: Scheduler,
        to_workers: Sequence[Sender],
        to_tokenizer: Sender,
        to_server: Sender,
        watchdog_timeout: float = 300.0,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """watchdog_timeout: seconds. debug: check all books whenever the engine falls idle."""
        self.scheduler = scheduler
        self._to_workers, self._to_tokenizer, self._to_server = to_workers, to_tokenizer, to_server
        self._watchdog_timeout, self._debug, self._clock = watchdog_timeout, debug, clock
        self._outputs: list[Output] = []
        self._heard = clock()  # when the worker last answered, or got a step while it had none
        self._stats_at = clock()
        self._was_idle = True

    @property
    def wait_ms(self) -> int:
        """How long the next look at the socket may block."""
        return IDLE_MS if self.scheduler.is_idle else BUSY_MS

    def handle(self, messages: Sequence[msgspec.Struct]) -> None:
        """Applies messages in order. What they give to send waits for `tick`, so that the workers are served
        first."""
        for message in messages:
            if isinstance(message, StepDone):
                self._outputs += self.scheduler.update(message)
                self._heard = self._clock()
            elif isinstance(message, Generate):
                self._outputs += self.scheduler.add(message)
            elif isinstance(message, Abort):
                self._outputs += self.scheduler.abort(message.rid)
            elif isinstance(message, StopString):
                self._outputs += self.scheduler.stop_string(message)
            else:
                raise TypeError(f"the scheduler takes no {type(message).__name__}")

    def tick(self) -> None:
        """Sends every step that may be sent, then tokens, then statistics.

        Raises:
            EngineDead: a step has had no answer for too long.
        """
        while (step := self._next_step()) is not None:
            for worker in self._to_workers:
                worker.send(step)
        if self._outputs:
            self._to_tokenizer.send(Tokens(self._outputs))
            self._outputs = []
        now = self._clock()
        if self.scheduler.num_in_flight and now - self._heard > self._watchdog_timeout:
            raise EngineDead(f"no answer from the worker for {self._watchdog_timeout:g} seconds")
        self._report(now)

    def _next_step(self) -> msgspec.Struct | None:
        was_empty = self.scheduler.num_in_flight == 0
        step = self.scheduler.schedule()
        if step is not None and was_empty:
            self._heard = self._clock()
        return step

    def _report(self, now: float) -> None:
        idle = self.scheduler.is_idle
        fell_idle = idle and not self._was_idle
        if fell_idle:
            self.scheduler.check_idle()
            if self._debug:
                self.scheduler.check()
        if fell_idle or now - self._stats_at >= STATS_SECONDS:
            self._to_server.send(self.scheduler.stats())
            self._stats_at = now
        self._was_idle = idle


def run(child: Child) -> None:
    """Serves for ever. `child.info` has what the worker settled: pages, slots, budget, rounds in flight."""
    resolved, info = child.resolved, child.info
    limits = SchedulerLimits(
        num_pages=int(info["num_pages"]),
        page_size=int(info["page_size"]),
        max_num_seqs=int(info["max_num_seqs"]),
        max_num_batched_tokens=int(info["max_num_batched_tokens"]),
        rounds_in_flight=int(info["rounds_in_flight"]),
        max_model_len=resolved.max_model_len,
        eos_token_ids=resolved.eos_token_ids,
        enable_prefix_caching=resolved.config.enable_prefix_caching,
    )
    plan = plan_for(resolved.shapes, resolved.plain_above, info.get("calibration"))
    pull = Pull(address(resolved.run_dir, "scheduler"), ToScheduler)
    loop = SchedulerLoop(
        Scheduler(limits, plan),
        [Push(address(resolved.run_dir, "worker"), ToWorker)],
        Push(address(resolved.run_dir, "tokenizer"), ToTokenizer),
        Push(address(resolved.run_dir, "server"), ToServer),
        watchdog_timeout=resolved.config.watchdog_timeout,
        debug=resolved.config.log_level == "debug",
    )
    child.ready()
    serve(loop, pull)


def serve(loop: SchedulerLoop, pull: Pull) -> None:
    while True:
        message = pull.recv(loop.wait_ms)
        if message is not None:
            loop.handle([message, *pull.drain()])
        loop.tick()
