"""Tokens per second of the offline `LLM` under a closed-loop load."""

import time
from collections.abc import Sequence
from typing import Any

from tokenspeed.bench.acceptance import Record, accept_length
from tokenspeed.bench.report import percentiles
from tokenspeed.bench.workload import Prompt
from tokenspeed.params import SamplingParams


def measure(
    llm: Any,
    prompts: Sequence[Prompt],
    concurrency: int,
    params: SamplingParams | Sequence[SamplingParams],
    show: bool = False,
) -> tuple[dict[str, Any], list[Record]]:
    """Answers `prompts` with `concurrency` in flight: when an answer ends, the next prompt follows.

    The last requests run with fewer beside them, so give several times `concurrency` prompts.

    Args:
        llm: a `tokenspeed.LLM`. params: for every prompt, or of each. show: a progress bar.

    Returns:
        a row of results (see `report.summarise`; without times per token), and each answer's account.
    """
    conversations = [list(prompt.messages) for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.chat(conversations, params, use_tqdm=show, concurrency=concurrency)
    seconds = time.perf_counter() - start
    records = [record(prompt.category, output) for prompt, output in zip(prompts, outputs, strict=True)]
    return row(records, seconds, concurrency), records


def record(category: str, output: Any) -> Record:
    """The account of one RequestOutput's first choice."""
    metrics, choice = output.metrics, output.outputs[0]
    return Record(
        category=category,
        prompt_ids=tuple(output.prompt_token_ids),
        token_ids=tuple(choice.token_ids),
        rounds=metrics.get("num_rounds") or 0,
        drafted=metrics.get("num_drafted") or 0,
        accepted=metrics.get("num_accepted") or 0,
        per_depth=tuple(metrics.get("accepted_per_depth") or ()),
    )


def acceptance(records: Sequence[Record]) -> dict[str, Any] | None:
    """The `acceptance` of a row; None where no draft tree was used."""
    if (length := accept_length(records)) is None:
        return None
    whole = [r for r in records if not r.loops]
    categories = sorted({r.category for r in records})
    return {
        "source": "spec_metrics",
        "accept_length": length,
        "accept_length_no_loops": accept_length(whole),
        "by_category": {c: accept_length(r for r in records if r.category == c) for c in categories},
    }


def row(records: Sequence[Record], seconds: float, concurrency: int) -> dict[str, Any]:
    """One row of results; the times that only a stream can tell are None."""
    tokens = sum(len(r.token_ids) for r in records)
    nothing = percentiles([])
    return {
        "concurrency": concurrency,
        "num_requests": len(records),
        "num_failed": 0,
        "errors": [],
        "seconds": seconds,
        "prompt_tokens": sum(len(r.prompt_ids) for r in records),
        "output_tokens": tokens,
        "tokens_counted_by_server": True,
        "output_tokens_per_second": tokens / seconds,
        "requests_per_second": len(records) / seconds,
        "tokens_per_second_per_request": tokens / seconds / min(concurrency, len(records)),
        "looping_share": sum(r.loops for r in records) / len(records),
        "ttft_ms": nothing,
        "itl_ms": nothing,
        "acceptance": acceptance(records),
    }
