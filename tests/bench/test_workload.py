"""Datasets in all their forms, and the test for loops."""

import gzip
import json
import random
from dataclasses import replace

import pytest

from tokenspeed.bench.acceptance import (
    Record,
    agreement,
    by_depth,
    loops,
    per_depth,
    recall,
    summary,
    table,
)
from tokenspeed.bench.workload import load_prompts
from tokenspeed.errors import ConfigError


def test_builtin():
    prompts = load_prompts("builtin")
    assert len(prompts) == 24 and len({p.messages[0]["content"] for p in prompts}) == 24
    assert {"writing", "coding", "math"} <= {p.category for p in prompts}
    assert len({p.category for p in load_prompts("builtin", 6)}) == 6  # taken evenly
    assert len(load_prompts("builtin", 50)) == 50


def test_file_forms(tmp_path):
    rows = [
        {"prompt": "a", "category": "x"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}], "set": "y"},
        {"turns": ["c", "c2"], "category": "writing", "question_id": 81},
        {"question": "d", "answer": "4"},
    ]
    text = "\n".join(map(json.dumps, rows)) + "\n\n"
    path, packed = tmp_path / "p.jsonl", tmp_path / "p.jsonl.gz"
    path.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    found = load_prompts(str(path))
    assert [(p.category, p.messages[-1]["content"]) for p in found] == [
        ("x", "a"), ("y", "b"), ("writing", "c"), ("all", "d"),
    ]  # fmt: skip
    assert len(found[1].messages) == 2
    assert load_prompts(str(packed)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no prompts"),
        ("{", "line 1 is not valid JSON"),
        ('{"prompt": "a"}\n[1]', "line 2 must be"),
        ('{"prompt": 3}', "line 1 must be"),
        ('{"messages": []}', "line 1 must be"),
        ('{"messages": ["x"]}', "line 1 must be"),
    ],
)
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_prompts(str(path))


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        load_prompts(str(tmp_path / "none.jsonl"))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="can't be read"):
        load_prompts(str(tmp_path / "b.jsonl"))
    (tmp_path / "b.gz").write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match="can't be read"):
        load_prompts(str(tmp_path / "b.gz"))


def counted(tokens):
    """The definition, word for word."""
    tail = tokens[-128:]
    grams = [tuple(tail[i : i + 8]) for i in range(len(tail) - 7)]
    return any(grams.count(gram) >= 4 for gram in grams)


def test_loops_by_the_definition():
    phrase, other = list(range(8)), list(range(100, 400))
    assert loops(phrase * 4) and not loops(phrase * 3) and not loops(other)
    assert loops([5] * 11) and not loops([5] * 10)  # overlapping 8-grams: 11 - 7 = 4
    assert not loops([]) and not loops([1] * 7)
    assert not loops(phrase * 4 + other[:128])  # over 128 tokens ago
    assert loops(other + phrase * 4)
    assert loops(phrase + other[:32] + phrase + other[40:60] + phrase + other[70:80] + phrase)
    draw = random.Random(0)
    for _ in range(300):
        tokens = [draw.randrange(2) for _ in range(draw.randrange(160))]
        block = tokens[: draw.randrange(1, 40)] * draw.randrange(1, 8)
        assert loops(tokens) == counted(tokens) and loops(block) == counted(block)


PROMPT = tuple(range(10))
RECORDS = [
    Record("math", PROMPT, tuple(range(20)), 2, 30, 3, (2, 1), ((10, 1), (255, 2))),
    Record("code", PROMPT * 30, tuple(range(100)), 48, 720, 77, (38, 25, 12, 2), ((300, 0), (9000, 4))),
    Record("code", PROMPT, tuple(range(8)) * 8, 4, 60, 28, (4, 4, 4, 4, 4, 4, 4), ((10, 7),)),  # loops
]


def test_summary():
    found = summary(RECORDS)
    assert (found["num_answers"], found["num_looping"]) == (3, 1)
    assert found["all"]["accept_length"] == pytest.approx(1 + 108 / 54)
    assert found["all"]["accept_length_no_loops"] == pytest.approx(1 + 80 / 50)
    assert list(found["by_category"]) == ["code", "math"]
    assert found["by_category"]["code"]["accept_length"] == pytest.approx(1 + 105 / 52)
    assert found["by_category"]["code"]["accept_length_no_loops"] == pytest.approx(1 + 77 / 48)
    assert found["by_depth"]["all"][0] == pytest.approx(44 / 54)
    assert found["by_depth"]["no_loops"] == pytest.approx([40 / 50, 26 / 50, 12 / 50, 2 / 50])
    assert sum(by_depth(RECORDS)) == pytest.approx(found["all"]["accept_length"] - 1)
    text = table({"decoded": found})
    assert "3.000" in text and "2.600" in text and "position 0-256" in text and "1 of 3 answers loop" in text


def test_positions_are_those_of_the_rounds():
    found = summary(RECORDS)["by_position"]
    assert list(found) == ["0-256", "256-1024", "8192-"]
    assert (found["0-256"]["rounds"], found["0-256"]["accept_length"]) == (3, pytest.approx(1 + 10 / 3))
    assert found["0-256"]["accept_length_no_loops"] == pytest.approx(1 + 3 / 2)
    assert found["8192-"]["accept_length"] == 5 and found["256-1024"]["accept_length"] == 1


def test_counts_by_depth():
    assert per_depth([0, 2, 1, 2]) == (3, 2) and per_depth([]) == () and per_depth([0, 0]) == ()


def test_agreement():
    assert agreement(RECORDS, RECORDS)["num_other_rounds"] == 0
    other = [replace(RECORDS[0], accepted=4, per_depth=(2, 2)), *RECORDS[1:]]
    found = agreement(RECORDS, other)
    assert (found["num_answers"], found["num_other_rounds"], found["where"]) == (3, 1, "category math")
    assert found["largest_difference"] == pytest.approx(0.5)
    assert found["relative"] == pytest.approx(1 / 54 / 3)


def test_two_ways_to_count_stand_side_by_side():
    decoded = summary([replace(r, spans=()) for r in RECORDS])
    lines = table({"decoded": decoded, "offline": summary(RECORDS)}).splitlines()
    (position,) = (line for line in lines if line.startswith("position 256"))
    assert position.split() == ["position", "256-1024", "-", "-", "1.000", "1.000"]
    (code,) = (line for line in lines if line.startswith("code"))
    assert code.split() == ["code", "2", "50%", "3.019", "2.604", "3.019", "2.604"]


def test_recall():
    """Sums of rows, not means of shares; accounts that did not look, or have no candidate head, add nothing."""
    looked = [
        replace(RECORDS[0], recall=((8, 8), (4, 3))),
        replace(RECORDS[1], recall=((12, 9),)),
        RECORDS[2],
    ]
    found = recall(looked)
    assert found == {"rows": 24, "all": 20 / 24, "by_step": [17 / 20, 3 / 4]}
    assert recall(RECORDS) is None and recall([replace(RECORDS[0], recall=((0, 0),))]) is None
    lines = table({"decoded": summary(RECORDS), "offline": summary(looked)}).splitlines()
    (line,) = (line for line in lines if "candidates" in line)
    assert line.endswith("full head's best token: 83.33% (by step: 85.0% 75.0%)")


def test_summary_without_rounds():
    found = summary([Record("a", (1,), (1, 2), 0, 0, 0, ())])
    assert found["all"]["accept_length"] is None and found["by_depth"]["all"] == []
    assert "-" in table({"decoded": found}) and summary([])["num_answers"] == 0
