"""The OpenAI-compatible endpoints, /tokenize and /detokenize: a body in, an answer of the engine out."""

import random
import time
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tokenspeed.config import Resolved
from tokenspeed.errors import RequestError
from tokenspeed.ipc.messages import unpack
from tokenspeed.params import SamplingParams
from tokenspeed.server.client import EngineClient, Generation, check_room
from tokenspeed.server.errors import shorten
from tokenspeed.server.lifecycle import Lifecycle
from tokenspeed.server.parsing import parse
from tokenspeed.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    check_token_ids,
    encode_messages,
)
from tokenspeed.server.reply import ChatReply, CompletionReply, Events, Reply
from tokenspeed.server.stream import EventStream, whole_response

DEFAULT_MAX_NUM_SEQS = 256  # bound on open requests until the engine reports what it chose

AnyBody = TypeVar("AnyBody", bound=Body)


class Api:
    """Handlers. Each raises RequestError for what the client did wrong."""

    def __init__(self, client: EngineClient, resolved: Resolved, lifecycle: Lifecycle):
        self.client, self.resolved, self.lifecycle = client, resolved, lifecycle
        self.info: dict[str, int | float | str] = {}  # what the engine reported when it was ready
        self.created = int(time.time())
        self._max_body = resolved.config.max_body_mib << 20
        self._seeds = None if (seed := resolved.config.seed) is None else random.Random(seed)

    # ---- generation

    async def chat(self, request: Request) -> Response:
        body = await self._read(request, ChatRequest)
        params = body.params(self.vocab_size)
        prompts = [{"messages": encode_messages(body.messages)}]
        return await self._generate(request, body, params, prompts, ChatReply)

    async def completions(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)
        params = body.params(self.vocab_size)
        prompts = body.prompts(self.vocab_size)
        for prompt in prompts:
            prompt["echo"] = bool(body.echo)
        return await self._generate(request, body, params, prompts, CompletionReply)

    async def _generate(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        params: SamplingParams,
        prompts: list[dict[str, Any]],
        kind: type[Reply],
    ) -> Response:
        count = len(prompts) * params.n
        check_room(self.client, count, self.max_open)
        reply = kind(self._model(body), count, params.n, bool(body.return_spec_metrics))
        reply.logprobs = params.logprobs is not None
        generation = Generation(self.client)
        for prompt in prompts:
            for j in range(params.n):
                generation.add(
                    params.resolved(j, self._seeds), max_tokens_field=body.max_tokens_field, **prompt
                )
        if not body.stream:
            return await whole_response(request, generation, reply)
        events = Events(reply, body.include_usage, body.continuous_usage)
        return await EventStream.begin(request, generation, events)

    # ---- tokens

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        special = True if body.add_special_tokens is None else body.add_special_tokens
        messages = None if body.messages is None else encode_messages(body.messages)
        answer = await self.client.tokenize(messages=messages, text=body.prompt, add_special_tokens=special)
        if answer.error:
            raise RequestError(answer.error, "prompt" if messages is None else "messages")
        ids = unpack(answer.token_ids)
        strings = answer.token_texts if body.return_token_strs else None
        limit = self.resolved.max_model_len
        return JSONResponse({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeRequest)
        if body.tokens:
            check_token_ids("tokens", body.tokens, self.vocab_size)
        answer = await self.client.detokenize(body.tokens)
        if answer.error:
            raise RequestError(answer.error, "tokens")
        return JSONResponse({"prompt": answer.text})

    # ---- models

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self.resolved.names]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._card(self._known(request.path_params["model"])))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "tokenspeed",
            "root": self.resolved.config.model,
            "parent": None,
            "max_model_len": self.resolved.max_model_len,
        }

    # ---- shared

    @property
    def vocab_size(self) -> int:
        return int(self.info.get("vocab_size", self.resolved.model.vocab_size))

    @property
    def max_open(self) -> int:
        """Open requests before 503: those that run and those that may wait."""
        config = self.resolved.config
        running = self.info.get("max_num_seqs") or config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
        return int(running) + config.max_queued_requests

    async def _read(self, request: Request, kind: type[AnyBody]) -> AnyBody:
        """The checked body of a request that can be served now."""
        self.lifecycle.check()
        body = parse(kind, await read_body(request, self._max_body))
        self._model(body)
        self.lifecycle.check()  # it may have changed while the body came
        return body

    def _model(self, body: Any) -> str:
        return self.resolved.names[0] if body.model is None else self._known(body.model)

    def _known(self, name: str) -> str:
        if name not in self.resolved.names:
            message = f"the model {shorten(name, 200)!r} does not exist"
            raise RequestError(message, "model", status=404, code="model_not_found")
        return name


async def read_body(request: Request, limit: int) -> bytes:
    """At most `limit` bytes of JSON. Raises RequestError 413, or 400 for another content type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestError("the content-type must be application/json", code="invalid_content_type")
    length = request.headers.get("content-length", "")
    too_large = RequestError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_large
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)
