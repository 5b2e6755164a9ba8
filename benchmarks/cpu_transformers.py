"""One request on the CPU: plain and eagle4 against the faster of transformers' float32 and bfloat16, interleaved.

    python benchmarks/cpu_transformers.py PROMPTS.jsonl [--num 8] [--max-tokens 64] [--name cpu_transformers]

Each prompt is answered by every engine in turn, greedily, so that all see the same machine; the figure of an engine
is its output tokens over its seconds. PROMPTS comes from benchmarks/prompts.py. The engine's default dtype is used.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tokenspeed import LLM, SamplingParams
from tokenspeed.bench.report import document, write_json
from tokenspeed.hub.resolve import resolve_model

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--num", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--shape", default=None, help="tree of eagle4 (default: the engine's)")
    parser.add_argument("--name", default="cpu_transformers")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    every = max(1, len(rows) // args.num)
    prompts = [row["messages"] for row in rows[::every][: args.num]]
    path = resolve_model("demo", None, lambda *_: None)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    models = {
        f"transformers {d}": AutoModelForCausalLM.from_pretrained(path, dtype=d)
        for d in ("float32", "bfloat16")
    }
    seconds: dict[str, float] = {}
    tokens: dict[str, int] = {}

    def took(name: str, started: float, count: int) -> None:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - started
        tokens[name] = tokens.get(name, 0) + count

    with LLM("demo") as plain, LLM("demo", spec="eagle4", spec_shape=args.shape) as drafted:

        def answer(messages: list) -> None:
            ids = []
            for name, llm in {"none": plain, "eagle4": drafted}.items():
                started = time.perf_counter()
                out = llm.chat([messages], params)[0]
                took(name, started, len(out.outputs[0].token_ids))
                ids = out.prompt_token_ids
            x = torch.tensor([ids])
            for name, model in models.items():
                started = time.perf_counter()
                y = model.generate(
                    x, attention_mask=torch.ones_like(x), max_new_tokens=args.max_tokens, do_sample=False
                )
                took(name, started, y.shape[1] - x.shape[1])

        answer(prompts[0])  # warms up
        seconds.clear()
        tokens.clear()
        for messages in prompts:
            answer(messages)
        info = drafted.info
    speed = {name: tokens[name] / seconds[name] for name in seconds}
    best = max(value for name, value in speed.items() if name.startswith("transformers"))
    found = [
        {"engine": name, "tokens_per_second": round(value, 2), "over_transformers": round(value / best, 2)}
        for name, value in speed.items()
    ]
    for row in found:
        print(f"{row['engine']:24} {row['tokens_per_second']:8.1f} tok/s  {row['over_transformers']:.2f}x")
    write_json(RESULTS / f"{args.name}.json", document("cpu against transformers", found, engine=info))


if __name__ == "__main__":
    main()
