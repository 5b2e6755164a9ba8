"""No input makes the server fail: random bodies, and requests made from the server's own OpenAPI document."""

import asyncio
import contextlib
import threading
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from server_fakes import world

numbers = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30]),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
roles = st.sampled_from(["user", "system", "assistant", "tool", "developer", "other"])
messages = st.one_of(
    json_values,
    st.lists(
        st.fixed_dictionaries({"role": roles, "content": st.one_of(st.text(max_size=20), json_values)}),
        max_size=3,
    ),
)
ids = st.lists(st.integers(-2, 260), max_size=5)
fields = {
    "messages": messages,
    "prompt": st.one_of(st.text(max_size=30), st.lists(st.text(max_size=9), max_size=4), ids, json_values),
    "tokens": st.one_of(ids, json_values),
    "stop": st.one_of(st.text(max_size=5), st.lists(st.text(max_size=5), max_size=4), json_values),
    "bad_words": st.one_of(st.lists(st.text(max_size=5), max_size=4), json_values),
    "stop_token_ids": st.one_of(ids, json_values),
    "allowed_token_ids": st.one_of(ids, json_values),
    "logit_bias": st.one_of(st.dictionaries(st.integers(-2, 300).map(str), numbers, max_size=4), json_values),
    "stream": st.one_of(st.booleans(), json_values),
    "echo": st.one_of(st.booleans(), json_values),
    "logprobs": st.one_of(st.booleans(), st.integers(0, 22), json_values),
    "top_logprobs": st.one_of(st.integers(0, 22), json_values),
    "n": st.one_of(st.integers(0, 5), numbers),
    "max_tokens": st.one_of(st.integers(0, 50), numbers),
    "stream_options": st.one_of(st.fixed_dictionaries({"include_usage": st.booleans()}), json_values),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty"), st.one_of(st.floats(0, 1), numbers)
    ),
    **dict.fromkeys(("top_k", "seed", "min_tokens", "repetition_penalty", "best_of"), numbers),
    **dict.fromkeys(("model", "user", "tools", "metadata", "response_format", "suffix", "odd"), json_values),
    **dict.fromkeys(("return_spec_metrics", "ignore_eos", "add_special_tokens"), st.booleans()),
}
bodies = st.one_of(
    st.fixed_dictionaries(
        {"prompt": fields["prompt"]}, optional={k: v for k, v in fields.items() if k != "prompt"}
    ),
    st.fixed_dictionaries({}, optional=fields),
    json_values,
)
paths = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])


@pytest.fixture(scope="module")
def served():
    """The World of a server that runs in a thread, and what calls a coroutine there."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    stack = contextlib.AsyncExitStack()
    w = call(stack.enter_async_context(world(real=True)))
    yield w, call
    call(stack.aclose())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def check(answer: httpx.Response) -> None:
    if answer.status_code >= 400:
        assert answer.status_code < 500, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 4000


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(path=paths, body=bodies)
def test_random_json(served, path, body):
    w, call = served
    check(call(w.http.post(path, json=body)))
    assert w.client.num_open == 0


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(path=paths, body=st.binary(max_size=300), kind=st.sampled_from(["application/json", "text/plain"]))
def test_random_bytes(served, path, body, kind):
    w, call = served
    check(call(w.http.post(path, content=body, headers={"content-type": kind})))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(path=st.text(max_size=40), method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"]))
def test_random_paths(served, path, method):
    w, call = served
    answer = call(w.http.request(method, f"/{quote(path)}"))
    assert answer.status_code < 500
    if answer.status_code >= 400 and method != "HEAD":
        assert "error" in answer.json()


def test_from_its_own_openapi(served):
    w, _ = served
    schema = schemathesis.openapi.from_dict(w.app.openapi())
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {o.path for o in operations} >= {
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/metrics",
    }

    @settings(
        max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
    )
    @given(st.one_of([o.as_strategy() for o in operations if o.method == "post"]))
    def send(case):
        answer = case.call(base_url=str(w.http.base_url), timeout=10)
        assert answer.status_code < 500, answer.text

    send()


def test_healthy_after_all_that(served):
    w, call = served
    assert call(w.http.get("/health")).status_code == 200
    assert call(w.chat("hello")).json()["choices"][0]["message"]["content"] == "hello"
    assert w.client.num_open == 0 and w.client.error is None
