"""The server process: uvicorn on the socket that the launcher bound, from before the engine is ready on.

It answers /health from the first moment. The launcher's `Ready` starts one real generation through the whole
ring; only after it the server is ready and says so. `Drain` lets open requests end; `Dead` ends all at once.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn

from tokenspeed.errors import EngineDead, RequestError
from tokenspeed.ipc.messages import Drain, Ready
from tokenspeed.ipc.process import Child
from tokenspeed.params import SamplingParams
from tokenspeed.server.app import Server, create_app
from tokenspeed.server.client import EngineClient
from tokenspeed.server.lifecycle import DEAD, DRAINING, READY

logger = logging.getLogger(__name__)
FLUSH_SECONDS = 1.0  # that responses get to leave once nothing is generated any more
POLL_SECONDS = 0.02


def run(child: Child) -> None:
    """Serves until drained. Raises SystemExit(1) when the engine died, any error of the warm-up otherwise."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the launcher gets them, and sends Drain
    try:
        import uvloop
    except ImportError:
        error = asyncio.run(_serve(child))
    else:
        error = uvloop.run(_serve(child))
    if error is not None:
        child.dead(error)  # the launcher may not know it yet: the watchdog is here
        raise SystemExit(1)


async def _serve(child: Child) -> str | None:
    """Returns why the engine died, if it did."""
    resolved = child.resolved
    client = EngineClient.connect(resolved.run_dir, resolved.config.watchdog_timeout)
    host = Host(child, client, create_app(client, resolved))
    client.start()
    try:
        await host.serve(socket.socket(fileno=child.listen_fd))
    finally:
        await client.close()
    return client.error


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Host:
    """Runs an application over a client and moves its lifecycle as the launcher's messages come."""

    def __init__(self, child: Child, client: EngineClient, app: Server):
        self.child, self.client, self.app = child, client, app
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                loop="none",
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None
        self._deadline: float | None = None  # when drained
        client.on_ready, client.on_drain, client.on_dead = self._on_ready, self._on_drain, self._on_dead

    async def serve(self, listener: socket.socket) -> None:
        """Until drained or dead. Raises what made the warm-up fail."""
        # Connections inherit it. asyncio sets it only where the listener names its protocol; without it the
        # kernel holds an event back until the client has acknowledged the one before, up to 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await self._uvicorn.serve(sockets=[listener])
        for task in self._tasks:
            task.cancel()
        if self._failed is not None:
            raise self._failed

    # ---- messages of the launcher

    def _on_ready(self, ready: Ready) -> None:
        self.app.api.info = dict(ready.info)
        self._spawn(self._warm_up())

    def _on_drain(self, drain: Drain) -> None:
        """A second Drain may only shorten the first."""
        first = self._deadline is None
        deadline = time.monotonic() + drain.timeout
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        self.app.lifecycle.move(DRAINING, "the server is shutting down")
        if first:
            self._spawn(self._drain())

    def _on_dead(self, error: str) -> None:
        logger.error("engine died: %s", error)
        self.app.lifecycle.move(DEAD, "the engine has died")
        self._spawn(self._stop(FLUSH_SECONDS / 2, force=True))

    # ---- what they start

    async def _warm_up(self) -> None:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True).resolved()
        generation = self.client.generate(params, token_ids=[0])
        try:
            async for piece in generation:
                if piece.finished is not None and piece.finished.reason == "error":
                    raise RuntimeError(f"the first generation failed: {piece.finished.message}")
        except EngineDead:
            return  # on_dead ends the server
        finally:
            generation.close()
        self.app.lifecycle.move(READY, "")
        self.child.ready()

    async def _drain(self) -> None:
        while self.client.num_busy and time.monotonic() < (self._deadline or 0.0):
            await asyncio.sleep(POLL_SECONDS)
        self.client.fail_open(RequestError("the server is shutting down", status=503, code="server_draining"))
        await self._stop(0.0, force=False)

    async def _stop(self, delay: float, force: bool) -> None:
        await asyncio.sleep(delay)
        self._uvicorn.force_exit = self._uvicorn.force_exit or force
        self._uvicorn.should_exit = True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A failure of `work` ends the server and is raised by `serve`."""

        def ended(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failed = error
                self._uvicorn.should_exit = True

        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(ended)
        self._tasks.add(task)
