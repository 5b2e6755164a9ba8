"""Answers on disk: what was written comes back, an interrupted run goes on, damage is told in one line."""

import json
import os
import resource

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tokenspeed.errors import ConfigError
from tokenspeed.train.answers import INDEX, AnswerWriter, read_answers

VOCAB = 50


def text(number: int, length: int = 9) -> np.ndarray:
    return (np.arange(length) * 7 + number).astype(np.int32) % VOCAB


def write(path, numbers, **options) -> AnswerWriter:
    writer = AnswerWriter(path, "tiny", VOCAB, **options)
    for i in numbers:
        writer.add(text(i, 9 + i % 3), 4, (0.0, 0.7)[i % 2], i % 5 == 0, f"source {i % 2}", "MIT")
    writer.save(3)
    return writer


def index_of(path) -> dict:
    return json.loads((path / INDEX).read_text())


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_what_was_written_comes_back(tmp_path):
    write(tmp_path / "out", range(30), shard_tokens=100)
    found = read_answers(tmp_path / "out")
    assert [a.num_prompt for a in found] == [4] * 30
    assert all(np.array_equal(a.tokens, text(i, 9 + i % 3)) for i, a in enumerate(found))
    index = index_of(tmp_path / "out")
    assert index == {
        "format": 1,
        "model": "tiny",
        "vocab_size": VOCAB,
        "num_answers": 30,
        "num_tokens": 300,
        "shards": ["answers-00000.safetensors", "answers-00001.safetensors", "answers-00002.safetensors"],
        "sources": {
            "source 0": {"prompts": 15, "licence": "MIT"},
            "source 1": {"prompts": 15, "licence": "MIT"},
        },
        "temperatures": {"0": 15, "0.7": 15},
        "looping": {"0": 3, "0.7": 3},
        "dropped_for_ngrams": 3,
    }
    assert sorted(os.listdir(tmp_path / "out")) == sorted([INDEX, *index["shards"]])  # nothing half written


def test_goes_on_where_it_ended(tmp_path):
    write(tmp_path, range(10), shard_tokens=60)
    writer = AnswerWriter(tmp_path, "tiny", VOCAB)
    assert (
        writer.has(text(2)[:4], 0.0)
        and not writer.has(text(2)[:4], 0.7)
        and not writer.has(text(11)[:4], 0.7)
    )
    assert writer.num_prompts_of("source 0") == 5 and writer.num_prompts_of("other") == 0
    writer.add(text(11), 4, 0.7, False, "source 1")
    writer.add(text(2, 12), 4, 0.7, False, "source 0")  # a second answer to a known prompt
    writer.save()
    new = [answer.tokens.tolist() for answer in read_answers(tmp_path)[10:]]
    assert new == [text(11).tolist(), text(2, 12).tolist()]
    index = index_of(tmp_path)
    assert [source["prompts"] for source in index["sources"].values()] == [5, 6]
    assert index["temperatures"] == {"0": 5, "0.7": 7} and index["dropped_for_ngrams"] == 3


def test_a_shard_that_was_never_named_is_replaced(tmp_path):
    """A run that is cut off between the shard and the index."""
    write(tmp_path, range(3))
    (tmp_path / "answers-00001.safetensors").write_bytes(b"half")
    write(tmp_path, range(10, 12))
    assert len(read_answers(tmp_path)) == 5


@pytest.mark.parametrize(("model", "vocab"), [("other", VOCAB), ("tiny", 49)])
def test_answers_of_another_model_are_left_alone(tmp_path, model, vocab):
    write(tmp_path, range(3))
    with pytest.raises(ConfigError, match="holds answers of tiny") as error:
        AnswerWriter(tmp_path, model, vocab)
    assert "--output" in one_line(error)


def test_disk_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written") as error:
        AnswerWriter(tmp_path / "file" / "out", "tiny", VOCAB)
    one_line(error)
    with pytest.raises(ConfigError, match="can't be written"):
        AnswerWriter(tmp_path / "file", "tiny", VOCAB)


def test_read_only_disk(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ConfigError, match="Read-only file system") as error:
        AnswerWriter(tmp_path, "tiny", VOCAB)
    one_line(error)


def test_full_disk_keeps_what_was_saved(tmp_path):
    writer = write(tmp_path, range(5))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer.add(np.ones(200_000, dtype=np.int32), 4, 0.0, False, "s")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(ConfigError, match="can't be written") as error:
            writer.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    one_line(error)
    assert len(read_answers(tmp_path)) == 5


def change(name: str, value):
    def damage(path):
        index = index_of(path)
        index[name] = value
        (path / INDEX).write_text(json.dumps(index))

    return damage


def change_tensor(name: str, edit):
    def damage(path):
        file = path / "answers-00000.safetensors"
        tensors = load_file(file)
        tensors[name] = edit(tensors[name])
        save_file(tensors, file)

    return damage


def remove_tensor(path):
    file = path / "answers-00000.safetensors"
    tensors = load_file(file)
    del tensors["num_prompt"]
    save_file(tensors, file)


def cut(path):
    file = path / "answers-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


DAMAGE = {
    "no index": (lambda path: (path / INDEX).unlink(), "has no data.json"),
    "index no JSON": (lambda path: (path / INDEX).write_text("{"), "can't be read"),
    "index no object": (lambda path: (path / INDEX).write_text("[1]"), "not of format 1"),
    "format": (change("format", 2), "not of format 1"),
    "vocab_size": (change("vocab_size", "50"), "vocab_size is missing or of a wrong type"),
    "sources": (change("sources", None), "sources is missing"),
    "shards": (change("shards", ["../x"]), "must be file names"),
    "count": (change("num_answers", 7), "names 7 answers"),
    "tokens counted": (change("num_tokens", 7), "of 7 tokens"),
    "vocabulary": (change("vocab_size", 20), "a token is not in the vocabulary"),
    "no shard": (lambda path: (path / "answers-00000.safetensors").unlink(), "is missing"),
    "cut shard": (cut, "can't be read"),
    "no tensor": (remove_tensor, "num_prompt is missing"),
    "type": (change_tensor("tokens", lambda t: t.astype(np.int64)), "tokens is missing or of a wrong type"),
    "offsets": (change_tensor("offsets", lambda t: t[::-1].copy()), "offsets do not fit"),
    "lengths": (change_tensor("offsets", lambda t: t[:-1]), "different lengths"),
    "prompt": (change_tensor("num_prompt", lambda t: t * 0), "a prompt is empty"),
    "no answer": (change_tensor("num_prompt", lambda t: t + 20), "as long as its text"),
    "negative": (change_tensor("tokens", lambda t: -t), "not in the vocabulary"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told(tmp_path, kind):
    damage, message = DAMAGE[kind]
    write(tmp_path, range(5))
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        read_answers(tmp_path)
    one_line(error)


def test_no_answers(tmp_path):
    AnswerWriter(tmp_path, "tiny", VOCAB).save()
    with pytest.raises(ConfigError, match="holds no answers"):
        read_answers(tmp_path)
