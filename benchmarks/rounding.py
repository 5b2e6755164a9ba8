"""How far apart do two ways of computing the same answer round?

    python benchmarks/rounding.py MODEL [--draft D] --prompts P.jsonl [--num 40] [--max-tokens 64] [--output FILE.json]

Plain bfloat16 decoding, one request at a time, is the reference. Against it: plain in batches of 16, eagle4 alone and
in batches of 16, and plain float32. As long as two answers agree, the margin between the two likeliest tokens of the
reference is taken from both; reported are the root mean square of its change and how often it did not change.
"""

import argparse
import json
import math
from pathlib import Path

from tokenspeed import LLM, SamplingParams
from tokenspeed.bench.report import document, write_json

BATCH = 16
TOP = 10  # log-probabilities asked for, so that the reference's two best are found in the other answer


def margins(ours: dict[int, float], theirs: dict[int, float]) -> tuple[float, float] | None:
    """Margin of our two likeliest tokens, as both see it."""
    first, second = sorted(ours, key=ours.get, reverse=True)[:2]
    if first not in theirs or second not in theirs:
        return None
    return ours[first] - ours[second], theirs[first] - theirs[second]


def compare(reference: list, other: list) -> dict:
    changes, differ = [], 0
    for a, b in zip(reference, other, strict=True):
        for (token, ours), (other_token, theirs) in zip(a, b, strict=False):
            if (pair := margins(ours, theirs)) is not None:
                changes.append(pair[1] - pair[0])
            if token != other_token:
                differ += 1
                break
    return {
        "prompts": len(reference),
        "differ": differ,
        "positions": len(changes),
        "margin_change_rms": round(math.sqrt(sum(c * c for c in changes) / len(changes)), 4),
        "unchanged": round(sum(c == 0 for c in changes) / len(changes), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = [json.loads(line)["messages"] for line in args.prompts.read_text().splitlines()][: args.num]
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, logprobs=TOP)

    def answers(batches: tuple[int, ...], **options) -> list[list]:
        """For each batch size: of each prompt, (token, log-probability by token) at each position."""
        with LLM(args.model, enable_prefix_caching=False, kv_cache_tokens=65536, **options) as llm:
            found = []
            for batch in batches:
                outputs = llm.chat(rows, params, concurrency=batch)
                found.append(
                    [
                        [(p.token_id, {e[0]: e[3] for e in p.top}) for p in out.outputs[0].logprobs]
                        for out in outputs
                    ]
                )
        return found

    alone, batched = answers((1, BATCH), dtype="bfloat16")
    drafted = answers((1, BATCH), dtype="bfloat16", spec="eagle4", draft=args.draft)
    (exact,) = answers((BATCH,), dtype="float32")
    others = {"plain, 16": batched, "eagle4, 1": drafted[0], "eagle4, 16": drafted[1], "float32": exact}
    results = [{"against plain, 1": name, **compare(alone, other)} for name, other in others.items()]
    for row in results:
        print(json.dumps(row))
    if args.output:
        write_json(args.output, document("rounding", results, model=args.model))


if __name__ == "__main__":
    main()
