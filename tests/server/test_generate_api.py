"""What the generation endpoints answer: forms, counts, streams, choices."""

import asyncio
import contextlib

import httpx
import pytest
from server_fakes import VOCAB, World, events, until, world


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


def test_chat_answer():
    async def go():
        async with world() as w:
            answer = await w.chat("hello", max_tokens=100, model="other")
            body = answer.json()
            assert answer.status_code == 200
            assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
            assert body["model"] == "other"
            assert body["choices"] == [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "hello", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": None,
                }
            ]
            assert body["usage"] == {
                "prompt_tokens": 5,
                "completion_tokens": 5,
                "total_tokens": 10,
                "prompt_tokens_details": {"cached_tokens": 2},
            }
            assert "spec_metrics" not in body
            assert w.ring.requests[0].params.max_tokens == 100 and w.client.num_open == 0

    run(go())


@pytest.mark.parametrize("real", [False, True])
def test_chat_stream_equals_whole(real):
    async def go():
        async with world(real) as w:
            ask = dict(max_tokens=50, ignore_eos=True, logprobs=True, top_logprobs=2, stop="lo wo")
            whole = (await w.chat("hello world", **ask)).json()
            answer = await w.chat("hello world", stream=True, stream_options={"include_usage": True}, **ask)
            assert answer.headers["content-type"].startswith("text/event-stream")
            *chunks, usage, done = events(answer.text)
            assert done == "[DONE]" and usage["usage"] == whole["usage"] and usage["choices"] == []
            assert all(c["object"] == "chat.completion.chunk" and c["usage"] is None for c in chunks)
            assert len({c["id"] for c in (*chunks, usage)}) == 1
            deltas = [c["choices"][0]["delta"] for c in chunks]
            assert deltas[0]["role"] == "assistant" and not any("role" in d for d in deltas[1:])
            choice = whole["choices"][0]
            assert "".join(d["content"] for d in deltas) == choice["message"]["content"] == "hel"
            streamed = [e for c in chunks for e in c["choices"][0]["logprobs"]["content"]]
            assert streamed == choice["logprobs"]["content"]
            assert len(streamed) == whole["usage"]["completion_tokens"] == 8
            assert streamed[0]["bytes"] == [ord("h")] and len(streamed[0]["top_logprobs"]) == 2
            reasons = [c["choices"][0]["finish_reason"] for c in chunks]
            assert reasons[-1] == "stop" and set(reasons[:-1]) <= {None}
            assert chunks[-1]["choices"][0]["stop_reason"] == choice["stop_reason"] == "lo wo"

    run(go())


@pytest.mark.parametrize("real", [False, True])
def test_completion_stream_equals_whole(real):
    async def go():
        async with world(real) as w:
            ask = dict(max_tokens=7, logprobs=1, echo=True, n=2, ignore_eos=True, prompt=["abc", "de"])
            whole = (await w.complete(**ask)).json()
            answer = await w.complete(stream=True, **ask)
            *chunks, done = events(answer.text)
            assert done == "[DONE]" and all(c["object"] == "text_completion" for c in chunks)
            for choice in whole["choices"]:
                mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
                assert "".join(c["text"] for c in mine) == choice["text"]
                joined = {k: [x for c in mine for x in c["logprobs"][k]] for k in choice["logprobs"]}
                assert joined == choice["logprobs"]
                assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"

    run(go())


def test_choices_of_several_prompts():
    async def go():
        async with world() as w:
            body = (await w.complete(["ab", "cde"], n=2, seed=5, max_tokens=4)).json()
            assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
            assert [c["text"] for c in body["choices"]] == ["ab", "ab", "cde", "cde"]
            assert body["usage"]["prompt_tokens"] == 5  # each prompt once
            assert body["usage"]["completion_tokens"] == 10
            seeds = [r.params.seed for r in w.ring.requests]
            assert seeds[0] == seeds[2] == 5 and seeds[1] == seeds[3] != 5
            assert all(r.params.n == 1 for r in w.ring.requests)

    run(go())


def test_token_prompts():
    async def go():
        async with world() as w:
            one = (await w.complete([104, 105])).json()
            assert one["choices"][0]["text"] == "hi"
            many = (await w.complete([[104, 105], [111]])).json()
            assert [c["text"] for c in many["choices"]] == ["hi", "o"]
            bad = await w.complete([1, VOCAB])
            assert bad.status_code == 400 and bad.json()["error"]["param"] == "prompt"
            assert str(VOCAB) in bad.json()["error"]["message"]

    run(go())


def test_echo_and_completion_logprobs():
    async def go():
        async with world() as w:
            body = (await w.complete("héy", echo=True, max_tokens=2, logprobs=2, ignore_eos=True)).json()
            choice = body["choices"][0]
            assert choice["text"] == "héyhé"
            form = choice["logprobs"]
            assert form["tokens"] == list("héyhé") and form["text_offset"] == [0, 1, 2, 3, 4]
            assert form["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]
            assert form["top_logprobs"][0] is None
            assert form["top_logprobs"][3] == {"a": -1.0, "b": -2.0, "h": -0.5}
            nothing = (await w.complete("hey", echo=True, max_tokens=0, logprobs=1)).json()
            assert nothing["choices"][0]["text"] == "hey"
            assert nothing["choices"][0]["logprobs"]["tokens"] == list("hey")
            assert nothing["usage"]["completion_tokens"] == 0

    run(go())


def test_continuous_usage_and_spec_metrics():
    async def go():
        async with world() as w:
            options = {"include_usage": True, "continuous_usage_stats": True}
            ask = dict(max_tokens=8, n=2, return_spec_metrics=True)
            answer = await w.chat("hello world", stream=True, stream_options=options, **ask)
            *chunks, last, _ = events(answer.text)
            counts = [c["usage"]["completion_tokens"] for c in chunks]
            assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 16
            assert chunks[0]["usage"]["prompt_tokens"] == 11
            summary = {
                "num_rounds": 8,
                "num_drafted": 56,
                "num_accepted": 12,
                "accept_length": 2.5,
                "accepted_per_depth": [8, 4],
            }
            assert last["spec_metrics"] == summary
            whole = (await w.chat("hello world", **ask)).json()
            assert whole["spec_metrics"] == summary
            plain = events((await w.chat("hello", stream=True, return_spec_metrics=True)).text)
            assert "usage" not in plain[0]
            assert ["spec_metrics" in c for c in plain[:-1]] == [False] * (len(plain) - 2) + [True]

    run(go())


def test_messages_reach_the_template_as_strings():
    async def go():
        async with world() as w:
            parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
            messages = [
                {"role": "system", "content": "s"},
                {"role": "tool", "content": "t", "tool_call_id": "1"},
                {"role": "user", "content": parts, "name": "n"},
            ]
            answer = await w.http.post("/v1/chat/completions", json={"messages": messages})
            assert answer.json()["choices"][0]["message"]["content"] == "a\nb"
            assert w.ring.requests[0].messages == (
                b'[{"role":"system","content":"s"},{"role":"tool","content":"t","tool_call_id":"1"},'
                b'{"role":"user","content":"a\\nb","name":"n"}]'
            )

    run(go())


def test_defaults_and_nulls():
    async def go():
        async with world() as w:
            nulls = dict.fromkeys(("max_tokens", "temperature", "stop", "tools", "n", "logit_bias", "seed"))
            defaults = dict(response_format={"type": "text"}, store=False, stream=None)
            assert (await w.chat("x", **nulls, **defaults)).status_code == 200
            assert (await w.complete("x", **nulls, suffix=None, best_of=1)).status_code == 200
            chat, completion = (r.params for r in w.ring.requests)
            assert chat.max_tokens is None and completion.max_tokens == 16
            assert chat.temperature == 1.0 and chat.seed is not None
            ask = dict(max_completion_tokens=5, logit_bias={"7": 1}, stop=["a", "b"], user="me")
            ask |= dict(allowed_token_ids=[3, 7], bad_words=["c", "d e"])
            await w.chat("x", temperature=0, **ask)
            last = w.ring.requests[-1]
            assert last.params.max_tokens == 5 and last.params.logit_bias == {7: 1}
            assert chat.allowed_token_ids is None and last.params.allowed_token_ids == (3, 7)
            assert chat.bad_words == () and last.params.bad_words == ("c", "d e")
            assert last.max_tokens_field == "max_completion_tokens" and tuple(last.params.stop) == ("a", "b")

    run(go())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["!hang this one", "!slow " + "x" * 500])
def test_disconnect_aborts(stream, prompt):
    async def go():
        async with world(real=True) as w:
            body = {"prompt": prompt, "stream": stream, "max_tokens": 1000, "n": 3, "ignore_eos": True}
            task = asyncio.ensure_future(w.http.post("/v1/completions", json=body))
            await until(lambda: w.client.num_open == 3, 2)
            await asyncio.sleep(0.05)
            task.cancel()
            await until(lambda: len(w.ring.aborted) == 3, 0.5)
            assert w.client.num_open == 0 and w.app.metrics.ended["abort"] == 3

    run(go())


def test_200_at_once():
    async def go():
        async with world(real=True, delay=0.01) as w:
            prompts = [f"prompt number {i}" for i in range(200)]
            async with contextlib.AsyncExitStack() as stack:  # one httpx pool of 200 would be the slow part
                made = [httpx.AsyncClient(base_url=w.http.base_url, timeout=20) for _ in range(10)]
                webs = [await stack.enter_async_context(web) for web in made]
                worlds = [World(web, w.ring, w.client, w.app) for web in webs]
                asks = [
                    worlds[i % 10].chat(p, stream=i % 2 == 0, max_tokens=100) for i, p in enumerate(prompts)
                ]
                answers = await asyncio.gather(*asks, w.http.get("/health"))
            assert answers.pop().status_code == 200
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                if i % 2:
                    text = answer.json()["choices"][0]["message"]["content"]
                else:
                    text = "".join(c["choices"][0]["delta"]["content"] for c in events(answer.text)[:-1])
                assert text == prompt
            assert w.client.num_open == 0

    run(go())


def test_tokenize_and_detokenize():
    async def go():
        async with world() as w:
            ask = {"prompt": "hi", "return_token_strs": True}
            answer = (await w.http.post("/tokenize", json=ask)).json()
            assert answer.pop("token_strs") == ["h", "i"]
            assert answer == {"count": 2, "max_model_len": 4096, "tokens": [104, 105]}
            messages = {"messages": [{"role": "user", "content": "hi"}], "add_special_tokens": False}
            assert (await w.http.post("/tokenize", json=messages)).json()["tokens"] == [104, 105]
            assert w.ring.sent[-1].add_special_tokens is False
            assert (await w.http.post("/detokenize", json={"tokens": [104, 105]})).json() == {"prompt": "hi"}
            failed = await w.http.post("/tokenize", json={"prompt": "!error"})
            assert failed.status_code == 400 and failed.json()["error"]["param"] == "prompt"
            for path, bad in (
                ("/tokenize", {}),
                ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
                ("/detokenize", {"tokens": [VOCAB]}),
                ("/detokenize", {"tokens": [-1]}),
                ("/detokenize", {"tokens": ["a", 1]}),
                ("/detokenize", {"tokens": [2**80]}),
            ):
                assert (await w.http.post(path, json=bad)).status_code == 400

    run(go())
