"""Calibrations in files: what is kept, and what a file that can't be used leads to."""

import json
import logging

import msgspec
import pytest

from tokenspeed.config import Shape
from tokenspeed.errors import ConfigError
from tokenspeed.spec.calibration import Calibration, decode, encode, load, path_of, save

KEY = {"device": "a GPU", "dtype": "bfloat16", "tokenspeed": "1"}
FOUND = Calibration(
    times=[(1, None, 4000.5), (1, (8, 4, 16), 5200.0), (8, None, 4400.0)],
    per_token=[(None, 0.25)],
    priors=[((2, 1, 3), [0.75, 0.5])],
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path))


def test_what_is_saved_is_found_by_its_key():
    assert load(KEY) is None
    path = save(KEY, FOUND)
    assert load(dict(reversed(KEY.items()))) == FOUND == decode(encode(FOUND))
    assert load({**KEY, "device": "another GPU"}) is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert FOUND.ladder() == {1: (Shape(8, 4, 16),), 8: ()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.update(format=99), "format 99"),
        (lambda raw: raw["key"].update(device="another"), "another device"),
        (lambda raw: raw["calibration"].update(times=[]), "times"),
        (lambda raw: raw["calibration"]["times"].__setitem__(0, [1, None, -4.0]), "positive"),
        (lambda raw: raw["calibration"]["times"].pop(0), "plain"),
        (lambda raw: raw["calibration"]["times"].__setitem__(0, [1, None, "fast"]), "float"),
        (lambda raw: raw["calibration"].update(priors=[[[2, 1, 3], [0.5]]]), "acceptance"),
        (lambda raw: raw["calibration"].update(priors=[[[2, 1, 3], [0.5, 1.5]]]), "acceptance"),
        (lambda raw: raw["calibration"].update(more=1), "more"),
        (lambda raw: raw.pop("calibration"), "calibration"),
    ],
)
def test_a_file_that_can_not_be_used_is_named_and_left_out(change, words, caplog):
    path = save(KEY, FOUND)
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with caplog.at_level(logging.WARNING):
        assert load(KEY) is None
    (line,) = caplog.messages
    assert str(path) in line and words in line and "tokenspeed calibrate" in line


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00\xff", "null"])
def test_a_file_that_is_no_calibration(text, caplog):
    path = path_of(KEY)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert load(KEY) is None and str(path) in caplog.text


def test_a_place_that_can_not_be_written(tmp_path):
    (tmp_path / "calibration").write_text("in the way")
    with pytest.raises(ConfigError, match=r"can't be written.*TOKENSPEED_CACHE"):
        save(KEY, FOUND)


def test_infinite_times_are_none():
    with pytest.raises(ValueError):
        Calibration([(1, None, float("inf"))])
    with pytest.raises(msgspec.ValidationError):
        decode('{"times": [[1, null, 0.0]]}')
