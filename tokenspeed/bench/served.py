"""A `tokenspeed serve` of a benchmark's own, on a free port."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from tokenspeed.errors import ConfigError

STOP_SECONDS = 20.0


class Served:
    """A server that answers: `with Served(arguments) as server:`; leaving stops it.

    Args:
        arguments: of `tokenspeed serve`, without a port.
        environment: what differs from this process's; an API key that stands there is not passed on.

    Attributes:
        url: with the port. ready_seconds: from the launch until /health answered 200.
        client: an httpx.Client for it.

    Raises:
        ConfigError: the server has ended instead, with the last line that it said.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None):
        inherited = {name: value for name, value in os.environ.items() if name != "TOKENSPEED_API_KEY"}
        command = [sys.executable, "-m", "tokenspeed", "serve", *arguments, "--host=127.0.0.1", "--port=0"]
        with contextlib.ExitStack() as stack:
            errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            self.started = time.perf_counter()
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**inherited, **(environment or {})},
            )
            stack.callback(self._stop)
            line = self._process.stdout.readline()
            if not line:
                self._process.wait(STOP_SECONDS)
                errors.seek(0)
                said = errors.read().strip().splitlines() or ["nothing"]
                raise ConfigError(f"tokenspeed serve has ended; it said: {said[-1]}")
            self.url = line.removeprefix("Server ready on ").split()[0]
            self.client = stack.enter_context(httpx.Client(base_url=self.url, timeout=600, trust_env=False))
            self.client.get("/health").raise_for_status()
            self.ready_seconds = time.perf_counter() - self.started
            self._stack = stack.pop_all()

    def first_event(self, body: dict[str, Any]) -> float:
        """Seconds from sending a streamed completion to its first event. Reads the stream to its end.

        Raises:
            ConfigError: the server refuses it.
        """
        start, first = time.perf_counter(), None
        with self.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if response.status_code != 200 or line.startswith('data: {"error"'):
                    raise ConfigError(f"the server answers {response.status_code}: {line}")
                if first is None and line.startswith("data: {"):
                    first = time.perf_counter() - start
        if first is None:
            raise ConfigError("the server's answer is empty")
        return first

    def engine(self) -> dict[str, Any]:
        """What its worker reported when it was ready: device, memory, graphs."""
        return self.client.get("/server_info").raise_for_status().json()["engine"]

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _stop(self) -> None:
        if self._process.poll() is None:
            for _ in range(2):  # the second does not wait for open requests
                self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
