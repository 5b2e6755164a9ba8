"""Runs steps: applies what the scheduler decided, launches the passes, brings results to the host."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenspeed.config import Shape
from tokenspeed.ipc.messages import Logprobs, Step, StepDone, pack, unpack
from tokenspeed.params import SamplingParams
from tokenspeed.sampling.logprobs import logprobs_of
from tokenspeed.worker.engine import DRAFT_NAN, TARGET_NAN, Engine, PrefillResult
from tokenspeed.worker.graph import GraphSet
from tokenspeed.worker.prefill import Chunks, ChunkTensors
from tokenspeed.worker.transfer import to_device, to_host

UNUSABLE = "the model's logits are NaN, or what the request bans leaves no token to choose"


@dataclass
class _Slot:
    """What the host knows of a request on the device."""

    input_ids: Tensor  # int64 [n] on the host
    params: SamplingParams
    max_len: int  # bound on its length, counting steps in flight


@dataclass
class Launched:
    """A step on its way. `ready()` says whether `result()` would not wait."""

    step: int
    started: float
    round: Tensor | None  # RoundResult.packed, host, filled when `done` has passed
    first: Tensor | None  # PrefillResult.packed of finished prompts, host, likewise
    ends: list[int]  # prefill rows that end their prompt
    num_prefill: int
    decoded: list[_Slot]
    num_most: int  # most tokens a decode row can have emitted
    done: torch.cuda.Event | None
    finished: float | None = None  # when the work was done, where that is known at launch (CPU)
    graphed: bool = False
    logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)

    def ready(self) -> bool:
        return self.done is None or self.done.query()


class Runner:
    """One GPU's (or the CPU's) share of every step.

    Args:
        engine: model, drafter and device state. graphs: captured rounds and prefills, or None for eager.
    """

    def __init__(self, engine: Engine, graphs: GraphSet | None, page_size: int):
        self.engine, self.graphs, self.page_size = engine, graphs, page_size
        self.state = engine.state
        self.device = engine.state.device
        self._slots: dict[int, _Slot] = {}
        self._answered = 0.0  # when the last step was done

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Queues everything the step asks for. On a GPU it returns before the work is done."""
        started = time.perf_counter()
        self._apply(step)
        out = Launched(step.step, started, None, None, [], 0, [], 0, None)
        if step.prefill_slots:
            self._prefill(step, out)
        if step.decode_slots:
            self._decode(step, out)
        if self.device.type == "cuda":
            out.done = torch.cuda.Event()
            out.done.record()
        else:
            out.finished = time.perf_counter()
        return out

    def result(self, launched: Launched) -> StepDone:
        """Waits for the step and reads what it produced."""
        if launched.done is not None:
            launched.done.synchronize()
        counts, tokens, failed, num_nan_drafts = [0] * launched.num_prefill, [], {}, 0
        firsts = [] if launched.first is None else launched.first.tolist()
        for row, (token, bad) in zip(launched.ends, firsts, strict=True):
            counts[row] = 1
            tokens.append(token)
            if bad:
                failed[row] = UNUSABLE
        rows = [] if launched.round is None else launched.round.tolist()
        for row, (request, values) in enumerate(
            zip(launched.decoded, rows, strict=True), launched.num_prefill
        ):
            count, bits = values[-2:]
            counts.append(count)
            tokens += values[:count]
            request.max_len -= launched.num_most - count
            if bits:
                num_nan_drafts += bool(bits & DRAFT_NAN)
                if bits & TARGET_NAN:
                    failed[row] = UNUSABLE
        now = launched.finished or time.perf_counter()
        # Without the time in which the step before was still running.
        elapsed = int((now - max(launched.started, self._answered)) * 1e6)
        self._answered = now
        return StepDone(
            step=launched.step,
            counts=pack(counts),
            tokens=pack(tokens),
            elapsed_us=elapsed,
            logprobs=launched.logprobs,
            prompt_logprobs=launched.prompt_logprobs,
            failed=failed,
            graphed=launched.graphed,
            num_nan_drafts=num_nan_drafts,
        )

    # ---- parts of a step

    def _apply(self, step: Step) -> None:
        released = unpack(step.release)
        self.state.clear(released)
        for slot in released:
            self._slots.pop(slot, None)
            self.engine.edits.release(slot)
            self.engine.matchers.release(slot)
        self.state.add_pages(unpack(step.page_slots), unpack(step.page_ids))
        if step.admit:
            self.engine.sampling.set([a.slot for a in step.admit], [a.params for a in step.admit])
        for admit in step.admit:
            ids = unpack(admit.input_ids)
            self._slots[admit.slot] = _Slot(torch.tensor(ids), admit.params, len(ids))
            self.engine.edits.admit(admit.slot, ids, admit.num_prompt, admit.params)
            self.engine.matchers.admit(admit.slot, ids[admit.num_prompt :], admit.params)
        if cached := [(a.slot, a.num_cached // self.page_size - 1) for a in step.admit if a.num_cached]:
            slots, columns = to_device(cached, self.device).T
            self.engine.resume(slots, self.state.block_table[slots, columns].long())

    def _prefill(self, step: Step, out: Launched) -> None:
        slots, starts, counts = (
            unpack(step.prefill_slots),
            unpack(step.prefill_starts),
            unpack(step.prefill_counts),
        )
        requests = [self._slots[slot] for slot in slots]
        spans = list(zip(requests, starts, counts, strict=True))
        tokens = torch.cat([r.input_ids[start : start + count] for r, start, count in spans])
        ends = [i for i, (r, start, count) in enumerate(spans) if start + count == len(r.input_ids)]
        end_slots = [slots[i] for i in ends]
        chunks = Chunks.of(tokens, slots, starts, counts, ends)
        wanted = any(r.params.logprobs is not None or r.params.prompt_logprobs is not None for r in requests)
        edited = self.engine.edits.any(end_slots) or self.engine.matchers.any(end_slots)
        if self.graphs is not None and not wanted and not edited and self.graphs.covers_prefill(chunks):
            packed = self.graphs.replay_prefill(chunks)
        else:
            result = self.engine.prefill(ChunkTensors.of(chunks, self.device), end_slots)
            packed = result.packed()
            self._prefill_logprobs(spans, ends, result, out)
        for i in ends:
            requests[i].max_len += 1
        out.num_prefill, out.ends = len(slots), ends
        out.first = to_host(packed)

    def _prefill_logprobs(self, spans, ends: list[int], result: PrefillResult, out: Launched) -> None:
        for i, row in enumerate(ends):
            if (top := spans[row][0].params.logprobs) is not None:
                out.logprobs[row] = logprobs_of(result.last_logits[i : i + 1], result.tokens[i : i + 1], top)
        offset = 0
        for row, (request, start, count) in enumerate(spans):
            if (top := request.params.prompt_logprobs) is not None:
                targets = request.input_ids[start + 1 : start + count + 1].to(self.device)
                logits = self.engine.model.logits(result.hidden[offset : offset + len(targets)])
                out.prompt_logprobs[row] = logprobs_of(logits, targets, top)
            offset += count

    def _decode(self, step: Step, out: Launched) -> None:
        slots = unpack(step.decode_slots)
        shape = None if step.shape is None else Shape(*step.shape)
        out.decoded = [self._slots[s] for s in slots]
        out.num_most = 1 if shape is None else shape.steps + 1
        wanted = {i: top for i, s in enumerate(out.decoded) if (top := s.params.logprobs) is not None}
        edited = self.engine.edits.any(slots) or self.engine.matchers.any(slots)
        if self.graphs is not None and not wanted and not edited and self.graphs.covers(len(slots), shape):
            packed = self.graphs.replay(slots, shape)
            out.graphed = True
        else:
            max_len = max(slot.max_len for slot in out.decoded)
            result = self.engine.round(to_device(slots, self.device), slots, shape, max_len)
            packed = result.packed()
            for row, top in wanted.items():
                n = int(result.counts[row])  # a request with logprobs waits for its round
                logits = result.logits[row, result.path[row, :n]]
                out.logprobs[out.num_prefill + row] = logprobs_of(logits, result.tokens[row, :n], top)
        for slot in out.decoded:
            slot.max_len += out.num_most
        out.round = to_host(packed)
