"""Every way a request can be wrong, and what the client is told."""

import asyncio
import json

import pytest
from server_fakes import VOCAB, events, world

MESSAGES = [{"role": "user", "content": "hi"}]


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


def check_error(answer, status: int, param: str | None = None, code: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and isinstance(error["message"], str) and error["message"]
    if code is not None:
        assert error["code"] == code
    if status < 500 and status != 429:
        assert error["type"] == "invalid_request_error"
    return error["message"]


BAD_CHAT = [
    ({"temperature": -5}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1000000}, "n"),
    ({"n": 1.0}, "n"),
    ({"n": True}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": 2**80}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 4097}, "max_completion_tokens"),
    ({"max_tokens": 4096}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"stop_token_ids": 1}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": 3}, "allowed_token_ids"),
    ({"allowed_token_ids": [3, VOCAB]}, "allowed_token_ids"),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids"),
    ({"bad_words": "a"}, "bad_words"),
    ({"bad_words": ["a", ""]}, "bad_words"),
    ({"bad_words": ["a" * 257]}, "bad_words"),
    ({"bad_words": [3]}, "bad_words"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"bad_words_token_ids": [[3]]}, "bad_words_token_ids"),  # not offered here, so not ignored
    ({"logit_bias": {str(VOCAB): 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1000000000": 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "2"}}, "logit_bias"),
    ({"logit_bias": {"1": 10**300}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": 1}, "stream"),
    ({"user": 5}, "user"),
    ({"unknown": None}, "unknown"),
    ({"prompt": "x"}, "prompt"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"prediction": {}}, "prediction"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"store": True}, "store"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "y": 1}]}, "messages[0].y"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "user", "content": "!refuse"}]}, "messages"),
]
BAD_COMPLETION = [
    ({"logprob_token_ids": [5], "logprobs": 1}, "logprob_token_ids"),  # B06: an option there is not
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": 21, "echo": True}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"messages": MESSAGES}, "messages"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"),
    ({"prompt": [VOCAB]}, "prompt"),
    ({"prompt": [[1], [-1]]}, "prompt"),
    ({"prompt": [2**80]}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_are_400_and_named(stream):
    async def go():
        async with world() as w:
            paths = (
                ("/v1/chat/completions", {"messages": MESSAGES}, BAD_CHAT),
                ("/v1/completions", {"prompt": "x"}, BAD_COMPLETION),
            )
            for path, base, cases in paths:
                for case, param in cases:
                    if stream and ("stream" in case or "stream_options" in case):
                        continue
                    answer = await w.http.post(path, json={**base, "stream": stream, **case})
                    check_error(answer, 400, param)
            assert w.client.num_open == 0
            assert (await w.chat("fine")).status_code == 200

    run(go())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": ' + b"9" * 400 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": ' + b"9" * 400 + b"}}",
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 6000 + b"}",
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
        b'{"tools": ' + b"[" * 900 + b"]" * 900 + b"}",
        json.dumps({"messages": MESSAGES}).encode("utf-16"),
    ],
    ids=lambda b: repr(b[:70]),
)
def test_malformed_json(body):
    async def go():
        async with world() as w:
            headers = {"content-type": "application/json"}
            for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
                answer = await w.http.post(path, content=body, headers=headers)
                assert answer.status_code == 400 and len(answer.content) < 3000
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

    run(go())


def test_wrong_content_type():
    async def go():
        async with world() as w:
            path, body = "/v1/chat/completions", json.dumps({"messages": MESSAGES}).encode()
            for kind in (
                "text/plain",
                "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=x",
                "",
            ):
                answer = await w.http.post(
                    "/v1/chat/completions", content=body, headers={"content-type": kind}
                )
                check_error(answer, 400, code="invalid_content_type")
            kind = "Application/JSON; charset=utf-8"
            good = await w.http.post(path, content=body, headers={"content-type": kind})
            assert good.status_code == 200

    run(go())


def test_echoed_text_is_capped():
    async def go():
        async with world() as w:
            long = "k" * 1_000_000
            for body in (
                {"messages": MESSAGES, long: 1},
                {"messages": MESSAGES, "model": long},
                {"messages": MESSAGES, "logit_bias": {long: 1}},
                {"messages": MESSAGES, **{f"key{i}": i for i in range(20_000)}},
                {"messages": [5] * 100_000},
                {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}] * 50_000}]},
                {"messages": MESSAGES, "stop_token_ids": ["a"] * 100_000},
                {"messages": MESSAGES, "stop_token_ids": [long]},
            ):
                answer = await w.http.post("/v1/chat/completions", json=body)
                assert answer.status_code in (400, 404) and len(answer.content) < 2500
            answer = await w.http.get("/v1/models/" + "m" * 10_000)
            assert answer.status_code == 404 and len(answer.content) < 2500

    run(go())


def test_routes_models_and_methods():
    async def go():
        async with world() as w:
            models = (await w.http.get("/v1/models")).json()
            assert [m["id"] for m in models["data"]] == ["fake", "other"]
            assert models["data"][0]["max_model_len"] == 4096 and models["data"][0]["root"] == "fake/model"
            assert (await w.http.get("/v1/models/other")).json()["id"] == "other"
            message = check_error(await w.chat(model="nope"), 404, "model", "model_not_found")
            assert "'nope'" in message
            check_error(await w.http.get("/v1/models/no/pe"), 404, "model", "model_not_found")
            check_error(await w.http.get("/v2/none"), 404)
            check_error(await w.http.post("/v1/embeddings", json={}), 404)
            wrong = await w.http.get("/v1/chat/completions")
            check_error(wrong, 405)
            assert wrong.headers["allow"] == "POST"
            check_error(await w.http.post("/health"), 405)

    run(go())


@pytest.mark.parametrize("real", [False, True])
def test_body_too_large(real):
    async def go():
        async with world(real, max_body_mib=1) as w:
            body = json.dumps({"messages": [{"role": "user", "content": "x" * (2 << 20)}]}).encode()
            headers = {"content-type": "application/json"}
            with_length = await w.http.post("/v1/chat/completions", content=body, headers=headers)
            check_error(with_length, 413, code="body_too_large")

            async def chunks():
                for i in range(0, len(body), 65536):
                    yield body[i : i + 65536]

            without = await w.http.post("/v1/chat/completions", content=chunks(), headers=headers)
            check_error(without, 413, code="body_too_large")
            assert (await w.chat("fine")).status_code == 200

    run(go())


def test_ten_megabytes_are_read():
    async def go():
        async with world(real=True) as w:
            answer = await w.complete("x" * 10_000_000, max_tokens=5)
            check_error(answer, 400, "max_tokens", "context_length_exceeded")
            ids = await w.complete([1] * 1_000_000, max_tokens=5)
            check_error(ids, 400, "max_tokens", "context_length_exceeded")

    run(go())


def test_queue_full():
    async def go():
        async with world(real=True, max_num_seqs=2, max_queued_requests=3) as w:
            full = await w.complete("x", n=6)
            check_error(full, 503, code="queue_full")
            assert int(full.headers["retry-after"]) >= 1
            tasks = [asyncio.ensure_future(w.complete("!hang " + "x" * 50, max_tokens=50)) for _ in range(5)]
            while w.client.num_open < 5:
                await asyncio.sleep(0.01)
            check_error(await w.chat(), 503, code="queue_full")
            assert (await w.http.get("/health")).status_code == 200
            tasks[0].cancel()
            await asyncio.sleep(0.1)
            assert (await w.chat()).status_code == 200
            for task in tasks:
                task.cancel()

    run(go())


def test_one_failed_choice_aborts_the_others():
    async def go():
        async with world() as w:
            answer = await w.complete(["!slow " + "x" * 300, "!refuse"], max_tokens=300)
            check_error(answer, 400, "messages")
            assert w.client.num_open == 0
            await asyncio.sleep(0.01)
            assert w.ring.aborted == {w.ring.requests[0].rid}

    run(go())


def test_failure_in_mid_stream_is_an_event():
    async def go():
        async with world() as w:
            answer = await w.chat("!midway " + "x" * 50, stream=True)
            assert answer.status_code == 200
            first, failure, done = events(answer.text)
            assert first["choices"][0]["delta"]["role"] == "assistant"
            assert failure["error"]["type"] == "server_error" and "not finite" in failure["error"]["message"]
            assert done == "[DONE]"
            check = await w.chat("!midway " + "x" * 50)
            assert check.status_code == 500 and "not finite" in check.json()["error"]["message"]

    run(go())


def test_unforeseen_error_stays_in_the_log(monkeypatch, caplog):
    async def go():
        async with world(real=True) as w:

            async def broken():
                raise ValueError("secret at 0x7f00 in /home/me")

            w.app.add_api_route("/broken", broken)
            answer = await w.http.get("/broken")
            assert answer.status_code == 500 and "secret" not in answer.text
            assert answer.json()["error"]["type"] == "server_error"

    run(go())
    assert "secret" in caplog.text


def test_api_key(monkeypatch):
    async def go(**options):
        async with world(**options) as w:
            for path in ("/v1/models", "/server_info", "/v1/nothing"):
                for headers in (
                    {},
                    {"authorization": "Bearer wrong"},
                    {"authorization": "sesame"},
                    {"authorization": "Basic sesame"},
                    {"authorization": b"Bearer \xff\xfe"},
                ):
                    answer = await w.http.get(path, headers=headers)
                    check_error(answer, 401, code="invalid_api_key")
                    assert answer.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
                check_error(await w.http.post(path, json={}), 401)
            assert (
                await w.http.get("/v1/models", headers={"authorization": "bearer sesame"})
            ).status_code == 200
            for path in ("/health", "/ready", "/ping", "/version", "/metrics"):
                assert (await w.http.get(path)).status_code == 200
            info = await w.http.get("/server_info", headers={"authorization": "Bearer sesame"})
            assert "sesame" not in info.text

    run(go(api_key="sesame"))
    monkeypatch.setenv("TOKENSPEED_API_KEY", "sesame")
    run(go())
