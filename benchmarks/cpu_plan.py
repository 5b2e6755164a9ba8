"""Does the plan of a CPU ever lose? Plain, the first default tree at every load, and the plan, in turns.

    python benchmarks/cpu_plan.py PROMPTS.jsonl [--concurrency 1,2,4,8] [--num 8] [--max-tokens 64] [--name cpu_plan]

PROMPTS comes from benchmarks/prompts.py. Greedy; the figure of an engine is its output tokens over its seconds.
"""

import argparse
import json
import time
from pathlib import Path

from tokenspeed import LLM, SamplingParams
from tokenspeed.bench.report import document, write_json
from tokenspeed.spec.options import CPU_SHAPES

RESULTS = Path(__file__).parent / "results"
REPEATS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--concurrency", default="1,2,4,8")
    parser.add_argument("--num", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--name", default="cpu_plan")
    args = parser.parse_args()
    rows = [json.loads(line)["messages"] for line in args.prompts.read_text().splitlines()]
    prompts = rows[:: max(1, len(rows) // args.num)][: args.num]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    common = {"device": "cpu", "kv_cache_tokens": 16384}
    pinned = str(CPU_SHAPES[0])
    engines = {
        "none": LLM("demo", **common),
        pinned: LLM("demo", spec="eagle4", spec_shape=pinned, **common),
        "plan": LLM("demo", spec="eagle4", **common),
    }
    results = []
    for concurrency in map(int, args.concurrency.split(",")):
        seconds, tokens = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0)
        for _ in range(REPEATS):
            for name, engine in engines.items():
                started = time.perf_counter()
                outputs = engine.chat(prompts, params, concurrency=concurrency)
                seconds[name] += time.perf_counter() - started
                tokens[name] += sum(len(out.outputs[0].token_ids) for out in outputs)
        speeds = {name: round(tokens[name] / seconds[name], 2) for name in engines}
        results.append({"concurrency": concurrency, "tokens_per_second": speeds})
        print(
            concurrency, {name: f"{speed} ({speed / speeds['none']:.2f}x)" for name, speed in speeds.items()}
        )
    info = engines["plan"].info
    for engine in engines.values():
        engine.shutdown()
    write_json(RESULTS / f"{args.name}.json", document("plan on a CPU", results, engine=info))


if __name__ == "__main__":
    main()
