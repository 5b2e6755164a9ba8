"""Microseconds that the host spends on a round, by stage, without a model: real code, answers that are made up.

    python benchmarks/host_path.py [MODEL] [--requests 1,64,256] [--tokens 1,4] [--rounds N] [--output FILE.json]

The worker's and the scheduler's share and the two messages between them lie between two rounds of the GPU; with
rounds_in_flight of 2 they must take less than one round. What is after them runs beside it, each in a process of its
own: it must take less than a round too, or it falls behind. The model is needed for its tokenizer only.
"""

import asyncio
import gc
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from operator import sub
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import uvicorn
import uvloop

from tokenspeed.bench.report import document, write_json
from tokenspeed.cli.args import Parser, positive, positives
from tokenspeed.config import Config, Resolved, Shape
from tokenspeed.ipc.messages import (
    Generate,
    Output,
    Step,
    StepDone,
    Tokenize,
    Tokens,
    ToScheduler,
    ToServer,
    ToTokenizer,
    ToWorker,
    pack,
)
from tokenspeed.launch import resolve
from tokenspeed.llm import CompletionOutput, RequestOutput, _take
from tokenspeed.params import SamplingParams
from tokenspeed.scheduler.scheduler import Scheduler, SchedulerLimits
from tokenspeed.server.app import create_app
from tokenspeed.server.client import EngineClient
from tokenspeed.server.lifecycle import READY
from tokenspeed.spec.cost import Costs
from tokenspeed.spec.gain import Gain, default_prior
from tokenspeed.spec.plan import AdaptivePlan, StaticPlan
from tokenspeed.tokenizer.encoder import Encoder
from tokenspeed.tokenizer.process import TokenizerLoop
from tokenspeed.worker.runner import Runner
from tokenspeed.worker.state import SlotState

PROMPT = 200  # tokens
PARAMS = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
SHAPES = (Shape(8, 4, 16), Shape(5, 4, 8), Shape(3, 2, 4))
WARM_UP = 20  # rounds


class Load:
    """Rounds of `requests` rows that bring `tokens` tokens each, of real text."""

    def __init__(self, resolved: Resolved, encoder: Encoder, requests: int, tokens: int, rounds: int):
        self.resolved, self.encoder = resolved, encoder
        self.requests, self.tokens, self.rounds = requests, tokens, rounds
        self.rids = list(range(1, requests + 1))
        text = Path(__file__).read_text() + " caf\u00e9 \u4f60\u597d, \U0001f642 na\u00efve\n"
        self._ids = encoder.encode([text], add_special_tokens=False)[0]
        self.params = msgspec.structs.replace(PARAMS.resolved(), max_tokens=(rounds + WARM_UP + 8) * 16)

    def ids(self, row: int, round_number: int) -> list[int]:
        start = row * 37 + round_number * self.tokens
        return [self._ids[(start + i) % len(self._ids)] for i in range(self.tokens)]

    def outputs(self) -> Iterator[Tokens]:
        for number in range(self.rounds + WARM_UP):
            yield Tokens([Output(rid, pack(self.ids(rid, number))) for rid in self.rids])


class Sink(list):
    """A link that keeps what is sent."""

    send = list.append


def timed(load: Load, one_round: Callable[[], None]) -> float:
    """Median microseconds of a round."""
    for _ in range(WARM_UP):
        one_round()
    marks = [time.perf_counter()]
    for _ in range(load.rounds):
        one_round()
        marks.append(time.perf_counter())
    return statistics.median(map(sub, marks[1:], marks)) * 1e6


# ---- between two rounds of the GPU


def plan_of(load: Load) -> StaticPlan | AdaptivePlan:
    if load.tokens == 1:
        return StaticPlan(None)
    costs = Costs({(b, s): 1000.0 + b * (s.nodes if s else 1) for b in (1, 64, 256) for s in (None, *SHAPES)})
    return AdaptivePlan(Gain({s: default_prior(s) for s in SHAPES}), costs, SHAPES)


def decoding_scheduler(load: Load) -> tuple[Scheduler, Step]:
    """One whose requests have all had their prompts computed, and the step that did it."""
    rows, longest = load.requests, PROMPT + load.params.max_tokens
    limits = SchedulerLimits(
        num_pages=rows * (longest // 16 + 8),
        page_size=16,
        max_num_seqs=rows,
        max_num_batched_tokens=rows * PROMPT,
        rounds_in_flight=2,
        max_model_len=longest,
        enable_prefix_caching=False,
    )
    scheduler = Scheduler(limits, plan_of(load))
    for rid in load.rids:
        scheduler.add(Generate(rid, pack([rid % 100] * PROMPT), load.params))
    step = scheduler.schedule()
    assert step is not None and len(step.admit) == rows
    scheduler.update(StepDone(step.step, pack([1] * rows), pack([1] * rows)))
    return scheduler, step


def answer(load: Load, step: Step, number: int) -> StepDone:
    count = min(load.tokens, step.shape[0] + 1 if step.shape else 1)
    new = [token for rid in load.rids for token in load.ids(rid, number)[:count]]
    return StepDone(step.step, pack([count] * load.requests), pack(new), elapsed_us=1000)


def scheduler_times(load: Load) -> dict[str, float]:
    """update and schedule, two steps in flight."""
    scheduler, _ = decoding_scheduler(load)
    steps = [scheduler.schedule(), scheduler.schedule()]
    updates, schedules = [], []
    for number in range(WARM_UP + load.rounds):
        done = answer(load, steps.pop(0), number)
        start = time.perf_counter()
        scheduler.update(done)
        middle = time.perf_counter()
        steps.append(scheduler.schedule())
        end = time.perf_counter()
        updates.append(middle - start)
        schedules.append(end - middle)
    return {
        "scheduler: answer": statistics.median(updates[WARM_UP:]) * 1e6,
        "scheduler: next step": statistics.median(schedules[WARM_UP:]) * 1e6,
    }


class FakeGraphs:
    """Rounds that cost nothing."""

    def __init__(self, load: Load):
        most = SHAPES[0].steps + 1 if load.tokens > 1 else 1
        row = [*range(most), load.tokens, 0]  # as RoundResult.packed
        self._packed = torch.tensor([row] * load.requests)

    def covers(self, batch: int, shape: Shape | None) -> bool:
        return True

    def replay(self, slots: list[int], shape: Shape | None) -> torch.Tensor:
        return self._packed


def worker_time(load: Load) -> float:
    """Runner.launch and result: all of the worker's work on the host but the launch of the graph itself."""
    nothing = SimpleNamespace(any=lambda slots: False, admit=lambda *_: None)
    state = SlotState(
        load.requests, PROMPT + load.params.max_tokens, 16, 0, torch.float32, torch.device("cpu")
    )
    sampling = SimpleNamespace(set=lambda *_: None)
    engine = SimpleNamespace(state=state, edits=nothing, matchers=nothing, sampling=sampling)
    runner = Runner(engine, FakeGraphs(load), 16)
    scheduler, first = decoding_scheduler(load)
    runner._apply(first)
    steps = [scheduler.schedule(), scheduler.schedule()]
    times = []
    for number in range(WARM_UP + load.rounds):
        step = steps.pop(0)
        start = time.perf_counter()
        runner.result(runner.launch(step))
        times.append(time.perf_counter() - start)
        scheduler.update(answer(load, step, number))
        steps.append(scheduler.schedule())
    return statistics.median(times[WARM_UP:]) * 1e6


def message_times(load: Load) -> dict[str, float]:
    """Encoding and decoding of a round's four messages."""
    scheduler, _ = decoding_scheduler(load)
    step = scheduler.schedule()
    tokens = next(load.outputs())
    loop, to_server = tokenizer_loop(load)
    loop.handle([tokens])
    of = {
        "message: StepDone": (answer(load, step, 0), ToScheduler),
        "message: Step": (step, ToWorker),
        "message: Tokens": (tokens, ToTokenizer),
        "message: Texts": (to_server[-1], ToServer),
    }
    out = {}
    for name, (message, union) in of.items():
        encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(union)
        out[name] = timed(load, lambda e=encoder, d=decoder, m=message: d.decode(e.encode(m)))
    return out


# ---- beside them


def tokenizer_loop(load: Load) -> tuple[TokenizerLoop, Sink]:
    to_server = Sink()
    loop = TokenizerLoop(load.resolved, load.encoder, Sink(), to_server)
    loop.handle([Tokenize(rid, PARAMS.resolved(), token_ids=pack([1, 2, 3])) for rid in load.rids])
    return loop, to_server


def tokenizer_time(load: Load) -> float:
    loop, to_server = tokenizer_loop(load)
    ahead = iter(list(load.outputs()))

    def one_round() -> None:
        loop.handle([next(ahead)])
        to_server.clear()

    return timed(load, one_round)


def texts_of(load: Load) -> list[bytes]:
    """The tokenizer's messages, encoded."""
    loop, to_server = tokenizer_loop(load)
    encode = msgspec.msgpack.Encoder().encode
    out = []
    for tokens in load.outputs():
        loop.handle([tokens])
        out.append(encode(to_server.pop()))
    return out


class FakeLink:
    """Both ends of an EngineClient: plays rounds once `requests` prompts have been sent."""

    def __init__(self, load: Load, rounds: list[bytes]):
        self._load, self._rounds = load, rounds
        self._decoder = msgspec.msgpack.Decoder(ToServer)
        self._at = self._num_prompts = 0
        self._begun, self._ended = asyncio.Event(), asyncio.Event()
        self.marks: list[float] = []  # CPU time of this process before each round

    async def send(self, message: Any) -> None:
        self._num_prompts += isinstance(message, Tokenize)
        if self._num_prompts == self._load.requests:
            self._begun.set()

    async def recv(self) -> Any:
        await self._begun.wait()
        for _ in range(6):  # all consumers get on with what has come before
            await asyncio.sleep(0)
        if self._at < len(self._rounds):
            self.marks.append(time.process_time())
            self._at += 1
            return self._decoder.decode(self._rounds[self._at - 1])
        self._ended.set()
        await asyncio.Event().wait()

    async def ended(self) -> float:
        """Median microseconds of CPU time of a round."""
        await self._ended.wait()
        return statistics.median(map(sub, self.marks[WARM_UP + 1 :], self.marks[WARM_UP:])) * 1e6

    def close(self) -> None:
        pass


async def offline_time(load: Load) -> float:
    """The client of an `LLM`, with its tasks."""
    link = FakeLink(load, texts_of(load))
    client = EngineClient(link, link)
    client.start()

    async def one() -> None:
        out, choice = RequestOutput("0", None), CompletionOutput(0)
        async for piece in client.generate(PARAMS, token_ids=[1, 2, 3]):
            _take(out, choice, piece)

    tasks = [asyncio.ensure_future(one()) for _ in load.rids]
    took = await link.ended()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    return took


def read_streams(port: int, model: str, count: int) -> None:
    """A process: sends `count` streaming chat requests and reads until they close."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        body = msgspec.json.encode(asked)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        while await reader.read(1 << 16):
            pass

    async def every() -> None:
        await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)

    uvloop.run(every())


async def server_time(load: Load) -> float:
    """The HTTP server: one event a request and round, to sockets."""
    link = FakeLink(load, texts_of(load))
    client = EngineClient(link, link)
    app = create_app(client, load.resolved)
    app.lifecycle.move(READY, "")
    client.start()
    config = uvicorn.Config(
        app, loop="none", lifespan="off", ws="none", log_level="warning", access_log=False
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    arguments = (listener.getsockname()[1], load.resolved.names[0], load.requests)
    reader = multiprocessing.get_context("spawn").Process(target=read_streams, args=arguments)
    reader.start()
    took = await link.ended()
    await client.close()
    server.should_exit = server.force_exit = True
    await task
    reader.terminate()
    reader.join()
    return took


# ---- all of it


def measure(load: Load) -> dict[str, Any]:
    gc.collect()
    stages = {
        "worker": worker_time(load),
        **scheduler_times(load),
        **message_times(load),
        "tokenizer": tokenizer_time(load),
        "offline client": uvloop.run(offline_time(load)),
        "server, streaming": uvloop.run(server_time(load)),
    }
    between = ("worker", "scheduler: answer", "scheduler: next step", "message: StepDone", "message: Step")
    total = sum(stages[name] for name in between)
    return {
        "requests": load.requests,
        "tokens": load.tokens,
        "us": {name: round(us, 1) for name, us in stages.items()},
        "between_rounds_us": round(total, 1),
    }


def show(rows: list[dict[str, Any]]) -> None:
    print("microseconds a round     " + "".join(f"{r['requests']:>6} x {r['tokens']}" for r in rows))
    for name in rows[0]["us"]:
        print(f"{name:<25}" + "".join(f"{r['us'][name]:>10.0f}" for r in rows))
    print(f"{'worker to worker, in all':<25}" + "".join(f"{r['between_rounds_us']:>10.0f}" for r in rows))


def main() -> None:
    parser = Parser(prog="host_path.py", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--requests", type=positives, default=(1, 64, 256), metavar="N,N,...")
    parser.add_argument(
        "--tokens", type=positives, default=(1, 4), metavar="N,N,...", help="of a request and round"
    )
    parser.add_argument("--rounds", type=positive, default=200)
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    args = parser.parse(sys.argv[1:])
    resolved = resolve(Config(model=args.model, device="cpu"), lambda *_: None)
    encoder = Encoder.load(resolved.model_dir)
    rows = [
        measure(Load(resolved, encoder, requests, tokens, args.rounds))
        for tokens in args.tokens
        for requests in args.requests
    ]
    show(rows)
    if args.output:
        write_json(args.output, document("host_path", rows, model=args.model, rounds=args.rounds))


if __name__ == "__main__":
    main()
