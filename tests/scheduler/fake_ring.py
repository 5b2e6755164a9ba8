"""A worker in pure Python for the scheduler's tests, and a driver that plays requests through both.

The worker keeps "K/V" per place in the pages: a running hash of all tokens up to that index, as real K/V
depends on all of them. It checks what it reads before every row, so a page with another request's content is
found at once. The next token is a function of that hash, so `expected` gives the right answer without any
scheduler.
"""

import random
from collections import deque
from dataclasses import dataclass

from tokenspeed.config import Shape
from tokenspeed.ipc.messages import Generate, Logprobs, Output, Step, StepDone, StopString, pack, unpack
from tokenspeed.params import SamplingParams
from tokenspeed.scheduler.scheduler import Scheduler, SchedulerLimits
from tokenspeed.spec.plan import StaticPlan

VOCAB = 50
TREE = Shape(3, 2, 6)
EOS = 7
MASK = (1 << 64) - 1


def chain(before: int, token: int) -> int:
    return (before * 6364136223846793005 + token * 2862933555777941757 + 1442695040888963407) & MASK


def next_token(state: int, banned: frozenset[int]) -> int:
    token = (state >> 33) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def banned_at(params: SamplingParams, num_output: int) -> frozenset[int]:
    """What min_tokens forbids."""
    if num_output >= params.min_tokens:
        return frozenset()
    return frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else (EOS,))


def expected(prompt: list[int], params: SamplingParams, max_model_len: int = 10**9) -> tuple[list[int], str]:
    """Output tokens and finish reason, one token after the other."""
    state, out = 0, []
    for token in prompt:
        state = chain(state, token)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while len(out) < params.max_tokens and len(prompt) + len(out) < max_model_len:
        out.append(next_token(state, banned_at(params, len(out))))
        state = chain(state, out[-1])
        if out[-1] in stops:
            return out, "stop"
    return out, "length"


def generate(rid: int, prompt: list[int], **params) -> Generate:
    return Generate(rid, pack(prompt), SamplingParams(seed=0, **params).resolved())


def scheduler_with(shape: Shape | None = None, **limits) -> Scheduler:
    defaults = dict(
        num_pages=101,
        page_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        rounds_in_flight=2,
        max_model_len=200,
        eos_token_ids=(EOS,),
    )
    return Scheduler(SchedulerLimits(**{**defaults, **limits}), StaticPlan(shape))


@dataclass
class Slot:
    tokens: list[int]  # known to the device: input, then all it has sampled
    num_input: int
    num_prompt: int
    num_cached: int
    params: SamplingParams
    table: list[int]
    num_kv: int


class FakeWorker:
    def __init__(self, limits: SchedulerLimits, rng: random.Random, fail_share: float = 0.0):
        self.limits, self.rng, self.fail_share = limits, rng, fail_share
        self.slots: dict[int, Slot] = {}
        self.kv: dict[int, int] = {}  # place -> hash
        self.next_step = 0

    def run(self, step: Step) -> StepDone:
        assert step.step == self.next_step, "steps out of order"
        self.next_step += 1
        self._apply(step)
        rows = [self._chunk(*row) for row in zip(*map(unpack, self._prefill(step)), strict=True)]
        logprobs, prompt_logprobs = {}, {}
        for row, (slot, start, _) in enumerate(zip(*map(unpack, self._prefill(step)), strict=True)):
            if self.slots[slot].params.prompt_logprobs is not None:
                # Of the last chunk the last entry is the sampled token's, which is none of the prompt.
                following = self.slots[slot].tokens[start + 1 : self.slots[slot].num_kv + 1]
                prompt_logprobs[row] = [Logprobs(float(token)) for token in following]
        decode = unpack(step.decode_slots)
        assert len(set(decode)) == len(decode)
        shape = Shape(*step.shape) if step.shape else None
        rows += [self._round(slot, shape) for slot in decode]
        for row, slot in enumerate(unpack(step.prefill_slots) + decode):
            if self.slots[slot].params.logprobs is not None:
                logprobs[row] = [Logprobs(float(token)) for token in rows[row]]
        failed = {row: "NaN" for row in range(len(rows)) if self.rng.random() < self.fail_share}
        return StepDone(
            step=step.step,
            counts=pack([len(row) for row in rows]),
            tokens=pack([token for row in rows for token in row]),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            failed=failed,
        )

    @staticmethod
    def _prefill(step: Step) -> tuple[bytes, bytes, bytes]:
        return step.prefill_slots, step.prefill_starts, step.prefill_counts

    def _apply(self, step: Step) -> None:
        for slot in unpack(step.release):
            del self.slots[slot]
        for admit in step.admit:
            ids = unpack(admit.input_ids)
            assert admit.slot not in self.slots and 0 <= admit.slot < self.limits.max_num_seqs
            assert admit.num_cached % self.limits.page_size == 0 and 0 <= admit.num_cached < len(ids)
            slot = Slot(ids, len(ids), admit.num_prompt, admit.num_cached, admit.params, [], admit.num_cached)
            self.slots[admit.slot] = slot
        for slot, page in zip(unpack(step.page_slots), unpack(step.page_ids), strict=True):
            assert 0 < page < self.limits.num_pages
            assert page not in self.slots[slot].table
            self.slots[slot].table.append(page)

    def _place(self, slot: Slot, index: int) -> int | None:
        """None: the dummy page, allowed only past the context limit."""
        if index >= self.limits.max_model_len:
            return None
        column, offset = divmod(index, self.limits.page_size)
        assert column < len(slot.table), f"index {index} has no page"
        return slot.table[column] * self.limits.page_size + offset

    def _write(self, slot: Slot, index: int, value: int) -> None:
        place = self._place(slot, index)
        if place is not None:
            self.kv[place] = value

    def _state(self, slot: Slot, count: int) -> int:
        """Hash of the first `count` tokens, all read from the pages and compared."""
        state = 0
        for index, token in enumerate(slot.tokens[:count]):
            state = chain(state, token)
            place = self._place(slot, index)
            assert place is None or self.kv.get(place) == state, f"wrong K/V at index {index}"
        return state

    def _sample(self, slot: Slot, state: int) -> int:
        token = next_token(state, banned_at(slot.params, len(slot.tokens) - slot.num_prompt))
        slot.tokens.append(token)
        return token

    def _chunk(self, number: int, start: int, count: int) -> list[int]:
        slot = self.slots[number]
        assert start == slot.num_kv and count > 0 and start + count <= slot.num_input
        state = self._state(slot, start)
        for index in range(start, start + count):
            state = chain(state, slot.tokens[index])
            self._write(slot, index, state)
        slot.num_kv = start + count
        return [self._sample(slot, state)] if slot.num_kv == slot.num_input else []

    def _round(self, number: int, shape: Shape | None) -> list[int]:
        slot = self.slots[number]
        last = len(slot.tokens) - 1
        assert slot.num_kv == last >= slot.num_input, "decode before the prompt is computed"
        state = chain(self._state(slot, last), slot.tokens[last])
        if shape:  # a kept node may have any number, and the token after the last one has a draft row
            needed = last + max(shape.nodes, shape.steps + 2)
            assert needed <= len(slot.table) * self.limits.page_size, "a node or a draft row has no page"
        for index in range(last, last + (shape.nodes if shape else 1)):
            self._write(slot, index, -1)  # nodes of the tree: worth nothing unless accepted
        count = self.rng.randint(1, min(shape.steps, shape.nodes - 1) + 1) if shape else 1
        out = []
        for index in range(last, last + count):
            self._write(slot, index, state)
            out.append(self._sample(slot, state))
            state = chain(state, out[-1])
        slot.num_kv = last + count
        return out


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[Logprobs]
    prompt_logprobs: list[Logprobs]
    finished: list


class Ring:
    """Scheduler and worker with up to `rounds_in_flight` steps between. Checks all after each event."""

    def __init__(self, scheduler: Scheduler, seed: int = 0, fail_share: float = 0.0, check: bool = True):
        self.scheduler = scheduler
        self.rng = random.Random(seed)
        self.worker = FakeWorker(scheduler.limits, self.rng, fail_share)
        self.sent: deque[Step] = deque()
        self.steps: list[Step] = []
        self.answers: dict[int, Answer] = {}
        self._check = check

    def add(self, message: Generate) -> None:
        self.answers[message.rid] = Answer([], [], [], [])
        self.take(self.scheduler.add(message))

    def abort(self, rid: int) -> None:
        self.take(self.scheduler.abort(rid))

    def stop_string(self, rid: int, num_tokens: int) -> None:
        self.take(self.scheduler.stop_string(StopString(rid, num_tokens)))

    def send(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is not None:
            self.sent.append(step)
            self.steps.append(step)
        self.check()
        return step

    def answer(self) -> None:
        self.take(self.scheduler.update(self.worker.run(self.sent.popleft())))

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            answer = self.answers[output.rid]
            assert not answer.finished, f"request {output.rid} has been answered after its end"
            answer.tokens += unpack(output.token_ids)
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            if output.finished:
                answer.finished.append(output.finished)
        self.check()

    def run(self, max_steps: int = 100_000) -> None:
        """Until all is answered. The worker answers at random while more steps may be sent."""
        for _ in range(max_steps):
            if self.scheduler.is_idle:
                return
            sent = self.send()
            assert sent or self.sent, "nothing in flight and nothing scheduled: stuck"
            if sent is None or self.rng.random() < 0.5:
                self.answer()
        raise AssertionError(f"not idle after {max_steps} steps")

    def check(self) -> None:
        if not self._check:
            return
        self.scheduler.check()
        size = self.scheduler.limits.page_size
        stack = [(node, 0) for node in self.scheduler.cache.tree.root.children.values()]
        while stack:
            node, state = stack.pop()
            for i, token in enumerate(unpack(node.key)):
                state = chain(state, token)
                place = node.pages[i // size] * size + i % size
                assert self.worker.kv.get(place) == state, "the prefix tree holds wrong K/V"
            stack += [(child, state) for child in node.children.values()]


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + 3 * i * i + i) % 50 for i in range(length)]


def assert_answered(ring: Ring, rid: int, prompt: list[int], **params) -> None:
    """The answer is the closed form's, told once."""
    message = generate(rid, prompt, **params)
    tokens, reason = expected(prompt, message.params, ring.scheduler.limits.max_model_len)
    answer = ring.answers[rid]
    assert answer.tokens == tokens
    assert [f.reason for f in answer.finished] == [reason]
    finished = answer.finished[0]
    assert (finished.num_prompt, finished.num_output) == (len(prompt), len(tokens))
    assert finished.stop_token == (tokens[-1] if reason == "stop" else None)
