"""How long does a server take to start? From the launch to /health, and to the first streamed token.

    python benchmarks/startup.py MODEL [--runs 3] [--output FILE.json] [options of tokenspeed serve]

The first start is cold: Triton's cache is empty (a temporary folder). The warm ones after it share that folder.
Weights come from the disk or from the system's cache of it, as the machine has them; a model of the hub is fetched by
the cold start if it is not there. Graphs' seconds and bytes are what the worker reports in /server_info.
"""

import sys
import tempfile
from typing import Any

from tokenspeed.bench.report import document, spread, write_json
from tokenspeed.bench.served import Served
from tokenspeed.cli.args import Parser, add_config, arguments, make_config, positive, public, require_torch
from tokenspeed.errors import ConfigError

QUESTION = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}


def start(options: list[str], triton_cache: str) -> dict[str, Any]:
    """One start. Seconds count from the launch; the graphs' figures are None where none are captured."""
    with Served(options, {"TRITON_CACHE_DIR": triton_cache}) as server:
        ready = server.ready_seconds
        first = ready + server.first_event(QUESTION)
        engine = server.engine()
    graphs = {name: engine.get(name) for name in ("graphs", "graph_seconds", "graph_bytes")}
    return {"ready_seconds": ready, "first_token_seconds": first, **graphs, "device": engine["device"]}


def summary(kind: str, starts: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the results: the spread of each time over the starts, and what they captured."""
    row: dict[str, Any] = {"start": kind, "device": starts[0]["device"], "graphs": starts[0]["graphs"]}
    for name in ("ready_seconds", "first_token_seconds", "graph_seconds"):
        values = [found[name] for found in starts]
        row[name] = None if None in values else spread(values)
    return row | {"graph_bytes": starts[0]["graph_bytes"]}


def run(argv: list[str]) -> int:
    parser = Parser(prog="startup.py", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=positive, default=3, help="warm starts (default: 3)")
    parser.add_argument("--output", metavar="JSON", help="file for the results")
    parser.add_argument("--label", help="the model's name in the results")
    add_config(parser)
    args = parser.parse(argv)
    config = make_config(args)
    require_torch()
    with tempfile.TemporaryDirectory() as triton_cache:
        starts = [start(arguments(config), triton_cache) for _ in range(args.runs + 1)]
    rows = [summary("cold", starts[:1]), summary("warm", starts[1:])]
    for row in rows:
        print(_line(row))
    if args.output:
        about = {"model": args.label or config.model, "config": public(config)}
        write_json(args.output, document("startup", rows, **about))
    return 0


def _line(row: dict[str, Any]) -> str:
    times = [f"{what} {_seconds(row[name])}" for name, what in
             (("ready_seconds", "/health after"), ("first_token_seconds", "first token after"))]  # fmt: skip
    if row["graphs"]:
        times.append(
            f"of them {_seconds(row['graph_seconds'])} for {row['graphs']} graphs of "
            f"{row['graph_bytes'] / 2**30:.2f} GiB"
        )
    return f"{row['start']}: {', '.join(times)}"


def _seconds(found: dict[str, Any]) -> str:
    """A time with its spread, if it was measured more than once."""
    several = f" ({found['min']:.2f}-{found['max']:.2f})" if len(found["runs"]) > 1 else ""
    return f"{found['median']:.2f} s{several}"


def main() -> int:
    try:
        return run(sys.argv[1:])
    except ConfigError as error:
        print(f"startup: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
