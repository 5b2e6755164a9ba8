"""Whole runs on a CPU: learning, resuming, interruption, export, and mistakes."""

import errno
import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from train.train_cases import random_answers, write_answers

from tokenspeed.cli import main
from tokenspeed.cli.draft_train import _options, _parser
from tokenspeed.config import Config, Shape
from tokenspeed.errors import ConfigError
from tokenspeed.launch import resolve
from tokenspeed.models.config import load_model_config
from tokenspeed.spec.eagle4.config import check_draft
from tokenspeed.train.answers import AnswerWriter, read_answers
from tokenspeed.train.checkpoint import load_state, save_state
from tokenspeed.train.run import DRAFT, HEAD, LOG, PLOT, read_log
from tokenspeed.train.trainer import Budget, schedule
from tokenspeed.worker.replay import pool_tokens, replay
from tokenspeed.worker.setup import build

SMALL = ["--unroll", "3", "--ffn", "64", "--window", "24", "--rank", "24", "--num-candidates", "16"]
SMALL += ["--max-length", "64", "--tokens-per-step", "256", "--device", "cpu", "--log-every", "20"]


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir) -> Path:
    return tiny_model_dir()


@pytest.fixture(scope="module")
def data_dir(model_dir, tmp_path_factory) -> Path:
    return write_answers(tmp_path_factory.mktemp("answers"), model_dir)


@pytest.fixture(scope="module")
def trained(model_dir, data_dir, tmp_path_factory) -> Path:
    """A run of 200 steps, and 60 of the head."""
    output = tmp_path_factory.mktemp("runs") / "run"
    assert command(model_dir, data_dir, output, "--steps", "200", "--head-steps", "60") == 0
    return output


def command(model_dir: Path, data_dir: Path, output: Path, *more: str) -> int:
    words = ["draft", "train", str(model_dir), "--data", str(data_dir), "--output", str(output)]
    return main([*words, *SMALL, *more])


def test_training_raises_agreement_at_every_step_of_the_unroll(trained):
    records = [r for r in read_log(trained / LOG) if r["stage"] == "draft"]
    assert [r["step"] for r in records] == [1, *range(21, 200, 20), 200]
    first, last = records[0], records[-1]
    assert last["loss"] < 0.7 * first["loss"]
    for before, after in zip(first["top1"], last["top1"], strict=True):
        assert after > before + 0.2
    assert len(first["top1"]) == 3


def test_the_head_learns_the_full_heads_distribution(trained):
    records = [r for r in read_log(trained / LOG) if r["stage"] == "candidate head"]
    # The first of all is left out: it judges the very batch that the factors were fitted to.
    assert [r["step"] for r in records] == [1, 21, 41, 60]
    assert records[-1]["loss"] < 0.7 * records[1]["loss"]
    assert sum(records[-1]["recall"]) > sum(records[1]["recall"])
    assert (trained / PLOT).read_bytes().startswith(b"\x89PNG")


def test_the_export_is_a_draft_that_accepts_more_than_an_untrained_one(
    trained, model_dir, data_dir, tmp_path, capsys
):
    assert command(model_dir, data_dir, tmp_path / "untrained", "--steps", "1", "--head-steps", "60") == 0
    lengths = []
    for run in (tmp_path / "untrained", trained):
        draft = tmp_path / f"{run.name}-draft"
        assert main(["draft", "export", str(run), "--output", str(draft)]) == 0
        said = capsys.readouterr()
        assert "a candidate head of rank 24" in said.out and "not come to its end" not in said.err
        config = check_draft(draft, "eagle4", load_model_config(model_dir), model_dir, 4)
        assert (config.rank, config.num_candidates, config.window) == (24, 16, 24)
        lengths.append(accept_length(model_dir, draft, data_dir))
    assert lengths[1] > lengths[0] + 0.3
    told = json.loads((tmp_path / "run-draft" / "training.json").read_text())
    assert told["finished"] and told["stages"]["draft"]["step"] == 200
    assert told["options"]["lr"] == 8e-3 and told["data"]["num_answers"] == 64


@pytest.mark.parametrize("wider", [[], ["--ffn", "80"]])
def test_a_run_that_starts_from_a_draft_begins_where_that_one_ended(
    trained, model_dir, data_dir, tmp_path, wider
):
    assert main(["draft", "export", str(trained), "--output", str(tmp_path / "draft")]) == 0
    more = ["--start-from", str(tmp_path / "draft"), "--steps", "1", "--head-steps", "1", *wider]
    assert command(model_dir, data_dir, tmp_path / "more", *more) == 0
    first, last = {}, {}
    for stage, kind in (("draft", "top1"), ("candidate head", "recall")):
        last[stage] = next(r for r in reversed(read_log(trained / LOG)) if r["stage"] == stage)[kind]
        first[stage] = next(r for r in read_log(tmp_path / "more" / LOG) if r["stage"] == stage)[kind]
        for before, after in zip(last[stage], first[stage], strict=True):
            assert after > before - 0.15, stage  # one batch against many; untrained: test above, 0.2 lower


def test_a_start_of_another_shape_is_refused(trained, model_dir, data_dir, tmp_path, capsys):
    assert main(["draft", "export", str(trained), "--output", str(tmp_path / "draft")]) == 0
    base = ["draft", "train", str(model_dir), "--data", str(data_dir), "--output", str(tmp_path / "more")]
    base += [*SMALL, "--steps", "1", "--head-steps", "1"]
    narrower = [*base, "--start-from", str(tmp_path / "draft"), "--ffn", "63"]
    assert "has intermediate_size 64, this run 63" in fails(capsys, narrower)
    assert "has no config.json" in fails(capsys, [*base, "--start-from", str(tmp_path)])
    assert not (tmp_path / "more").exists()


def accept_length(model_dir: Path, draft: Path, data_dir: Path) -> float:
    """Tokens a round over some of the training answers, as `draft eval` counts offline."""
    config = Config(
        model=str(model_dir), spec="eagle4", draft=str(draft), spec_shape="3/2/6", device="cpu",
        dtype="float32", max_num_seqs=1, kv_cache_tokens=pool_tokens(64, 16),
    )  # fmt: skip
    engine = build(resolve(config, lambda *a: None), lambda *a: None).runner.engine
    rounds = []
    for answer in read_answers(data_dir)[:8]:
        text = answer.tokens.tolist()
        rounds += replay(engine, text[: answer.num_prompt], text[answer.num_prompt :], Shape(3, 2, 6))
    return 1 + sum(r.accepted for r in rounds) / len(rounds)


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(model_dir, data_dir, tmp_path, monkeypatch):
    options = ("--steps", "30", "--head-steps", "20")
    assert command(model_dir, data_dir, tmp_path / "whole", *options) == 0
    from tokenspeed.train.head import HeadStage
    from tokenspeed.train.stage1 import DraftStage

    for stage, at in ((DraftStage, 11), (HeadStage, 7)):
        count, step = [0], stage.step

        def interrupted(self, inputs, count=count, at=at, step=step):
            count[0] += 1
            if count[0] == at:
                os.kill(os.getpid(), signal.SIGINT)
            step(self, inputs)

        with monkeypatch.context() as patch:
            patch.setattr(stage, "step", interrupted)
            resume = ["--resume"] if (tmp_path / "cut").exists() else []
            assert command(model_dir, data_dir, tmp_path / "cut", *options, *resume) == 130
    assert load_state(tmp_path / "cut" / DRAFT)[1]["finished"]
    assert load_state(tmp_path / "cut" / HEAD)[1]["step"] == 7
    assert command(model_dir, data_dir, tmp_path / "cut", *options, "--resume") == 0
    for name in (DRAFT, HEAD):
        whole, cut = (load_state(tmp_path / run / name) for run in ("whole", "cut"))
        assert whole[0].keys() == cut[0].keys() and len(whole[0]) > 5
        assert all(torch.equal(whole[0][key], cut[0][key]) for key in whole[0])
        assert whole[1]["position"] == cut[1]["position"]
    steps = [(r["stage"], r["step"]) for r in read_log(tmp_path / "cut" / LOG)]
    assert len(steps) == len(set(steps)) and steps[-1] == ("candidate head", 20)
    before = (tmp_path / "cut" / DRAFT).read_bytes()
    assert command(model_dir, data_dir, tmp_path / "cut", *options, "--resume") == 0  # nothing is left to do
    assert (tmp_path / "cut" / DRAFT).read_bytes() == before


def test_an_interrupted_run_says_how_to_go_on_and_can_be_exported(model_dir, data_dir, tmp_path, capsys):
    timer = threading.Timer(3.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    assert command(model_dir, data_dir, tmp_path / "run", "--minutes", "5") == 130
    timer.join()
    assert "Go on with the same command and --resume" in capsys.readouterr().err
    assert main(["draft", "export", str(tmp_path / "run"), "--output", str(tmp_path / "draft")]) == 0
    said = capsys.readouterr()
    assert "no candidate head" in said.out and "has not come to its end" in said.err
    assert not json.loads((tmp_path / "draft" / "training.json").read_text())["finished"]


@pytest.mark.parametrize(("kind", "tied"), [("qwen2", True), ("qwen3", False)])
def test_other_targets(tiny_model_dir, tmp_path, kind, tied):
    """Biases, head norms and a shared embedding are the target's own business."""
    model_dir = tiny_model_dir(kind, tie_word_embeddings=tied)
    vocab = load_model_config(model_dir).vocab_size
    writer = AnswerWriter(tmp_path / "answers", "tiny", vocab)
    for answer in random_answers(20, vocab, 60):
        writer.add(answer.tokens, answer.num_prompt, 0.0, False, "random")
    writer.save()
    options = ("--steps", "2", "--head-steps", "2", "--aux-layers", "0,1,3")
    assert command(model_dir, tmp_path / "answers", tmp_path / "run", *options) == 0
    assert main(["draft", "export", str(tmp_path / "run"), "--output", str(tmp_path / "draft")]) == 0
    config = check_draft(tmp_path / "draft", "eagle4", load_model_config(model_dir), model_dir, 4)
    assert config.aux_layers == (0, 1, 3)


def test_budgets_and_schedule():
    assert [Budget(steps=10).fraction(s, 99.0) for s in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert Budget(seconds=60.0).fraction(7, 30.0) == 0.5
    rates = [schedule(i / 1000) for i in range(1001)]
    assert max(rates) == rates[30] == 1.0 and rates[0] == 0.02
    assert rates[15] == 0.5 and abs(rates[515] - 0.51) < 1e-3
    assert rates[-1] == pytest.approx(0.02) and rates[30:] == sorted(rates[30:], reverse=True)


def fails(capsys, argv: list[str]) -> str:
    assert main(argv) == 2
    said = capsys.readouterr().err.strip().splitlines()
    return next(line for line in said if line.startswith("tokenspeed: error: "))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--steps", "5", "--minutes", "1"], "give one of --minutes and --steps"),
        (["--head-steps", "5", "--head-seconds", "1"], "give one of --head-seconds and --head-steps"),
        (["--unroll", "17"], "--unroll must be from 1 to 16, not 17"),
        (["--lr", "-1"], "--lr must be from 1e-06 to 1.0"),
        (["--max-length", "60"], "--max-length must be a multiple of 8"),
        (["--tokens-per-step", "40"], "--tokens-per-step 40 holds no text of --max-length 64"),
        (["--max-length", "2048", "--tokens-per-step", "4096"], "is more than the 1024 positions"),
        (["--aux-layers", "0,9"], "--aux-layers names 9"),
        (["--aux-layers", "a"], "must be a list like 4,18,28"),
        (["--rank", "65"], "--rank 65 is more than the hidden size 64"),
        (["--num-candidates", "5000"], "--num-candidates 5000 is more than the vocabulary"),
        (["--data", "nowhere"], "there is no directory nowhere"),
        (["--resume"], "holds no run to go on with"),
        (["--step", "5"], "unknown option --step; did you mean --steps?"),
    ],
)
def test_options_out_of_place(model_dir, data_dir, tmp_path, capsys, more, words):
    argv = ["draft", "train", str(model_dir), "--data", str(data_dir), "--output", str(tmp_path / "run")]
    assert words in fails(capsys, [*argv, *SMALL, *more])
    assert not (tmp_path / "run").exists()


def test_directories_out_of_place(trained, model_dir, data_dir, tmp_path, capsys):
    base = ["draft", "train", str(model_dir), *SMALL, "--steps", "200", "--head-steps", "60"]
    data = ["--data", str(data_dir)]
    assert "holds a run; go on with it with --resume" in fails(
        capsys, [*base, *data, "--output", str(trained)]
    )
    other = [*base, *data, "--output", str(trained), "--resume", "--seed", "3"]
    assert "is a run with --seed 0, not 3" in fails(capsys, other)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    assert "is not empty" in fails(capsys, [*base, *data, "--output", str(tmp_path / "full")])
    (tmp_path / "none").mkdir()
    missing = [*base, "--data", str(tmp_path / "none"), "--output", str(tmp_path / "r")]
    assert "has no data.json" in fails(capsys, missing)
    writer = AnswerWriter(tmp_path / "alien", "other", 5000)
    for answer in random_answers(3, 5000, 30):
        writer.add(answer.tokens, answer.num_prompt, 0.0, False, "random")
    writer.save()
    alien = [*base, "--data", str(tmp_path / "alien"), "--output", str(tmp_path / "r")]
    assert "was made with a vocabulary of 5000 tokens" in fails(capsys, alien)
    export = ["draft", "export", str(tmp_path / "none"), "--output", str(tmp_path / "d")]
    assert "holds no training run" in fails(capsys, export)
    export = ["draft", "export", str(trained), "--output", str(tmp_path / "full")]
    assert "is not empty" in fails(capsys, export)


def test_a_full_disk_and_a_damaged_state(tmp_path, monkeypatch):
    path = tmp_path / "state.safetensors"
    save_state(path, {"a": torch.ones(3)}, {"step": 1})

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="is full; make room and go on with --resume"):
            save_state(path, {"a": torch.zeros(3)}, {"step": 2})
    assert load_state(path)[1] == {"step": 1} and [p.name for p in tmp_path.iterdir()] == [path.name]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ConfigError, match="damaged"):
        load_state(path)


def test_a_loss_that_is_no_number_ends_the_run(model_dir, data_dir, tmp_path, capsys):
    argv = ["draft", "train", str(model_dir), "--data", str(data_dir), "--output", str(tmp_path / "run")]
    from tokenspeed.train.stage1 import DraftStage

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftStage, "report", lambda self: {"loss": float("nan"), "top1": []})
        assert "train anew with a smaller --lr" in fails(capsys, [*argv, *SMALL, "--steps", "3"])


def test_defaults_are_the_recipe():
    options = _options(_parser().parse(["m", "--data", "d", "--output", "o"]))
    assert (options.minutes, options.steps, options.head_seconds) == (10.0, None, 60.0)
    assert (options.unroll, options.ffn, options.window, options.lr) == (7, 2048, 512, 8e-3)
    assert (options.tau, options.lk, options.decay, options.tokens_per_step) == (0.6, 1.0, 0.8, 24576)
