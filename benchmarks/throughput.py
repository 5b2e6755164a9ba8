"""Offline tokens per second with and without speculation, interleaved in one run.

    python benchmarks/throughput.py MODEL [--draft D] [--dataset F.jsonl] [--concurrency 1,8,64] [--name NAME]

Both engines are up at once (each with its share of one GPU's memory) and take turns, run by run, so that both
see the same machine. The load is a closed loop: as many requests in flight as asked for, until the prompts are
used up. The figure of an engine is the median over its repeats. The results go to benchmarks/results/NAME.json.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.bench.acceptance import Record
from tokenspeed.bench.offline import acceptance, measure
from tokenspeed.bench.report import document, table, write_json
from tokenspeed.bench.workload import Prompt, load_prompts
from tokenspeed.cli.args import Parser, positive, positives
from tokenspeed.errors import ConfigError
from tokenspeed.params import SamplingParams

RESULTS = Path(__file__).parent / "results"
WARM_UP_TOKENS = 16
PASSED_ON = ("gpu_memory_utilization", "kv_cache_tokens", "max_num_seqs", "max_model_len", "dtype", "device")


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
        second of every repeat, and acceptance and loops of all repeats together.
    """
    warm_up = msgspec.structs.replace(params, max_tokens=WARM_UP_TOKENS)
    for llm in engines.values():  # what a batch of this size makes once is paid for here
        measure(llm, prompts[:concurrency], concurrency, warm_up)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    records: dict[str, list[Record]] = {name: [] for name in engines}
    for repeat in range(repeats):
        for name, llm in engines.items():
            row, found = measure(llm, prompts, concurrency, params)
            rows[name].append(row)
            records[name] += found
            speed = row["output_tokens_per_second"]
            say(f"{concurrency} at once, run {repeat + 1}/{repeats}, {name}: {speed:.1f} tok/s")
    return {name: _median(found, records[name]) for name, found in rows.items()}


def _median(rows: list[dict[str, Any]], records: list[Record]) -> dict[str, Any]:
    runs = [row["output_tokens_per_second"] for row in rows]
    middle = sorted(rows, key=lambda row: row["output_tokens_per_second"])[(len(rows) - 1) // 2]
    return {
        **middle,
        "output_tokens_per_second": statistics.median(runs),
        "runs": runs,
        "looping_share": sum(record.loops for record in records) / len(records),
        "acceptance": acceptance(records),
    }


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes. Returns 0."""
    from tokenspeed import LLM

    prompts = load_prompts(args.dataset, args.num_prompts)
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=0, ignore_eos=args.ignore_eos
    )
    common = {name: value for name in PASSED_ON if (value := getattr(args, name)) is not None}
    common["enable_prefix_caching"] = False  # every run asks the same
    draft = {"draft": args.draft, "spec_shape": args.shape, "draft_head": args.draft_head}
    rows: list[dict[str, Any]] = []
    with (
        LLM(args.model, **common) as plain,
        LLM(args.model, spec=args.spec, **draft, **common) as drafted,
    ):
        engines = {"none": plain, args.spec: drafted}
        for concurrency in args.concurrency:
            chosen = prompts if concurrency > 1 else prompts[:: max(1, len(prompts) // args.alone)]
            found = interleaved(engines, chosen, concurrency, params, args.repeats, _say)
            rows += [{**row, "spec": name} for name, row in found.items()]
            slow, fast = rows[-2:]
            fast["speedup"] = fast["output_tokens_per_second"] / slow["output_tokens_per_second"]
        info = {name: llm.info for name, llm in engines.items()}
    _print(rows, args.spec)
    about = {"model": args.label or args.model, "dataset": args.dataset, "max_tokens": args.max_tokens,
             "temperature": args.temperature, "ignore_eos": args.ignore_eos, "engines": info, **draft}  # fmt: skip
    write_json(RESULTS / f"{args.name}.json", document("throughput", rows, **about))
    return 0


def _print(rows: list[dict[str, Any]], spec: str) -> None:
    for name in ("none", spec):
        print(f"\n{name}\n{table([row for row in rows if row['spec'] == name])}")
    for row in rows:
        if "speedup" not in row:
            continue
        length = (row["acceptance"] or {}).get("accept_length")
        shown = "no draft rounds" if length is None else f"accept length {length:.2f}"
        print(
            f"{spec} against none at {row['concurrency']}: {row['speedup']:.2f}x ({shown}, "
            f"{row['looping_share']:.0%} of answers loop)"
        )


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
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N")
    parser.add_argument("--ignore-eos", action="store_true", help="answers of equal length")
    engine = parser.add_argument_group("of each of the two engines")
    engine.add_argument("--gpu-memory-utilization", type=float, default=0.4, metavar="SHARE")
    engine.add_argument("--kv-cache-tokens", type=positive, metavar="N")
    engine.add_argument("--max-num-seqs", type=positive, metavar="N")
    engine.add_argument("--max-model-len", type=positive, metavar="N")
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--device", default="auto")
    engine.add_argument("--draft-head", default="candidate", choices=("candidate", "full"))
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
