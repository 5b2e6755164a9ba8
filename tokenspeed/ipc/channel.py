"""Typed one-way links between processes: ZMQ PUSH/PULL over ipc:// in the ring's private directory.

The receiver binds. A link carries one union of messages; anything else fails to decode and raises. No pickle.
"""

from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

HIGH_WATER_MARK = 100_000  # messages; a peer this far behind is stuck
SEND_TIMEOUT_MS = 30_000


def address(run_dir: str | Path, who: str) -> str:
    """Where `who` receives."""
    return f"{run_dir}/{who}.sock"


def _socket(context: zmq.Context, kind: int, path: str, bind: bool) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
    (socket.bind if bind else socket.connect)(f"ipc://{path}")
    return socket


class Push:
    """Sends messages of one union to the process that binds `path`."""

    def __init__(self, path: str, union: Any):
        self._socket = _socket(zmq.Context.instance(), zmq.PUSH, path, bind=False)
        self._encoder = msgspec.msgpack.Encoder()
        self.union = union

    def send(self, message: msgspec.Struct) -> None:
        """Raises TimeoutError when the receiver has taken nothing for long."""
        try:
            self._socket.send(self._encoder.encode(message), copy=False)
        except zmq.Again:
            raise TimeoutError(f"the receiver of {type(message).__name__} takes no messages") from None

    def close(self) -> None:
        self._socket.close()


class Pull:
    """Receives messages of one union at `path`."""

    def __init__(self, path: str, union: Any):
        self._socket = _socket(zmq.Context.instance(), zmq.PULL, path, bind=True)
        self._decoder = msgspec.msgpack.Decoder(union)

    def recv(self, timeout_ms: int | None = None) -> Any:
        """The next message, or None after `timeout_ms` (None: waits for ever)."""
        if timeout_ms is not None and not self._socket.poll(timeout_ms):
            return None
        return self._decoder.decode(self._socket.recv())

    def drain(self) -> list[Any]:
        """All messages that have arrived, without waiting."""
        out = []
        while True:
            try:
                out.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return out

    def close(self) -> None:
        self._socket.close()


class AsyncPush:
    """`Push` for an asyncio loop."""

    def __init__(self, path: str, union: Any):
        self._socket = _socket(zmq.asyncio.Context.instance(), zmq.PUSH, path, bind=False)
        self._encoder = msgspec.msgpack.Encoder()
        self.union = union

    async def send(self, message: msgspec.Struct) -> None:
        await self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        self._socket.close()


class AsyncPull:
    """`Pull` for an asyncio loop."""

    def __init__(self, path: str, union: Any):
        self._socket = _socket(zmq.asyncio.Context.instance(), zmq.PULL, path, bind=True)
        self._decoder = msgspec.msgpack.Decoder(union)

    async def recv(self) -> Any:
        return self._decoder.decode(await self._socket.recv())

    def close(self) -> None:
        self._socket.close()
