"""Which requests run in the next step, with which pages, and what the answer to a step means for them.

Pure logic: messages in, messages out. There are no phases: a step holds prefill chunks and one round for
every request whose prompt is computed. Up to `rounds_in_flight` steps are sent before the first has answered.
Until then a request's length is known only within bounds, so pages are reserved for the upper one and rounds
are scheduled by the lower one.

Ownership. A finished request's slot and pages go back at once and may be given away in the very next Step,
although an earlier step in flight still has a row for it: the worker runs steps in order, so whoever gets
them writes later. The answer to such a row is dropped, because the step remembers the Request and not its
slot.
"""

import array
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from tokenspeed.cache.manager import CacheManager, Match
from tokenspeed.config import Shape
from tokenspeed.ipc.messages import (
    Admit,
    Finished,
    Generate,
    Logprobs,
    Output,
    Stats,
    Step,
    StepDone,
    StopString,
    unpack,
)
from tokenspeed.scheduler import policy
from tokenspeed.scheduler.counters import Counters
from tokenspeed.scheduler.request import Request, Status
from tokenspeed.scheduler.step import Growth, StepInFlight, encode_step


@dataclass(frozen=True)
class SchedulerLimits:
    num_pages: int  # with the dummy page
    page_size: int  # tokens
    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # prefill tokens a step
    rounds_in_flight: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    enable_prefix_caching: bool = True


class Plan(Protocol):
    def choose(self, batch_size: int) -> Shape | None:
        """The tree for a round of `batch_size` requests; None is a plain round."""
        ...


class Scheduler:
    def __init__(self, limits: SchedulerLimits, plan: Plan):
        self.limits = limits
        self.plan = plan
        self.cache = CacheManager(limits.num_pages, limits.page_size, limits.enable_prefix_caching)
        self.counters = Counters()
        self.waiting: deque[Request] = deque()  # preempted ones in front
        self.running: dict[int, Request] = {}  # by rid
        self._requests: dict[int, Request] = {}  # by rid: waiting and running
        self._in_flight: deque[StepInFlight] = deque()
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._to_release: list[int] = []  # slots that the next Step names
        self._num_arrived = 0
        self._gathering = policy.Gathering()

    # ---- requests come and go

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_idle(self) -> bool:
        return not self._requests and not self._in_flight

    def add(self, message: Generate) -> list[Output]:
        """Queues a request. One that the KV pool could never hold is answered at once."""
        assert message.rid not in self._requests, f"request {message.rid} exists"
        request = Request(message, self._num_arrived, self.limits.max_model_len, self.limits.eos_token_ids)
        self._num_arrived += 1
        room = self.cache.num_total * self.limits.page_size
        if refusal := policy.refusal(request, room, self.limits.max_model_len):
            request.status = Status.FINISHED
            return [Output(request.rid, finished=refusal)]
        self._requests[request.rid] = request
        self.waiting.append(request)
        return []

    def abort(self, rid: int) -> list[Output]:
        """Ends a request in whatever state it is. Unknown ids are ignored."""
        request = self._requests.get(rid)
        return [] if request is None else [Output(rid, finished=self._finish(request, "abort"))]

    def stop_string(self, message: StopString) -> list[Output]:
        """Ends a request whose text holds a stop string; tokens after `num_tokens` are forgotten."""
        request = self._requests.get(message.rid)
        if request is None:
            return []
        del request.tokens[request.num_prompt + max(0, message.num_tokens) :]
        return [Output(request.rid, finished=self._finish(request, "stop"))]

    # ---- the next step

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to do before an answer or a request arrives."""
        if len(self._in_flight) >= self.limits.rounds_in_flight or not self._requests:
            return None
        growth = Growth()
        reserved = self._reserve_round(growth)
        if reserved is None:
            return None
        decode, shape = reserved
        chunks = self._share_prefill(growth, shape, len(decode))
        return self._send(growth, chunks, decode, shape) if chunks or decode else None

    def _reserve_round(self, growth: Growth) -> tuple[list[Request], Shape | None] | None:
        """The rows of the decode round and its tree, with pages for all they may write. None: no room before
        the steps in flight have answered."""
        while True:
            rows = [request for request in self.running.values() if request.can_decode()]
            shape = self.plan.choose(rows) if rows else None
            needs = self._needs(rows, shape)
            if sum(count for _, count in needs) <= self.cache.num_available:
                break
            if self._in_flight:
                return None
            if len(self.running) == 1:  # admission made sure that it fits without a tree
                shape = None
                needs = self._needs(rows, shape)
                break
            self._preempt(policy.victim(self.running.values()))
        for request, count in needs:
            num_tokens = request.num_covered + count * self.limits.page_size
            pages = self.cache.append(request.held, num_tokens)
            assert pages is not None, f"{count} pages were available and are not"
            request.num_covered = num_tokens
            growth.add_pages(request.slot, pages)
        return rows, shape

    def _needs(self, rows: list[Request], shape: Shape | None) -> list[tuple[Request, int]]:
        """The rows that need pages for a round of this shape, and how many."""
        size = self.limits.page_size
        needs = []
        for request in rows:
            upper = len(request.tokens) + request.most
            num_tokens = policy.tokens_to_cover(upper, shape, request.limit, self.limits.max_model_len)
            if num_tokens > request.num_covered:
                needs.append((request, -(-(num_tokens - request.num_covered) // size)))
        return needs

    def _preempt(self, request: Request) -> None:
        """Takes slot and pages away; the request computes its tokens again later. No step may be in flight:
        an answer on the way would bring tokens that the recomputation does not know of."""
        assert not self._in_flight
        self._release(request, request.committed_ids())
        request.status = Status.WAITING
        self.waiting.appendleft(request)
        self.counters.num_preemptions += 1

    def _share_prefill(self, growth: Growth, shape: Shape | None, decoding: int) -> list[tuple[Request, int]]:
        """The step's prefill chunks: running requests come first, then waiting ones."""
        running = [request for request in self.running.values() if request.num_scheduled < request.num_input]
        running.sort(key=lambda request: request.arrival)
        candidates = len(running) + min(len(self.waiting), len(self._free_slots))
        if not candidates or (not running and self._gathering.holds(candidates, decoding)):
            return []
        budget = policy.ChunkBudget(self.limits.max_num_batched_tokens, candidates)
        for request in running:
            budget.take(request, request.num_input - request.num_scheduled)
        passed_over = 0
        for request in list(islice(self.waiting, len(self._free_slots) + policy.MAX_PASSED_OVER)):
            if not (budget.left and self._free_slots and passed_over < policy.MAX_PASSED_OVER):
                break
            if request.pages_wanted + self._headroom(shape) > self.cache.num_available:
                break  # without looking it up again
            ids = request.tokens.tobytes()
            num_cached, match = self._look_up(request, ids)
            remaining = request.num_tokens - num_cached
            if budget.offer(remaining) == 0:
                passed_over += 1
                continue
            if not self._admit(request, ids, match, growth, shape):
                break
            budget.take(request, remaining)
        return budget.close()

    def _headroom(self, shape: Shape | None) -> int:
        return policy.headroom(len(self.running), shape, self.limits.page_size)

    def _look_up(self, request: Request, ids: bytes) -> tuple[int, Match]:
        if request.wants_prompt_logprobs:
            return self.cache.no_match()  # every position must be computed
        return self.cache.match(ids)

    def _admit(self, request: Request, ids: bytes, match: Match, growth: Growth, shape: Shape | None) -> bool:
        """Gives a waiting request a slot and pages for its whole input. False: none are left, for others neither."""
        before = self.cache.num_available
        held = self.cache.allocate(match)
        num_tokens = policy.tokens_to_cover(
            request.num_tokens, None, request.limit, self.limits.max_model_len
        )
        num_tokens = max(num_tokens, request.num_tokens)  # its input in any case
        need = self.cache.num_pages_for(num_tokens) - len(held.pages)
        if need + self._headroom(shape) > self.cache.num_available:
            request.pages_wanted = need + before - self.cache.num_available
            self.cache.release(held)
            return False
        self.cache.append(held, num_tokens)
        looked_up = self.limits.enable_prefix_caching and not request.wants_prompt_logprobs
        if looked_up and request.num_cached is None:
            self.counters.prefix_cache_queries += request.num_prompt
            self.counters.prefix_cache_hits += held.num_cached
        self.waiting.remove(request)
        self.running[request.rid] = request
        request.start(self._free_slots.pop(), held)
        request.num_covered = len(held.pages) * self.limits.page_size
        growth.admit.append(Admit(request.slot, ids, request.num_prompt, held.num_cached, request.params))
        growth.add_pages(request.slot, held.pages)
        return True

    def _send(
        self, growth: Growth, chunks: list[tuple[Request, int]], decode: list[Request], shape: Shape | None
    ) -> Step:
        """Books the step as in flight and encodes it."""
        starts = [request.num_scheduled for request, _ in chunks]
        ends = []
        for request, count in chunks:
            request.num_scheduled += count
            ends.append((request, request.num_scheduled))
            if request.num_scheduled == request.num_input:
                request.least += 1
                request.most += 1
        most = shape.steps + 1 if shape else 1
        for request in decode:
            request.least += 1
            request.most += most
        number = self.counters.steps
        self.counters.steps += 1
        self._in_flight.append(StepInFlight(number, ends, decode, shape))
        step = encode_step(number, self._to_release, growth, chunks, starts, decode, shape)
        self._to_release = []
        return step

    # ---- the answer

    def update(self, done: StepDone) -> list[Output]:
        """Applies the answer to the oldest step in flight: tokens for clients, finished requests, free
        pages."""
        flight = self._in_flight.popleft()
        assert done.step == flight.step, f"answer to step {done.step}, expected {flight.step}"
        counts, tokens = unpack(done.counts), array.array("i", done.tokens)
        rows = len(flight.prefill) + len(flight.decode)
        assert len(counts) == rows and sum(counts) == len(tokens), (
            f"step {done.step}: counts and tokens don't fit"
        )
        self.counters.graphed_steps += done.graphed
        self.counters.spec_decode_num_nan_drafts += done.num_nan_drafts
        outputs: list[Output] = []
        at = 0
        for row, (request, end) in enumerate(flight.prefill):
            new, at = tokens[at : at + counts[row]], at + counts[row]
            if request.status is not Status.RUNNING:
                continue
            if row in done.failed:
                outputs.append(self._fail(request, done.failed[row]))
            elif self._end_chunk(request, end, row, done):
                assert len(new) == 1, f"{len(new)} tokens for the end of a prefill"
                outputs.append(self._commit(request, row, new, done, 0))
        most = flight.shape.steps + 1 if flight.shape else 1
        num_drafted = flight.shape.nodes - 1 if flight.shape else 0
        seen: list[tuple[Request, int]] = []
        for row, request in enumerate(flight.decode, len(flight.prefill)):
            start, at = at, at + counts[row]
            if request.status is not Status.RUNNING:
                continue
            new = tokens[start:at]
            if row in done.failed:
                outputs.append(self._fail(request, done.failed[row]))
                continue
            assert 1 <= len(new) <= most, f"{len(new)} tokens from a round of at most {most}"
            request.least -= 1
            request.most -= most
            seen.append((request, len(new) - 1))
            outputs.append(self._commit(request, row, new, done, num_drafted))
        self.plan.observe(flight.shape, seen, None if flight.prefill else done.elapsed_us)
        self.counters.count_round(flight.shape, len(seen), self.plan.expected_tokens)
        return outputs

    def _end_chunk(self, request: Request, end: int, row: int, done: StepDone) -> bool:
        """Books computed prefill tokens. Returns whether the input ends here, so that the row has sampled a
        token."""
        request.num_computed = end
        if request.wants_prompt_logprobs:
            request.logprobs_of_prompt += done.prompt_logprobs.get(row, [])
        if end < request.num_input:
            return False
        request.least -= 1
        request.most -= 1
        if request.num_output == 0:
            self.counters.prompt_tokens += request.num_prompt
        # Others with this prompt need not wait for the end of this request.
        self.cache.insert(request.held, request.tokens.tobytes())
        return True

    def _commit(
        self, request: Request, row: int, new: array.array, done: StepDone, num_drafted: int
    ) -> Output:
        """Takes over a row's tokens up to the one that ends the request, and books what the draft was
        worth."""
        kept, reason, stop_token = request.commit(new)
        counters = self.counters
        counters.generation_tokens += kept
        if num_drafted:
            accepted = min(kept, len(new) - 1)
            request.num_drafted += num_drafted
            request.accepted[accepted] += 1
            counters.spec_decode_num_draft_tokens += num_drafted
            counters.accepted[accepted] += 1
        prompt_logprobs: list[Logprobs] = []
        if request.wants_prompt_logprobs:
            request.wants_prompt_logprobs = False
            prompt_logprobs = request.logprobs_of_prompt[: request.num_prompt - 1]
            request.logprobs_of_prompt = []
        return Output(
            request.rid,
            (new if kept == len(new) else new[:kept]).tobytes(),
            done.logprobs[row][:kept] if row in done.logprobs else [],
            prompt_logprobs,
            self._finish(request, reason, stop_token=stop_token) if reason else None,
        )

    def _fail(self, request: Request, why: str) -> Output:
        """For a row that the worker could not compute. Its K/V is not to be trusted, so none is kept."""
        self.counters.num_nan_aborted_requests += 1
        return Output(
            request.rid, finished=self._finish(request, "error", keep=False, message=why, status=500)
        )

    # ---- ends

    def _finish(
        self, request: Request, reason: str, keep: bool = True, **details: str | int | None
    ) -> Finished:
        """Takes the request off the books. keep: its K/V may be found by later prompts."""
        if request.status is Status.RUNNING:
            self._release(request, request.committed_ids() if keep else b"")
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        del self._requests[request.rid]
        return request.finished(reason, **details)

    def _release(self, request: Request, ids: bytes) -> None:
        """Gives slot and pages back; `ids` are the leading tokens whose K/V the prefix tree may keep."""
        self.cache.release(request.held, ids)
        request.held = None
        del self.running[request.rid]
        self._to_release.append(request.slot)
        self._free_slots.append(request.slot)

    # ---- books

    def stats(self) -> Stats:
        return Stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            pages_total=self.cache.num_total,
            pages_free=self.cache.num_free,
            pages_cached=self.cache.num_cached,
            counters=self.counters.as_dict(),
            spec_accepted_per_pos=self.counters.accepted_per_pos(),
            spec_rounds=dict(self.counters.rounds),
        )

    def check(self) -> None:
        """Raises AssertionError when requests, slots or pages do not add up. For tests and debug runs."""
        self.cache.check()
        slots = [request.slot for request in self.running.values()] + self._free_slots
        assert sorted(slots) == list(range(self.limits.max_num_seqs)), "a slot is lost or given twice"
        assert len(self._requests) == len(self.waiting) + len(self.running)
        for request in self.running.values():
            assert request.status is Status.RUNNING and request.held is not None
            assert request.num_computed <= request.num_scheduled <= request.num_input <= request.num_tokens
            assert 0 <= request.least <= request.most
        for request in self.waiting:
            assert request.status is Status.WAITING and request.held is None
        if self.is_idle:
            self.check_idle()

    def check_idle(self) -> None:
        """Raises AssertionError when no request is left but pages or slots are in use. Costs nothing."""
        assert self.is_idle and self.cache.num_used == 0, f"{self.cache.num_used} pages leaked"
        assert len(self._free_slots) == self.limits.max_num_seqs, "a slot leaked"
