"""Tokens per second of the offline `LLM`: waves of as many prompts as are to run at once."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from tokenspeed.bench.acceptance import Record, accept_length
from tokenspeed.bench.workload import Prompt
from tokenspeed.params import SamplingParams


def wave_sizes(total: int, concurrency: int) -> list[int]:
    """How many prompts each wave takes."""
    return [min(concurrency, total - start) for start in range(0, total, concurrency)]


def measure(
    llm: Any,
    prompts: Sequence[Prompt],
    concurrency: int,
    params: SamplingParams,
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, Any], list[Record]]:
    """Answers `prompts`, `concurrency` at a time: a wave starts when the one before has ended.

    The last requests of a wave run alone, so throughput is below that of a server kept full (`bench serve`),
    the more so the more their lengths differ.

    Args:
        llm: a `tokenspeed.LLM`. params: for every prompt.

    Returns:
        a row of results (see `report.summarise`; without times per token), and each answer's account.
    """
    records: list[Record] = []
    latencies: list[float] = []
    prompt_tokens, start = 0, time.perf_counter()
    for size in wave_sizes(len(prompts), concurrency):
        wave = prompts[len(records) : len(records) + size]
        began = time.perf_counter()
        outputs = llm.chat([list(prompt.messages) for prompt in wave], params)
        latencies.append(time.perf_counter() - began)
        records += [record(prompt.category, output) for prompt, output in zip(wave, outputs, strict=True)]
        prompt_tokens += sum(len(output.prompt_token_ids) for output in outputs)
        on_done(len(records), len(prompts))
    seconds = time.perf_counter() - start
    return _row(records, latencies, prompt_tokens, seconds, concurrency), records


def record(category: str, output: Any) -> Record:
    """The account of one RequestOutput's first choice."""
    metrics, choice = output.metrics, output.outputs[0]
    return Record(
        category=category,
        num_prompt=len(output.prompt_token_ids),
        token_ids=tuple(choice.token_ids),
        rounds=metrics.get("num_rounds") or 0,
        drafted=metrics.get("num_drafted") or 0,
        accepted=metrics.get("num_accepted") or 0,
        per_depth=tuple(metrics.get("accepted_per_depth") or ()),
    )


def _row(
    records: list[Record], waves: list[float], prompt_tokens: int, seconds: float, concurrency: int
) -> dict:
    from tokenspeed.bench.report import percentiles

    tokens = sum(len(r.token_ids) for r in records)
    length = accept_length(records)
    whole = [r for r in records if not r.loops]
    acceptance = None
    if length is not None:
        categories = sorted({r.category for r in records})
        acceptance = {
            "source": "spec_metrics",
            "accept_length": length,
            "accept_length_no_loops": accept_length(whole),
            "looping_share": 1 - len(whole) / len(records),
            "by_category": {c: accept_length(r for r in records if r.category == c) for c in categories},
        }
    nothing = percentiles([])
    return {
        "concurrency": concurrency,
        "num_requests": len(records),
        "num_failed": 0,
        "errors": [],
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": tokens,
        "tokens_counted_by_server": True,
        "output_tokens_per_second": tokens / seconds,
        "requests_per_second": len(records) / seconds,
        "tokens_per_second_per_request": tokens / seconds / min(concurrency, len(records)),
        "ttft_ms": nothing,
        "itl_ms": nothing,
        "wave_ms": percentiles([1e3 * wave for wave in waves]),
        "acceptance": acceptance,
    }
