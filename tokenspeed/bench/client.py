"""A closed-loop load on an OpenAI-compatible server, timed per token."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tokenspeed.bench.workload import Prompt
from tokenspeed.errors import ConfigError

CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0  # between two pieces of an answer

# What is asked of the server beside the answer, from most to least: a server that refuses one gets the next.
_DIALECTS: tuple[dict[str, Any], ...] = (
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stream_options": {"include_usage": True}},
    {},
)


@dataclass
class Target:
    """A server, the model asked of it, and which extras it accepts."""

    url: str
    model: str
    api_key: str | None = None
    extras: dict[str, Any] = field(default_factory=dict)
    ours: bool = False  # a tokenspeed server: tells each answer's acceptance

    def client(self) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(CONNECT_SECONDS, read=READ_SECONDS, pool=None, write=READ_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy between would be measured too
        )


@dataclass
class Answer:
    """One request's timing. Times in seconds; `gaps` holds one entry a token after the first piece."""

    category: str
    error: str | None = None
    ttft: float = 0.0
    latency: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    counted: bool = True  # False: the server told no usage, each piece is taken for one token
    spec: dict[str, Any] | None = None  # num_rounds, num_accepted, ... where the server is ours


async def connect(url: str, model: str | None, api_key: str | None) -> Target:
    """Finds the server's model (unless named) and what it offers; sends one short request.

    Raises:
        ConfigError: nothing answers there, the key is refused, or the server can't stream a chat.
    """
    target = Target(base_url(url), model or "", api_key)
    async with target.client() as client:
        try:
            response = await client.get("/v1/models")
            response.raise_for_status()
            cards = response.json()["data"]
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            raise ConfigError(f"{target.url}/v1/models answers {status}") from None
        except httpx.HTTPError as error:
            raise ConfigError(f"no server answers at {target.url} ({_words(error)})") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{target.url}/v1/models is no list of models") from None
        if not cards and not model:
            raise ConfigError(f"{target.url} serves no model; name one with --model")
        target.model = model or cards[0]["id"]
        target.ours = any(card.get("owned_by") == "tokenspeed" for card in cards)
        await _choose_extras(client, target)
    return target


async def _choose_extras(client: httpx.AsyncClient, target: Target) -> None:
    probe = Prompt("probe", ({"role": "user", "content": "Hello"},))
    answer = Answer("probe", error="not tried")
    for extras in _DIALECTS:
        target.extras = {**extras, "return_spec_metrics": True} if target.ours else extras
        answer = await ask(client, target, probe, {"max_tokens": 4, "temperature": 0.0})
        if answer.error is None:
            return
    raise ConfigError(f"{target.url} does not answer a streamed chat: {answer.error}")


async def closed_loop(
    target: Target,
    prompts: Sequence[Prompt],
    concurrency: int,
    sampling: dict[str, Any],
    on_done: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Answer], float]:
    """Keeps `concurrency` requests open until all prompts are answered. Returns answers and seconds."""
    waiting = iter(list(prompts))
    answers: list[Answer] = []

    async def worker(client: httpx.AsyncClient) -> None:
        for prompt in waiting:
            answers.append(await ask(client, target, prompt, sampling))
            on_done(len(answers), len(prompts))

    async with target.client() as client:
        start = time.perf_counter()
        await asyncio.gather(*(worker(client) for _ in range(min(concurrency, len(prompts)))))
        return answers, time.perf_counter() - start


async def ask(client: httpx.AsyncClient, target: Target, prompt: Prompt, sampling: dict[str, Any]) -> Answer:
    """One streamed chat. A failure is told in `Answer.error`, never raised."""
    body = {
        "model": target.model,
        "messages": list(prompt.messages),
        "stream": True,
        **sampling,
        **target.extras,
    }
    answer, pieces = Answer(prompt.category), _Pieces()
    start = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                answer.error = _refusal(response)
                return answer
            async for event in events(response):
                pieces.take(event, time.perf_counter() - start)
    except (httpx.HTTPError, ValueError) as error:
        answer.error = _words(error)
    answer.error = answer.error or pieces.error
    answer.latency = time.perf_counter() - start
    pieces.settle(answer)
    if answer.error is None and not answer.num_tokens:
        answer.error = "an empty answer"
    return answer


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to [DONE]. Raises ValueError for anything else."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is not an object: {data[:60]}")
        yield event


class _Pieces:
    """The pieces of one answer: when each came and how many tokens it brought."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.texts: list[tuple[float, int]] = []  # (time, characters)
        self.counts: list[tuple[float, int]] = []  # (time, tokens so far), where usage comes with each piece
        self.usage: dict[str, Any] | None = None
        self.spec: dict[str, Any] | None = None

    def take(self, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            error = event["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        choices = event.get("choices") or []
        usage = event.get("usage")
        if usage:
            self.usage = usage
            if choices and usage.get("completion_tokens"):
                self.counts.append((now, usage["completion_tokens"]))
        for choice in choices:
            delta = choice.get("delta") or {}
            text = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
            if text:
                self.texts.append((now, len(text)))
            self.spec = choice.get("spec_metrics") or self.spec
        self.spec = event.get("spec_metrics") or self.spec

    def settle(self, answer: Answer) -> None:
        """Fills the figures of `answer`. A piece's time is shared equally by the tokens it brought."""
        answer.spec = self.spec
        total = (self.usage or {}).get("completion_tokens") or 0
        answer.num_prompt_tokens = (self.usage or {}).get("prompt_tokens") or 0
        marks = self.counts
        if not marks and total:
            marks = _shared(self.texts, total)
        elif not marks:
            marks, answer.counted = [(now, i + 1) for i, (now, _) in enumerate(self.texts)], False
        if not marks:
            return
        answer.ttft, answer.num_tokens = marks[0][0], max(total, marks[-1][1])
        answer.gaps = token_gaps(marks)


def token_gaps(marks: Sequence[tuple[float, float]]) -> list[float]:
    """Seconds a token for each token after the first piece, from (time, tokens so far) of each piece."""
    gaps: list[float] = []
    (last_time, last_count), rest = marks[0], marks[1:]
    for now, count in rest:
        new = round(count) - round(last_count)
        if new > 0:
            gaps.extend([(now - last_time) / new] * new)
            last_time, last_count = now, count
    return gaps


def _shared(texts: Sequence[tuple[float, int]], total: int) -> list[tuple[float, float]]:
    """`total` tokens spread over the pieces by their characters."""
    characters, so_far, marks = sum(n for _, n in texts), 0, []
    for now, n in texts:
        so_far += n
        marks.append((now, max(1, total * so_far / characters)))
    return [(now, round(count)) for now, count in marks]


def base_url(url: str) -> str:
    """`url` without a trailing /v1, with http:// where no scheme is given."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def _refusal(response: httpx.Response) -> str:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    return f"status {response.status_code}: {message}"


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
