"""Closed loops, interleaving and the account of each answer, with an engine that only counts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import benchmarks.plot
import benchmarks.throughput
from benchmarks.throughput import interleaved
from tokenspeed.bench.offline import measure
from tokenspeed.bench.workload import load_prompts
from tokenspeed.cli import draft, main
from tokenspeed.params import SamplingParams


class CountingLLM:
    """Answers with 5 tokens in 2 rounds of a tree."""

    made: list[dict]
    made = []
    info = {"device": "none", "dtype": "float32"}

    def __init__(self, *args, rounds=2, **options):
        self.rounds, self.calls = rounds, []
        self.made.append(options)

    def chat(self, conversations, params, use_tqdm=False, concurrency=None):
        first = params[0] if isinstance(params, list) else params
        self.calls.append((len(conversations), concurrency, first.max_tokens))
        metrics = {
            "num_rounds": self.rounds,
            "num_drafted": 30,
            "num_accepted": 3,
            "accepted_per_depth": [2, 1],
        }
        choice = SimpleNamespace(token_ids=[1, 2, 3, 4, 5])
        return [
            SimpleNamespace(prompt_token_ids=[1] * 4, outputs=[choice], metrics=metrics)
            for _ in conversations
        ]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


@pytest.fixture
def llm_class(monkeypatch):
    import tokenspeed

    CountingLLM.made = []
    monkeypatch.setitem(tokenspeed.__dict__, "LLM", CountingLLM)
    return CountingLLM


def test_a_closed_loop_and_its_account():
    llm = CountingLLM()
    row, records = measure(llm, load_prompts("builtin", 10), 4, SamplingParams(max_tokens=9))
    assert llm.calls == [(10, 4, 9)]
    assert row["output_tokens"] == 50 and row["prompt_tokens"] == 40 and row["num_requests"] == 10
    assert row["acceptance"]["accept_length"] == 2.5 and row["looping_share"] == 0
    assert len(records) == 10 and records[0].per_depth == (2, 1) and records[0].prompt_ids == (1,) * 4


def test_without_a_draft_there_is_no_acceptance():
    row, _ = measure(CountingLLM(rounds=0), load_prompts("builtin", 2), 1, SamplingParams())
    assert row["acceptance"] is None


def test_interleaving_takes_turns_and_medians():
    order, a, b = [], CountingLLM(), CountingLLM(rounds=0)
    found = interleaved(
        {"eagle4": a, "none": b}, load_prompts("builtin", 2), 2, SamplingParams(), 3, order.append
    )
    assert [line.split(", ")[2].split(":")[0] for line in order] == ["eagle4", "none"] * 3
    assert len(found["none"]["runs"]) == 3
    assert found["none"]["output_tokens_per_second"] == sorted(found["none"]["runs"])[1]
    assert found["eagle4"]["acceptance"]["accept_length"] == 2.5 and found["none"]["acceptance"] is None
    assert a.calls == [(2, 2, 16), *[(2, 2, SamplingParams().max_tokens)] * 3] == b.calls  # first a warm-up


def test_bench_offline(llm_class, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TOKENSPEED_API_KEY", raising=False)
    out = tmp_path / "r.json"
    argv = [
        "bench",
        "offline",
        "some/model",
        "--spec",
        "eagle4",
        "--spec-shape",
        "5/4/16",
        "--concurrency",
        "1,2",
        "--num-prompts",
        "4",
    ]
    assert main([*argv, "--output", str(out)]) == 0
    assert llm_class.made == [{"model": "some/model", "spec": "eagle4", "spec_shape": "5/4/16"}]
    assert "2.50" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert data["kind"] == "offline" and data["config"]["spec"] == "eagle4" and len(data["results"]) == 2


def test_draft_eval(llm_class, tmp_path, capsys):
    out = tmp_path / "r.json"
    argv = [
        "draft",
        "eval",
        "m",
        "--draft",
        "d",
        "--shape",
        "8/4/16",
        "--shape",
        "3/1/4",
        "--num-prompts",
        "6",
        "--max-tokens",
        "5",
    ]
    assert main([*argv, "--no-offline", "--output", str(out)]) == 0
    assert [(made["spec"], made["draft"], made["spec_shape"]) for made in llm_class.made] == [
        ("eagle4", "d", "8/4/16"), ("eagle4", "d", "3/1/4"),
    ]  # fmt: skip
    assert "shape 3/1/4" in capsys.readouterr().out
    found = json.loads(out.read_text())["acceptance"]["8/4/16"]
    assert found["decoded"]["all"]["accept_length"] == 2.5 and list(found) == ["decoded"]
    assert len(found["decoded"]["by_category"]) == 6


def test_draft_eval_says_whether_both_counts_agree(llm_class, monkeypatch, capsys):
    def other(config, decoded, params, rounds=2):
        assert config.dtype == "float32"  # what the engine said, though "auto" was asked for
        return {shape: [replace(r, rounds=rounds, spans=((4, 3),)) for r in records]
                for shape, records in decoded.items()}  # fmt: skip

    monkeypatch.setattr(draft, "replay_all", other)
    argv = ["draft", "eval", "m", "--draft", "d", "--num-prompts", "2"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "offline and decoded agree: the same rounds in all 2 answers" in text and "position 0-256" in text
    monkeypatch.setattr(draft, "replay_all", lambda *args: other(*args, 3))
    assert main(argv) == 1
    assert "DISAGREE: other rounds in 2 of 2 answers, accept lengths at most 0.500 apart" in (
        capsys.readouterr().out
    )


def test_draft_eval_takes_other_spellings(llm_class):
    argv = ["draft", "eval", "m", "-sc", '{"method": "eagle3", "model": "d", "num_speculative_tokens": 2}']
    assert main([*argv, "--num-prompts", "1", "--no-offline"]) == 0
    (made,) = llm_class.made
    assert (made["spec"], made["draft"], made["spec_shape"]) == ("eagle3", "d", "2/1/3")
    assert made["speculative_config"] is None


def test_draft_eval_without_rounds_is_an_error(llm_class, monkeypatch, capsys):
    monkeypatch.setattr(CountingLLM.__init__, "__kwdefaults__", {"rounds": 0})
    assert main(["draft", "eval", "m", "--draft", "d", "--num-prompts", "1"]) == 2
    assert "no draft rounds" in capsys.readouterr().err


def test_throughput_program_and_its_plot(llm_class, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmarks.throughput, "RESULTS", tmp_path)
    argv = [
        "throughput.py",
        "m",
        "--draft",
        "d",
        "--concurrency",
        "1,2",
        "--num-prompts",
        "4",
        "--repeats",
        "1",
        "--name",
        "x",
        "--label",
        "L",
    ]
    monkeypatch.setattr("sys.argv", argv)
    assert benchmarks.throughput.main() == 0
    data = json.loads((tmp_path / "x.json").read_text())
    assert [(row["spec"], row["concurrency"]) for row in data["results"]] == [
        ("none", 1), ("eagle4", 1), ("none", 2), ("eagle4", 2),
    ]  # fmt: skip
    assert data["model"] == "L" and data["command"].startswith("throughput.py m")
    assert data["engines"]["none"]["dtype"] == "float32" and data["results"][1]["speedup"] > 0
    assert [made["gpu_memory_utilization"] for made in llm_class.made] == [0.4, 0.4]
    assert "eagle4 against none at 2" in capsys.readouterr().out
    png = tmp_path / "x.png"
    monkeypatch.setattr("sys.argv", ["plot.py", "throughput", str(tmp_path / "x.json"), "--out", str(png)])
    assert benchmarks.plot.main() == 0
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_an_api_key_stays_out_of_the_results(llm_class, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENSPEED_API_KEY", "s3cret")
    out = tmp_path / "r.json"
    for command in ("bench offline m --concurrency 1", "draft eval m --draft d --no-offline"):
        assert main([*command.split(), "--num-prompts", "1", "--output", str(out)]) == 0
        assert "s3cret" not in out.read_text()
