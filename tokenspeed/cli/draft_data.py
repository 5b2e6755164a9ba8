"""`tokenspeed draft data`: answers of the target itself to prompts, for `tokenspeed draft train`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenspeed.bench.workload import FORMS, load_prompts
from tokenspeed.cli.args import Parser, add_config, make_config, positive, require_torch
from tokenspeed.config import check_option
from tokenspeed.errors import ConfigError
from tokenspeed.progress import Bars


def run(argv: Sequence[str]) -> int:
    """Answers and says what there is. Returns 0.

    Raises:
        ConfigError: an option, a file of prompts, the model or the output directory.
    """
    args = _parser().parse(argv)
    config = make_config(args)
    if config.spec != "none" or config.speculative_config or config.speculative_algorithm:
        raise ConfigError(
            "draft data answers in batches too large for a draft; leave the options of --spec out"
        )
    check_option("temperatures", args.temperatures, (), (0.0, 2.0))
    check_option("answers", args.answers, (1, 2), None)
    check_option("seconds", args.seconds, (), (1.0, None))
    check_option("own", args.own, (), (0, None))
    prompts = [prompt for file in args.prompts for prompt in load_prompts(file)]
    exclude = [prompt for file in args.exclude for prompt in load_prompts(file)]
    require_torch()
    from tokenspeed.train.generate import Options, generate

    options = Options(
        max_tokens=args.max_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
        answers=args.answers,
        own=args.own,
        temperatures=args.temperatures,
        seconds=args.seconds,
    )
    bars = Bars(sys.stderr)
    try:
        done = generate(config, prompts, exclude, Path(args.output).expanduser(), options, bars.update)
    finally:
        bars.close()
    left_out = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in done.dropped.items())
    print(f"prompts left out: {left_out}")
    print(
        f"added to {args.output}: {done.num_answers} answers ({done.num_looping} cut where they began to loop, "
        f"{done.num_failed} failed), {done.num_generated} tokens generated in {done.seconds:.1f} s, "
        f"{done.num_generated / max(done.seconds, 1e-9):,.0f} tok/s"
    )
    return 0


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, not {text!r}") from None


def _parser() -> Parser:
    parser = Parser(
        prog="tokenspeed draft data",
        usage="%(prog)s MODEL --prompts FILE [FILE ...] --output DIR [options]",
        description="Lets MODEL answer prompts, in batches as large as memory allows, and saves the answers for "
        "tokenspeed draft train. Prompts that DIR has answers to are skipped. Engine options as in serve, and:",
    )
    group = parser.add_argument_group("data")
    group.add_argument(
        "--prompts", nargs="+", required=True, metavar="FILE", help=f"'builtin' or .jsonl of {FORMS}"
    )
    group.add_argument(
        "--output", required=True, metavar="DIR", help="directory of answers to begin or add to"
    )
    group.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        metavar="FILE",
        help="evaluation prompts; a prompt that shares 13 words in a row with one is left out",
    )
    group.add_argument(
        "--max-tokens", type=positive, default=512, metavar="N", help="of an answer (default: 512)"
    )
    group.add_argument(
        "--max-prompt-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="longer prompts are left out (default: 512)",
    )
    group.add_argument(
        "--answers", type=int, default=1, metavar="N", help="to each prompt, 1 or 2 (default: 1)"
    )
    group.add_argument(
        "--own",
        type=int,
        default=0,
        metavar="N",
        help="prompts that the model writes itself, in N attempts (default: 0)",
    )
    group.add_argument(
        "--temperatures",
        type=_temperatures,
        default=(0.0, 0.7, 0.0, 1.0),
        metavar="T,T,...",
        help="shared out evenly among the prompts (default: 0,0.7,0,1)",
    )
    group.add_argument(
        "--seconds", type=float, metavar="S", help="stop generating after so long and keep what there is"
    )
    add_config(parser)
    return parser
