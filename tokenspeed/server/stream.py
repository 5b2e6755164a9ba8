"""Sends an answer, whole or as server-sent events, and aborts its requests as soon as the client is gone."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenspeed.errors import EngineDead, RequestError
from tokenspeed.server.client import Generation, GenerationClosed
from tokenspeed.server.errors import error_event
from tokenspeed.server.reply import Events, Reply

logger = logging.getLogger(__name__)
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@contextlib.asynccontextmanager
async def watched(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Within, a disconnect closes `generation` at once. The request's body must have been read before."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.close()

    watcher = asyncio.ensure_future(wait())
    try:
        yield
    finally:
        watcher.cancel()


async def whole_response(request: Request, generation: Generation, reply: Reply) -> Response:
    """Waits for everything. Raises RequestError or EngineDead; one failed choice ends them all."""
    index = dict(zip(generation.rids, reply.choices, strict=True))
    try:
        async with watched(request.receive, generation):
            async for piece in generation:
                reply.keep(index[piece.rid], piece)
    finally:
        generation.close()
    return Response(reply.body(), media_type="application/json")


class EventStream(Response):
    """A server-sent event stream whose status waits for the first piece, so that a refusal is a proper 4xx.

    Make it with `await EventStream.begin(...)`.
    """

    def __init__(self, generation: Generation, events: Events):
        self.generation, self.events = generation, events
        self.index = dict(zip(generation.rids, events.reply.choices, strict=True))
        self.status_code = 200
        self.background = None
        self.first = b""

    @classmethod
    async def begin(cls, request: Request, generation: Generation, events: Events) -> "EventStream":
        """Raises RequestError or EngineDead if that is what comes first."""
        stream = cls(generation, events)
        try:
            async with watched(request.receive, generation):
                stream.first = await stream._next()
        except BaseException:
            generation.close()
            raise
        return stream

    async def _next(self) -> bytes:
        """Events of all pieces that have arrived; empty at the end."""
        while True:
            pieces = await self.generation.batch()
            events = b"".join([self.events.piece(self.index[p.rid], p) for p in pieces])
            if events or not pieces:
                return events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with watched(receive, self.generation):
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                end = await self._send_pieces(send)
                await send({"type": "http.response.body", "body": end, "more_body": False})
        except GenerationClosed:
            pass  # nobody listens
        finally:
            self.generation.close()

    async def _send_pieces(self, send: Send) -> bytes:
        """Returns the events that end the stream, whether it went well or not. Raises GenerationClosed."""
        try:
            data = self.first
            while data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await self._next()
            return self.events.last()
        except (RequestError, EngineDead) as error:
            return error_event(error)
        except GenerationClosed:
            raise
        except Exception as error:  # the HTTP boundary: the client gets an event, the log the rest
            logger.exception("a stream failed")
            return error_event(error)
