"""`tokenspeed calibrate`: times plain rounds and many trees on this machine, and keeps the best few for `serve`."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenspeed.cli.args import Parser, add_config, make_config, positive, positives, require_torch
from tokenspeed.config import Config, Shape
from tokenspeed.errors import ConfigError
from tokenspeed.progress import Bars
from tokenspeed.spec.calibration import Calibration, check_place, save
from tokenspeed.spec.choose import acceptance, choose, expected_speed, priors_of
from tokenspeed.spec.options import CPU_SHAPES, default_shapes, parse_shape

CPU_CANDIDATES = ("6/4/16", "8/4/16", "5/4/8", "4/2/8", "3/2/6", "2/1/3")
GPU_CANDIDATES = (
    "7/10/60", "12/5/48", "6/6/32", "12/4/24", "8/4/16", "12/4/16", "5/4/16", "5/4/12", "6/3/8", "5/4/8", "4/2/8",
    "5/2/6", "3/2/6", "3/2/4", "3/1/4", "2/1/3", "1/1/2",
)  # fmt: skip
MAX_ROWS = 1024  # nodes of all requests of a round
CONTEXT = 400  # tokens a request, for the choice and the figures shown


def run(argv: Sequence[str]) -> int:
    """Measures, prints, writes. Returns 0."""
    args = _parser().parse(argv)
    config = make_config(args)
    if config.spec == "none" and config.speculative_config is None and config.speculative_algorithm is None:
        config = dataclasses.replace(config, spec="eagle4")
    if args.plot is not None:
        from tokenspeed.bench.report import check_plot

        check_plot(args.plot)
    check_place(args.output)
    require_torch()
    measured, key, draft_dir = measure(config, args)
    kept = choose(measured, CONTEXT)
    print(table(measured, kept))
    path = save(key, kept, args.output)
    print(f"kept in {path}; `tokenspeed serve` with the same model, draft and options uses it")
    if args.keep_in_draft:
        from tokenspeed.spec.eagle4.config import keep_acceptance

        print(f"acceptance kept in {keep_acceptance(draft_dir, priors_of(measured))}")
    if args.plot is not None:
        plot(args.plot, measured, f"{config.model} on {key['device']}")
    return 0


def measure(config: Config, args: argparse.Namespace) -> tuple[Calibration, dict, str]:
    """Answers prompts, times every candidate, and counts what each would have accepted of the answers.

    Returns:
        All that was found, the key of this machine, model and draft, and the draft's directory.
    """
    from tokenspeed.bench.workload import load_prompts
    from tokenspeed.cli.draft import decode, only, sampling
    from tokenspeed.launch import resolve
    from tokenspeed.spec.eagle4.config import check_keeps, fitting_shapes, load_draft_config
    from tokenspeed.worker.calibrate import CONTEXT_BATCH, CONTEXT_ROOM, CPU_BATCHES, calibrate, key_of
    from tokenspeed.worker.graph import GraphSet
    from tokenspeed.worker.replay import pool_tokens, replay
    from tokenspeed.worker.setup import batches_for, build

    first = default_shapes(config.device)[0]
    bars = Bars(sys.stderr)
    resolved = resolve(config, bars.update)
    if args.keep_in_draft:
        check_keeps(resolved.draft_dir)
    on_cpu = default_shapes(config.device) == CPU_SHAPES
    num_prompts = args.num_prompts or (4 if on_cpu else 24)
    prompts = load_prompts(args.prompts, num_prompts)
    params = sampling(config, args, len(prompts))
    records, info = decode(config, first, prompts, params, args.concurrency)
    longest = max(len(record.prompt_ids) + len(record.token_ids) for record in records)
    room = CONTEXT_ROOM * (CPU_BATCHES[-1] if on_cpu else CONTEXT_BATCH)
    pool = max(room, pool_tokens(longest, config.page_size))
    bare = dataclasses.replace(
        config, **only(first, config), dtype=info["dtype"], enforce_eager=True, kv_cache_tokens=pool
    )
    built = build(resolve(bare, bars.update), bars.update)
    engine = built.runner.engine
    key = key_of(resolved, str(built.info["device"]), engine.pool.dtype)
    shapes = [parse_shape(text) for text in args.candidates or (CPU_CANDIDATES if on_cpu else GPU_CANDIDATES)]
    draft = load_draft_config(resolved.draft_dir, resolved.model)
    shapes = list(fitting_shapes(draft, tuple(shapes), config.draft_head == "full"))
    batches = args.batches or batches_for(config, on_cpu, int(built.info["max_num_seqs"]))
    ladder = {b: (None, *(s for s in shapes if b * s.nodes <= MAX_ROWS)) for b in sorted(batches)}
    graphs = None if on_cpu or config.enforce_eager else GraphSet(engine, ladder)
    if graphs:
        graphs.capture(bars.update)
    found = calibrate(engine, graphs, ladder, bars.update)
    accepted: dict[Shape, list[int]] = {shape: [] for shape in shapes}
    for done, shape in enumerate(shapes):
        bars.update("counting acceptance", done, len(shapes))
        for record, sampled in zip(records, params, strict=True):
            rounds = replay(engine, record.prompt_ids, record.token_ids, shape, sampled)
            accepted[shape] += [count for _, count in rounds]
    bars.update("counting acceptance", len(shapes), len(shapes))
    bars.close()
    measured = Calibration(found.times, found.per_token, acceptance(accepted), found.padded)
    return measured, key, resolved.draft_dir


def table(measured: Calibration, kept: Calibration) -> str:
    """A line for each batch and round: milliseconds, expected tokens a second and times plain; * where kept."""
    speeds = expected_speed(measured, CONTEXT)
    chosen = {(batch, size) for batch, size, _ in kept.times}
    lines = [f"{'requests':>8}  {'tree':>8}  {'ms':>8}  {'tok/s':>8}  {'x plain':>7}"]
    for batch, size, us in measured.times:
        shape = Shape(*size) if size else None
        speed = speeds[batch, shape]
        mark = "*" if (batch, size) in chosen else ""
        lines.append(
            f"{batch:8}  {shape or 'plain'!s:>8}  {us / 1e3:8.2f}  {speed:8.0f}  "
            f"{speed / speeds[batch, None]:7.2f} {mark}".rstrip()
        )
    return "\n".join(lines)


def plot(path: Path, measured: Calibration, title: str) -> None:
    """A PNG: time of a round, and expected tokens a second over plain, by requests. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    speeds = expected_speed(measured, CONTEXT)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for size in dict.fromkeys(size for _, size, _ in measured.times):
        shape = Shape(*size) if size else None
        points = [(batch, us / 1e3) for batch, s, us in measured.times if s == size]
        style = {"color": "black", "linewidth": 2} if shape is None else {"linewidth": 1}
        left.plot(*zip(*points, strict=True), marker=".", label=str(shape or "plain"), **style)
        gain = [(batch, speeds[batch, shape] / speeds[batch, None]) for batch, _ in points]
        right.plot(*zip(*gain, strict=True), marker=".", label=str(shape or "plain"), **style)
    left.set(ylabel="milliseconds a round", yscale="log")
    right.set(ylabel="expected tokens a second, times plain")
    for axes in (left, right):
        axes.set(xlabel="requests", xscale="log")
        axes.grid(alpha=0.3)
    right.legend(fontsize=7, ncols=2)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} can't be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _parser() -> Parser:
    parser = Parser(
        prog="tokenspeed calibrate",
        usage="%(prog)s [MODEL] [--draft D] [options]",
        description="Times plain rounds and trees of many shapes for each number of requests, measures what the draft "
        "brings with each, and keeps the best few: `serve` then starts with them. Engine options as in serve, and:",
    )
    group = parser.add_argument_group("calibration")
    group.add_argument("--candidates", nargs="+", metavar="S/K/N", help="trees to try (default: many)")
    group.add_argument(
        "--batches", type=positives, metavar="N,N,...", help="requests of a round (default: serve's)"
    )
    group.add_argument(
        "--prompts", default="builtin", metavar="FILE", help="'builtin' or .jsonl to measure acceptance"
    )
    group.add_argument("--num-prompts", type=positive, metavar="N", help="how many (default: 24, on a CPU 4)")
    group.add_argument(
        "--max-tokens", type=positive, default=96, metavar="N", help="of an answer (default: 96)"
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of the answers (default: 0)"
    )
    group.add_argument(
        "--concurrency", type=positive, default=8, metavar="N", help="answers at once (default: 8)"
    )
    group.add_argument(
        "--output", type=Path, metavar="JSON", help="file (default: in the cache, where serve looks)"
    )
    group.add_argument(
        "--keep-in-draft",
        action="store_true",
        help="write what each tree brings into the draft's config.json, for servers that were not calibrated",
    )
    group.add_argument(
        "--plot", type=Path, metavar="PNG", help="plot of the times and of what the trees bring"
    )
    add_config(parser)
    return parser
