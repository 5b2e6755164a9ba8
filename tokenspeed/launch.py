"""Starts the ring, watches it, stops it. The parent process: no torch, no model code."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

from tokenspeed.config import Config, Resolved
from tokenspeed.errors import ConfigError, EngineDead
from tokenspeed.hub.resolve import resolve_draft, resolve_model
from tokenspeed.ipc.channel import Pull, Push, address
from tokenspeed.ipc.messages import Dead, Drain, Progress, Ready, ToLauncher, ToServer
from tokenspeed.ipc.process import start_child
from tokenspeed.models.config import load_model_config
from tokenspeed.progress import Bars
from tokenspeed.spec.eagle4.config import check_draft, fitting_shapes
from tokenspeed.spec.options import plain_above, speculation

LOAD_TIMEOUT = 3600.0  # seconds for weights to load and graphs to be captured
DEATH_GRACE = 2.0  # seconds the server gets to end open streams when a process has died
POLL_MS = 100


def resolve(config: Config, progress: Callable[[str, int, int], None]) -> Resolved:
    """Fills every choice that needs no torch; finds, and where needed makes, model and draft.

    Raises:
        ConfigError: anything the user can mend, in one line.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("torch is not installed; install it with: pip install torch")
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(config, name) != 1:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(config, name)} is not supported yet; leave it at 1")
    method, draft, shapes = speculation(config)
    limit = plain_above(config)
    model_dir = resolve_model(config.model, config.revision, progress)
    model = load_model_config(model_dir)
    max_len = config.max_model_len or model.max_position_embeddings
    if max_len > model.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {max_len} is more than the model's {model.max_position_embeddings} positions; "
            f"give at most {model.max_position_embeddings}"
        )
    resolved = Resolved(
        config=config,
        model_dir=str(model_dir),
        model=model,
        names=config.served_model_name or (config.model,),
        max_model_len=max_len,
        eos_token_ids=model.eos_token_ids,
        method=method,
    )
    if method == "none":
        return resolved
    draft_dir = resolve_draft(draft, config.model, model_dir, method)
    found = check_draft(draft_dir, method, model, model_dir, max(shape.steps for shape in shapes))
    shapes = fitting_shapes(found, shapes, config.draft_head == "full")
    return replace(resolved, draft_dir=str(draft_dir), shapes=shapes, plain_above=limit)


def listen(host: str, port: int) -> socket.socket:
    """Binds the HTTP port before anything slow begins."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"can't listen on {host}:{port} ({error}); choose another with --port or --host"
        ) from None
    return sock


class Ring:
    """The processes of one engine. `with Ring(...) as ring: ring.start(...)`; leaving stops everything."""

    def __init__(self, resolved: Resolved, bars: Bars, interrupted: Callable[[], bool] = lambda: False):
        self.run_dir = tempfile.mkdtemp(prefix="tokenspeed-")  # 0700
        self.resolved = replace(resolved, run_dir=self.run_dir)
        self.bars, self.interrupted = bars, interrupted
        self.children: dict[str, subprocess.Popen] = {}
        self.info: dict[str, int | float | str] = {}
        self._pull = Pull(address(self.run_dir, "launcher"), ToLauncher)
        self._death_pipe = list(os.pipe())  # (read, write) until closed
        self._ready: set[str] = set()

    def __enter__(self) -> "Ring":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self, listener: socket.socket | None = None) -> None:
        """Starts every process and returns when all are ready, the server (if any) after a real generation.

        Raises:
            ConfigError: a child reported a mistake of the user's. EngineDead: a child broke. TimeoutError.
            KeyboardInterrupt: `interrupted` says so.
        """
        if listener is not None:
            self._start("server", listener.fileno())
        self._start("worker")
        self._start("tokenizer")
        self._await({"worker", "tokenizer"})
        self._start("scheduler")
        self._await({"scheduler"})
        if listener is not None:
            self.to_server(Ready("engine", self.info))
            self._await({"server"})

    def to_server(self, message: Ready | Dead | Drain) -> None:
        push = Push(address(self.run_dir, "server"), ToServer)
        push.send(message)
        push.close()

    def poll(self, timeout_ms: int = POLL_MS) -> Dead | None:
        """Takes reports and looks at the processes. Returns what died, if anything did."""
        message = self._pull.recv(timeout_ms)
        if message is not None:
            if isinstance(message, Dead):
                return message
            self._note(message)
        for who, process in self.children.items():
            if (code := process.poll()) is not None:
                return self._reported(who) or Dead(who, _ending(code))
        return None

    def close(self) -> None:
        """Kills what still runs and removes the directory. Safe to call twice."""
        for process in self.children.values():
            if process.poll() is None:
                process.kill()
        for process in self.children.values():
            process.wait()
        self.children.clear()
        while self._death_pipe:  # a number closed twice may be another ring's by then
            os.close(self._death_pipe.pop())
        self._pull.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def _start(self, who: str, listen_fd: int | None = None) -> None:
        self.children[who] = start_child(who, self.resolved, self.info, self._death_pipe[0], listen_fd)

    def _note(self, message: Ready | Progress) -> None:
        if isinstance(message, Progress):
            self.bars.update(message.text, message.done, message.total)
        else:
            self._ready.add(message.who)
            self.info.update(message.info)

    def _reported(self, who: str) -> Dead | None:
        """The Dead that a process sent before it went, if it is still on the way."""
        while (message := self._pull.recv(200)) is not None:
            if isinstance(message, Dead):
                return message
            self._note(message)
        return None

    def _await(self, names: set[str]) -> None:
        deadline = time.monotonic() + LOAD_TIMEOUT
        while not names <= self._ready:
            dead = self.poll()
            if self.interrupted():
                raise KeyboardInterrupt
            if dead is not None and dead.user_error:
                raise ConfigError(dead.error)
            if dead is not None:
                raise EngineDead(f"{dead.who} did not start: {dead.error}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{', '.join(sorted(names - self._ready))} did not start in {LOAD_TIMEOUT:.0f} s"
                )


def _ending(code: int) -> str:
    """What an exit code says. The kernel kills with SIGKILL when memory runs out."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (", perhaps because memory ran out" if -code == signal.SIGKILL else "")


class _Interrupts:
    """Counts SIGINT and SIGTERM instead of raising: the first drains, the second ends at once."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._count)

    def _count(self, *_: object) -> None:
        self.count += 1


def serve(config: Config) -> int:
    """Runs the server until it is told to stop. Returns the exit code: 0 drained, 1 a process died, 130 twice
    interrupted."""
    bars = Bars(sys.stderr)
    listener = listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    resolved = resolve(config, bars.update)
    interrupts = _Interrupts()
    with listener, Ring(resolved, bars, lambda: interrupts.count > 0) as ring:
        try:
            ring.start(listener)
        except (EngineDead, TimeoutError) as error:
            print(f"tokenspeed: error: {error}", file=sys.stderr)
            return 1
        bars.close()
        print(_banner(ring, host, port), flush=True)
        return _watch(ring, interrupts, config.shutdown_timeout)


def _watch(ring: Ring, interrupts: _Interrupts, drain_seconds: float) -> int:
    drained_by: float | None = None
    while True:
        dead = ring.poll()
        if dead is not None and dead.who == "server" and drained_by is not None:
            return 0 if ring.children["server"].wait() == 0 else 1
        if dead is not None:
            print(
                f"tokenspeed: error: the {dead.who} process has died ({dead.error}); stopping",
                file=sys.stderr,
            )
            if dead.who != "server":
                _let_server_end(ring, dead)
            return 1
        if interrupts.count >= 2:
            return 130
        if interrupts.count == 1 and drained_by is None:
            print("tokenspeed: finishing open requests (again to stop at once)", file=sys.stderr)
            ring.to_server(Drain(drain_seconds))
            drained_by = time.monotonic() + drain_seconds + DEATH_GRACE
        if drained_by is not None and time.monotonic() > drained_by:
            return 1


def _let_server_end(ring: Ring, dead: Dead) -> None:
    """Open streams get an error event before everything is killed."""
    ring.to_server(dead)
    with contextlib.suppress(subprocess.TimeoutExpired):
        ring.children["server"].wait(DEATH_GRACE)


def _banner(ring: Ring, host: str, port: int) -> str:
    resolved = ring.resolved
    trees = resolved.shapes
    shape = f", tree {trees[0]}" if len(trees) == 1 else ", trees by the load" if trees else ""
    shown = f"[{host}]" if ":" in host else host
    name = resolved.names[0]
    return (
        f"Server ready on http://{shown}:{port} (model={name}, spec={resolved.method}{shape}); try: "
        f"curl -N http://{shown}:{port}/v1/chat/completions -H 'content-type: application/json' "
        f'-d \'{{"model": "{name}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}\''
    )
