"""How the ring starts, drains, and ends when a process dies (B35, B36, B38, B39)."""

import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from servers import Running, Stream, alive, wait_until

LONG = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tiny_model_dir, tiny_draft_dir):
    target = tiny_model_dir("llama")
    return [str(target), "--spec", "eagle4", "--draft", str(tiny_draft_dir(target)), "--dtype", "float32"]


def streams(server: Running, count: int) -> list[Stream]:
    found = [Stream(server, **LONG) for _ in range(count)]
    for stream in found:
        assert stream.started.wait(30)
    return found


@pytest.mark.parametrize("victim", ["worker", "scheduler", "tokenizer", "server"])
def test_a_killed_process_ends_everything(model, victim):
    with Running(*model) as server:
        children, run_dir = server.children(), server.run_dir()
        assert set(children) == {"server", "tokenizer", "scheduler", "worker"}
        open_streams = streams(server, 8)
        os.kill(children[victim], signal.SIGKILL)
        started = time.monotonic()
        assert server.wait_exit(5) != 0
        assert wait_until(lambda: not any(alive(pid) for pid in children.values()), 1)
        assert time.monotonic() - started < 5
        for stream in open_streams:
            stream.join(5)
            assert not stream.is_alive()
            if victim != "server":  # a dead server can say nothing
                assert stream.error is not None and stream.events[-1] == "[DONE]"
            else:
                assert stream.broken is not None
        assert not run_dir.exists()
        assert any("has died" in line for line in server.errors)


def test_a_killed_launcher_leaves_nobody(model):
    with Running(*model) as server:
        children = server.children()
        os.kill(server.process.pid, signal.SIGKILL)
        server.wait_exit(5)
        assert wait_until(lambda: not any(alive(pid) for pid in children.values()), 5)


def test_first_interrupt_drains_second_ends(model):
    with Running(*model) as server:
        children, run_dir = server.children(), server.run_dir()
        (stream,) = streams(server, 1)
        server.signal(signal.SIGINT)
        assert wait_until(lambda: _health(server) == 503, 3)
        refused = server.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code == 503 and "Retry-After" in refused.headers
        stream.join(60)
        assert stream.error is None and stream.events[-1] == "[DONE]"
        assert server.wait_exit(10) == 0
        assert not any(alive(pid) for pid in children.values()) and not run_dir.exists()
    with Running(*model) as server:
        streams(server, 1)
        server.signal(signal.SIGINT)
        time.sleep(0.3)
        server.signal(signal.SIGINT)
        assert server.wait_exit(3) == 130


def test_drain_has_a_limit(model):
    with Running(*model, "--shutdown-timeout", "0.5") as server:
        found = streams(server, 8)
        server.signal(signal.SIGTERM)
        assert server.wait_exit(6) == 0
        for stream in found:
            stream.join(5)
            assert stream.events[-1] == "[DONE]"


def test_client_that_goes_away_is_aborted(model):
    with Running(*model) as server, httpx.Client() as client:
        body = {"prompt": "the", "stream": True, "max_tokens": 1000, "ignore_eos": True}
        with client.stream("POST", server.url + "/v1/completions", json=body) as response:
            next(response.iter_lines())
        assert wait_until(lambda: server.metric("tokenspeed:num_requests_running") == 0, 2)
        assert server.complete(max_tokens=4)["usage"]["completion_tokens"] == 4


def test_port_in_use_is_told_at_once(model):
    with Running(*model) as server:
        port = server.url.rsplit(":", 1)[1]
        started = time.monotonic()
        second = Running(*model, "--port", port, wait=False)
        assert second.wait_exit(10) == 2
        assert time.monotonic() - started < 5
        assert wait_until(lambda: any(f":{port}" in line for line in second.errors), 1)
        assert len(second.errors) == 1


def test_nothing_listens_but_the_http_port(model):
    with Running(*model) as server:
        pids = [server.process.pid, *server.children().values()]
        inodes = set()
        for pid in pids:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                except OSError:
                    continue
                if target.startswith("socket:"):
                    inodes.add(target[8:-1])
        listening = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == "0A" and parts[9] in inodes:
                    listening.add(int(parts[1].split(":")[1], 16))
        assert listening == {int(server.url.rsplit(":", 1)[1])}
        assert server.run_dir().stat().st_mode & 0o777 == 0o700


def _health(server: Running) -> int:
    try:
        return httpx.get(server.url + "/health").status_code
    except httpx.HTTPError:
        return 0
