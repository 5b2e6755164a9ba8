"""A real `tokenspeed serve` in its own process, for tests of the whole ring."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]


class Running:
    """A server that has printed its ready line."""

    def __init__(self, *args: str, env: dict[str, str] | None = None, wait: bool = True):
        port = () if "--port" in args else ("--port", "0")
        command = [sys.executable, "-m", "tokenspeed", "serve", *map(str, args), *port]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )
        self.errors: list[str] = []
        threading.Thread(target=self._read_errors, daemon=True).start()
        self.url = ""
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        line = self.process.stdout.readline()
        found = re.search(r"Server ready on (http://\S+)", line)
        assert found, f"no ready line but {line!r}; {''.join(self.errors)[-2000:]}"
        self.url = found.group(1)

    def _read_errors(self) -> None:
        for line in self.process.stderr:
            self.errors.append(line)

    def children(self) -> dict[str, int]:
        """Process ids by role."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if int(stat[1]) == self.process.pid and stat[0] != "Z" and b"tokenspeed.ipc.process" in command:
                found[Path(command[3].decode()).stem] = int(entry.name)
        return found

    def run_dir(self) -> Path:
        pid = self.children()["worker"]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return Path(command[3].decode()).parent

    def post(self, path: str, body: dict, timeout: float = 60.0) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout)

    def complete(self, **body) -> dict:
        response = self.post("/v1/completions", {"prompt": "the quick brown", "temperature": 0, **body})
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics").text
        values = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)]
        assert values, f"no metric {name}"
        return values[0]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_exit(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()


class Stream(threading.Thread):
    """Reads one SSE stream to its end in the background."""

    def __init__(self, server: Running, **body):
        super().__init__(daemon=True)
        self.url, self.body = (
            server.url,
            {"prompt": "the quick brown", "stream": True, "temperature": 0, **body},
        )
        self.events: list[str] = []
        self.status = 0
        self.broken: Exception | None = None
        self.started = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url + "/v1/completions", json=self.body, timeout=60) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line[6:])
                        self.started.set()
        except httpx.HTTPError as error:
            self.broken = error
        self.started.set()

    @property
    def error(self) -> dict | None:
        """The error event, if one came."""
        for event in self.events:
            if event != "[DONE]" and "error" in (data := json.loads(event)):
                return data["error"]
        return None


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
