"""The benchmarks that start a server of their own, whole, with a tiny model; and their load against a fake server."""

import json

import pytest

from benchmarks import startup, streaming, ttft
from tokenspeed.bench.workload import load_prompts
from tokenspeed.errors import ConfigError

ON_CPU = ("--dtype", "float32", "--device", "cpu", "--max-num-seqs", "4", "--spec-shape", "2/1/3")


@pytest.fixture
def engine(tiny_model_dir, tiny_draft_dir):
    """Arguments of an engine that speculates."""
    model = tiny_model_dir("llama")
    return [str(model), "--spec", "eagle4", "--draft", str(tiny_draft_dir(model)), *ON_CPU]


def test_startup(engine, tmp_path, capsys):
    out = tmp_path / "r.json"
    assert startup.run([*engine, "--runs", "1", "--output", str(out)]) == 0
    cold, warm = json.loads(out.read_text())["results"]
    assert (cold["start"], warm["start"]) == ("cold", "warm")
    for row in (cold, warm):
        assert 0 < row["ready_seconds"]["median"] < row["first_token_seconds"]["median"] < 60
        assert row["graphs"] is row["graph_seconds"] is row["graph_bytes"] is None  # none on a CPU
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["cold", "warm"]


def test_startup_tells_what_graphs_took():
    found = {"ready_seconds": 9.0, "first_token_seconds": 9.5, "device": "d"}
    captured = {"graphs": 54, "graph_seconds": 4.0, "graph_bytes": 2**29}
    row = startup.summary("warm", [{**found, **captured}, {**found, **captured, "graph_seconds": 6.0}])
    assert row["graph_seconds"] == {"median": 5.0, "min": 4.0, "max": 6.0, "runs": [4.0, 6.0]}
    assert "5.00 s (4.00-6.00) for 54 graphs of 0.50 GiB" in startup._line(row)


def test_ttft(engine, tmp_path):
    out = tmp_path / "r.json"
    assert ttft.run([*engine, "--prompt-tokens", "40", "--repeats", "2", "--output", str(out)]) == 0
    data = json.loads(out.read_text())
    assert [(row["way"], row["prompt_tokens"]) for row in data["results"]] == [("offline", 40), ("http", 40)]
    assert all(0 < ms < 60_000 for row in data["results"] for ms in row["ttft_ms"]["runs"])
    assert data["config"]["gpu_memory_utilization"] == 0.4 and data["engine"]["dtype"] == "float32"


def test_streaming(engine, tmp_path):
    out = tmp_path / "r.json"
    load = "--concurrency 3 --num-prompts 6 --max-tokens 8 --ignore-eos --repeats 1 --clients 2"
    assert streaming.run([*engine, *load.split(), "--output", str(out)]) == 0
    none, eagle4 = json.loads(out.read_text())["results"]
    assert (none["spec"], eagle4["spec"]) == ("none", "eagle4")
    for row in (none, eagle4):
        assert row["offline_tokens"] == row["http_tokens"] == 6 * 8 and 0 < row["client_busy"] < 1
        ratio = row["http_tokens_per_second"]["median"] / row["offline_tokens_per_second"]["median"]
        assert row["http_over_offline"]["median"] == pytest.approx(ratio, abs=1e-3)
    assert "memory_draft" not in none["engine"] and "memory_draft" in eagle4["engine"]


def test_the_load_of_several_clients(behaviour, url):
    """Three answers open at once, of six tokens and six events: the role, three pieces, usage, and the end."""
    behaviour.delay = 0.05
    found = streaming.over_http(url, load_prompts("builtin", 9), 3, {"max_tokens": 8}, 2)
    assert found["tokens"] == 9 * 6 and behaviour.open_most == 3 and len(behaviour.bodies) == 9
    assert found["seconds"] >= 3 * 3 * 0.05
    assert all(body["stream"] and body["max_tokens"] == 8 for body in behaviour.bodies)
    assert found["events"] == 9 * 6
    with pytest.raises(ConfigError, match="more than a pipe can number"):
        streaming.over_http(url, load_prompts("builtin", 10) * 2000, 3, {"max_tokens": 8}, 2)


@pytest.mark.parametrize(
    ("fail", "words"), [("refuse", "503"), ("midway", "the engine died"), ("cut", "200")]
)
def test_a_failed_answer_ends_the_measurement(behaviour, url, fail, words):
    behaviour.fail = fail
    with pytest.raises(ConfigError, match=words):
        streaming.over_http(url, load_prompts("builtin", 2), 1, {"max_tokens": 8}, 1)


@pytest.mark.parametrize("program", [startup, ttft, streaming])
def test_mistakes_are_one_line(program, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["x.py", "/no/such/model"])
    assert program.main() == 2
    said = capsys.readouterr().err
    assert "there is no directory /no/such/model" in said and said.count("\n") == 1
