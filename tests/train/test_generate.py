"""`tokenspeed draft data`: the engine's own answers, loops cut, n-grams kept out, runs that go on."""

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import InProcessEngine

from tokenspeed.bench.acceptance import loops
from tokenspeed.bench.workload import load_prompts
from tokenspeed.cli import main
from tokenspeed.config import Config
from tokenspeed.errors import ConfigError
from tokenspeed.launch import resolve
from tokenspeed.params import SamplingParams
from tokenspeed.tokenizer.encoder import Encoder
from tokenspeed.train import bulk
from tokenspeed.train.answers import INDEX, read_answers
from tokenspeed.train.bulk import BulkDecoder, Task
from tokenspeed.train.generate import _PromptMaker
from tokenspeed.train.loops import loop_end, looping
from tokenspeed.worker.setup import build

OPTIONS = {"device": "cpu", "dtype": "float32"}
FLAGS = ["--device", "cpu", "--dtype", "float32"]


def prompts_file(path: Path, texts, **fields) -> Path:
    rows = [{"messages": [{"role": "user", "content": text}], **fields} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def index_of(path: Path) -> dict:
    return json.loads((path / INDEX).read_text())


@pytest.fixture
def model(tiny_model_dir) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture
def decoder(model):
    """decoder(**options) -> a BulkDecoder for texts of 96 tokens."""

    def make(**options) -> BulkDecoder:
        config = Config(model=str(model), max_model_len=96, **{**OPTIONS, "max_num_seqs": 5, **options})
        resolved = resolve(config, lambda *_: None)
        return BulkDecoder(
            build(resolved, lambda *_: None), 96, resolved.eos_token_ids, resolved.model.vocab_size
        )

    return make


def tasks_of(count: int, rng: random.Random) -> list[Task]:
    """Prompts of 1 to 30 tokens and answers of 1 to 64, at all temperatures."""
    return [
        Task(
            np.array([rng.randrange(3, 300) for _ in range(rng.randint(1, 30))], dtype=np.int32),
            rng.choice((0.0, 0.7, 1.0)),
            rng.choice((1, 2, 15, 16, 17, 33, 64)),
            rng.getrandbits(40),
            i,
        )
        for i in range(count)
    ]


# ---- many at once


def test_answers_are_those_of_the_scheduled_engine(model, decoder):
    """More tasks than slots, prompts in several chunks; every answer the one that the engine gives, up to its
    loop."""
    tasks = tasks_of(60, random.Random(1))
    engine = InProcessEngine(model, max_num_seqs=4, max_model_len=96)
    params = [SamplingParams(temperature=t.temperature, max_tokens=t.max_tokens, seed=t.seed) for t in tasks]
    wanted = engine.generate([task.ids.tolist() for task in tasks], params)
    found = {task.source: answer for task, answer in decoder(max_num_batched_tokens=64).run(tasks)}
    assert sorted(found) == list(range(60))
    for i, answer in enumerate(wanted):
        end = loop_end(np.asarray(answer.token_ids))
        assert found[i][:end].tolist() == answer.token_ids[:end]
        assert end is not None or len(found[i]) == len(answer.token_ids)
    assert any(loop_end(np.asarray(answer.token_ids)) is None for answer in wanted)


def test_can_be_used_again_and_gives_nothing_to_nobody(decoder):
    one, tasks = decoder(), tasks_of(12, random.Random(2))
    first = {task.source: answer.tolist() for task, answer in one.run(tasks)}
    assert list(one.run([])) == []
    assert {task.source: answer.tolist() for task, answer in one.run(reversed(tasks))} == first


def test_deadline_leaves_what_there_is(decoder):
    tasks = tasks_of(40, random.Random(3))
    one = decoder()
    assert list(one.run(tasks, time.monotonic() - 1)) == []
    whole = {task.source: answer.tolist() for task, answer in one.run(tasks)}
    ticks = iter([0.0, 0.0, 2.0])
    monotonic = time.monotonic
    bulk.time.monotonic = lambda: next(ticks)
    try:
        found = {task.source: answer.tolist() for task, answer in one.run(tasks, 1.0)}
    finally:
        bulk.time.monotonic = monotonic
    assert 5 <= len(found) < 40
    assert all(answer and whole[i][: len(answer)] == answer for i, answer in found.items())
    assert any(len(answer) < len(whole[i]) for i, answer in found.items())
    assert {task.source: answer.tolist() for task, answer in one.run(tasks)} == whole  # and it goes on


def test_nan_gives_an_empty_answer(decoder):
    one = decoder()
    one.runner.engine.model.norm.weight.fill_(float("nan"))
    found = list(one.run(tasks_of(7, random.Random(4))))
    assert len(found) == 7 and all(len(answer) == 0 for _, answer in found)


def test_pool_too_small_for_one_text(decoder):
    with pytest.raises(ConfigError, match=r"KV pool holds 64 tokens.*--max-tokens"):
        decoder(kv_cache_tokens=64)
    assert decoder(kv_cache_tokens=96 * 3).num_slots == 3


# ---- loops


def random_text(rng: random.Random) -> np.ndarray:
    """Words from few letters, some of them repeated for a while."""
    out = [rng.randrange(400) for _ in range(rng.randint(0, 150))]
    if rng.random() < 0.7:
        unit = [rng.randrange(400) for _ in range(rng.randint(1, 50))]
        out += unit * rng.randint(1, 6) + [rng.randrange(400) for _ in range(rng.randint(0, 100))]
    return np.asarray(out, dtype=np.int32)


def test_loops_are_found_where_they_show():
    rng = random.Random(6)
    texts = [random_text(rng) for _ in range(300)]
    ends = []
    for text in texts:
        wanted = next((n for n in range(len(text) + 1) if loops(text[:n].tolist())), None)
        assert loop_end(text) == wanted
        window = np.concatenate([-1 - np.arange(128), text])[-128:]
        assert bool(looping(window[None])[0]) == loops(text.tolist())
        ends.append(wanted)
    assert 50 < sum(end is None for end in ends) < 250


# ---- the command


def test_whole_command(model, tmp_path, capsys):
    exam = "Tell me the names of all the rivers that flow through the old town of this country today"
    first = [f"What is {i} + {i}? Explain in {i} words." for i in range(20)]
    one = prompts_file(tmp_path / "a.jsonl", [*first, first[0], "word " * 400], source="sums", licence="MIT")
    two = prompts_file(tmp_path / "b.jsonl", ["Hello!", f"Please: {exam.upper()}."], category="chat")
    bad = prompts_file(tmp_path / "e.jsonl", [exam])
    out = tmp_path / "out"
    command = ["draft", "data", str(model), "--prompts", str(one), str(two), "--output", str(out), *FLAGS]
    command += [
        "--exclude",
        str(bad),
        "--max-tokens",
        "40",
        "--max-prompt-tokens",
        "120",
        "--max-num-seqs",
        "6",
    ]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "prompts left out: 1 ngrams, 1 too long, 1 repeated, 0 refused" in text
    index, answers = index_of(out), read_answers(out)
    assert index["num_answers"] == len(answers) == 21 and index["dropped_for_ngrams"] == 1
    assert index["sources"] == {
        "sums": {"prompts": 20, "licence": "MIT"},
        "chat": {"prompts": 1, "licence": None},
    }
    assert set(index["temperatures"]) == {"0", "0.7", "1"} and sum(index["temperatures"].values()) == 21
    encoder = Encoder.load(model)
    prompts = {encoder.decode(a.tokens[: a.num_prompt].tolist(), False) for a in answers}
    assert encoder.chat.render(b'[{"role": "user", "content": "Hello!"}]') in prompts
    assert all(len(a.tokens) - a.num_prompt <= 40 for a in answers)
    assert main(command) == 0 and ": 0 answers" in capsys.readouterr().out
    assert main([*command, "--answers", "2"]) == 0  # a second one each, at the next temperature
    assert index_of(out)["num_answers"] == 42
    assert sum(source["prompts"] for source in index_of(out)["sources"].values()) == 21


def test_loops_are_cut(model, tmp_path):
    file = prompts_file(tmp_path / "a.jsonl", [f"Say {i}" for i in range(12)])
    out = tmp_path / "out"
    command = ["draft", "data", str(model), "--prompts", str(file), "--output", str(out), *FLAGS]
    assert main([*command, "--max-tokens", "300", "--temperatures", "0"]) == 0
    index = index_of(out)
    assert index["temperatures"] == {"0": 12} and index["looping"]["0"] > 0
    cut = 0
    for answer in read_answers(out):
        ids = answer.tokens[answer.num_prompt :].tolist()
        assert not loops(ids[:-1])
        cut += loops(ids)
    assert cut == index["looping"]["0"]


def test_own_prompts(model, tmp_path):
    file = prompts_file(tmp_path / "a.jsonl", ["Hello!"])
    out = tmp_path / "out"
    command = ["draft", "data", str(model), "--prompts", str(file), "--output", str(out), *FLAGS]
    assert main([*command, "--max-tokens", "8", "--own", "60", "--seed", "3"]) == 0
    own = index_of(out)["sources"]["own"]
    assert own["licence"] == "written by the model" and 1 <= own["prompts"] < 60
    encoder = Encoder.load(model)
    user = encoder.chat.render(b'[{"role": "user", "content": "@"}]').partition("@")
    texts = [encoder.decode(a.tokens[: a.num_prompt].tolist(), False) for a in read_answers(out)]
    assert all(text.startswith(user[0]) and text.endswith(user[2]) for text in texts)


def test_time_limit(model, tmp_path, capsys):
    file = prompts_file(tmp_path / "a.jsonl", [f"Write about the number {i}" for i in range(3000)])
    out = tmp_path / "out"
    command = ["draft", "data", str(model), "--prompts", str(file), "--output", str(out), *FLAGS]
    started = time.monotonic()
    assert main([*command, "--seconds", "2", "--temperatures", "1"]) == 0
    assert time.monotonic() - started < 60
    assert 0 < index_of(out)["num_answers"] == len(read_answers(out)) < 3000


def test_prompts_that_no_template_takes_are_counted(model):
    resolved = resolve(Config(model=str(model), **OPTIONS), lambda *_: None)
    dropped = dict.fromkeys(("ngrams", "too_long", "repeated", "refused"), 0)
    maker = _PromptMaker(resolved, [], 100, dropped)
    prompts = [p for p in load_prompts("builtin") if p.category == "lists"][:2]
    odd = [
        type(prompts[0])("odd", ({"role": "user", "content": "\ud800"},)),
        type(prompts[0])("odd", ({"role": 7, "content": "x"},)),
    ]
    assert [found.source for found in maker.encode([*prompts, *odd])] == ["lists", "lists"]
    assert dropped["refused"] == 2


# ---- mistakes


def refused(capsys, *argv) -> str:
    assert main(["draft", "data", *map(str, argv)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_mistakes_in_the_command_line(model, tmp_path, capsys):
    file, out = prompts_file(tmp_path / "a.jsonl", ["Hello!"]), tmp_path / "out"
    good = [model, "--prompts", file, "--output", out, *FLAGS]
    assert "required: --prompts, --output" in refused(capsys, model)
    assert "leave the options of --spec out" in refused(capsys, *good, "--spec", "eagle4")
    assert "--answers must be one of 1, 2, not 3" in refused(capsys, *good, "--answers", "3")
    assert "--temperatures must be from 0.0 to 2.0" in refused(capsys, *good, "--temperatures", "0,3")
    assert "must be numbers" in refused(capsys, *good, "--temperatures", "0,x")
    assert "--seconds must be at least 1" in refused(capsys, *good, "--seconds", "0")
    assert "--own must be at least 0" in refused(capsys, *good, "--own", "-2")
    assert "leaves no room for a prompt" in refused(capsys, *good, "--max-tokens", "1024")
    assert not out.exists()


def test_mistakes_in_files(model, tmp_path, capsys):
    out = tmp_path / "out"

    def tried(prompts, *more) -> str:
        return refused(capsys, model, "--prompts", prompts, "--output", out, *FLAGS, *more)

    file = prompts_file(tmp_path / "a.jsonl", ["Hello!", "Bye"])
    assert "nothing.jsonl can't be read" in tried(tmp_path / "nothing.jsonl")
    assert "nothing.jsonl can't be read" in tried(file, "--exclude", tmp_path / "nothing.jsonl")
    (tmp_path / "b.jsonl").write_text(file.read_text() + '{"messages": [\n')
    assert "b.jsonl line 3 is not valid JSON" in tried(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n')
    assert "c.jsonl line 1 must be" in tried(tmp_path / "c.jsonl")
    (tmp_path / "d.jsonl").write_text("\n")
    assert "d.jsonl holds no prompts" in tried(tmp_path / "d.jsonl")
    assert not out.exists()
    assert "no prompt is left to answer (2 ngrams)" in tried(file, "--exclude", file)
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    assert "can't be written" in tried(file)


def test_directory_of_another_model(model, tiny_model_dir, tmp_path, capsys):
    file, out = prompts_file(tmp_path / "a.jsonl", ["Hello!"]), tmp_path / "out"
    assert main(["draft", "data", str(model), "--prompts", str(file), "--output", str(out), *FLAGS]) == 0
    other = tiny_model_dir("qwen2")
    capsys.readouterr()  # what was written meanwhile
    line = refused(capsys, other, "--prompts", file, "--output", out, *FLAGS)
    assert f"holds answers of {model.name}" in line and "--output" in line


def test_model_without_a_template(model, tmp_path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).write_bytes(file.read_bytes())
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    file = prompts_file(tmp_path / "a.jsonl", ["Hello!"])
    assert "has no chat template" in refused(
        capsys, bare, "--prompts", file, "--output", tmp_path / "out", *FLAGS
    )


@pytest.mark.gpu
def test_gpu_answers_are_those_of_the_scheduled_engine(model):
    """Graphs of a bucket above 256, slots that change hands."""
    options = {"device": "cuda", "dtype": "float32"}
    resolved = resolve(
        Config(model=str(model), max_model_len=96, max_num_seqs=400, **options), lambda *_: None
    )
    built = build(resolved, lambda *_: None)
    assert built.runner.graphs.buckets[-2:] == (384, 400)
    one = BulkDecoder(built, 96, resolved.eos_token_ids, resolved.model.vocab_size)
    tasks = [task for task in tasks_of(1000, random.Random(1)) if task.temperature == 0]
    found = {task.source: answer.tolist() for task, answer in one.run(tasks)}
    del one, built
    torch.cuda.empty_cache()
    engine = InProcessEngine(model, max_num_seqs=8, max_model_len=96, **options)
    wanted = engine.generate(
        [task.ids.tolist() for task in tasks],
        [SamplingParams(temperature=0.0, max_tokens=task.max_tokens) for task in tasks],
    )
    other = 0
    for task, answer in zip(tasks, wanted, strict=True):
        end = loop_end(np.asarray(answer.token_ids))
        other += found[task.source][:end] != answer.token_ids[:end]
    assert other <= len(tasks) // 100  # near-ties that another batch size rounds elsewhere
