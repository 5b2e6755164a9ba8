"""One real server under bad input, load and comparison with plain decoding; the numbers are those of
docs/known-bugs.md. It runs with debug logs, so the scheduler checks all its books whenever it falls idle."""

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from harness import InProcessEngine
from servers import Running, Stream, wait_until

from tokenspeed.params import SamplingParams
from tokenspeed.tokenizer.encoder import Encoder

TREE = "6/4/16"
CHUNK = 32
CONTEXT, VOCAB, RUNNING, QUEUED = 1024, 320, 8, 100
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = list(range(40, 75))


@pytest.fixture(scope="module")
def target(tiny_model_dir) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def running(target, tiny_draft_dir) -> Iterator[Running]:
    """Its draft has 128 positions."""
    options = ["--spec", "eagle4", "--draft", tiny_draft_dir(target), "--dtype", "float32"]
    options += ["--spec-shape", TREE]  # pinned: the plan would give up a draft of a random model
    options += ["--max-num-batched-tokens", CHUNK, "--max-queued-requests", QUEUED]
    options += ["--log-level", "debug", "--kv-cache-tokens", 8192]
    with Running(target, *options) as server:
        yield server


@pytest.fixture
def server(running) -> Iterator[Running]:
    """After each test: idle within two seconds, no page held, and it answers."""
    yield running
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert wait_until(lambda: all(running.metric(f"tokenspeed:{name}") == 0 for name in gauges), 2)
    assert running.complete(max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    assert httpx.get(running.url + "/health").status_code == 200


@pytest.fixture(scope="module")
def plain(target) -> InProcessEngine:
    """Plain decoding, whole prompts at once, no process but this one."""
    return InProcessEngine(target, kv_cache_tokens=8192)


@pytest.fixture(scope="module")
def unchunked(target, tiny_draft_dir) -> InProcessEngine:
    """The same speculation, whole prompts at once."""
    draft = str(tiny_draft_dir(target))
    return InProcessEngine(target, spec="eagle4", draft=draft, spec_shape=TREE, kv_cache_tokens=8192)


@pytest.fixture(scope="module")
def encoder(target) -> Encoder:
    return Encoder.load(target)


def refused(answer: httpx.Response, status: int = 400) -> dict:
    assert answer.status_code == status, (answer.status_code, answer.text[:300])
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(answer.content) < 3000
    return error


# ---- bad input


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff\xfe",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 50_000,
    ],
    ids=lambda body: repr(body[:40]),
)
def test_malformed_bodies(server, body):
    headers = {"content-type": "application/json"}
    refused(httpx.post(server.url + COMPLETIONS, content=body, headers=headers))


WRONG = [
    ({"temperature": -5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"bad_words": "x"}, "bad_words"),
    ({"unknown_field": 1}, "unknown_field"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"model": "no-such-model"}, "model"),
    # B40
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": CONTEXT}, "max_tokens"),
    # B43
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": 65, "prompt": ["a", "b"]}, "prompt"),
]
IDS = [VOCAB, VOCAB + 1, 10**9, -1]  # B41


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda x: json.dumps(x)[:50])
def test_values_that_are_refused(server, fields, param):
    started = time.monotonic()
    error = refused(server.post(COMPLETIONS, {"prompt": "x", **fields}), 404 if "model" in fields else 400)
    assert error["param"] == param
    assert time.monotonic() - started < 1  # most of it is making a connection


@pytest.mark.parametrize("token", IDS)
def test_ids_outside_the_vocabulary(server, token):
    for fields in ({"logit_bias": {str(token): 1}}, {"stop_token_ids": [token]}, {"prompt": [5, token]}):
        (param,) = fields
        error = refused(server.post(COMPLETIONS, {"prompt": "x", **fields}))
        assert error["param"] == param and str(token) in error["message"]
    refused(server.post("/detokenize", {"tokens": [token]}))


def test_the_ends_of_max_tokens(server):
    echoed = server.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    logprobs = echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert len(logprobs) == len(PROMPT) and logprobs[0] is None and all(x <= 0 for x in logprobs[1:])
    assert echoed["usage"]["completion_tokens"] == 0
    default = server.complete(prompt=PROMPT, max_tokens=None, ignore_eos=True)
    assert default["usage"]["completion_tokens"] == 16
    long = [3 + i % 300 for i in range(CONTEXT - 20)]
    longest = server.complete(prompt=long, max_tokens=20, ignore_eos=True)
    assert longest["usage"]["total_tokens"] == CONTEXT


def test_messages(server):
    for messages in ([], [{}], "hi", [{"role": "user"}], [{"role": "robot", "content": "x"}]):
        refused(server.post(CHAT, {"messages": messages}))
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": ""}], "max_tokens": 2})
    assert answer.status_code == 200


def test_a_prompt_longer_than_the_context(server):
    for prompt in (list(range(3, 303)) * 4, "word " * 3000):
        error = refused(server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1}))
        assert error["param"] == "prompt" and str(CONTEXT) in error["message"]


def test_ten_megabytes(server):
    error = refused(server.post(COMPLETIONS, {"prompt": "a" * 10_000_000, "max_tokens": 1}))
    assert error["code"] == "context_length_exceeded"
    refused(server.post(COMPLETIONS, {"prompt": "x", "stop": ["a" * 10_000_000]}))


def test_eight_choices(server):
    """B43."""
    body = {"prompt": PROMPT, "n": 8, "temperature": 1, "max_tokens": 20, "ignore_eos": True}
    answer = server.complete(**body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    assert len(set(texts)) == 8
    assert answer["usage"]["completion_tokens"] == 160
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    *events, done = stream(server, **body, stream_options={"include_usage": True})
    assert done == "[DONE]" and json.loads(events[-1])["usage"]["completion_tokens"] == 160


def stream(server: Running, **body) -> list[str]:
    reader = Stream(server, **body)
    reader.join(60)
    assert not reader.is_alive() and reader.broken is None
    return reader.events


# ---- the same as plain decoding


def text_of(encoder: Encoder, ids: list[int]) -> str:
    return encoder.decode(ids, skip_special_tokens=True)


PENALTIES = [
    {"frequency_penalty": 2.0},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 1.5},
]


@pytest.mark.parametrize("fields", PENALTIES, ids=str)
def test_penalties(server, plain, encoder, fields):
    """B02."""
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, **fields)
    expected = text_of(encoder, plain.generate([PROMPT], params)[0].token_ids)
    body = {"prompt": PROMPT, "max_tokens": 32, "ignore_eos": True}
    assert server.complete(**body, **fields)["choices"][0]["text"] == expected
    if fields != {"presence_penalty": -2.0}:  # which only strengthens what greedy text repeats anyway
        assert server.complete(**body)["choices"][0]["text"] != expected


def test_bad_words(server, plain, encoder):
    """Words become ids on the way; what is left is plain decoding without those sequences."""
    free = plain.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[
        0
    ].token_ids
    parts = [tuple(free[i : i + n]) for i in range(30) for n in (1, 2)]
    told = {part: text_of(encoder, part) for part in parts}
    words = [text for part, text in told.items() if text and part in encoder.encode_word(text)][:5]
    assert words
    ids = tuple(sequence for word in words for sequence in encoder.encode_word(word))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, bad_words_token_ids=ids)
    expected = plain.generate([PROMPT], params)[0].token_ids
    assert expected != free
    answer = server.complete(prompt=PROMPT, max_tokens=40, ignore_eos=True, bad_words=words)
    assert answer["choices"][0]["text"] == text_of(encoder, expected)


def test_logprobs(server, plain):
    """B04: whole and streamed, one entry a token, those of plain decoding."""
    params = SamplingParams(temperature=0.0, max_tokens=50, logprobs=5, ignore_eos=True)
    expected = [entry.logprob for entry in plain.generate([PROMPT], params)[0].logprobs]
    body = {"prompt": PROMPT, "max_tokens": 50, "logprobs": 5, "ignore_eos": True}
    whole = server.complete(**body)["choices"][0]["logprobs"]
    forms = [json.loads(e)["choices"][0]["logprobs"] for e in stream(server, **body)[:-1]]
    streamed = [x for form in forms if form for x in form["token_logprobs"]]
    assert len(expected) == 50 and all(x <= 0 for x in expected)
    assert whole["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    assert streamed == pytest.approx(expected, abs=1e-3)
    assert all(1 <= len(top) <= 6 for top in whole["top_logprobs"])  # by text: parts of characters coincide


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK + 1, 400])
def test_prompt_lengths_about_a_chunk(server, plain, unchunked, encoder, length):
    """B25, and B21 for the last one: the draft's config has 128 positions. Same text as plain decoding, and
    drafts as good as when the prompt is computed in one piece."""
    prompt = [3 + (7 * i + i * i) % (VOCAB - 3) for i in range(length)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = text_of(encoder, plain.generate([prompt], params)[0].token_ids)
    account = unchunked.generate([prompt], params)[0].finished
    answer = server.complete(prompt=prompt, max_tokens=40, ignore_eos=True, return_spec_metrics=True)
    assert answer["choices"][0]["text"] == expected
    accept_length = 1 + account.num_accepted / account.num_rounds
    assert accept_length > 1.1
    assert answer["spec_metrics"]["accept_length"] == pytest.approx(accept_length, rel=0.03)


def test_stop_strings(server, plain, encoder):
    """B13: the text is cut where the string begins, and all counts end with the token that completed it."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    ids = plain.generate([PROMPT], params)[0].token_ids
    text = text_of(encoder, ids)
    ends = [len(text_of(encoder, ids[: i + 1])) for i in range(len(ids))]
    rng = random.Random(1)
    cuts = [(at, at + rng.randrange(1, 7)) for at in rng.choices(range(len(text)), k=200)]
    stops = [stop for begin, end in cuts if "\ufffd" not in (stop := text[begin:end])]
    assert len(stops) > 50
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 60, "ignore_eos": True, "logprobs": 0}
    answers = at_once(server, [{**body, "stop": [stop]} for stop in stops])
    for stop, answer in zip(stops, answers, strict=True):
        (choice,) = answer.json()["choices"]
        begin = text.index(stop)
        needed = next(i + 1 for i, end in enumerate(ends) if end >= begin + len(stop))
        assert choice["text"] == text[:begin], stop
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
        counts = answer.json()["usage"]["completion_tokens"], len(choice["logprobs"]["tokens"])
        assert counts == (needed, needed), stop


def at_once(server: Running, bodies: list[dict]) -> list[httpx.Response]:
    """Answers to completions that are all sent at the same moment, in order, each over a connection of its own.
    (httpx's own pool takes time by the square of the number of connections.)"""
    host, port = server.url.removeprefix("http://").split(":")

    async def post(body: dict) -> httpx.Response:
        data = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + data)
        lines, content = (await reader.read()).split(b"\r\n\r\n", 1)
        writer.close()
        status, *headers = lines.decode().split("\r\n")
        pairs = [tuple(line.split(": ", 1)) for line in headers]
        return httpx.Response(int(status.split()[1]), headers=pairs, content=content)

    async def go() -> list[httpx.Response]:
        return await asyncio.wait_for(asyncio.gather(*map(post, bodies)), 100)

    return asyncio.run(go())


# ---- many, slow and lost clients


def test_clients_that_go_away(server):
    """B35, B30: each of them frees what it had, whatever it was waiting for."""
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 900, "ignore_eos": True}

    async def leave(client: httpx.AsyncClient, seconds: float) -> None:
        try:
            async with client.stream("POST", COMPLETIONS, json=body) as answer:
                async for _ in answer.aiter_lines():
                    await asyncio.sleep(seconds)
                    return
        except httpx.HTTPError:
            pass

    async def go() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            await asyncio.gather(*(leave(client, 0.02 * i) for i in range(20)))

    asyncio.run(go())
    assert wait_until(lambda: server.metric("tokenspeed:num_requests_running") == 0, 2)


def check_storm(server: Running, count: int) -> None:
    """More than are let in: every one is answered, those too many with 503 and Retry-After."""
    bodies = [
        {"prompt": [3 + i % 300] * (1 + i % 40), "max_tokens": 1 + i % 6, "ignore_eos": True}
        for i in range(count)
    ]
    answers = at_once(server, bodies)
    for number, answer in enumerate(answers):
        if answer.status_code == 200:
            assert answer.json()["usage"]["completion_tokens"] == 1 + number % 6
        else:
            refused(answer, 503)
            assert answer.headers["retry-after"]
    served = sum(answer.status_code == 200 for answer in answers)
    assert served >= min(count, RUNNING + QUEUED)


def test_three_hundred_at_once(server):
    check_storm(server, 300)


@pytest.mark.long
def test_a_thousand_at_once(server):
    for _ in range(5):
        check_storm(server, 1000)


def test_health_under_load(server):
    """B37."""
    load = [Stream(server, prompt=PROMPT, max_tokens=120, ignore_eos=True) for _ in range(RUNNING)]
    assert all(one.started.wait(30) for one in load)
    times = []
    with httpx.Client(base_url=server.url) as client:
        while len(times) < 40 and all(one.is_alive() for one in load):
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            times.append(time.monotonic() - started)
            time.sleep(0.01)
    for one in load:
        one.join(60)
        assert one.events[-1] == "[DONE]" and one.error is None
    times.sort()
    assert len(times) >= 10 and times[int(0.9 * len(times))] < 0.1, times
