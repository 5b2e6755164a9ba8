"""Thousands of answers at once on a worker's engine, without the scheduler and its processes.

Through the ring every token costs the scheduler, the tokenizer and the client some microseconds each. Here
every slot owns the pages of a longest text for good, so there is nothing to schedule: the host launches ROUNDS
rounds, and books their tokens with numpy while the next ones run.
"""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokenspeed.bench.acceptance import LOOP_WINDOW
from tokenspeed.errors import ConfigError
from tokenspeed.ipc.messages import Admit, Step, StepDone, pack
from tokenspeed.params import SamplingParams
from tokenspeed.train.loops import looping
from tokenspeed.worker.runner import Launched
from tokenspeed.worker.setup import Built
from tokenspeed.worker.state import MAX_OVERHANG

ROUNDS = 16  # between two looks; what a slot computes past its end goes to the overhang of the block table
assert ROUNDS <= MAX_OVERHANG


@dataclass(frozen=True)
class Task:
    """One answer to write."""

    ids: np.ndarray  # int32 [n] the prompt
    temperature: float
    max_tokens: int
    seed: int
    source: Any = None  # the caller's


class BulkDecoder:
    """Args:
        built: an engine without a drafter. max_len: tokens of the longest prompt and answer together.
        stop_ids: tokens that end an answer. vocab_size: of the model.

    Raises:
        ConfigError: the KV pool does not hold one text.
    """

    def __init__(self, built: Built, max_len: int, stop_ids: tuple[int, ...], vocab_size: int):
        self.runner, info = built.runner, built.info
        pages = -(-max_len // info["page_size"])  # of a slot
        self.num_slots = min(info["max_num_seqs"], (info["num_pages"] - 1) // pages)
        if not self.num_slots:
            raise ConfigError(
                f"the KV pool holds {info['kv_tokens']} tokens, a prompt with its answer may have {max_len}; "
                "lower --max-tokens or --max-prompt-tokens, or raise --kv-cache-tokens"
            )
        self._prefill_tokens = info["max_num_batched_tokens"]
        self._num_steps = 0
        self._is_stop = np.zeros(vocab_size, dtype=bool)
        self._is_stop[list(stop_ids)] = True
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._tasks: dict[int, Task] = {}  # by slot
        # Answers by slot, each behind numbers that are no token and all different: see `looping`.
        self._text = np.empty((self.num_slots, LOOP_WINDOW + max_len), dtype=np.int32)
        self._text[:, :LOOP_WINDOW] = -1 - np.arange(LOOP_WINDOW)
        self._count = np.zeros(self.num_slots, dtype=np.int64)  # tokens of the answer
        self._limit = np.zeros(self.num_slots, dtype=np.int64)
        self._ended = np.zeros(self.num_slots, dtype=bool)
        slots = np.repeat(np.arange(self.num_slots), pages)
        self._launch(page_slots=pack(slots), page_ids=pack(np.arange(1, len(slots) + 1)))

    def run(self, tasks: Iterable[Task], deadline: float = math.inf) -> Iterator[tuple[Task, np.ndarray]]:
        """Answers every task, in no particular order.

        Args:
            deadline: of time.monotonic(); the answers that are under way then come as far as they are.

        Yields:
            the task and its answer, int32 [n], with the stop token if one ended it. It also ends where it has
            begun to loop, and is empty when the model's logits were NaN.
        """
        waiting = iter(tasks)
        while time.monotonic() < deadline:
            under_way = self._admit(waiting)
            if not self._tasks:
                return
            slots = np.fromiter(self._tasks, dtype=np.int64)
            rows = pack(slots)
            under_way += [(slots, self._launch(decode_slots=rows)) for _ in range(ROUNDS)]
            for row_slots, launched in under_way:
                self._take(row_slots, self.runner.result(launched))
            self._ended[slots] |= looping(self._last(slots))
            yield from self._leave(slots[self._ended[slots]].tolist())
        yield from self._leave(list(self._tasks))

    # ---- a task's way

    def _admit(self, waiting: Iterator[Task]) -> list[tuple[np.ndarray, Launched]]:
        """Gives free slots to tasks that wait, and launches their prompts in chunks."""
        launched = []
        chunk: list[Admit] = []
        size = 0
        while self._free and (task := next(waiting, None)) is not None:
            if chunk and size + len(task.ids) > self._prefill_tokens:
                launched.append(self._prefill(chunk))
                chunk, size = [], 0
            slot = self._free.pop()
            self._tasks[slot] = task
            self._count[slot], self._limit[slot], self._ended[slot] = 0, task.max_tokens, False
            params = SamplingParams(temperature=task.temperature, seed=task.seed)
            chunk.append(Admit(slot, task.ids.tobytes(), len(task.ids), 0, params))
            size += len(task.ids)
        if chunk:
            launched.append(self._prefill(chunk))
        return launched

    def _prefill(self, chunk: list[Admit]) -> tuple[np.ndarray, Launched]:
        slots = [admit.slot for admit in chunk]
        launched = self._launch(
            admit=chunk,
            prefill_slots=pack(slots),
            prefill_starts=pack([0] * len(slots)),
            prefill_counts=pack([admit.num_prompt for admit in chunk]),
        )
        return np.asarray(slots), launched

    def _launch(self, **parts: Any) -> Launched:
        self._num_steps += 1
        return self.runner.launch(Step(self._num_steps, **parts))

    def _take(self, slots: np.ndarray, done: StepDone) -> None:
        """Books one token for each of the slots that have not ended."""
        goes_on = ~self._ended[slots]
        tokens, live = np.frombuffer(done.tokens, dtype=np.int32)[goes_on], slots[goes_on]
        self._text[live, LOOP_WINDOW + self._count[live]] = tokens
        self._count[live] += 1
        self._ended[live] = self._is_stop[tokens] | (self._count[live] >= self._limit[live])
        for row in done.failed:
            self._ended[slots[row]], self._count[slots[row]] = True, 0

    def _last(self, slots: np.ndarray) -> np.ndarray:
        """int32 [B, 128]: the last tokens of each answer."""
        columns = self._count[slots, None] + np.arange(LOOP_WINDOW)
        return self._text[slots[:, None], columns]

    def _leave(self, slots: list[int]) -> Iterator[tuple[Task, np.ndarray]]:
        for slot in slots:
            self._free.append(slot)
            yield self._tasks.pop(slot), self._text[slot, LOOP_WINDOW:][: self._count[slot]].copy()
