"""Does the plan ever lose? Plain decoding, every fixed tree, and the plan, at each number of requests.

    python benchmarks/plan.py MODEL --prompts P.jsonl [--draft D] [--concurrency 1,8,64] [--device cpu] [--name plan]

P.jsonl comes from benchmarks/prompts.py. Scheduler and worker run in this process, without the ring, in a closed
loop of so many requests; the figure is output tokens over seconds, prefill included, greedy. Plain decoding is an
engine of its own, without a draft. All take turns, run by run.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict, deque
from pathlib import Path

from tokenspeed.bench.report import document, write_json
from tokenspeed.bench.workload import Prompt, load_prompts
from tokenspeed.cli.args import Parser, positive, positives
from tokenspeed.config import Config, Shape
from tokenspeed.ipc.messages import Generate, pack, unpack
from tokenspeed.launch import resolve
from tokenspeed.params import SamplingParams
from tokenspeed.scheduler.scheduler import Scheduler, SchedulerLimits
from tokenspeed.spec.calibration import decode
from tokenspeed.spec.plan import StaticPlan, plan_for
from tokenspeed.tokenizer.encoder import Encoder
from tokenspeed.worker.setup import build

RESULTS = Path(__file__).parent / "results"


class FixedPlan(StaticPlan):
    """One tree, as long as there are as many requests as it was captured for; then the first of what is captured.

    Without graphs a round takes several times as long, and the end of every run would be of such rounds.
    """

    def __init__(self, shape: Shape, ladder: dict[int, tuple[Shape, ...]]):
        super().__init__(shape)
        self._ladder = ladder

    def choose(self, rows: list) -> Shape | None:
        bucket = min((b for b in self._ladder if b >= len(rows)), default=max(self._ladder))
        return self.shape if self.shape in self._ladder[bucket] else self._ladder[bucket][0]


class Engine:
    """Scheduler and worker joined by a function call."""

    def __init__(self, config: Config):
        self.resolved = resolve(config, lambda *_: None)
        built = build(self.resolved, lambda text, done, total: total or print(text, flush=True))
        self.runner, self.info = built.runner, built.info
        names = ("num_pages", "page_size", "max_num_seqs", "max_num_batched_tokens", "rounds_in_flight")
        limits = SchedulerLimits(
            **{name: built.info[name] for name in names},
            max_model_len=self.resolved.max_model_len,
            eos_token_ids=self.resolved.eos_token_ids,
            enable_prefix_caching=False,
        )
        self.scheduler = Scheduler(limits, self.new_plan())
        self._rid = 0

    def new_plan(self):
        return plan_for(self.resolved.shapes, self.resolved.plain_above, self.info.get("calibration"))

    def run(self, prompts: list[list[int]], params: SamplingParams, concurrency: int, plan) -> dict:
        """Answers the prompts, `concurrency` at once: seconds, tokens, answers in order, and the tree of each round."""
        scheduler, waiting, under_way = self.scheduler, deque(prompts), deque()
        scheduler.plan, rounds, answers, open_now = plan, [], defaultdict(list), 0
        started = time.perf_counter()
        while waiting or open_now:
            while waiting and open_now < concurrency:
                self._rid, open_now = self._rid + 1, open_now + 1
                scheduler.add(Generate(self._rid, pack(waiting.popleft()), params))
            while (step := scheduler.schedule()) is not None:
                under_way.append(self.runner.launch(step))
                if step.decode_slots:
                    rounds.append(str(Shape(*step.shape)) if step.shape else "plain")
            for out in scheduler.update(self.runner.result(under_way.popleft())):
                answers[out.rid] += unpack(out.token_ids)
                open_now -= out.finished is not None
        seconds = time.perf_counter() - started
        while under_way:  # rounds that were sent before the last answer was known
            scheduler.update(self.runner.result(under_way.popleft()))
        ordered = [answers[rid] for rid in sorted(answers)]
        return {"tokens": sum(map(len, ordered)), "seconds": seconds, "rounds": rounds, "answers": ordered}


def main() -> None:
    args = _parse()
    common = {"device": args.device, "kv_cache_tokens": args.kv_cache_tokens, "max_num_seqs": max(args.concurrency),
              "gpu_memory_utilization": args.gpu_memory_utilization, "dtype": args.dtype}  # fmt: skip
    common = {name: value for name, value in common.items() if value is not None}
    plain = Engine(Config(model=args.model, **common))
    spec = Engine(Config(model=args.model, spec="eagle4", draft=args.draft, **common))
    encoder = Encoder.load(spec.resolved.model_dir)
    calibration = decode(spec.info["calibration"])
    print(json.dumps({"times": calibration.times, "per_token": calibration.per_token}), flush=True)
    ladder = calibration.ladder()
    rows, plan = [], spec.new_plan()
    about = {"model": args.label or args.model, "max_tokens": args.max_tokens, "engine": spec.info}
    for concurrency in args.concurrency:
        prompts = encode(encoder, load_prompts(args.prompts, max(args.num, 2 * concurrency)))
        params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens).resolved()
        warm_up = SamplingParams(temperature=0.0, max_tokens=8).resolved()
        bucket = min((b for b in ladder if b >= concurrency), default=max(ladder))
        kinds = {"none": (plain, StaticPlan(None)), "plan": (spec, plan)}
        kinds |= {str(s): (spec, FixedPlan(s, ladder)) for s in ladder[bucket]}
        found: dict[str, list[float]] = {name: [] for name in kinds}
        seen: dict[str, int] = {}
        for engine, how in kinds.values():  # what a batch of this size makes once is paid for here
            engine.run(prompts[:concurrency], warm_up, concurrency, how)
        for _ in range(args.repeats):
            for name, (engine, how) in kinds.items():
                result = engine.run(prompts, params, concurrency, how)
                found[name].append(result["tokens"] / result["seconds"])
                seen = dict(Counter(result["rounds"])) if name == "plan" else seen
        speeds = {name: round(statistics.median(runs), 1) for name, runs in found.items()}
        best = max(speed for name, speed in speeds.items() if name not in ("plan", "none"))
        row = {"concurrency": concurrency, "tokens_per_second": speeds, "plan_rounds": seen,
               "plan_over_none": speeds["plan"] / speeds["none"],
               "plan_over_best_fixed": speeds["plan"] / max(best, speeds["none"])}  # fmt: skip
        rows.append(row)
        print(json.dumps(row), flush=True)
        write_json(
            RESULTS / f"{args.name}.json", document("plan", rows, **about)
        )  # what there is, if it is stopped


def encode(encoder: Encoder, prompts: list[Prompt]) -> list[list[int]]:
    texts = [encoder.chat.render(json.dumps(prompt.messages).encode()) for prompt in prompts]
    return encoder.encode(texts, add_special_tokens=False)


def _parse() -> argparse.Namespace:
    parser = Parser(prog="plan.py", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", default="builtin", metavar="FILE")
    parser.add_argument("--draft")
    parser.add_argument("--concurrency", type=positives, default=(1, 2, 4, 8), metavar="N,N,...")
    parser.add_argument(
        "--num", type=positive, default=8, help="prompts at least; twice the requests in any case"
    )
    parser.add_argument("--max-tokens", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype")
    parser.add_argument("--kv-cache-tokens", type=positive)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--label")
    parser.add_argument("--name", default="plan", help="of the file in benchmarks/results")
    return parser.parse(sys.argv[1:])


if __name__ == "__main__":
    main()
