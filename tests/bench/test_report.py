"""Percentiles, rows, the JSON file, the plot, and the command over a fake server."""

import json

import numpy
import pytest

from tokenspeed.bench import report
from tokenspeed.bench.client import Answer
from tokenspeed.cli import main
from tokenspeed.errors import ConfigError


@pytest.mark.parametrize("n", [1, 2, 5, 100])
@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_numpys(n, percent):
    values = numpy.random.default_rng(n).normal(size=n)
    assert report.percentile(list(values), percent) == pytest.approx(numpy.percentile(values, percent))


def test_a_row():
    spec = {"num_rounds": 4, "num_drafted": 60, "num_accepted": 8}
    answers = [
        Answer("math", None, 0.1, 0.5, [0.1] * 4, 7, 5, True, spec),
        Answer("code", None, 0.3, 0.9, [0.2] * 3, 7, 4, True, None),
        Answer("code", "no room"),
    ]
    row = report.summarise(answers, 2.0, 8)
    assert (row["num_requests"], row["num_failed"], row["errors"]) == (3, 1, ["no room"])
    assert row["output_tokens"] == 9 and row["output_tokens_per_second"] == 4.5
    assert row["prompt_tokens"] == 14 and row["requests_per_second"] == 1.0
    assert row["ttft_ms"]["p50"] == pytest.approx(200)
    assert row["itl_ms"]["p50"] == pytest.approx(100) and row["itl_ms"]["p99"] == pytest.approx(200)
    assert row["tokens_per_second_per_request"] == pytest.approx(7.5)
    assert row["acceptance"]["accept_length"] == 3.0 and row["acceptance"]["accept_rate"] == pytest.approx(
        8 / 60
    )
    assert row["acceptance"]["by_category"] == {"math": 3.0, "code": None}
    text = report.table([row])
    assert "4.5" in text and "3.00" in text and len(text.splitlines()) == 2


def test_nothing_answered():
    row = report.summarise([Answer("a", "x")], 1.0, 1)
    assert row["itl_ms"] == {"p50": None, "p90": None, "p99": None}
    assert "-/-/-" in report.table([row])


def test_command_writes_json_and_plot(behaviour, url, tmp_path, capsys):
    behaviour.owner = "tokenspeed"
    out, png = tmp_path / "r" / "results.json", tmp_path / "plot.png"
    argv = ["bench", "serve", "--url", url, "--concurrency", "1,4", "--num-prompts", "4", "--max-tokens", "8"]
    assert main([*argv, "--output", str(out), "--plot", str(png)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    data = json.loads(out.read_text())
    assert set(data) >= {"kind", "command", "date", "versions", "gpu", "model", "url", "load", "results"}
    assert data["kind"] == "serve" and data["versions"]["torch"] and data["model"] == "fake"
    assert [row["concurrency"] for row in data["results"]] == [1, 4]
    assert all(
        row["output_tokens"] == 24 and row["acceptance"]["accept_length"] == 3.0 for row in data["results"]
    )
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert behaviour.bodies[-1]["max_tokens"] == 8 and "ignore_eos" not in behaviour.bodies[-1]
    assert main([*argv, "--ignore-eos"]) == 0
    assert behaviour.bodies[-1]["ignore_eos"] is True


def test_command_fails_when_requests_fail(behaviour, url, monkeypatch, capsys):
    from tokenspeed.bench import client

    plain = client.closed_loop

    async def then_fail(*args):
        behaviour.fail = "midway"
        return await plain(*args)

    monkeypatch.setattr(client, "closed_loop", then_fail)
    assert main(["bench", "serve", "--url", url, "--concurrency", "1", "--num-prompts", "2"]) == 1
    assert "2 requests failed at 1: the engine died" in capsys.readouterr().err


def test_no_server_is_one_line(capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_matplotlib_it_is_said_before_the_work(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        report.check_plot("x.png")
    report.check_plot(None)


def test_unwritable_output():
    with pytest.raises(ConfigError, match="can't be written"):
        report.write_json("/proc/none/x.json", {})


def test_no_key_in_the_record(behaviour, url, tmp_path, monkeypatch):
    behaviour.key = "s3cret"
    out = tmp_path / "r.json"
    argv = ["bench", "serve", "--url", url, "--api-key", "s3cret", "--num-prompts", "1", "--concurrency", "1"]
    monkeypatch.setattr("sys.argv", ["/usr/bin/tokenspeed", *argv])
    assert main([*argv, "--output", str(out)]) == 0
    assert "s3cret" not in out.read_text()
    assert json.loads(out.read_text())["command"].startswith("tokenspeed bench serve --url")
    assert report.command_line(["/x/tokenspeed/__main__.py", "bench"]) == "tokenspeed bench"
    assert report.command_line(["x/a.py", "--api_key=s3cret", "--api-key"]) == "a.py --api-key=... --api-key"


def test_the_record_names_no_folder_of_this_machine():
    argv = ["/x/tokenspeed", "bench", "offline", "/a/b/model", "--draft=/c/d", "some/hub-name"]
    assert report.command_line(argv) == "tokenspeed bench offline model --draft=d some/hub-name"
    data = report.document("k", [], config={"model": "/a/b", "names": ("/c/d", 3)}, url="http://x/y")
    assert (data["config"], data["url"]) == ({"model": "b", "names": ["d", 3]}, "http://x/y")
