"""`tokenspeed draft eval` with real engines: both ways to count the rounds must agree."""

import json

import pytest

from tokenspeed.cli import main


def evaluate(capsys, tmp_path, *argv: str, device: str = "cpu") -> dict:
    """Runs the command in float32 and returns what it found, by shape."""
    out = tmp_path / "found.json"
    command = ["draft", "eval", *argv, "--device", device, "--dtype", "float32", "--output", str(out)]
    assert main(command) == 0, capsys.readouterr()
    found = json.loads(out.read_text())["acceptance"]
    text = capsys.readouterr().out
    assert all(f"shape {shape}" in text for shape in found)
    return found


def same_rounds(account: dict) -> None:
    assert account["agreement"]["num_other_rounds"] == 0 and account["agreement"]["largest_difference"] == 0
    decoded, offline = account["decoded"], account["offline"]
    assert offline["by_depth"] == decoded["by_depth"] and offline["by_category"] == decoded["by_category"]
    rounds = sum(entry["rounds"] for entry in offline["by_position"].values())
    assert rounds == decoded["all"]["rounds"] > 0


def test_tiny(capsys, tmp_path, tiny_model_dir, tiny_draft_dir):
    target = tiny_model_dir("llama")
    argv = [str(target), "--draft", str(tiny_draft_dir(target)), "--kv-cache-tokens", "2048"]
    found = evaluate(capsys, tmp_path, *argv, "--shape", "3/2/6", "--num-prompts", "6", "--max-tokens", "40")
    same_rounds(found["3/2/6"])
    assert found["3/2/6"]["decoded"]["num_answers"] == 6
    assert found["3/2/6"]["decoded"]["all"]["accept_length"] > 1.1
    recall = found["3/2/6"]["offline"]["recall"]
    assert 0.5 < recall["all"] <= 1 and len(recall["by_step"]) == 3
    assert found["3/2/6"]["decoded"]["recall"] is None  # only the offline account sees the draft's rows


@pytest.mark.gpu
def test_tiny_on_a_gpu(capsys, tmp_path, tiny_model_dir, tiny_draft_dir):
    """Here kernels of other shapes round otherwise, so both counts need only be near; the exit code says so."""
    target = tiny_model_dir("llama")
    argv = [str(target), "--draft", str(tiny_draft_dir(target)), "--kv-cache-tokens", "4096"]
    argv += ["--shape", "3/2/6", "--shape", "8/4/16", "--num-prompts", "12", "--max-tokens", "60"]
    found = evaluate(capsys, tmp_path, *argv, "--max-num-seqs", "8", device="cuda")
    assert all(account["offline"]["all"]["rounds"] > 0 for account in found.values())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_demo(capsys, tmp_path):
    shapes = ("8/4/16", "3/1/4")
    options = [word for shape in shapes for word in ("--shape", shape)]
    found = evaluate(capsys, tmp_path, "demo", *options, "--num-prompts", "4", "--max-tokens", "96")
    assert list(found) == list(shapes)
    for account in found.values():
        same_rounds(account)
    assert found["8/4/16"]["decoded"]["all"]["accept_length"] > 2.0
    assert found["8/4/16"]["offline"]["recall"]["all"] > 0.95
