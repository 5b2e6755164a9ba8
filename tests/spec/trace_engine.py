"""The real scheduler and plan over a made-up device: times by a table, acceptance as counted in real texts.

`data/traces.json` holds, for 32 answers of the demo model (MT-bench, HumanEval, GSM8K; up to 256 tokens) and each
tree, how many draft tokens a round would have accepted at each position: one hexadecimal digit a token. A request
walks its answer.
"""

import json
import math
import random
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.config import Shape
from tokenspeed.ipc.messages import Generate, Step, StepDone, pack, unpack
from tokenspeed.params import SamplingParams
from tokenspeed.scheduler.scheduler import Scheduler, SchedulerLimits
from tokenspeed.spec.cost import Costs
from tokenspeed.spec.options import parse_shape

TRACES = Path(__file__).parent / "data" / "traces.json"
LONGEST = 256  # tokens of an answer; a shorter one has ended by itself
EOS, WORD = 0, 1
PREFILL_US, PREFILL_TOKEN_US = 4000.0, 20.0  # of a pass, and of each token of it


@dataclass
class Text:
    """A prompt's length, and what each tree brings at each token of its answer."""

    prompt: int
    accepted: dict[Shape, bytes]
    length: int


def read_texts(path: Path = TRACES) -> list[Text]:
    raw = json.loads(path.read_text())
    digits = {parse_shape(name): texts for name, texts in raw["shapes"].items()}
    return [
        Text(
            prompt,
            {s: bytes(int(c, 16) for c in t[i]) for s, t in digits.items()},
            len(next(iter(digits.values()))[i]),
        )
        for i, prompt in enumerate(raw["prompts"])
    ]


class Device:
    """Does steps one after the other in its own time.

    Args:
        costs: the true times of rounds. noise: standard deviation of a round's time, a logarithm.
        row_us: of each row of a round with a tree, what the time told of the round leaves out.
    """

    def __init__(self, costs: Costs, noise: float, seed: int, row_us: float = 0.0):
        self.costs, self.noise, self.row_us, self.random = costs, noise, row_us, random.Random(seed)
        self.now = 0.0  # us
        self.slots: dict[int, tuple[Text, int]] = {}  # and the number of its output tokens
        self.rounds: Counter = Counter()

    def run(self, step: Step, texts: dict[int, Text]) -> StepDone:
        """texts: by the first token of the prompt."""
        for admit in step.admit:
            self.slots[admit.slot] = texts[unpack(admit.input_ids)[0]], 0
        counts, tokens, time = [], [], 0.0
        prefilled = unpack(step.prefill_slots)
        if prefilled:
            time += PREFILL_US + PREFILL_TOKEN_US * sum(unpack(step.prefill_counts))
        for slot, start, count in zip(
            prefilled, unpack(step.prefill_starts), unpack(step.prefill_counts), strict=True
        ):
            ends = start + count == self.slots[slot][0].prompt
            counts.append(int(ends))
            tokens += self._emit(slot, 1) if ends else []
        rows = unpack(step.decode_slots)
        if rows:
            shape = Shape(*step.shape) if step.shape else None
            context = sum(text.prompt + done for text, done in map(self.slots.get, rows))
            time += self.costs.time(len(rows), shape, context) * math.exp(self.random.gauss(0, self.noise))
            self.rounds[str(shape or "plain")] += 1
            for slot in rows:
                new = self._emit(slot, 1 + self._accepted(slot, shape))
                counts.append(len(new))
                tokens += new
            self.now += self.row_us * len(rows) * (shape is not None)
        self.now += time
        return StepDone(step=step.step, counts=pack(counts), tokens=pack(tokens), elapsed_us=int(time))

    def _accepted(self, slot: int, shape: Shape | None) -> int:
        text, done = self.slots[slot]
        if shape is None or done > text.length:
            return 0
        return text.accepted[shape][done - 1]  # its root is the last token

    def _emit(self, slot: int, count: int) -> list[int]:
        text, done = self.slots[slot]
        self.slots[slot] = text, done + count
        last = text.length - 1 if text.length < LONGEST else -1
        return [EOS if i == last else WORD for i in range(done, done + count)]


def serve(
    plan, device: Device, texts: list[Text], concurrency: int, max_tokens: int = 96, num: int = 8
) -> float:
    """A closed loop of so many requests over the texts, again and again: tokens a second.

    num: requests in all, at least, and at least twice `concurrency`.
    """
    limits = SchedulerLimits(
        num_pages=100_000, page_size=16, max_num_seqs=concurrency, max_num_batched_tokens=4096,
        rounds_in_flight=2, max_model_len=8192, eos_token_ids=(EOS,), enable_prefix_caching=False,
    )  # fmt: skip
    scheduler = Scheduler(limits, plan)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens).resolved()
    waiting = deque(i % len(texts) for i in range(max(num, 2 * concurrency)))
    named, under_way, open_now, made, rid = dict(enumerate(texts)), deque(), 0, 0, 0
    started = device.now
    while waiting or open_now:
        while waiting and open_now < concurrency:
            i, rid, open_now = waiting.popleft(), rid + 1, open_now + 1
            scheduler.add(Generate(rid, pack([i] * texts[i].prompt), params))
        while (step := scheduler.schedule()) is not None:
            under_way.append(device.run(step, named))
        for out in scheduler.update(under_way.popleft()):
            made += len(unpack(out.token_ids))
            open_now -= out.finished is not None
    seconds = (device.now - started) / 1e6
    while under_way:
        scheduler.update(under_way.popleft())
    return made / seconds
