"""`tokenspeed draft train` and `tokenspeed draft export`: a draft learns from its target's answers, and becomes
a checkpoint.

Here is what needs no torch, so that a mistake in the command line is told at once; the work itself is
train/run.py and train/export.py.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from tokenspeed.cli.args import Parser, positive, require_torch
from tokenspeed.cli.draft_convert import output_directory
from tokenspeed.errors import ConfigError
from tokenspeed.progress import Bars
from tokenspeed.train.options import TrainOptions

MINUTES, HEAD_SECONDS = 10.0, 60.0  # where nothing is said
INTERRUPTED = 130


def train(argv: Sequence[str]) -> int:
    """Trains, and says what to do next. Returns 0, or 130 after Ctrl-C.

    Raises:
        ConfigError: an option is wrong, or `run.train` refuses.
    """
    args = _parser().parse(argv)
    options = _options(args)
    options.check()
    if not Path(options.data).is_dir():
        raise ConfigError(f"there is no directory {options.data}; make it with tokenspeed draft data")
    require_torch()
    from tokenspeed.train.run import train as train_run

    output = Path(args.output).expanduser()
    bars = Bars(sys.stderr)
    try:
        finished = train_run(
            options,
            output,
            bars.update,
            resume=args.resume,
            device=args.device,
            capture=args.capture,
            log_every=args.log_every,
        )
    finally:
        bars.close()
    if not finished:
        print(f"stopped; the state is in {output}. Go on with the same command and --resume", file=sys.stderr)
        return INTERRUPTED
    print(
        f"trained {output}; make a draft of it: tokenspeed draft export {shlex.quote(str(output))} --output DIR"
    )
    return 0


def export(argv: Sequence[str]) -> int:
    """Writes a draft and says how to serve it. Returns 0. Raises ConfigError as `export_draft` does."""
    parser = Parser(
        prog="tokenspeed draft export",
        usage="%(prog)s RUN_DIR --output DIR",
        description="Writes the draft that tokenspeed draft train has trained in RUN_DIR as a checkpoint that "
        "tokenspeed serve loads. Works during the training too, with what has been saved so far.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="--output of tokenspeed draft train")
    parser.add_argument("--output", metavar="DIR", required=True, help="directory to write")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16"
    )
    args = parser.parse(argv)
    run_dir = Path(args.run_dir).expanduser()
    output = output_directory(run_dir, args.output)
    require_torch()
    import torch

    from tokenspeed.train.export import export_draft

    done = export_draft(run_dir, output.resolve(), getattr(torch, args.dtype))
    if not done.finished:
        print(f"the training of {run_dir} has not come to its end yet", file=sys.stderr)
    head = f"a candidate head of rank {done.rank}" if done.rank else "no candidate head"
    print(
        f"wrote {output}: {done.num_bytes / 2**20:.1f} MiB, {head}; judge it: tokenspeed draft eval MODEL "
        f"--draft {shlex.quote(str(output))}"
    )
    return 0


def _options(args: argparse.Namespace) -> TrainOptions:
    values = {f.name: getattr(args, f.name) for f in fields(TrainOptions) if f.name in args}
    if values.get("minutes") is None and values.get("steps") is None:
        values["minutes"] = MINUTES
    if values.get("head_seconds") is None and values.get("head_steps") is None:
        values["head_seconds"] = HEAD_SECONDS
    return TrainOptions(**values)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a list like 4,18,28, not {text!r}") from None


def _parser() -> Parser:
    parser = Parser(
        prog="tokenspeed draft train",
        usage="%(prog)s MODEL --data DIR --output DIR [options]",
        description="Trains an EAGLE-4 draft on answers that MODEL itself has given (tokenspeed draft data): "
        "first the draft layer, then its candidate head.",
    )
    parser.add_argument("model", metavar="MODEL", help="directory, GGUF file, hub name, or 'demo'")
    parser.add_argument("--data", metavar="DIR", required=True, help="answers, of tokenspeed draft data")
    parser.add_argument("--output", metavar="DIR", required=True, help="run directory to write")
    run = parser.add_argument_group("run")
    run.add_argument("--resume", action="store_true", help="go on with the run in --output")
    run.add_argument("--minutes", type=float, metavar="N", help=f"how long to train (default: {MINUTES:g})")
    run.add_argument("--steps", type=positive, metavar="N", help="instead of --minutes")
    run.add_argument(
        "--head-seconds",
        type=float,
        metavar="N",
        help=f"how long to train the candidate head; 0: no head (default: {HEAD_SECONDS:g})",
    )
    run.add_argument("--head-steps", type=int, metavar="N", help="instead of --head-seconds")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    run.add_argument(
        "--capture",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the step as a CUDA graph (default: on)",
    )
    run.add_argument("--log-every", type=positive, default=50, metavar="N", help="steps (default: 50)")
    group = parser.add_argument_group("what is trained")
    for name, kind, about in (
        ("unroll", positive, "draft steps that are trained"),
        ("ffn", positive, "width of the draft's MLP"),
        ("window", positive, "tokens that the draft's attention sees back"),
        ("lr", float, "learning rate"),
        ("tau", float, "least temperature of the target's distribution; a warmer answer's own"),
        ("lk", float, "weight of 1 - sum min(p, q)"),
        ("decay", float, "weight of each further draft step"),
        ("rank", positive, "of the candidate head"),
        ("num-candidates", positive, "tokens that the candidate head picks"),
        ("max-length", positive, "tokens of a text; what is longer is cut"),
        ("tokens-per-step", positive, "padded tokens of a step"),
        ("seed", int, "of first weights, order and starts"),
    ):
        default = getattr(TrainOptions, name.replace("-", "_"))
        group.add_argument(
            f"--{name}", type=kind, default=default, metavar="N", help=f"{about} (default: {default:g})"
        )
    group.add_argument(
        "--aux-layers",
        type=_layers,
        default=(),
        metavar="A,B,C",
        help="target layers whose outputs the draft reads (default: an early, a middle and a late one)",
    )
    group.add_argument(
        "--start-from",
        metavar="DRAFT",
        help="directory of a draft of the same shape or with a narrower MLP, to train on (default: random weights)",
    )
    return parser
