"""A load that swings from one request to many and back: does the plan follow, and is all as it was afterwards?

    python benchmarks/swing.py MODEL --prompts P.jsonl [--draft D] [--many 128] [--name swing]

Three phases in one engine, which learns throughout: some prompts one by one, many at once, and the first ones again.
Told of each phase: tokens a second, tokens a round and request, and after how many rounds the plan used what it used in
the phase's second half: the first round from which two thirds of the next WINDOW are of that mix. In half precision a
near-tie may turn out otherwise in a tree of another shape, so a few answers may differ between the phases.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from plan import RESULTS, Engine, encode  # beside this program

from tokenspeed.bench.report import document, write_json
from tokenspeed.bench.workload import load_prompts
from tokenspeed.cli.args import Parser, positive
from tokenspeed.config import Config
from tokenspeed.params import SamplingParams
from tokenspeed.tokenizer.encoder import Encoder

WINDOW = 20


def settled(rounds: list[str]) -> int:
    """Rounds until the mix of trees is that of the second half, within a third."""
    half = rounds[len(rounds) // 2 :]
    late = {name: count / len(half) for name, count in Counter(half).items()}
    for i in range(len(rounds) - WINDOW):
        now = Counter(rounds[i : i + WINDOW])
        if sum(min(share, now[name] / WINDOW) for name, share in late.items()) >= 2 / 3:
            return i
    return len(rounds)


def main() -> None:
    args = _parse()
    common = {"device": args.device, "kv_cache_tokens": args.kv_cache_tokens, "max_num_seqs": args.many,
              "gpu_memory_utilization": args.gpu_memory_utilization}  # fmt: skip
    common = {name: value for name, value in common.items() if value is not None}
    engine = Engine(Config(model=args.model, spec="eagle4", draft=args.draft, **common))
    encoder = Encoder.load(engine.resolved.model_dir)
    prompts = encode(encoder, load_prompts(args.prompts, max(args.few, 2 * args.many)))
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True).resolved()
    plan, rows, answers = engine.new_plan(), [], []
    engine.run(
        prompts[: args.many], SamplingParams(temperature=0.0, max_tokens=8).resolved(), args.many, plan
    )
    phases = ((1, prompts[: args.few]), (args.many, prompts), (1, prompts[: args.few]))
    for concurrency, texts in phases:
        found = engine.run(texts, params, concurrency, plan)
        answers.append(found["answers"])
        row = {
            "concurrency": concurrency,
            "tokens_per_second": round(found["tokens"] / found["seconds"], 1),
            "tokens_a_round": round(found["tokens"] / len(found["rounds"]) / concurrency, 3),
            "rounds": len(found["rounds"]),
            "rounds_until_settled": settled(found["rounds"]),
            "trees": dict(Counter(found["rounds"])),
            "tokens_missing": len(texts) * args.max_tokens - found["tokens"],
        }
        rows.append(row)
        print(row, flush=True)
    same = sum(a == b for a, b in zip(answers[0], answers[2], strict=True))
    print(f"{same} of {args.few} answers are the same before and after")
    about = {"model": args.label or args.model, "max_tokens": args.max_tokens, "same_answers": same}
    write_json(Path(RESULTS) / f"{args.name}.json", document("swing", rows, **about))


def _parse() -> argparse.Namespace:
    parser = Parser(prog="swing.py", description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", default="builtin", metavar="FILE")
    parser.add_argument("--draft")
    parser.add_argument("--few", type=positive, default=4, help="prompts answered one by one")
    parser.add_argument("--many", type=positive, default=128, help="requests at once in the middle")
    parser.add_argument("--max-tokens", type=positive, default=192)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kv-cache-tokens", type=positive)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--label")
    parser.add_argument("--name", default="swing", help="of the file in benchmarks/results")
    return parser.parse(sys.argv[1:])


if __name__ == "__main__":
    main()
