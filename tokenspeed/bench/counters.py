"""Acceptance as a server's own counters tell it: /metrics of vLLM and tokenspeed, /server_info of SGLang."""

from typing import Any

import httpx

from tokenspeed.bench.client import Target

_ROUNDS = "vllm:spec_decode_num_drafts_total"
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_PER_DEPTH = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


async def read(target: Target) -> dict[str, float]:
    """The counters now. Empty where the server has none."""
    async with target.client() as client:
        text = await _get(client, "/metrics")
        counters = parse(text.text) if text is not None else {}
        if not counters:
            for path in ("/server_info", "/get_server_info"):
                info = await _get(client, path)
                if info is not None and (length := _sglang(info)) is not None:
                    return {"sglang": length}
    return counters


def parse(text: str) -> dict[str, float]:
    """Speculation's counters out of a Prometheus page, summed over engines; per depth as name[i]."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        if name not in (_ROUNDS, _DRAFTED, _ACCEPTED, _PER_DEPTH):
            continue
        try:
            value = float(line.rsplit(" ", 1)[1])
        except (IndexError, ValueError):
            continue
        if name == _PER_DEPTH:
            name += (
                f"[{rest.partition('position=')[2].split(',')[0].strip('}').split('}')[0].strip(chr(34))}]"
            )
        found[name] = found.get(name, 0.0) + value
    return found


def between(before: dict[str, float], after: dict[str, float]) -> dict[str, Any] | None:
    """The acceptance of what was done between two readings; None where nothing was drafted."""
    if "sglang" in after:
        return {"source": "server_info (since the server's start)", "accept_length": after["sglang"]}
    delta = {name: value - before.get(name, 0.0) for name, value in after.items()}
    if not delta.get(_ROUNDS):
        return None
    rounds, drafted, accepted = (delta.get(name, 0.0) for name in (_ROUNDS, _DRAFTED, _ACCEPTED))
    depths = sorted(int(name[len(_PER_DEPTH) + 1 : -1]) for name in delta if name.startswith(_PER_DEPTH))
    return {
        "source": "metrics",
        "accept_length": 1 + accepted / rounds,
        "accept_rate": accepted / drafted if drafted else None,
        "accepted_per_depth": [delta[f"{_PER_DEPTH}[{depth}]"] / rounds for depth in depths],
    }


async def _get(client: httpx.AsyncClient, path: str) -> httpx.Response | None:
    try:
        response = await client.get(path)
    except httpx.HTTPError:
        return None
    return response if response.status_code == 200 else None


def _sglang(response: httpx.Response) -> float | None:
    try:
        return float(response.json()["internal_states"][0]["avg_spec_accept_length"])
    except (ValueError, KeyError, IndexError, TypeError):
        return None
