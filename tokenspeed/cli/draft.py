"""`tokenspeed draft eval`: how many draft tokens a target accepts, by category, position and depth."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from tokenspeed.bench.acceptance import Record, summary, table
from tokenspeed.bench.workload import FORMS, load_prompts
from tokenspeed.cli.args import Parser, add_config, make_config, overrides, positive, public, require_torch
from tokenspeed.config import Config, Shape
from tokenspeed.errors import ConfigError
from tokenspeed.progress import Bars
from tokenspeed.spec.plan import DEFAULT_SHAPE, parse_shape, speculation

_NOT_YET = ("convert", "train", "export")
_USAGE = "usage: tokenspeed draft eval MODEL --draft D [options]; see tokenspeed draft eval --help"


def run(argv: Sequence[str]) -> int:
    """Judges a draft. Returns the exit code."""
    if argv and argv[0] == "eval":
        return _eval(list(argv[1:]))
    if argv and argv[0] in _NOT_YET:
        raise ConfigError(f"tokenspeed draft {argv[0]} is not part of this version; only draft eval is")
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    raise ConfigError(f"unknown command {argv[0]!r}; {_USAGE}" if argv else _USAGE)


def _eval(argv: list[str]) -> int:
    parser = _parser()
    args = parser.parse(argv)
    config = make_config(args)
    if config.spec == "none" and config.speculative_config is None and config.speculative_algorithm is None:
        config = dataclasses.replace(config, spec="eagle4")
    shapes = [parse_shape(text) for text in args.shape]
    if not shapes:
        shapes = [speculation(config)[2] or DEFAULT_SHAPE]
    prompts = load_prompts(args.prompts, args.num_prompts)
    require_torch()
    results: dict[str, Any] = {}
    for shape in shapes:
        records = decode(config, shape, prompts, args)
        results[str(shape)] = summary(records)
        print(f"\nshape {shape}, {args.max_tokens} tokens at temperature {args.temperature}, decoded")
        print(table(results[str(shape)]))
    if args.output:
        from tokenspeed.bench.report import document, write_json

        write_json(args.output, document("draft eval", [], config=public(config), acceptance=results))
    return 0


def decode(config: Config, shape: Shape, prompts: Sequence[Any], args: argparse.Namespace) -> list[Record]:
    """Answers every prompt by true speculative decoding with `shape`."""
    from tokenspeed import LLM, SamplingParams
    from tokenspeed.bench.offline import measure

    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=config.seed)
    bars = Bars(sys.stderr)
    with LLM(**{**overrides(config), **_only(shape, config)}) as llm:
        _, records = measure(
            llm,
            prompts,
            args.concurrency,
            params,
            lambda done, total: bars.update(f"shape {shape}", done, total),
        )
    bars.close()
    if not any(record.rounds for record in records):
        raise ConfigError("the engine made no draft rounds; the answers are too short, or --max-tokens is 1")
    return records


def _only(shape: Shape, config: Config) -> dict[str, Any]:
    """The options that leave `shape` as the one shape, whatever spelling the user chose."""
    method, draft, _ = speculation(config)
    return {
        "spec": method,
        "draft": draft,
        "spec_shape": str(shape),
        "speculative_config": None,
        "speculative_algorithm": None,
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
    }


def _parser() -> Parser:
    parser = Parser(
        prog="tokenspeed draft eval",
        usage="%(prog)s MODEL --draft D [options]",
        description="Prints accept lengths (tokens a target forward, bonus token included) by category, "
        "position and depth, with and without answers that loop. Engine options as in serve, and:",
    )
    group = parser.add_argument_group("evaluation")
    group.add_argument("--shape", action="append", default=[], metavar="S/K/N", help="tree; may be repeated")
    group.add_argument("--prompts", default="builtin", metavar="FILE", help=f"'builtin' or .jsonl of {FORMS}")
    group.add_argument("--num-prompts", type=positive, metavar="N", help="how many prompts (default: all)")
    group.add_argument(
        "--max-tokens", type=positive, default=256, metavar="N", help="of an answer (default: 256)"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    group.add_argument(
        "--concurrency", type=positive, default=8, metavar="N", help="answers at once (default: 8)"
    )
    group.add_argument("--output", metavar="JSON", help="file for the results")
    add_config(parser)
    return parser
