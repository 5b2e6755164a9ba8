"""The real process: started as the launcher starts it, over real sockets, to its exit code."""

import dataclasses
import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from server_fakes import events, resolved

from tokenspeed.ipc.channel import Pull, Push, address
from tokenspeed.ipc.messages import (
    Dead,
    Drain,
    Finished,
    Ready,
    Text,
    Texts,
    Tokenize,
    ToLauncher,
    ToServer,
    ToTokenizer,
    pack,
)
from tokenspeed.ipc.process import start_child


class Ring:
    """Launcher and tokenizer of one server process. A prompt with "hang" in it gets one piece and no end."""

    def __init__(self, run_dir: Path):
        self.resolved = dataclasses.replace(resolved(), run_dir=str(run_dir))
        self.launcher = Pull(address(run_dir, "launcher"), ToLauncher)
        self.tokenizer = Pull(address(run_dir, "tokenizer"), ToTokenizer)
        self.to_server = Push(address(run_dir, "server"), ToServer)
        self.answers = Push(address(run_dir, "server"), ToServer)
        listener = socket.create_server(("127.0.0.1", 0))
        read, self.death_fd = os.pipe()
        self.process = start_child("server", self.resolved, {}, read, listener.fileno())
        os.close(read)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=10)
        listener.close()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()

    def _answer(self) -> None:
        while not self.stopped.is_set():
            message = self.tokenizer.recv(50)
            if isinstance(message, Tokenize):
                hang = b"hang" in (message.messages or b"")
                end = None if hang else Finished("length", 1, 2)
                piece = Text(message.rid, "ab", pack([1, 2]), finished=end, prompt_token_ids=pack([0]))
                self.answers.send(Texts([piece]))

    def make_ready(self) -> None:
        self.to_server.send(Ready("engine", {"max_num_seqs": 4}))
        assert self.launcher.recv(10_000) == Ready("server")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.stopped.set()
        self.thread.join()
        os.close(self.death_fd)
        self.http.close()
        for link in (self.launcher, self.tokenizer, self.to_server, self.answers):
            link.close()

    def chat(self, text: str, **more) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": text}], **more}
        return self.http.post("/v1/chat/completions", json=body)


@pytest.fixture
def ring(tmp_path):
    ring = Ring(tmp_path)
    yield ring
    ring.close()


def test_from_start_to_drain(ring):
    health = ring.http.get("/health")  # the launcher's socket takes it before the process is up
    assert health.status_code == 503 and health.json()["status"] == "starting"
    ring.make_ready()
    assert ring.http.get("/health").status_code == 200
    assert ring.chat("hello").json()["choices"][0]["message"]["content"] == "ab"
    *chunks, done = events(ring.chat("hello", stream=True).text)
    assert done == "[DONE]" and chunks[0]["choices"][0]["delta"]["content"] == "ab"
    for number in (signal.SIGINT, signal.SIGTERM):
        ring.process.send_signal(number)
    assert ring.chat("still here").status_code == 200
    ring.to_server.send(Drain(5.0))
    assert ring.process.wait(3) == 0


def test_death_of_the_engine(ring):
    ring.make_ready()
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(ring.chat("hang", stream=True)))
    client.start()
    time.sleep(0.3)
    start = time.monotonic()
    ring.to_server.send(Dead("worker", "broken"))
    client.join(5)
    *_, failure, done = events(answers[0].text)
    assert failure["error"]["code"] == "engine_dead" and done == "[DONE]"
    assert ring.process.wait(3) == 1
    assert time.monotonic() - start < 1.5
