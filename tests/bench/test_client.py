"""The load client against a server that sends several tokens a piece at known times."""

import asyncio
import time

import pytest

from tokenspeed.bench import client, counters
from tokenspeed.bench.client import Target, closed_loop, connect, token_gaps
from tokenspeed.bench.workload import load_prompts
from tokenspeed.errors import ConfigError

SAMPLING = {"max_tokens": 16, "temperature": 0.0}


def answers_of(url, n=1, concurrency=1, **kwargs):
    async def go():
        target = await connect(url, kwargs.get("model"), kwargs.get("key"))
        return target, *await closed_loop(target, load_prompts("builtin", n), concurrency, SAMPLING)

    return asyncio.run(go())


def test_gaps_are_per_token():
    assert token_gaps([(1.0, 1), (1.3, 4), (1.4, 5)]) == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert token_gaps([(1.0, 3), (1.2, 3), (1.4, 5)]) == pytest.approx([0.2, 0.2])  # a piece without a token
    assert token_gaps([(1.0, 6)]) == []


@pytest.mark.parametrize(
    ("offered", "counted"),
    [(dict(), True), (dict(continuous=False), True), (dict(stream_options=False), False)],
)
def test_tokens_and_times(behaviour, url, offered, counted):
    for name, value in offered.items():
        setattr(behaviour, name, value)
    behaviour.delay = 0.06
    target, (answer,), _ = answers_of(url)
    assert answer.error is None and answer.counted is counted
    assert answer.num_tokens == (6 if counted else 3)  # without usage a piece counts as a token
    assert len(answer.gaps) == (5 if counted else 2)
    assert answer.num_prompt_tokens == (7 if counted else 0)
    assert answer.ttft >= 0.055 and sum(answer.gaps) >= 0.11  # one piece, then two more, 0.06 s each
    assert answer.latency >= answer.ttft + sum(answer.gaps) - 1e-6
    if counted and behaviour.continuous:
        assert answer.gaps[0] == answer.gaps[1] == answer.gaps[2]  # one piece of three tokens
        assert answer.gaps[3] == answer.gaps[4]
    assert target.model == "fake"


def test_unfitting_extras_are_found_once_by_a_probe(behaviour, url):
    behaviour.continuous = False
    answers_of(url, n=3)
    asked = [
        bool((body.get("stream_options") or {}).get("continuous_usage_stats")) for body in behaviour.bodies
    ]
    assert asked == [True, False, False, False, False]  # refused, probe, then the load
    assert all(body["stream"] and body["temperature"] == 0.0 for body in behaviour.bodies)


def test_the_loop_is_closed(behaviour, url):
    behaviour.delay = 0.02
    start = time.perf_counter()
    _, answers, seconds = answers_of(url, n=12, concurrency=4)
    assert len(answers) == 12 and all(a.error is None for a in answers)
    assert behaviour.open_most == 4
    assert 3 * 3 * 0.02 <= seconds <= time.perf_counter() - start


def test_our_server_tells_acceptance(behaviour, url):
    behaviour.owner = "tokenspeed"
    target, (answer,), _ = answers_of(url)
    assert target.ours and answer.spec["num_accepted"] == 6
    behaviour.owner = "someone"
    target, (answer,), _ = answers_of(url)
    assert not target.ours and answer.spec is None
    assert "return_spec_metrics" not in behaviour.bodies[-1]


@pytest.mark.parametrize(
    ("fail", "words"),
    [("refuse", "status 503: no room"), ("midway", "the engine died"), ("garbage", "Expecting"),
                        ("cut", "incomplete")],
)  # fmt: skip
def test_failures_are_told_not_raised(behaviour, url, fail, words):
    async def go():
        target = await connect(url, None, None)
        behaviour.fail = fail
        return await closed_loop(target, load_prompts("builtin", 2), 2, SAMPLING)

    answers, _ = asyncio.run(go())
    assert len(answers) == 2 and all(words in a.error for a in answers)


def test_connect_says_what_is_wrong(behaviour, url):
    with pytest.raises(ConfigError, match=r"no server answers at http://127.0.0.1:9 "):
        answers_of("127.0.0.1:9")
    behaviour.key = "secret"
    with pytest.raises(ConfigError, match="answers 401"):
        answers_of(url)
    behaviour.key, behaviour.models = None, ()
    with pytest.raises(ConfigError, match="serves no model"):
        answers_of(url)
    behaviour.models, behaviour.fail = ("fake",), "refuse"
    with pytest.raises(ConfigError, match="does not answer a streamed chat: status 503"):
        answers_of(url)


def test_urls():
    assert (
        client.base_url("h:1")
        == client.base_url("http://h:1/v1/")
        == client.base_url("http://h:1")
        == "http://h:1"
    )


VLLM_METRICS = """\
# HELP vllm:spec_decode_num_drafts_total rounds
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 45.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1",model_name="m"} 6.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9
vllm:num_requests_running 3
"""


def test_vllm_counters():
    found = counters.parse(VLLM_METRICS)
    half = {name: value / 3 for name, value in found.items()}
    told = counters.between(half, found)
    assert told["accept_length"] == pytest.approx(3.0)
    assert told["accept_rate"] == pytest.approx(30 / 45)
    assert told["accepted_per_depth"] == pytest.approx([12 / 15, 6 / 15])
    assert counters.between(found, found) is None
    assert counters.between({}, counters.parse("vllm:num_requests_running 3\n")) is None


def test_counters_over_http(behaviour, url):
    target = Target(url, "fake")
    assert asyncio.run(counters.read(target)) == {}
    behaviour.server_info = {"internal_states": [{"avg_spec_accept_length": 2.5}]}
    assert counters.between({}, asyncio.run(counters.read(target)))["accept_length"] == 2.5
    behaviour.metrics = VLLM_METRICS
    assert counters.between({}, asyncio.run(counters.read(target)))["source"] == "metrics"
    assert asyncio.run(counters.read(Target("http://127.0.0.1:9", "fake"))) == {}
