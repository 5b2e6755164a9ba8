"""The scheduler's loop: order of what it sends, watchdog, statistics, and the real sockets."""

import random
import threading

import pytest
from fake_ring import FakeWorker, expected, generate, scheduler_with

from tokenspeed.config import Shape
from tokenspeed.errors import EngineDead
from tokenspeed.ipc.channel import Pull, Push
from tokenspeed.ipc.messages import (
    Abort,
    Stats,
    Step,
    StopString,
    Tokenize,
    Tokens,
    ToScheduler,
    ToServer,
    ToTokenizer,
    ToWorker,
    unpack,
)
from tokenspeed.scheduler.process import BUSY_MS, IDLE_MS, STATS_SECONDS, SchedulerLoop, serve


class Recorder:
    """Three links that write into one list, so that the order between them shows."""

    def __init__(self) -> None:
        self.sent: list = []

    def send(self, message) -> None:
        self.sent.append(message)

    def take(self, kind: type) -> list:
        out = [m for m in self.sent if isinstance(m, kind)]
        self.sent = [m for m in self.sent if not isinstance(m, kind)]
        return out


def loop_with(**kwargs):
    now = [0.0]
    recorder = Recorder()
    scheduler = scheduler_with(Shape(3, 2, 6))
    loop = SchedulerLoop(
        scheduler, [recorder], recorder, recorder, clock=lambda: now[0], debug=True, **kwargs
    )
    return loop, recorder, now


def test_requests_to_tokens_and_stats():
    loop, recorder, _ = loop_with()
    worker = FakeWorker(loop.scheduler.limits, random.Random(0))
    prompts = {rid: [rid, 2, 3, 4, 5] for rid in range(4)}
    assert loop.wait_ms == IDLE_MS
    loop.handle([generate(rid, prompt, max_tokens=20, ignore_eos=True) for rid, prompt in prompts.items()])
    loop.tick()
    assert loop.wait_ms == BUSY_MS
    got: dict[int, list[int]] = {rid: [] for rid in prompts}
    ends = []
    while not loop.scheduler.is_idle:
        for step in recorder.take(Step):
            loop.handle([worker.run(step)])
        loop.tick()
        kinds = [type(m) for m in recorder.sent]
        assert Step not in kinds or kinds[0] is Step, "the worker comes first"
        for message in recorder.take(Tokens):
            for output in message.outputs:
                got[output.rid] += unpack(output.token_ids)
                ends += [output.finished] if output.finished else []
    for rid, prompt in prompts.items():
        assert got[rid] == expected(prompt, generate(0, prompt, max_tokens=20, ignore_eos=True).params)[0]
    assert len(ends) == 4
    stats = recorder.take(Stats)[-1]  # sent because the engine fell idle, whatever the clock says
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.pages_free + stats.pages_cached == stats.pages_total == 100
    assert stats.counters["generation_tokens"] == 80


def test_stats_come_by_the_clock():
    loop, recorder, now = loop_with()
    loop.tick()
    assert not recorder.take(Stats)
    for tick in range(1, 4):
        now[0] = tick * STATS_SECONDS
        loop.tick()
        loop.tick()
        assert len(recorder.take(Stats)) == 1


def test_abort_and_stop_string_and_a_foreign_message():
    loop, recorder, _ = loop_with()
    loop.handle(
        [generate(1, [1, 2], max_tokens=9), generate(2, [1, 2], max_tokens=9), Abort(1), StopString(2, 0)]
    )
    loop.tick()
    (tokens,) = recorder.take(Tokens)
    assert [(o.rid, o.finished.reason) for o in tokens.outputs] == [(1, "abort"), (2, "stop")]
    with pytest.raises(TypeError):
        loop.handle([Tokenize(1, generate(1, [1]).params)])


def test_watchdog():
    loop, recorder, now = loop_with(watchdog_timeout=10.0)
    now[0] = 100.0
    loop.handle([generate(1, [1, 2], max_tokens=9)])
    loop.tick()
    now[0] = 109.0  # ten seconds since the step was sent, not since the start
    loop.tick()
    worker = FakeWorker(loop.scheduler.limits, random.Random(0))
    loop.handle([worker.run(recorder.take(Step)[0])])
    now[0] = 118.0
    loop.tick()
    now[0] = 119.5
    with pytest.raises(EngineDead, match="10 seconds"):
        loop.tick()


def test_leak_is_noticed_when_idle():
    loop, _, _ = loop_with()
    loop.handle([generate(1, [1, 2], max_tokens=9)])
    loop.tick()
    loop.scheduler.cache.pool.take(1)
    loop.handle([Abort(1)])
    while loop.scheduler.num_in_flight:
        loop.scheduler._in_flight.clear()
    with pytest.raises(AssertionError, match="leaked"):
        loop.tick()


class Ended(Exception):
    pass


def test_over_real_sockets(tmp_path):
    """The loop in a thread; steps, answers, requests and tokens go through sockets."""
    paths = {who: str(tmp_path / f"{who}.sock") for who in ("scheduler", "worker", "tokenizer", "server")}
    steps, tokens = Pull(paths["worker"], ToWorker), Pull(paths["tokenizer"], ToTokenizer)
    stats = Pull(paths["server"], ToServer)

    class Inbox:
        """The scheduler's socket, until a message with rid -1 ends the thread."""

        def __init__(self):
            self.pull = Pull(paths["scheduler"], ToScheduler)

        def recv(self, timeout_ms):
            message = self.pull.recv(timeout_ms)
            if isinstance(message, Abort) and message.rid == -1:
                raise Ended
            return message

        def drain(self):
            return self.pull.drain()

    inbox = Inbox()
    scheduler = scheduler_with(Shape(3, 2, 6))

    def body() -> None:
        links = (
            Push(paths["worker"], ToWorker),
            Push(paths["tokenizer"], ToTokenizer),
            Push(paths["server"], ToServer),
        )
        try:
            serve(SchedulerLoop(scheduler, [links[0]], links[1], links[2]), inbox)
        except Ended:
            for link in links:
                link.close()

    thread = threading.Thread(target=body)
    thread.start()
    to_scheduler = Push(paths["scheduler"], ToScheduler)
    worker = FakeWorker(scheduler.limits, random.Random(0))
    prompt = [1, 2, 3, 4, 5, 6]
    to_scheduler.send(generate(1, prompt, max_tokens=12, ignore_eos=True))
    got, ended = [], False
    while not ended:
        if (step := steps.recv(20)) is not None:
            to_scheduler.send(worker.run(step))
        for message in tokens.drain():
            for output in message.outputs:
                got += unpack(output.token_ids)
                ended |= output.finished is not None
    for step in steps.drain():
        to_scheduler.send(worker.run(step))
    assert got == expected(prompt, generate(0, prompt, max_tokens=12, ignore_eos=True).params)[0]
    assert stats.recv(5000).counters["generation_tokens"] == 12
    to_scheduler.send(Abort(-1))
    thread.join(10)
    assert not thread.is_alive()
    for socket in (to_scheduler, steps, tokens, stats, inbox.pull):
        socket.close()
