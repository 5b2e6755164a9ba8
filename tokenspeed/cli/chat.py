"""`tokenspeed chat`: a conversation in the terminal with any OpenAI-compatible server."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tokenspeed.bench.client import base_url
from tokenspeed.cli.args import Parser, positive
from tokenspeed.config import check_option
from tokenspeed.errors import ConfigError

HELP = "/reset forgets the conversation, /exit leaves, Ctrl-C stops an answer"


@dataclass
class Chat:
    """A conversation and the server it is held with."""

    client: httpx.Client
    model: str
    sampling: dict[str, Any]
    system: str | None = None
    ours: bool = False  # a tokenspeed server tells its acceptance
    history: list[dict[str, str]] = field(default_factory=list)
    usage_offered: bool = True

    def reset(self) -> None:
        self.history.clear()

    def ask(self, text: str, write: Callable[[str], None]) -> str:
        """Streams the answer to `text` into `write` and keeps both in the history.

        Ctrl-C stops the answer; what has come is kept. Returns a line about speed and acceptance.

        Raises:
            ConfigError: the server refuses the request or goes away; the history is as before.
        """
        self.history.append({"role": "user", "content": text})
        answer: list[str] = []
        seen: dict[str, Any] = {}
        start = time.perf_counter()
        first = None
        try:
            for event in self._events():
                for choice in event.get("choices") or []:
                    if piece := (choice.get("delta") or {}).get("content"):
                        first = first or time.perf_counter()
                        answer.append(piece)
                        write(piece)
                    seen["spec"] = choice.get("spec_metrics") or seen.get("spec")
                seen["usage"] = event.get("usage") or seen.get("usage")
                seen["spec"] = event.get("spec_metrics") or seen.get("spec")
        except KeyboardInterrupt:
            seen["stopped"] = True
        except (ConfigError, httpx.HTTPError):
            self.history.pop()
            raise
        now = time.perf_counter()
        self.history.append({"role": "assistant", "content": "".join(answer)})
        return _about(seen, (first or now) - start, now - (first or now))

    def _events(self) -> Iterator[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": system + self.history, "stream": True, **self.sampling}
        if self.usage_offered:
            body["stream_options"] = {"include_usage": True}
        if self.ours:
            body["return_spec_metrics"] = True
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code == 400 and self.usage_offered:
                self.usage_offered = False  # an old server may not know stream_options
            elif response.status_code != 200:
                response.read()
                raise ConfigError(f"the server answers {response.status_code}: {_message(response)}")
            else:
                yield from _parsed(response.iter_lines())
                return
        yield from self._events()


def run(argv: Sequence[str]) -> int:
    """Talks until /exit or the end of input. Returns 0."""
    parser = Parser(prog="tokenspeed chat", description=f"Talks to an OpenAI-compatible server. {HELP}.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--model", help="name in the API (default: the first that the server lists)")
    parser.add_argument("--api-key", help="bearer token")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="default: 0.7")
    parser.add_argument(
        "--max-tokens", type=positive, default=1024, metavar="N", help="of an answer (default: 1024)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    args = parser.parse(argv)
    check_option("temperature", args.temperature, (), (0.0, 2.0))
    sampling = {"temperature": args.temperature, "max_tokens": args.max_tokens}
    with open_chat(args.url, args.model, args.api_key, sampling, args.system) as chat:
        print(f"{chat.model} at {args.url}; {HELP}")
        return _loop(chat)


@contextlib.contextmanager
def open_chat(
    url: str, model: str | None, api_key: str | None, sampling: dict[str, Any], system: str | None = None
) -> Iterator[Chat]:
    """`with open_chat(...) as chat`: finds the server's model. Raises ConfigError when nothing answers."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(10.0, read=600.0)
    with httpx.Client(base_url=base_url(url), headers=headers, timeout=timeout) as client:
        try:
            response = client.get("/v1/models")
            if response.status_code != 200:
                raise ConfigError(f"the server answers {response.status_code}: {_message(response)}")
            cards = response.json()["data"]
            model = model or cards[0]["id"]
            ours = any(card.get("owned_by") == "tokenspeed" for card in cards)
        except httpx.HTTPError as error:
            hint = "start one with: tokenspeed serve MODEL"
            raise ConfigError(f"no server answers at {base_url(url)} ({error}); {hint}") from None
        except (ValueError, KeyError, IndexError, TypeError):
            raise ConfigError(f"{base_url(url)} lists no models at /v1/models") from None
        yield Chat(client, model, sampling, system, ours)


def _loop(chat: Chat) -> int:
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            print()
            return 0
        if text in ("/exit", "/quit"):
            return 0
        if text == "/reset":
            chat.reset()
            print("(forgotten)")
        elif text in ("/help", "/?"):
            print(HELP)
        elif text:
            try:
                about = chat.ask(text, lambda piece: print(piece, end="", flush=True))
            except (ConfigError, httpx.HTTPError) as error:
                print(f"(error: {error})")
            else:
                print(f"\n({about})")


def _parsed(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises ConfigError for an error event or something that is no event."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise ConfigError("the server sent something that is not JSON") from None
        if "error" in event:
            error = event["error"]
            raise ConfigError(str(error.get("message", error) if isinstance(error, dict) else error))
        yield event


def _about(seen: dict[str, Any], wait: float, seconds: float) -> str:
    parts = ["stopped"] if seen.get("stopped") else []
    tokens = (seen.get("usage") or {}).get("completion_tokens")
    if tokens:
        parts.append(f"{tokens} tokens")
        if tokens > 1 and seconds > 0:
            parts.append(f"{(tokens - 1) / seconds:.1f} tok/s")
    parts.append(f"first after {wait * 1e3:.0f} ms")
    spec = seen.get("spec") or {}
    if spec.get("num_rounds"):
        parts.append(f"accept length {1 + (spec.get('num_accepted') or 0) / spec['num_rounds']:.2f}")
    return ", ".join(parts)


def _message(response: httpx.Response) -> str:
    response.read()
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200] or response.reason_phrase
