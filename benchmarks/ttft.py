"""How long does one request wait for its first token, offline and over HTTP?

    python benchmarks/ttft.py MODEL [--prompt-tokens 1024] [--repeats 10] [--output FILE.json] [options of serve]

An offline LLM and a server are up at once, each with its share of the GPU's memory, and take turns. Every prompt is
random token ids that no other prompt begins with, so the prefix cache never helps. One token is asked for: offline the
time is that of the whole call, over HTTP that until the first event of the stream.
"""

import random
import sys
import time
from dataclasses import replace
from typing import Any

from tokenspeed.bench.report import document, spread, write_json
from tokenspeed.bench.served import Served
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

WARM_UP = 3
SHARE = 0.4  # of the GPU's memory for each engine, unless told otherwise


def offline(llm: Any, prompt: list[int]) -> float:
    """Seconds. Raises ConfigError where the prefix cache knew the prompt."""
    from tokenspeed import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    (output,) = llm.generate([prompt], params)
    seconds = time.perf_counter() - start
    if output.metrics["num_cached_tokens"]:
        raise ConfigError(f"{output.metrics['num_cached_tokens']} tokens of a fresh prompt were cached")
    return seconds


def over_http(server: Served, prompt: list[int]) -> float:
    """Seconds."""
    return server.first_event({"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "ignore_eos": True})


def measure(config: Config, prompt_tokens: int, repeats: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of the results, in milliseconds, and what the offline engine says of itself."""
    from tokenspeed import LLM

    chance = random.Random(0)
    with LLM(**overrides(config)) as llm, Served(arguments(config)) as server:
        ways = {"offline": (offline, llm), "http": (over_http, server)}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(WARM_UP + repeats):
            for name, (ask, engine) in ways.items():
                prompt = [chance.randrange(llm.vocab_size) for _ in range(prompt_tokens)]
                seconds = ask(engine, prompt)
                if repeat >= WARM_UP:
                    found[name].append(seconds * 1e3)
        info = llm.info
    return [
        {"way": name, "prompt_tokens": prompt_tokens, "ttft_ms": spread(times)}
        for name, times in found.items()
    ], info


def run(argv: list[str]) -> int:
    parser = Parser(prog="ttft.py", description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=positive, default=1024, help="of a prompt (default: 1024)")
    parser.add_argument("--repeats", type=positive, default=10, help="of each way (default: 10)")
    parser.add_argument("--output", metavar="JSON", help="file for the results")
    parser.add_argument("--label", help="the model's name in the results")
    add_config(parser)
    args = parser.parse(argv)
    config = make_config(args)
    if "gpu_memory_utilization" not in args:
        config = replace(config, gpu_memory_utilization=SHARE)
    require_torch()
    rows, info = measure(config, args.prompt_tokens, args.repeats)
    for row in rows:
        ms = row["ttft_ms"]
        print(f"{row['way']}: {ms['median']:.2f} ms ({ms['min']:.2f}-{ms['max']:.2f}) to the first token")
    if args.output:
        about = {"model": args.label or config.model, "config": public(config), "engine": info}
        write_json(args.output, document("ttft", rows, **about))
    return 0


def main() -> int:
    try:
        return run(sys.argv[1:])
    except (ConfigError, RequestError) as error:
        print(f"ttft: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
