"""A child of the launcher: how one is started, how it reports, and how it dies with its parent."""

import ctypes
import gc
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tokenspeed.config import Resolved
from tokenspeed.errors import ConfigError
from tokenspeed.ipc.channel import Push, address
from tokenspeed.ipc.messages import Dead, Progress, Ready, ToLauncher

ENTRIES = {  # who -> module whose run(child) is the process
    "server": "tokenspeed.server.process",
    "tokenizer": "tokenspeed.tokenizer.process",
    "scheduler": "tokenspeed.scheduler.process",
    "worker": "tokenspeed.worker.process",
}
PR_SET_PDEATHSIG = 1


class Child:
    """What a child knows of its start: its name, the configuration, the facts that earlier children reported."""

    def __init__(
        self, who: str, resolved: Resolved, info: dict[str, int | float | str], listen_fd: int | None
    ):
        self.who, self.resolved, self.info, self.listen_fd = who, resolved, info, listen_fd
        self._launcher = Push(address(resolved.run_dir, "launcher"), ToLauncher)

    def ready(self, **info: int | float | str) -> None:
        gc.freeze()  # code, weights and vocabulary never die: collections need not look at them
        self._launcher.send(Ready(self.who, info))

    def progress(self, text: str, done: int = 0, total: int = 0) -> None:
        """A line, or with `total` a bar, for the person who started the server."""
        self._launcher.send(Progress(self.who, text, done, total))

    def dead(self, error: str, user_error: bool = False) -> None:
        self._launcher.send(Dead(self.who, error, user_error))
        self._launcher.close()


class _Start(msgspec.Struct):
    who: str
    resolved: Resolved
    info: dict[str, int | float | str]
    listen_fd: int | None
    death_fd: int


def start_child(
    who: str,
    resolved: Resolved,
    info: Mapping[str, int | float | str],
    death_fd: int,
    listen_fd: int | None = None,
) -> subprocess.Popen:
    """Starts `who`. It dies when this process does: by PDEATHSIG, and when the pipe `death_fd` closes."""
    start = Path(resolved.run_dir) / f"{who}.json"
    start.write_bytes(msgspec.json.encode(_Start(who, resolved, dict(info), listen_fd, death_fd)))
    fds = (death_fd,) if listen_fd is None else (death_fd, listen_fd)
    command = [sys.executable, "-m", "tokenspeed.ipc.process", str(start)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        env=_environment(),
        start_new_session=True,  # Ctrl-C reaches the launcher alone, which drains
    )


def _environment() -> dict[str, str]:
    """Ours, with OpenMP told to spin briefly.

    A CPU step forks and joins hundreds of times. Threads that spin to their default of milliseconds hold the core that
    their late partner needs, once anything else runs: 500 to 900 ms a step in place of 50 to 60 on two cores. Alone,
    the time is the same.
    """
    given = dict(os.environ)
    if "OMP_WAIT_POLICY" not in given:
        given.setdefault("GOMP_SPINCOUNT", "1000")
    return given


def _die_with_parent(death_fd: int, parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before prctl was called
        os._exit(1)

    def watch() -> None:
        os.read(death_fd, 1)  # returns when the launcher has closed its end
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="death-pipe").start()


def main(start_file: str) -> int:
    """Runs one child to its end. Returns the exit code: 0 asked to stop, 1 broken, 2 a user's start-up mistake."""
    parent = os.getppid()
    start = msgspec.json.decode(Path(start_file).read_bytes(), type=_Start)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent(start.death_fd, parent)
    from tokenspeed.log import setup_logging

    setup_logging(start.who, start.resolved.config.log_level)
    child = Child(start.who, start.resolved, start.info, start.listen_fd)
    try:
        importlib.import_module(ENTRIES[start.who]).run(child)
        return 0
    except ConfigError as error:
        child.dead(str(error), user_error=True)
        return 2
    except Exception as error:  # the top of a process: report, then die
        import traceback

        traceback.print_exc()
        child.dead(f"{type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
