"""Does speculation change what the model says? The rule of docs/exactness.md, measured with its control.

    python benchmarks/equality.py MODEL --spec eagle4 [--draft D] --prompts P.jsonl [--num 344] [--max-tokens 128]
        [--dtype float32] [--batch-invariant] [--output FILE.json]

Greedy answers of plain decoding, one request at a time, are the reference. Against it: plain decoding with 16 requests
in flight (the control: kernels for 1 and for 16 rows round differently) and speculation, alone and with 16. At each
first difference the gap of the reference's two likeliest tokens is measured. The rule: every gap at most 0.5, and the
share of prompts that differ at most the control's plus 5 points. With --batch-invariant, and in float32, nothing may
differ at all, and seeded answers at temperature 1 are compared too.
"""

import argparse
import json
import sys
from pathlib import Path

from tokenspeed import LLM, SamplingParams
from tokenspeed.bench.report import document, write_json
from tokenspeed.errors import ConfigError

MAX_GAP = 0.5
MARGIN = 0.05
BATCH = 16


def answers(
    llm: LLM, conversations: list, params: SamplingParams, batch: int
) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, answer ids) of each conversation, `batch` at a time: when one ends, the next follows."""
    outputs = llm.chat(conversations, params, concurrency=batch)
    return [(out.prompt_token_ids, out.outputs[0].token_ids) for out in outputs]


def first_difference(a: list[int], b: list[int]) -> int | None:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def gap(llm: LLM, ids: list[int]) -> float:
    """Log-probability of the likeliest next token minus that of the second."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2, ignore_eos=True)
    top = llm.generate([ids], params)[0].outputs[0].logprobs[0].top
    return top[0][3] - top[1][3]


def compare(reference: list, other: list, llm: LLM) -> dict:
    """Share of prompts that differ, and the reference's top-2 gaps at first differences."""
    gaps = []
    for (prompt, a), (_, b) in zip(reference, other, strict=True):
        if (at := first_difference(a, b)) is not None:
            gaps.append(round(gap(llm, prompt + a[:at]), 4))
    return {"differ": len(gaps), "of": len(reference), "gaps": sorted(gaps, reverse=True)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--spec", default="eagle4")
    parser.add_argument("--draft")
    parser.add_argument("--shape", default=None)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num", type=int, default=344)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    exact = args.batch_invariant or args.dtype == "float32"
    rows = [json.loads(line)["messages"] for line in args.prompts.read_text().splitlines()][: args.num]
    greedy = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=args.max_tokens)
    common = {
        "model": args.model,
        "dtype": args.dtype,
        "batch_invariant": args.batch_invariant,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.4,  # two engines share the GPU
    }
    with LLM(**common) as llm:
        reference = answers(llm, rows, greedy, 1)
        control = compare(reference, answers(llm, rows, greedy, BATCH), llm)
        drawn = answers(llm, rows[:BATCH], seeded, 1) if exact else []
        with LLM(**common, spec=args.spec, draft=args.draft, spec_shape=args.shape) as speculative:
            alone = answers(speculative, rows, greedy, 1)
            together = answers(speculative, rows, greedy, BATCH)
            redrawn = answers(speculative, rows[:BATCH], seeded, BATCH) if drawn else []
        result = {
            "control": control,
            "alone": compare(reference, alone, llm),
            "batch": compare(reference, together, llm),
        }
        if drawn:
            result["seeded_equal"] = drawn == redrawn
        info = llm.info
    limit = 0 if exact else control["differ"] / control["of"] + MARGIN
    checked = [result["alone"], result["batch"]] + ([control] if exact else [])
    holds = all(c["differ"] / c["of"] <= limit and max(c["gaps"], default=0) <= MAX_GAP for c in checked)
    result["holds"] = holds and result.get("seeded_equal", True)
    print(json.dumps(result, indent=1))
    if args.output:
        write_json(args.output, document("equality", [result], model=args.model, engine=info))
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"equality: error: {error}")
