"""`tokenspeed draft eval`: how many draft tokens a target accepts, by category, position and depth.

Counted twice: by true speculative decoding, and offline from the finished answers (spec/evaluate.py), which
also tells where in a text the rounds began. The two must agree.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from tokenspeed.bench.acceptance import Record, agreement, per_depth, summary, table
from tokenspeed.bench.workload import FORMS, Prompt, load_prompts
from tokenspeed.cli.args import Parser, add_config, make_config, overrides, positive, public, require_torch
from tokenspeed.config import Config, Shape, check_option
from tokenspeed.errors import ConfigError
from tokenspeed.params import SamplingParams
from tokenspeed.progress import Bars
from tokenspeed.spec.options import default_shapes, parse_shape, speculation

TOLERANCE = 0.05  # of the accept length, between the two ways to count it

_USAGE = (
    "usage: tokenspeed draft eval MODEL --draft D, tokenspeed draft data MODEL --prompts FILE --output DIR, "
    "tokenspeed draft train MODEL --data DIR --output RUN, "
    "tokenspeed draft export RUN --output DIR, or tokenspeed draft convert SRC; each has --help"
)


def run(argv: Sequence[str]) -> int:
    """Judges, trains, exports or converts a draft, or makes the data for one. Returns the exit code."""
    if argv and argv[0] == "eval":
        return _eval(list(argv[1:]))
    if argv and argv[0] == "convert":
        from tokenspeed.cli import draft_convert

        return draft_convert.run(argv[1:])
    if argv and argv[0] == "data":
        from tokenspeed.cli import draft_data

        return draft_data.run(argv[1:])
    if argv and argv[0] in ("train", "export"):
        from tokenspeed.cli import draft_train

        return getattr(draft_train, argv[0])(argv[1:])
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
        shapes = [(speculation(config)[2] or default_shapes(config.device))[0]]
    check_option("temperature", args.temperature, (), (0.0, 2.0))
    prompts = load_prompts(args.prompts, args.num_prompts)
    require_torch()
    params = sampling(config, args, len(prompts))
    decoded: dict[Shape, list[Record]] = {}
    for shape in shapes:
        decoded[shape], info = decode(config, shape, prompts, params, args.concurrency)
        config = dataclasses.replace(config, dtype=info.get("dtype", config.dtype))  # "auto" may choose anew
    offline = replay_all(config, decoded, params) if args.offline else {}
    found = {str(shape): _account(records, offline.get(shape)) for shape, records in decoded.items()}
    for name, account in found.items():
        print(f"\nshape {name}, {args.max_tokens} tokens at temperature {args.temperature}")
        print(table({way: account[way] for way in ("decoded", "offline") if way in account}))
        if "agreement" in account:
            print(_verdict(account["agreement"]))
    if args.output:
        from tokenspeed.bench.report import document, write_json

        write_json(args.output, document("draft eval", [], config=public(config), acceptance=found))
    return 0 if all(_agrees(account) for account in found.values()) else 1


def sampling(config: Config, args: argparse.Namespace, num: int) -> list[SamplingParams]:
    """How each of `num` prompts is answered. Their seeds are known: the noise of an answer decides what is drafted."""
    first = config.seed or 0
    return [
        SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=first + i)
        for i in range(num)
    ]


def decode(
    config: Config,
    shape: Shape,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    concurrency: int,
) -> tuple[list[Record], dict[str, Any]]:
    """Answers every prompt by true speculative decoding with `shape`: the accounts, and `LLM.info`."""
    from tokenspeed import LLM
    from tokenspeed.bench.offline import measure

    with LLM(**{**overrides(config), **only(shape, config)}) as llm:
        print(f"decoding with shape {shape}", file=sys.stderr)
        _, records = measure(llm, prompts, concurrency, params, show=True)
        info = llm.info
    if not any(record.rounds for record in records):
        raise ConfigError("the engine made no draft rounds; the answers are too short, or --max-tokens is 1")
    return records, info


def replay_all(
    config: Config, decoded: dict[Shape, list[Record]], params: Sequence[SamplingParams]
) -> dict[Shape, list[Record]]:
    """Counts the same answers offline. Target and drafter are loaded into this process.

    Args:
        decoded: shape -> accounts of `decode`, whose engine has been shut down: the memory is taken again.
        params: of `decode`.
    """
    from tokenspeed.launch import resolve
    from tokenspeed.spec.evaluate import watch_recall
    from tokenspeed.worker.replay import pool_tokens, replay
    from tokenspeed.worker.setup import build

    texts = [
        (shape, *text) for shape, records in decoded.items() for text in zip(records, params, strict=True)
    ]
    longest = max(len(record.prompt_ids) + len(record.token_ids) for _, record, _ in texts)
    bars = Bars(sys.stderr)
    options = only(next(iter(decoded)), config)
    alone = {"max_num_seqs": 1, "enforce_eager": True}
    alone["kv_cache_tokens"] = pool_tokens(longest, config.page_size)
    engine = build(
        resolve(dataclasses.replace(config, **options, **alone), bars.update), bars.update
    ).runner.engine
    found: dict[Shape, list[Record]] = {shape: [] for shape in decoded}
    for shape, record, sampled in texts:
        with watch_recall(engine.drafter, shape) as recall:
            rounds = replay(engine, record.prompt_ids, record.token_ids, shape, sampled)
        found[shape].append(_offline_record(record, rounds, shape, recall.by_step()))
        bars.update("counting offline", sum(map(len, found.values())), len(texts))
    bars.close()
    return found


def _offline_record(
    record: Record,
    rounds: Sequence[tuple[int, int]],
    shape: Shape,
    recall: tuple[tuple[int, int], ...],
) -> Record:
    accepted = [count for _, count in rounds]
    return dataclasses.replace(
        record,
        rounds=len(rounds),
        drafted=len(rounds) * (shape.nodes - 1),
        accepted=sum(accepted),
        per_depth=per_depth(accepted),
        spans=tuple((start, count) for start, count in rounds),
        recall=recall,
    )


def _account(decoded: list[Record], offline: list[Record] | None) -> dict[str, Any]:
    if offline is None:
        return {"decoded": summary(decoded)}
    return {
        "decoded": summary(decoded),
        "offline": summary(offline),
        "agreement": agreement(decoded, offline),
    }


def _agrees(account: dict[str, Any]) -> bool:
    return "agreement" not in account or account["agreement"]["relative"] <= TOLERANCE


def _verdict(found: dict[str, Any]) -> str:
    """One line: whether offline and decoded rounds are the same, and how far apart if not."""
    if not found["num_other_rounds"]:
        return f"offline and decoded agree: the same rounds in all {found['num_answers']} answers"
    word = "agree up to rounding" if found["relative"] <= TOLERANCE else "DISAGREE"
    return (
        f"offline and decoded {word}: other rounds in {found['num_other_rounds']} of {found['num_answers']} "
        f"answers, accept lengths at most {found['largest_difference']:.3f} apart ({found['where']})"
    )


def only(shape: Shape, config: Config) -> dict[str, Any]:
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
    group.add_argument(
        "--offline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="count the finished answers offline too, which tells positions (default: on)",
    )
    group.add_argument("--output", metavar="JSON", help="file for the results")
    add_config(parser)
    return parser
