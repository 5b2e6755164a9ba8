"""Processes that do not die but hang: within the watchdog's time all ends, and open streams are told (B36, B38)."""

import os
import signal
import threading
import time

import httpx
import pytest
from servers import Running, Stream, alive, wait_until

WATCHDOG = 2.0
WHY = {
    "scheduler": "the ring has shown no sign of life for 2 seconds",
    "worker": "no answer from the worker for 2 seconds",
    "tokenizer": "the ring has shown no sign of life for 2 seconds",
}


class Health(threading.Thread):
    """Asks again and again; keeps the codes and the slowest answer."""

    def __init__(self, server: Running):
        super().__init__(daemon=True)
        self.url, self.codes, self.slowest = server.url + "/health", set(), 0.0
        self.start()

    def run(self) -> None:
        with httpx.Client(timeout=5) as client:
            while True:
                started = time.monotonic()
                try:
                    self.codes.add(client.get(self.url).status_code)
                except httpx.HTTPError:
                    return
                self.slowest = max(self.slowest, time.monotonic() - started)
                time.sleep(0.02)


@pytest.mark.parametrize("victim", WHY)
def test_a_process_that_hangs(tiny_model_dir, tiny_draft_dir, victim):
    target = tiny_model_dir("llama")
    options = ["--spec", "eagle4", "--draft", tiny_draft_dir(target), "--dtype", "float32"]
    with Running(target, *options, "--watchdog-timeout", WATCHDOG) as server:
        children, run_dir = server.children(), server.run_dir()
        # Nothing is open: however long the ring is silent, it is not dead.
        time.sleep(WATCHDOG + 0.5)
        found = [Stream(server, max_tokens=900, ignore_eos=True) for _ in range(4)]
        assert all(stream.started.wait(30) for stream in found)
        health = Health(server)
        os.kill(children[victim], signal.SIGSTOP)
        started = time.monotonic()
        for stream in found:
            stream.join(20)
            assert stream.error is not None and stream.error["code"] == "engine_dead"
            assert stream.events[-1] == "[DONE]"
        # A stopped tokenizer shows only when the scheduler has run out of work.
        assert time.monotonic() - started < WATCHDOG + (10 if victim == "tokenizer" else 2)
        assert server.wait_exit(5) == 1
        health.join(5)
        assert health.codes == {200, 503}
        assert not any(alive(pid) for pid in children.values()) and not run_dir.exists()
        assert wait_until(lambda: any(WHY[victim] in line for line in server.errors), 1), server.errors
