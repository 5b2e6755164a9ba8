"""Health, readiness, death and drain, metrics, and what the server says about itself."""

import asyncio
import socket
import time

import httpx
import pytest
from server_fakes import FakeRing, World, events, resolved, until, world

from tokenspeed.errors import EngineDead
from tokenspeed.ipc.messages import Dead, Drain, Finished, Ready, Stats, Tokenize
from tokenspeed.params import SamplingParams
from tokenspeed.server.app import create_app
from tokenspeed.server.client import EngineClient, GenerationClosed
from tokenspeed.server.lifecycle import DEAD, DRAINING, READY, STARTING, Lifecycle
from tokenspeed.server.process import Host


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


def test_lifecycle_moves_forward_only():
    life = Lifecycle()
    assert life.state == STARTING and not life.healthy
    life.move(DRAINING, "going")
    life.move(READY, "")
    assert life.state == DRAINING and life.reason == "going"
    life.move(DEAD, "gone")
    assert life.state == DEAD


def test_nothing_is_served_while_starting():
    async def go():
        async with world(ready=False) as w:
            for path in ("/health", "/ready", "/ping"):
                answer = await w.http.get(path)
                assert answer.status_code == 503 and answer.json()["status"] == "starting"
                assert answer.json()["reason"]
            answer = await w.chat()
            assert answer.status_code == 503 and "retry-after" in answer.headers
            assert answer.json()["error"]["code"] == "server_starting"
            assert (await w.http.get("/version")).status_code == 200
            w.app.lifecycle.move(READY, "")
            assert (await w.http.get("/health")).json() == {"status": "ready"}
            assert (await w.http.head("/health")).status_code == 200

    run(go())


def test_server_info_and_version():
    async def go():
        async with world(method="eagle4") as w:
            w.app.api.info = {"kv_tokens": 1000, "dtype": "bfloat16"}
            info = (await w.http.get("/server_info")).json()
            assert info["internal_states"] == [{"avg_spec_accept_length": None}]
            w.client.stats = Stats(
                counters=dict(spec_decode_num_drafts=4, spec_decode_num_accepted_tokens=10)
            )
            info = (await w.http.get("/server_info")).json()
            assert info["internal_states"] == [{"avg_spec_accept_length": 3.5}]
            assert info["speculative_algorithm"] == "EAGLE4" and info["speculative_num_draft_tokens"] == 8
            assert info["speculation"]["shapes"] == ["4/2/8"] and info["engine"]["kv_tokens"] == 1000
            assert (await w.http.get("/version")).json()["version"] == info["version"]

    run(go())


def test_metrics():
    async def go():
        async with world() as w:
            await w.chat("hello", max_tokens=50)
            await w.chat("!refuse")
            counters = dict(
                prompt_tokens=7, spec_decode_num_drafts=4, spec_decode_num_draft_tokens=28,
                spec_decode_num_accepted_tokens=10, spec_decode_plain_rounds=3,
            )  # fmt: skip
            w.client.stats = Stats(2, 1, 100, 60, 20, counters, [4, 3, 3])
            answer = await w.http.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain")
            lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
            values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
            label = 'model_name="fake"'
            assert values[f"vllm:spec_decode_num_drafts_total{{{label}}}"] == 4
            assert values[f"vllm:spec_decode_num_draft_tokens_total{{{label}}}"] == 28
            assert values[f"vllm:spec_decode_num_accepted_tokens_total{{{label}}}"] == 10
            per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            assert [values[f'{per_position}{{{label},position="{i}"}}'] for i in range(3)] == [4, 3, 3]
            # a benchmark client cuts these lines at "{" and wants every one of them to be a counter
            speculative = [line.split("{")[0] for line in lines if line.startswith("vllm:spec_decode")]
            assert speculative and all(name.endswith("_total") for name in speculative)
            for prefix in ("vllm", "tokenspeed"):
                assert values[f"{prefix}:prompt_tokens_total{{{label}}}"] == 7
                assert values[f"{prefix}:num_requests_running{{{label}}}"] == 2
                assert values[f"{prefix}:num_requests_waiting{{{label}}}"] == 1
                assert values[f"{prefix}:kv_cache_usage_perc{{{label}}}"] == pytest.approx(0.2)
                assert values[f"{prefix}:time_to_first_token_seconds_count{{{label}}}"] == 1
                assert values[f"{prefix}:inter_token_latency_seconds_count{{{label}}}"] == 2
                assert values[f"{prefix}:e2e_request_latency_seconds_count{{{label}}}"] == 1
                ended = f'{prefix}:request_success_total{{finished_reason="%s",{label}}}'
                assert values[ended % "stop"] == 1 and values[ended % "error"] == 1
            assert values[f"tokenspeed:spec_decode_plain_rounds_total{{{label}}}"] == 3
            assert values[f"tokenspeed:spec_accept_length{{{label}}}"] == 3.5

    run(go())


def test_dead_engine_fails_open_requests():
    async def go():
        async with world(real=True) as w:
            stream = asyncio.ensure_future(w.chat("!hang " + "x" * 50, stream=True))
            whole = asyncio.ensure_future(w.chat("!hang " + "x" * 50))
            call = asyncio.ensure_future(w.chat("!hang " + "x" * 50, n=3, stream=True))
            await until(lambda: w.client.num_open == 5, 2)
            await asyncio.sleep(0.1)  # the streams have begun
            w.ring.give(Dead("scheduler", "broken"))
            for task in (stream, call):
                answer = await task
                *_, failure, done = events(answer.text)
                assert answer.status_code == 200 and done == "[DONE]"
                assert failure["error"]["code"] == "engine_dead"
            assert (await whole).status_code == 503
            assert (await w.chat()).status_code == 503
            assert (await w.http.post("/tokenize", json={"prompt": "x"})).status_code == 503
            assert w.client.num_open == 0 and not w.ring.aborted

    run(go())


def test_a_message_that_does_not_decode_is_death():
    async def go():
        async with world() as w:
            generation = w.client.generate(SamplingParams().resolved(), text="!hang " + "x" * 50)
            w.ring._inbox.put_nowait(b"\x93\xa3Foo\x01\x02")
            with pytest.raises(EngineDead, match="link"):
                async for _ in generation:
                    pass
            with pytest.raises(EngineDead):
                w.client.generate(SamplingParams().resolved(), text="x")

    run(go())


def test_client_without_http():
    async def go():
        async with world() as w:
            generation = w.client.generate(
                SamplingParams(max_tokens=5, ignore_eos=True).resolved(), text="abc"
            )
            pieces = [piece async for piece in generation]
            assert "".join(p.text for p in pieces) == "abcab"
            assert pieces[-1].finished == Finished("length", 3, 5, 1, None, num_rounds=4, num_drafted=28,
                                                   num_accepted=6, accepted_per_depth=[4, 2])  # fmt: skip
            slow = w.client.generate(SamplingParams(max_tokens=90, ignore_eos=True).resolved(), text="!slow")
            assert (await slow.batch())[0].text == "!sl"
            w.client.abort(slow.rids[0])
            rest = [piece async for piece in slow]
            assert rest[-1].finished.reason == "abort"
            await until(lambda: w.ring.aborted == {slow.rids[0]})
            closed = w.client.generate(SamplingParams(max_tokens=90).resolved(), text="!hang on")
            waiting = asyncio.ensure_future(closed.batch())
            await asyncio.sleep(0)
            closed.close()
            with pytest.raises(GenerationClosed):
                await waiting
            kinds = [(type(m).__name__, m.rid) for m in w.ring.sent]
            assert kinds.index(("Tokenize", slow.rids[0])) < kinds.index(("Abort", slow.rids[0]))

    run(go())


class FakeChild:
    def __init__(self, **options):
        self.resolved = resolved(**options)
        self.said_ready = 0

    def ready(self, **info):
        self.said_ready += 1


class Running(World):
    """A Host on a port of its own; `ended` is the task of its serve."""

    @classmethod
    async def start(cls) -> "Running":
        ring = FakeRing()
        client = EngineClient(ring, ring)
        client.start()
        child = FakeChild()
        app = create_app(client, child.resolved)
        host = Host(child, client, app)
        listener = socket.create_server(("127.0.0.1", 0))
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=10)
        running = cls(http, ring, client, app)
        running.child, running.host = child, host
        running.ended = asyncio.ensure_future(host.serve(listener))
        await until(lambda: host._uvicorn.started, 5)
        running.nodelay = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        return running

    async def make_ready(self) -> None:
        self.ring.give(Ready("worker", {"vocab_size": 200, "max_num_seqs": 8}))
        await until(lambda: self.child.said_ready == 1, 2)

    async def finish(self) -> None:
        await self.http.aclose()
        await self.client.close()


def test_ready_only_after_a_real_generation():
    async def go():
        w = await Running.start()
        assert w.nodelay  # else events wait for the client's acknowledgements
        assert (await w.http.get("/health")).status_code == 503
        assert not w.ring.sent
        await w.make_ready()
        assert (await w.http.get("/health")).status_code == 200
        (warm_up,) = w.ring.requests
        assert isinstance(warm_up, Tokenize) and warm_up.params.max_tokens == 2 and warm_up.params.greedy
        assert w.app.api.vocab_size == 200 and w.app.api.max_open == 8 + 2048
        assert (await w.complete([199])).status_code == 200
        assert (await w.complete([200])).status_code == 400
        w.ring.give(Drain(5.0))
        await asyncio.wait_for(w.ended, 3)
        await w.finish()

    run(go())


def test_failed_warm_up_ends_the_server():
    async def go():
        w = await Running.start()
        w.ring._trouble = lambda prompt, request: Finished("error", message="no kernel", status=500)
        w.ring.give(Ready("worker", {}))
        with pytest.raises(RuntimeError, match="no kernel"):
            await asyncio.wait_for(w.ended, 3)
        assert w.child.said_ready == 0
        await w.finish()

    run(go())


def test_death_ends_the_process_soon():
    async def go():
        w = await Running.start()
        await w.make_ready()
        stream = asyncio.ensure_future(w.chat("!hang " + "x" * 50, stream=True))
        await until(lambda: w.client.num_open == 1, 2)
        await asyncio.sleep(0.1)
        start = time.monotonic()
        w.ring.give(Dead("worker", "out of memory"))
        answer = await stream
        assert events(answer.text)[-2]["error"]["code"] == "engine_dead"
        assert time.monotonic() - start < 0.3
        health = await w.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "dead"
        await asyncio.wait_for(w.ended, 3)
        assert time.monotonic() - start < 1.5 and w.client.error == "worker: out of memory"
        await w.finish()

    run(go())


def test_drain_lets_open_requests_end():
    async def go():
        w = await Running.start()
        await w.make_ready()
        prompt = "!slow " + "x" * 60
        open_one = asyncio.ensure_future(w.chat(prompt, stream=True))
        await until(lambda: w.client.num_open == 1, 2)
        w.ring.give(Drain(10.0))
        await until(lambda: w.app.lifecycle.state == DRAINING)
        health = await w.http.get("/health")
        assert health.status_code == 503 and health.json()["status"] == "draining"
        refused = await w.chat("new")
        assert refused.status_code == 503 and "retry-after" in refused.headers
        *chunks, done = events((await open_one).text)
        assert done == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == prompt
        await asyncio.wait_for(w.ended, 2)
        await w.finish()

    run(go())


def test_drain_aborts_after_its_timeout():
    async def go():
        w = await Running.start()
        await w.make_ready()
        stream = asyncio.ensure_future(w.chat("!hang " + "x" * 50, stream=True))
        whole = asyncio.ensure_future(w.chat("!hang " + "x" * 50))
        await until(lambda: w.client.num_open == 2, 2)
        await asyncio.sleep(0.1)
        start = time.monotonic()
        w.ring.give(Drain(60.0))
        w.ring.give(Drain(0.2))  # a second Ctrl-C is in more of a hurry
        assert events((await stream).text)[-2]["error"]["code"] == "server_draining"
        assert (await whole).status_code == 503
        await asyncio.wait_for(w.ended, 3)
        assert 0.2 <= time.monotonic() - start < 2.5
        await until(lambda: len(w.ring.aborted) == 2)
        await w.finish()

    run(go())
