"""`tokenspeed calibrate` on a tiny model: what it prints and keeps, and that an engine then starts with it."""

import json
import tempfile
from pathlib import Path

import msgspec
import pytest
import torch
from engine.harness import InProcessEngine

from tokenspeed import LLM, SamplingParams
from tokenspeed.cli import calibrate, main
from tokenspeed.spec.calibration import Calibration, save
from tokenspeed.worker import calibrate as timing
from tokenspeed.worker.calibrate import key_of
from tokenspeed.worker.setup import _name

OPTIONS = ("--device", "cpu", "--dtype", "float32", "--kv-cache-tokens", "2048", "--max-num-seqs", "4")


@pytest.fixture
def models(tmp_path, monkeypatch, tiny_model_dir, tiny_draft_dir):
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    target = tiny_model_dir("llama")
    return [str(target), "--draft", str(tiny_draft_dir(target))]


def test_calibrate_and_use(models, tmp_path, capsys):
    plot = tmp_path / "plot.png"
    load = [
        "--candidates",
        "3/2/6",
        "2/1/3",
        "1/1/2",
        "--batches",
        "1,4",
        "--num-prompts",
        "2",
        "--max-tokens",
        "24",
    ]
    assert main(["calibrate", *models, *OPTIONS, *load, "--plot", str(plot)]) == 0, capsys.readouterr()
    out = capsys.readouterr().out
    assert all(tree in out for tree in ("plain", "3/2/6", "2/1/3", "1/1/2"))
    assert plot.read_bytes().startswith(b"\x89PNG")
    (path,) = (tmp_path / "cache" / "calibration").iterdir()
    found = json.loads(path.read_text())["calibration"]
    assert {batch for batch, _, _ in found["times"]} == {1, 4} and str(path) in out
    assert all(us > 0 for _, _, us in found["times"]) and len(found["priors"]) == 3
    assert [size for size, _ in found["per_token"]] == [None, [3, 2, 6], [2, 1, 3], [1, 1, 2]]
    found["times"] = [[batch, size, 1e6 if size is None else 1e3] for batch, size, _ in found["times"]]
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "calibration": found}))  # nothing but the file can lead to these times
    with LLM(models[0], draft=models[2], spec="eagle4", device="cpu", dtype="float32", kv_cache_tokens=2048,
             max_num_seqs=4) as llm:  # fmt: skip
        assert json.loads(llm.info["calibration"])["times"] == found["times"]
        (out,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
        assert out.outputs[0].metrics["num_drafted"] > 0


def test_acceptance_is_kept_in_the_draft(models, tmp_path, capsys):
    """A server without a calibration file plans with it, and the file that was written along is still of use."""
    load = [
        "--candidates",
        "3/2/6",
        "2/1/3",
        "1/1/2",
        "--batches",
        "1",
        "--num-prompts",
        "2",
        "--max-tokens",
        "24",
    ]
    file = tmp_path / "elsewhere.json"
    assert main(["calibrate", *models, *OPTIONS, *load, "--keep-in-draft"]) == 0, capsys.readouterr()
    (path,) = (tmp_path / "cache" / "calibration").iterdir()
    stated = json.loads((Path(models[2]) / "config.json").read_text())["acceptance"]
    measured = json.loads(path.read_text())["calibration"]["priors"]
    assert stated == {"/".join(map(str, size)): prior for size, prior in measured} and len(stated) == 3
    options = {"draft": models[2], "spec": "eagle4", "max_num_seqs": 4, "kv_cache_tokens": 2048}
    times = json.loads(path.read_text())["calibration"]["times"]
    found = json.loads(InProcessEngine(models[0], **options).info["calibration"])
    assert found["times"] == times
    path.rename(file)
    found = json.loads(InProcessEngine(models[0], **options).info["calibration"])
    assert found["times"] != times
    assert {"/".join(map(str, size)): prior for size, prior in found["priors"]} == stated


def test_rounds_are_timed_in_turns(monkeypatch):
    """By a clock that rounds move: a slow moment falls on all alike, and one slow round is enough."""
    clock, order = [0.0], []

    def kind(name: str, *seconds: float):
        left = list(seconds)

        def run() -> None:
            order.append(name)
            clock[0] += left.pop(0)

        return run

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    rounds = [kind("a", 0.03, 0.01, 0.02, 0.02), kind("slow", 0.75), kind("b", 0.02, 0.02, 0.04, 0.03)]
    assert timing._least(rounds) == pytest.approx([1e4, 75e4, 2e4])
    assert order == ["a", "slow", "b", "a", "b", "a", "b", "a", "b"]


def test_a_draft_that_can_not_keep_acceptance(models, capsys, monkeypatch):
    """Told before anything is measured."""
    monkeypatch.setattr("tokenspeed.cli.draft.decode", lambda *_: pytest.fail("it was measured"))
    raw = json.loads((Path(models[2]) / "config.json").read_text())

    make = tempfile.TemporaryFile

    def refuse(dir):  # in the draft's directory, not in the cache
        if dir == Path(models[2]):
            raise PermissionError(13, "Permission denied")
        return make(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert main(["calibrate", *models, *OPTIONS, "--keep-in-draft"]) == 2
    assert "can't be written: Permission denied; copy the draft" in capsys.readouterr().err
    assert json.loads((Path(models[2]) / "config.json").read_text()) == raw


def test_what_can_not_be_done(models, tmp_path, capsys):
    assert main(["calibrate", *models, *OPTIONS, "--candidates", "9/9"]) == 2
    assert "STEPS/TOPK/NODES" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path / "none"), *OPTIONS]) == 2
    capsys.readouterr()
    wide = ["--candidates", "2/64/64", "--num-prompts", "1", "--max-tokens", "8"]
    assert main(["calibrate", *models, *OPTIONS, *wide]) == 2
    assert "asks for 64 tokens a step" in capsys.readouterr().err


@pytest.mark.parametrize("output", [None, "gone/file.json"])
def test_a_disk_that_can_not_be_written(models, tmp_path, capsys, monkeypatch, output):
    """Told before anything is measured."""
    monkeypatch.setattr(calibrate, "measure", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "calibration").write_text("in the way")
    (tmp_path / "gone").write_text("in the way")
    where = [] if output is None else ["--output", str(tmp_path / output)]
    assert main(["calibrate", *models, *OPTIONS, *where]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "can't be written" in line and "TOKENSPEED_CACHE" in line


def corrupt(raw: dict) -> str:
    return json.dumps(raw)[:-20]


def of_another_gpu(raw: dict) -> str:
    return json.dumps({**raw, "key": {**raw["key"], "device": "NVIDIA H100"}})


def of_another_version(raw: dict) -> str:
    return json.dumps({**raw, "key": {**raw["key"], "tokenspeed": "0.0.1"}})


def of_other_kernels(raw: dict) -> str:
    return json.dumps({**raw, "key": {**raw["key"], "csrc": True}})


@pytest.mark.parametrize("spoil", [None, corrupt, of_another_gpu, of_another_version, of_other_kernels])
def test_a_file_that_is_of_no_use_leads_to_a_calibration_at_start(models, caplog, spoil):
    """The engine starts all the same, and nothing of the file's times is left."""
    times = [[batch, size, 77.0] for batch in (1, 2, 4) for size in (None, [3, 2, 6])]
    options = {"draft": models[2], "spec": "eagle4", "max_num_seqs": 4, "kv_cache_tokens": 2048}
    resolved = InProcessEngine(models[0], **options).resolved
    key = key_of(resolved, _name(torch.device("cpu")), torch.float32)
    path = save(key, msgspec.convert({"times": times}, Calibration))
    if spoil is not None:
        path.write_text(spoil(json.loads(path.read_text())))
    found = json.loads(InProcessEngine(models[0], **options).info["calibration"])["times"]
    assert (found == times) == (spoil is None)
    assert (str(path) in caplog.text) == (spoil is not None)
