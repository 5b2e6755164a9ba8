"""The engine in one process: scheduler and runner joined by a function call, for tests that need no sockets."""

from dataclasses import dataclass, field

from tokenspeed.config import Config
from tokenspeed.ipc.messages import Finished, Generate, Logprobs, Output, pack, unpack
from tokenspeed.launch import resolve
from tokenspeed.params import SamplingParams
from tokenspeed.scheduler.scheduler import Scheduler, SchedulerLimits
from tokenspeed.spec.plan import StaticPlan
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
        shapes = self.resolved.shapes
        self.scheduler = Scheduler(limits, StaticPlan(shapes[0] if shapes else None))
        self._next_rid = 0

    def generate(self, prompts, params) -> list[Answer]:
        """prompts: lists of token ids. params: one for all, or one each. All are queued at once."""
        every = params if isinstance(params, list) else [params] * len(prompts)
        answers: dict[int, Answer] = {}
        for ids, one in zip(prompts, every, strict=True):
            self._next_rid += 1
            answers[self._next_rid] = Answer()
            self._take(answers, self.scheduler.add(Generate(self._next_rid, pack(ids), one.resolved())))
        self.drain(answers)
        return list(answers.values())

    def drain(self, answers: dict[int, Answer]) -> None:
        under_way = []
        while not self.scheduler.is_idle:
            while (step := self.scheduler.schedule()) is not None:
                under_way.append(self.runner.launch(step))
            self._take(answers, self.scheduler.update(self.runner.result(under_way.pop(0))))
            self.scheduler.check()

    @staticmethod
    def _take(answers: dict[int, Answer], outputs: list[Output]) -> None:
        for out in outputs:
            answer = answers[out.rid]
            assert answer.finished is None, "an answer after the last"
            answer.token_ids += unpack(out.token_ids)
            answer.logprobs += out.logprobs
            answer.prompt_logprobs += out.prompt_logprobs
            answer.finished = out.finished


def greedy(max_tokens: int = 24, **fields) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)
