"""What does HTTP streaming cost? The same load offline and over HTTP, in turns.

    python benchmarks/streaming.py MODEL [--spec eagle4 --draft D] [--concurrency 64] [--dataset F.jsonl]
        [--output FILE.json] [options of tokenspeed serve]

Measured without speculation, and with --spec too where it is given. Each time an offline LLM and a server are up at
once, each with its share of the GPU's memory, without a prefix cache, and take turns (ABAB...). The load is a closed
loop of greedy chats. Over HTTP it comes from processes of their own (benchmarks/stream_client.py), one server-sent
event a request and round; `client_busy` is the share of the time that the busiest of them computed: near 1, the client
is what was measured, and more --clients help.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenspeed.bench.offline import measure
from tokenspeed.bench.report import document, spread, write_json
from tokenspeed.bench.served import Served
from tokenspeed.bench.workload import FORMS, Prompt, load_prompts
from tokenspeed.cli.args import (
    Parser,
    add_config,
    arguments,
    make_config,
    overrides,
    positive,
    public,
    require_torch,
)
from tokenspeed.config import Config
from tokenspeed.errors import ConfigError, RequestError
from tokenspeed.params import SamplingParams

NUMBER = 4  # bytes, as in stream_client.py
CLIENT = Path(__file__).with_name("stream_client.py")
WARM_UP_TOKENS = 16
SHARE = 0.4  # of the GPU's memory for each engine, unless told otherwise
SPECULATION = (
    "draft",
    "spec_shape",
    "speculative_config",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_disable_by_batch_size",
)


def over_http(
    url: str, prompts: Sequence[Prompt], concurrency: int, sampling: dict[str, Any], clients: int
) -> dict[str, Any]:
    """Puts the load on the server: tokens, events, seconds, tokens a second, client_busy.

    Raises:
        ConfigError: an answer failed.
    """
    address = urlsplit(url)
    bodies = [
        {"messages": list(p.messages), "stream": True, "stream_options": {"include_usage": True}, **sampling}
        for p in prompts
    ]
    clients = min(clients, concurrency)
    queue, end = os.pipe()
    os.set_blocking(end, False)
    try:
        for i in range(len(bodies)):
            os.write(end, i.to_bytes(NUMBER, "little"))
    except BlockingIOError:
        raise ConfigError(f"{len(bodies)} prompts are more than a pipe can number; give fewer") from None
    finally:
        os.close(end)
    running = []
    for i in range(clients):
        process = subprocess.Popen(
            [sys.executable, str(CLIENT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(queue,),
        )
        share = concurrency // clients + (i < concurrency % clients)
        job = {"host": address.hostname, "port": address.port, "concurrency": share, "bodies": bodies}
        process.stdin.write(json.dumps({**job, "queue": queue}) + "\n")
        process.stdin.flush()
        running.append(process)
    os.close(queue)
    for process in running:
        process.stdout.readline()
    start = time.perf_counter()
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [process.stdout.readline() for process in running]
    seconds = time.perf_counter() - start
    for process in running:
        process.communicate()
    found = [json.loads(line or '{"error": "a client has ended"}') for line in said]
    if failed := [one["error"] for one in found if "error" in one]:
        raise ConfigError(f"over HTTP {failed[0]}")
    tokens = sum(one["tokens"] for one in found)
    return {
        "tokens": tokens,
        "events": sum(one["events"] for one in found),
        "seconds": seconds,
        "output_tokens_per_second": tokens / seconds,
        "client_busy": max(one["cpu_seconds"] for one in found) / seconds,
    }


def compare(config: Config, prompts: Sequence[Prompt], args: argparse.Namespace) -> dict[str, Any]:
    """One row of the results: both ways, and `http_over_offline` of each pair of neighbours."""
    from tokenspeed import LLM

    n = args.concurrency
    limits = {"temperature": 0.0, "ignore_eos": args.ignore_eos}
    offline: list[dict[str, Any]] = []
    http: list[dict[str, Any]] = []
    with LLM(**overrides(config)) as llm, Served(arguments(config)) as server:
        for tokens, repeats in ((WARM_UP_TOKENS, 1), (args.max_tokens, args.repeats)):
            sampling = {**limits, "max_tokens": tokens}
            offline.clear()
            http.clear()
            for _ in range(repeats):
                offline.append(measure(llm, prompts, n, SamplingParams(**sampling))[0])
                http.append(over_http(server.url, prompts, n, sampling, args.clients))
        info = llm.info
    speeds = [[row["output_tokens_per_second"] for row in rows] for rows in (offline, http)]
    return {
        "concurrency": n,
        "num_requests": len(prompts),
        "offline_tokens_per_second": spread(speeds[0]),
        "http_tokens_per_second": spread(speeds[1]),
        "http_over_offline": spread([b / a for a, b in zip(*speeds, strict=True)]),
        "offline_tokens": offline[-1]["output_tokens"],
        "http_tokens": http[-1]["tokens"],
        "http_events": http[-1]["events"],
        "client_busy": max(row["client_busy"] for row in http),
        "engine": info,
    }


def run(argv: list[str]) -> int:
    args = _parse(argv)
    config = replace(make_config(args), enable_prefix_caching=False)  # every run asks the same
    if "gpu_memory_utilization" not in args:
        config = replace(config, gpu_memory_utilization=SHARE)
    require_torch()
    prompts = load_prompts(args.dataset, args.num_prompts or 4 * args.concurrency)
    configs = {"none": replace(config, spec="none", **dict.fromkeys(SPECULATION))}
    if config != configs["none"]:
        configs["speculation" if config.spec == "none" else config.spec] = config
    rows = []
    for name, one in configs.items():
        row = {"spec": name, **compare(one, prompts, args)}
        rows.append(row)
        ratio = row["http_over_offline"]
        print(
            f"{row['spec']}, {row['concurrency']} at once: "
            f"offline {row['offline_tokens_per_second']['median']:.1f} tok/s, "
            f"HTTP {row['http_tokens_per_second']['median']:.1f} tok/s, ratio {ratio['median']:.3f} "
            f"({ratio['min']:.3f}-{ratio['max']:.3f}), client busy {row['client_busy']:.0%}",
            flush=True,
        )
    if args.output:
        load = {name: getattr(args, name) for name in ("dataset", "max_tokens", "ignore_eos", "clients")}
        about = {"model": args.label or config.model, "config": public(config), **load}
        write_json(args.output, document("streaming", rows, **about))
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="streaming.py", description=__doc__.splitlines()[0])
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=positive, default=64, help="chats at once (default: 64)")
    load.add_argument("--dataset", default="builtin", help=f"'builtin' or a .jsonl file of {FORMS}")
    load.add_argument("--num-prompts", type=positive, help="how many (default: four times the chats)")
    load.add_argument("--max-tokens", type=positive, default=256, help="of an answer (default: 256)")
    load.add_argument("--ignore-eos", action="store_true", help="answers of equal length")
    load.add_argument("--repeats", type=positive, default=3, help="of each way (default: 3)")
    load.add_argument("--clients", type=positive, default=4, help="processes of the load (default: 4)")
    load.add_argument("--output", metavar="JSON", help="file for the results")
    load.add_argument("--label", help="the model's name in the results")
    add_config(parser)
    return parser.parse(argv)


def main() -> int:
    try:
        return run(sys.argv[1:])
    except (ConfigError, RequestError) as error:
        print(f"streaming: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
