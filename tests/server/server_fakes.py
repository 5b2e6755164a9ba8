"""A ring in memory: it answers the client's messages as tokenizer and scheduler would, one character a token.

A prompt is answered with its own characters, `CHUNK` at a time, again and again until max_tokens; without
ignore_eos it stops after one round. Prompts that begin with "!" ask for trouble, see `FakeRing._trouble`.
"""

import asyncio
import contextlib
import math
import socket

import httpx
import msgspec
import uvicorn

from tokenspeed.config import Config, Resolved, Shape
from tokenspeed.ipc.messages import (
    Abort,
    Dead,
    Decoded,
    DetokenizeOnly,
    Finished,
    Text,
    Texts,
    TokenIds,
    Tokenize,
    TokenizeOnly,
    TokenText,
    ToServer,
    ToTokenizer,
    pack,
    unpack,
)
from tokenspeed.models.config import ModelConfig, RopeConfig
from tokenspeed.server.app import Server, create_app
from tokenspeed.server.client import EngineClient
from tokenspeed.server.lifecycle import READY

VOCAB = 256
LIMIT = 4096  # context
CHUNK = 3


def resolved(method: str = "none", **options) -> Resolved:
    biases = (False, False, False, False)
    model = ModelConfig("Llama", VOCAB, 8, 8, 1, 1, 1, 8, 1e-6, RopeConfig(), LIMIT, True, *biases, (None,))
    config = Config(model="fake/model", **options)
    shapes = (Shape(4, 2, 8),) if method != "none" else ()
    return Resolved(config, "", model, ("fake", "other"), LIMIT, (0,), method, None, shapes)


class FakeRing:
    """Both ends that an EngineClient needs. Messages pass through msgpack, as they do between processes."""

    def __init__(self, delay: float = 0.0):
        self.delay = delay
        self.sent: list = []
        self.aborted: set[int] = set()
        self.broken: Exception | None = None
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks: set[asyncio.Task] = set()

    async def send(self, message) -> None:
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToTokenizer)
        self.sent.append(message)
        if isinstance(message, Tokenize):
            task = asyncio.ensure_future(self._answer(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, Abort):
            self.aborted.add(message.rid)
        elif isinstance(message, TokenizeOnly):
            text = _prompt(message)
            error = "the template has failed" if text == "!error" else ""
            self.give(TokenIds(message.rid, pack(list(text.encode())), list(text), error))
        elif isinstance(message, DetokenizeOnly):
            self.give(Decoded(message.rid, bytes(unpack(message.token_ids)).decode("latin-1")))

    async def recv(self):
        message = msgspec.msgpack.decode(await self._inbox.get(), type=ToServer)
        if self.broken:
            raise self.broken
        return message

    def give(self, message) -> None:
        self._inbox.put_nowait(msgspec.msgpack.encode(message))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    @property
    def requests(self) -> list[Tokenize]:
        return [m for m in self.sent if isinstance(m, Tokenize)]

    async def _answer(self, request: Tokenize) -> None:
        rid, params, prompt = request.rid, request.params, _prompt(request)
        if (end := self._trouble(prompt, request)) is not None:
            self.give(Texts([Text(rid, finished=end)]))
            return
        slow = prompt.startswith("!slow") or prompt.startswith("!hang")
        room = LIMIT - len(prompt)
        count = room if params.max_tokens is None else params.max_tokens
        if not params.ignore_eos:
            count = min(count, max(len(prompt), params.min_tokens))
        text = "".join(prompt[i % len(prompt)] for i in range(count)) if prompt else ""
        stop_reason = next((s for s in params.stop if s in text), None)
        if stop_reason is not None:
            text = text[: text.index(stop_reason)]
            count = len(text) + len(stop_reason)
        full = count == params.max_tokens and stop_reason is None
        pieces = [text[i : i + CHUNK] for i in range(0, len(text), CHUNK)] or [""]
        for i, piece in enumerate(pieces):
            if prompt.startswith("!hang") and i == 1:
                return
            await asyncio.sleep(0.02 if slow else self.delay)
            if rid in self.aborted:
                return
            first, last = i == 0, i == len(pieces) - 1
            ids = [ord(c) % VOCAB for c in piece]
            end = None
            if prompt.startswith("!midway") and i == 1:
                end = Finished("error", message="logits are not finite", status=500)
            elif last:
                ids += [7] * (count - len(text))
                end = Finished(
                    reason="length" if full else "stop",
                    num_prompt=len(prompt),
                    num_output=count,
                    num_cached=len(prompt) // 2,
                    num_rounds=4,
                    num_drafted=28,
                    num_accepted=6,
                    accepted_per_depth=[4, 2],
                )
            top = params.logprobs
            chars = [*piece, *[""] * (len(ids) - len(piece))]
            tokens = [] if top is None else [_token(t, c, top) for t, c in zip(ids, chars, strict=True)]
            self.give(
                Texts([
                    Text(
                        rid,
                        prompt + piece if request.echo and first else piece,
                        pack(ids),
                        tokens,
                        _prompt_tokens(prompt, params.prompt_logprobs) if first else [],
                        end,
                        stop_reason if last else None,
                        pack([ord(c) % VOCAB for c in prompt]) if first else b"",
                    )
                ])
            )  # fmt: skip

    def _trouble(self, prompt: str, request: Tokenize) -> Finished | None:
        wanted = request.params.max_tokens or 0
        if len(prompt) + wanted > LIMIT:
            message = f"{len(prompt)} prompt tokens and {wanted} more exceed the context of {LIMIT} tokens"
            return Finished(
                "error",
                message=message,
                param=request.max_tokens_field,
                status=400,
                code="context_length_exceeded",
            )
        if prompt.startswith("!refuse"):
            return Finished("error", message="refused", param="messages", status=400)
        if prompt.startswith("!die"):
            self.give(Dead("scheduler", "broken"))
        return None


def _prompt(request: Tokenize | TokenizeOnly) -> str:
    if request.messages is not None:
        return msgspec.json.decode(request.messages)[-1]["content"]
    if request.text is not None:
        return request.text
    return bytes(unpack(request.token_ids)).decode("latin-1")


def _token(token: int, char: str, count: int | None, logprob: float = -0.5) -> TokenText:
    top = [(t, chr(97 + t), bytes([97 + t]), -1.0 - t) for t in range(count or 0)]
    return TokenText(token, char, char.encode(), logprob, top)


def _prompt_tokens(prompt: str, count: int | None) -> list[TokenText]:
    if count is None:
        return []
    return [_token(ord(c) % VOCAB, c, count, math.nan if i == 0 else -0.25) for i, c in enumerate(prompt)]


class World:
    """A client over a fake ring, the application over the client, and an HTTP client of the application."""

    def __init__(self, http: httpx.AsyncClient, ring: FakeRing, client: EngineClient, app: Server):
        self.http, self.ring, self.client, self.app = http, ring, client, app

    async def chat(self, content: str = "hello world", **body) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **body}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, prompt="hello world", **body) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **body})


@contextlib.asynccontextmanager
async def world(real: bool = False, ready: bool = True, delay: float = 0.0, **options):
    """`real`: over TCP and uvicorn, where disconnects are real and answers stream; else in memory."""
    ring = FakeRing(delay)
    client = EngineClient(ring, ring)
    client.start()
    app = create_app(client, resolved(**options))
    if ready:
        app.lifecycle.move(READY, "")
    async with contextlib.AsyncExitStack() as stack:
        if real:
            address = await stack.enter_async_context(_serving(app))
            transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=None))
        else:
            address, transport = "http://fake", httpx.ASGITransport(app)
        http = await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url=address, timeout=20)
        )
        try:
            yield World(http, ring, client, app)
        finally:
            await client.close()


@contextlib.asynccontextmanager
async def _serving(app: Server):
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    )
    task = asyncio.ensure_future(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def events(text: str) -> list[dict | str]:
    """The data of each server-sent event."""
    out = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            out.append(data if data == "[DONE]" else msgspec.json.decode(data))
    return out


async def until(condition, seconds: float = 0.5) -> None:
    """Waits for `condition()`; fails after `seconds`."""
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    assert condition()
