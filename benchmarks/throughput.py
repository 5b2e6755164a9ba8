"""Offline tokens per second with and without speculation, interleaved in one run.

    python benchmarks/throughput.py MODEL [--draft D] [--dataset F.jsonl] [--concurrency 1,8,64] [--name NAME]

Both engines are up at once and take turns, run by run, so that both see the same machine. The figure of an
engine is the median over its repeats. The results go to benchmarks/results/NAME.json.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenspeed.bench.acceptance import accept_length
from tokenspeed.bench.offline import measure
from tokenspeed.bench.report import document, table, write_json
from tokenspeed.bench.workload import Prompt, load_prompts
from tokenspeed.cli.args import Parser, positive, positives
from tokenspeed.errors import ConfigError
from tokenspeed.params import SamplingParams

RESULTS = Path(__file__).parent / "results"


def interleaved(
    engines: dict[str, Any],
    prompts: Sequence[Prompt],
    concurrency: int,
    params: SamplingParams,
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Measures each engine `repeats` times in turns (ABAB...).

    Args:
        engines: name -> LLM.

    Returns:
        name -> the row (see report.summarise) of the repeat with the median throughput, with `runs`: tokens a
        second of every repeat, and the accept length of all repeats together.
    """
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    records: dict[str, list] = {name: [] for name in engines}
    for repeat in range(repeats):
        for name, llm in engines.items():
            row, found = measure(llm, prompts, concurrency, params)
            rows[name].append(row)
            records[name] += found
            speed = row["output_tokens_per_second"]
            say(f"{concurrency} at once, run {repeat + 1}/{repeats}, {name}: {speed:.1f} tok/s")
    out = {}
    for name, found in rows.items():
        runs = [row["output_tokens_per_second"] for row in found]
        middle = sorted(found, key=lambda row: row["output_tokens_per_second"])[(len(found) - 1) // 2]
        median = statistics.median(runs)
        out[name] = {**middle, "output_tokens_per_second": median, "runs": runs}
        if middle["acceptance"] is not None:
            out[name]["acceptance"] = {**middle["acceptance"], "accept_length": accept_length(records[name])}
    return out


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes. Returns 0."""
    from tokenspeed import LLM

    prompts = load_prompts(args.dataset, args.num_prompts)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
    common = {"gpu_memory_utilization": 0.42, "enable_prefix_caching": False, "dtype": args.dtype}
    if args.max_num_seqs is not None:
        common["max_num_seqs"] = args.max_num_seqs
    results: dict[str, list[dict[str, Any]]] = {"none": [], args.spec: []}
    with (
        LLM(args.model, **common) as plain,
        LLM(args.model, spec=args.spec, draft=args.draft, spec_shape=args.shape, **common) as drafted,
    ):
        engines = {"none": plain, args.spec: drafted}
        for llm in engines.values():
            llm.chat([list(prompts[0].messages)], params)  # the first request pays for what is made once
        for concurrency in args.concurrency:
            chosen = prompts if concurrency > 1 else prompts[:: max(1, len(prompts) // args.alone)]
            found = interleaved(engines, chosen, concurrency, params, args.repeats, _say)
            for name, row in found.items():
                results[name].append(row)
    for name, rows in results.items():
        print(f"\n{name}\n{table(rows)}")
    for a, b in zip(results["none"], results[args.spec], strict=True):
        ratio = b["output_tokens_per_second"] / a["output_tokens_per_second"]
        print(f"{args.spec} against none at {a['concurrency']}: {ratio:.2f}x")
    flat = [{**row, "spec": name} for name, rows in results.items() for row in rows]
    about = {"model": args.label or args.model, "dataset": args.dataset, "max_tokens": args.max_tokens,
             "temperature": args.temperature, "shape": args.shape}  # fmt: skip
    write_json(RESULTS / f"{args.name}.json", document("throughput", flat, **about))
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = Parser(
        prog="throughput.py", description="Tokens per second with and without speculation, interleaved."
    )
    parser.add_argument("model", help="directory, GGUF file, hub name, or 'demo'")
    parser.add_argument("--spec", default="eagle4", choices=("eagle", "eagle3", "eagle4"))
    parser.add_argument("--draft", help="draft directory or hub name")
    parser.add_argument("--shape", metavar="S/K/N", help="tree (default: the engine's)")
    parser.add_argument("--dataset", default="builtin", help="'builtin' or a .jsonl file")
    parser.add_argument("--num-prompts", type=positive, metavar="N", help="how many prompts (default: all)")
    parser.add_argument("--alone", type=positive, default=16, metavar="N", help="prompts at concurrency 1")
    parser.add_argument("--concurrency", type=positives, default=(1, 8, 64), metavar="N,N,...")
    parser.add_argument("--max-tokens", type=positive, default=256, metavar="N")
    parser.add_argument("--max-num-seqs", type=positive, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--label", help="the model's name in the results, e.g. 'SmolLM2-135M inflated to the 8B shape'"
    )
    parser.add_argument("--name", default="throughput", help="of the file in benchmarks/results")
    try:
        return run(parser.parse(sys.argv[1:]))
    except ConfigError as error:
        print(f"throughput: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
