"""`tokenspeed bench serve` and `tokenspeed bench offline`: load with real prompts, tables, JSON and plots."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from tokenspeed.bench.workload import FORMS, load_prompts
from tokenspeed.cli.args import (
    Parser,
    add_config,
    make_config,
    overrides,
    positive,
    positives,
    public,
    require_torch,
)
from tokenspeed.config import check_option
from tokenspeed.errors import ConfigError
from tokenspeed.progress import Bars


def run(argv: Sequence[str]) -> int:
    """Measures and prints. Returns 0, or 1 when a request failed."""
    kinds = {"serve": _serve, "offline": _offline}
    if argv and argv[0] in kinds:
        return kinds[argv[0]](list(argv[1:]))
    about = "usage: tokenspeed bench serve|offline [options]; each has --help"
    if argv and argv[0] in ("-h", "--help"):
        print(about)
        return 0
    raise ConfigError(f"unknown bench {argv[0]!r}; {about}" if argv else about)


def _serve(argv: list[str]) -> int:
    parser = Parser(
        prog="tokenspeed bench serve",
        description="Keeps an OpenAI-compatible server busy with real prompts and times it per token.",
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--model", help="name in the API (default: the first that the server lists)")
    parser.add_argument("--api-key", help="bearer token")
    _add_load(parser)
    args = parser.parse(argv)
    _check_load(args)
    rows, model = asyncio.run(_serve_rows(args))
    return _finish(args, "serve", rows, f"{model} at {args.url}", url=args.url, model=model)


async def _serve_rows(args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    from tokenspeed.bench import client, counters
    from tokenspeed.bench.report import summarise

    prompts = load_prompts(args.dataset, args.num_prompts)
    sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.ignore_eos:
        sampling["ignore_eos"] = True
    target = await client.connect(args.url, args.model, args.api_key)
    rows = []
    bars = Bars(sys.stderr)
    for concurrency in args.concurrency:
        before = await counters.read(target)
        shown = _shower(bars, concurrency)
        answers, seconds = await client.closed_loop(target, prompts, concurrency, sampling, shown)
        row = summarise(answers, seconds, concurrency)
        row["acceptance"] = row["acceptance"] or counters.between(before, await counters.read(target))
        rows.append(row)
    bars.close()
    return rows, target.model


def _offline(argv: list[str]) -> int:
    parser = Parser(
        prog="tokenspeed bench offline",
        usage="%(prog)s [MODEL] [options]",
        description="Measures the offline engine: all engine options of `tokenspeed serve`, and:",
    )
    _add_load(parser)
    add_config(parser)
    args = parser.parse(argv)
    config = make_config(args)
    _check_load(args)
    require_torch()
    prompts = load_prompts(args.dataset, args.num_prompts)
    from tokenspeed import LLM, SamplingParams
    from tokenspeed.bench.offline import measure

    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=config.seed, ignore_eos=args.ignore_eos
    )
    with LLM(**overrides(config)) as llm:
        llm.chat([list(prompts[0].messages)], params)  # the first request pays for what is made once
        rows = [measure(llm, prompts, n, params, show=True)[0] for n in args.concurrency]
    return _finish(
        args, "offline", rows, f"{config.model}, offline, spec {config.spec}", config=public(config)
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--concurrency", type=positives, default=(1, 8, 64), metavar="N,N,...",
                       help="requests at once, one measurement each (default: 1,8,64)")  # fmt: skip
    group.add_argument("--dataset", default="builtin", help=f"'builtin' or a .jsonl file of {FORMS}")
    group.add_argument("--num-prompts", type=positive, metavar="N", help="how many prompts (default: all)")
    group.add_argument(
        "--max-tokens", type=positive, default=256, metavar="N", help="of an answer (default: 256)"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    group.add_argument("--ignore-eos", action="store_true", help="answers of equal length")
    group.add_argument("--output", metavar="JSON", help="file for the results")
    group.add_argument(
        "--plot", metavar="PNG", help="file for a plot of tokens per second (needs matplotlib)"
    )


def _check_load(args: argparse.Namespace) -> None:
    from tokenspeed.bench.report import check_plot

    check_option("temperature", args.temperature, (), (0.0, 2.0))
    check_plot(args.plot)


def _finish(args: argparse.Namespace, kind: str, rows: list[dict[str, Any]], title: str, **about: Any) -> int:
    from tokenspeed.bench import report

    print(report.table(rows))
    if args.output:
        load = {"dataset": args.dataset, "max_tokens": args.max_tokens, "temperature": args.temperature}
        report.write_json(args.output, report.document(kind, rows, **about, load=load))
    if args.plot:
        report.plot(args.plot, {kind: rows}, title)
    failed = [row for row in rows if row["num_failed"]]
    for row in failed:
        print(
            f"{row['num_failed']} requests failed at {row['concurrency']}: {row['errors'][0]}",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _shower(bars: Bars, concurrency: int) -> Any:
    return lambda done, total: bars.update(f"{concurrency} at once", done, total)
