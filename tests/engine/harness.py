"""The engine in one process: scheduler and runner joined by a function call, for tests that need no sockets."""

from collections import deque
from dataclasses import dataclass, field

from tokenspeed.config import Config
from tokenspeed.ipc.messages import Finished, Generate, Logprobs, Output, pack, unpack
from tokenspeed.launch import resolve
from tokenspeed.params import SamplingParams
from tokenspeed.scheduler.scheduler import Scheduler, SchedulerLimits
from tokenspeed.spec.plan import plan_for
from tokenspeed.worker.runner import Launched
from tokenspeed.worker.setup import build


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    finished: Finished | None = None


class InProcessEngine:
    """`Config` options by name; float32 on the CPU unless said otherwise."""

    def __init__(self, model, **options):
        options = {"dtype": "float32", "device": "cpu", "kv_cache_tokens": 4096, **options}
        self.resolved = resolve(Config(model=str(model), **options), lambda *_: None)
        built = build(self.resolved, lambda *_: None)
        self.runner, self.info = built.runner, built.info
        limits = SchedulerLimits(
            num_pages=built.info["num_pages"],
            page_size=built.info["page_size"],
            max_num_seqs=built.info["max_num_seqs"],
            max_num_batched_tokens=built.info["max_num_batched_tokens"],
            rounds_in_flight=built.info["rounds_in_flight"],
            max_model_len=self.resolved.max_model_len,
            eos_token_ids=self.resolved.eos_token_ids,
            enable_prefix_caching=self.resolved.config.enable_prefix_caching,
        )
        plan = plan_for(self.resolved.shapes, self.resolved.plain_above, built.info.get("calibration"))
        self.scheduler = Scheduler(limits, plan)
        self.answers: dict[int, Answer] = {}  # by request number
        self._under_way: deque[Launched] = deque()
        self._next_rid = 0

    def generate(self, prompts, params) -> list[Answer]:
        """prompts: lists of token ids. params: one for all, or one each. All are queued at once."""
        every = params if isinstance(params, list) else [params] * len(prompts)
        rids = [self.submit(ids, one) for ids, one in zip(prompts, every, strict=True)]
        self.drain()
        return [self.answers.pop(rid) for rid in rids]

    def submit(self, ids: list[int], params: SamplingParams) -> int:
        """Queues a request; returns its number, under which `answers` fills."""
        self._next_rid += 1
        self.answers[self._next_rid] = Answer()
        self._take(self.scheduler.add(Generate(self._next_rid, pack(ids), params.resolved())))
        return self._next_rid

    def abort(self, rid: int) -> None:
        self._take(self.scheduler.abort(rid))

    def advance(self) -> None:
        """Sends what may be sent, up to rounds_in_flight steps, then takes the answer to the oldest."""
        while (step := self.scheduler.schedule()) is not None:
            self._under_way.append(self.runner.launch(step))
        if self._under_way:
            self._take(self.scheduler.update(self.runner.result(self._under_way.popleft())))
        elif not self.scheduler.is_idle:
            raise AssertionError("requests wait, but no step is under way and none can be sent")
        self.scheduler.check()

    def drain(self) -> None:
        while not self.scheduler.is_idle:
            self.advance()

    def _take(self, outputs: list[Output]) -> None:
        for out in outputs:
            answer = self.answers[out.rid]
            assert answer.finished is None, "an answer after the last"
            answer.token_ids += unpack(out.token_ids)
            answer.logprobs += out.logprobs
            answer.prompt_logprobs += out.prompt_logprobs
            answer.finished = out.finished


def greedy(max_tokens: int = 24, **fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)
