"""A small OpenAI-compatible server for the tests of the clients: pieces of several tokens, at known times."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

PROMPT_TOKENS = 7


@dataclass
class Behaviour:
    """What the server does; tests change it while it runs."""

    pieces: tuple[str, ...] = ("one ", "two three four ", "five six ")  # a word is a token
    delay: float = 0.0  # seconds before each piece
    stream_options: bool = True
    continuous: bool = True
    owner: str = "someone"
    models: tuple[str, ...] = ("fake",)
    key: str | None = None
    fail: str = ""  # "refuse", "midway", "garbage", "cut"
    metrics: str = ""
    server_info: dict | None = None
    bodies: list[dict] = field(default_factory=list)
    open_now: int = 0
    open_most: int = 0


def make_app(behaviour: Behaviour) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    def models(request: Request):
        if behaviour.key and request.headers.get("authorization") != f"Bearer {behaviour.key}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        return {"data": [{"id": name, "owned_by": behaviour.owner} for name in behaviour.models]}

    @app.get("/metrics")
    def metrics():
        return PlainTextResponse(behaviour.metrics, 200 if behaviour.metrics else 404)

    @app.get("/server_info")
    def server_info():
        return JSONResponse(behaviour.server_info or {}, 200 if behaviour.server_info else 404)

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        body = await request.json()
        behaviour.bodies.append(body)
        options = body.get("stream_options") or {}
        if options and not behaviour.stream_options:
            return JSONResponse({"error": {"message": "unknown field stream_options"}}, 400)
        if options.get("continuous_usage_stats") and not behaviour.continuous:
            return JSONResponse({"error": {"message": "unknown field continuous_usage_stats"}}, 400)
        if behaviour.fail == "refuse":
            return JSONResponse({"error": {"message": "no room"}}, 503)
        return StreamingResponse(stream(behaviour, body, options), media_type="text/event-stream")

    return app


async def stream(behaviour: Behaviour, body: dict, options: dict):
    behaviour.open_now += 1
    behaviour.open_most = max(behaviour.open_most, behaviour.open_now)
    try:
        tokens = 0
        yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for number, piece in enumerate(behaviour.pieces):
            await asyncio.sleep(behaviour.delay)
            if behaviour.fail == "midway" and number == 1:
                yield "data: " + json.dumps({"error": {"message": "the engine died"}}) + "\n\n"
                return
            if behaviour.fail == "garbage" and number == 1:
                yield "data: {nonsense\n\n"
                return
            if behaviour.fail == "cut" and number == 1:
                raise RuntimeError("cut")
            tokens += len(piece.split())
            yield event(
                [{"index": 0, "delta": {"content": piece}}],
                tokens if options.get("continuous_usage_stats") else 0,
            )
        spec = {"num_rounds": 3, "num_drafted": 45, "num_accepted": 6, "accepted_per_depth": [3, 2, 1]}
        extra = {"spec_metrics": spec} if body.get("return_spec_metrics") else {}
        if options.get("include_usage"):
            yield event([], tokens, extra)
        yield "data: [DONE]\n\n"
    finally:
        behaviour.open_now -= 1


def event(choices: list, tokens: int = 0, extra: dict | None = None) -> str:
    data = {"object": "chat.completion.chunk", "choices": choices, **(extra or {})}
    if tokens:
        data["usage"] = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens}
    return "data: " + json.dumps(data) + "\n\n"


@contextlib.contextmanager
def running(behaviour: Behaviour) -> Iterator[str]:
    """The server's URL while it runs in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = uvicorn.Server(uvicorn.Config(make_app(behaviour), log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
