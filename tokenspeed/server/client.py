"""`EngineClient`: the asyncio end of the ring, for the HTTP server and for the offline `LLM`."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tokenspeed.errors import EngineDead, RequestError
from tokenspeed.ipc.channel import AsyncPull, AsyncPush, address
from tokenspeed.ipc.messages import (
    Abort,
    Dead,
    Decoded,
    DetokenizeOnly,
    Drain,
    Finished,
    Message,
    Ready,
    Stats,
    Text,
    Texts,
    TokenIds,
    Tokenize,
    TokenizeOnly,
    ToServer,
    ToTokenizer,
    pack,
)
from tokenspeed.params import SamplingParams
from tokenspeed.server.watchdog import Watchdog


class Sender(Protocol):
    async def send(self, message: Message) -> None: ...
    def close(self) -> None: ...


class Receiver(Protocol):
    async def recv(self) -> Message: ...
    def close(self) -> None: ...


class Observer(Protocol):
    """Is told about each request as it proceeds. Times are seconds."""

    def first_token(self, since_start: float) -> None: ...
    def more_tokens(self, since_last: float, count: int) -> None: ...
    def finished(self, reason: str, since_start: float, since_first: float, num_tokens: int) -> None: ...


class GenerationClosed(Exception):
    """The consumer went away; nobody wants the rest."""


class Generation:
    """The pieces of one or several requests, in the order of their arrival.

    Iterate, or take `batch()`es; it ends when each request has had its piece with `finished`. Raises
    EngineDead when the engine died, RequestError when the server gave the requests up. `close()` it in the
    end: what has not finished is aborted.
    """

    def __init__(self, client: "EngineClient"):
        self.rids: list[int] = []  # in the order they were added
        self._client = client
        self._unfinished: set[int] = set()
        self._pieces: deque[Text] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def add(
        self,
        params: SamplingParams,
        *,
        messages: bytes | None = None,
        text: str | None = None,
        token_ids: list[int] | None = None,
        echo: bool = False,
        max_tokens_field: str = "max_tokens",
    ) -> int:
        """Sends one more request and returns its rid.

        Args:
            params: as `SamplingParams.resolved` gives them.
            messages: JSON list of chat messages. Exactly one of messages, text and token_ids is given.
        """
        ids = None if token_ids is None else pack(token_ids)
        rid = self._client._open_request(self)
        self.rids.append(rid)
        self._unfinished.add(rid)
        self._client._post(Tokenize(rid, params, messages, text, ids, echo, max_tokens_field))
        return rid

    async def batch(self) -> list[Text]:
        """Every piece that has arrived, at least one; an empty list at the end."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces = list(self._pieces)
        self._pieces.clear()
        return pieces

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Text:
        if not self._pieces:
            pieces = await self.batch()
            if not pieces:
                raise StopAsyncIteration
            self._pieces.extend(pieces)
        return self._pieces.popleft()

    def close(self) -> None:
        """Aborts what has not finished, at once. A consumer that still waits gets GenerationClosed."""
        self._fail(GenerationClosed("the consumer has gone"), abort=True)

    def _put(self, piece: Text) -> None:
        if piece.finished is not None:
            self._unfinished.discard(piece.rid)
        self._pieces.append(piece)
        self._wake()

    def _fail(self, error: Exception, abort: bool) -> None:
        for rid in self._unfinished:
            self._client._drop_request(rid, abort)
        self._unfinished.clear()
        if self._error is None:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Open:
    """One request that has not finished, with the times that the latency metrics need."""

    __slots__ = ("first", "generation", "last", "num_tokens", "started")

    def __init__(self, generation: Generation):
        self.generation = generation
        self.started = time.perf_counter()
        self.first = self.last = 0.0
        self.num_tokens = 0


class EngineClient:
    """Owns the request ids, sends to the tokenizer, hands what comes back to whoever waits for it.

    `start()` it inside the loop that uses it. After `Dead`, when a link breaks, or when the ring shows no
    sign of life for `watchdog_timeout` seconds (None: however long), every open `Generation` raises
    EngineDead and so does everything new.
    """

    def __init__(self, push: Sender, pull: Receiver, watchdog_timeout: float | None = None):
        self.stats = Stats()  # the last one that came
        self.error: str | None = None  # why the engine is dead
        self.observer: Observer | None = None
        self.on_ready: Callable[[Ready], None] | None = None
        self.on_drain: Callable[[Drain], None] | None = None
        self.on_dead: Callable[[str], None] | None = None
        self._push, self._pull = push, pull
        self._watchdog = None if watchdog_timeout is None else Watchdog(watchdog_timeout)
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._open: dict[int, _Open] = {}
        self._calls: dict[int, asyncio.Future[TokenIds | Decoded]] = {}
        self._next_rid = 0
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def connect(cls, run_dir: str, watchdog_timeout: float | None = None) -> "EngineClient":
        """A client of the ring whose sockets are in `run_dir`."""
        push = AsyncPush(address(run_dir, "tokenizer"), ToTokenizer)
        return cls(push, AsyncPull(address(run_dir, "server"), ToServer), watchdog_timeout)

    def start(self) -> None:
        watch = [] if self._watchdog is None else [self._watch(self._watchdog)]
        for work in (self._send_all(), self._receive_all(), *watch):
            task = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(self._link_ended)
            self._tasks.append(task)

    async def close(self) -> None:
        """Aborts what is open and closes the links. Aborts still in the outbox get a moment to leave."""
        self.fail_open(EngineDead("the client has been closed"))
        for _ in range(20):
            if self._outbox.empty() or self.error is not None:
                break
            await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._push.close()
        self._pull.close()

    @property
    def num_open(self) -> int:
        """Requests (choices) that have not finished."""
        return len(self._open)

    @property
    def num_busy(self) -> int:
        """Open requests and open tokenize calls."""
        return len(self._open) + len(self._calls)

    def generate(self, params: SamplingParams, **prompt) -> Generation:
        """One request; see `Generation.add` for the arguments. Raises EngineDead."""
        generation = Generation(self)
        generation.add(params, **prompt)
        return generation

    def abort(self, rid: int) -> None:
        """Ends one request of a Generation early; the others go on. Unknown ids are ignored."""
        if (entry := self._open.get(rid)) is not None:
            self._drop_request(rid, abort=True)
            entry.generation._put(Text(rid, finished=Finished("abort", num_output=entry.num_tokens)))

    async def tokenize(
        self, *, messages: bytes | None = None, text: str | None = None, add_special_tokens: bool = True
    ) -> TokenIds:
        """Raises EngineDead; what is wrong with the text is in the answer's `error`."""
        return await self._call(lambda rid: TokenizeOnly(rid, messages, text, add_special_tokens))

    async def detokenize(self, token_ids: list[int]) -> Decoded:
        ids = pack(token_ids)
        return await self._call(lambda rid: DetokenizeOnly(rid, ids))

    def fail_open(self, error: Exception, abort: bool = True) -> None:
        """Every open Generation and call raises `error`."""
        for generation in {entry.generation for entry in self._open.values()}:
            generation._fail(error, abort)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    # ---- for Generation

    def _open_request(self, generation: Generation) -> int:
        if self.error is not None:
            raise EngineDead(self.error)
        rid = self._new_rid()
        self._open[rid] = _Open(generation)
        return rid

    def _drop_request(self, rid: int, abort: bool) -> None:
        entry = self._open.pop(rid, None)
        if entry is None:
            return
        self._observe_end(entry, "abort" if abort else "error", entry.num_tokens)
        if abort:
            self._post(Abort(rid))

    def _post(self, message: Message) -> None:
        """Messages leave in this order; a request's Abort never overtakes its Tokenize."""
        self._outbox.put_nowait(message)

    # ---- the links

    def _new_rid(self) -> int:
        self._next_rid += 1
        return self._next_rid

    async def _call(self, make: Callable[[int], Message]):
        if self.error is not None:
            raise EngineDead(self.error)
        rid = self._new_rid()
        future = self._calls[rid] = asyncio.get_running_loop().create_future()
        self._post(make(rid))
        try:
            return await future
        finally:
            del self._calls[rid]

    async def _send_all(self) -> None:
        while True:
            await self._push.send(await self._outbox.get())

    async def _receive_all(self) -> None:
        while True:
            message = await self._pull.recv()
            if self._watchdog is not None:
                self._watchdog.hear(message)
            if isinstance(message, Texts):
                for piece in message.texts:
                    self._deliver(piece)
            elif isinstance(message, (TokenIds, Decoded)):
                future = self._calls.get(message.rid)
                if future is not None and not future.done():
                    future.set_result(message)
            elif isinstance(message, Stats):
                self.stats = message
            elif isinstance(message, Dead):
                self._die(f"{message.who}: {message.error}")
            elif isinstance(message, Ready) and self.on_ready is not None:
                self.on_ready(message)
            elif isinstance(message, Drain) and self.on_drain is not None:
                self.on_drain(message)

    async def _watch(self, watchdog: Watchdog) -> None:
        while not watchdog.look(self.num_busy):
            await asyncio.sleep(watchdog.interval)
        self._die(f"the ring has shown no sign of life for {watchdog.timeout:g} seconds")

    def _link_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(f"server: a link of the ring broke: {type(error).__name__}: {error}")

    def _die(self, error: str) -> None:
        if self.error is not None:
            return
        self.error = error
        self.fail_open(EngineDead(error), abort=False)
        if self.on_dead is not None:
            self.on_dead(error)

    def _deliver(self, piece: Text) -> None:
        entry = self._open.get(piece.rid)
        if entry is None:  # aborted meanwhile
            return
        if count := len(piece.token_ids) // 4:
            self._observe_tokens(entry, count)
        if piece.finished is not None:
            del self._open[piece.rid]
            self._observe_end(entry, piece.finished.reason, piece.finished.num_output)
        entry.generation._put(piece)

    def _observe_tokens(self, entry: _Open, count: int) -> None:
        now = time.perf_counter()
        first = entry.num_tokens == 0
        entry.num_tokens += count
        if first:
            entry.first = now
        if self.observer is not None:
            if first:
                self.observer.first_token(now - entry.started)
            else:
                self.observer.more_tokens(now - entry.last, count)
        entry.last = now

    def _observe_end(self, entry: _Open, reason: str, num_tokens: int) -> None:
        if self.observer is not None:
            now = time.perf_counter()
            self.observer.finished(reason, now - entry.started, now - (entry.first or now), num_tokens)


def check_room(client: EngineClient, count: int, limit: int) -> None:
    """Raises RequestError 503 when `count` more requests would make more than `limit` open ones."""
    if client.num_open + count > limit:
        raise RequestError(
            f"the server is full: {client.num_open} requests are open, {count} more don't fit in {limit}; "
            "try again later",
            status=503,
            code="queue_full",
        )
