"""The cache directory: made once whoever comes first, nothing half-made left, a full disk told."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
from gguf_files import write_gguf

from tokenspeed.errors import ConfigError
from tokenspeed.hub.cache import BUILDING, build_once, cache_root, file_key
from tokenspeed.hub.resolve import resolve_model

CONVERT = """
import sys
from pathlib import Path
from tokenspeed.hub.resolve import resolve_model
seen = []
def progress(text, done, total):
    if not seen:
        seen.append(1)
        print("converting", flush=True)
        if len(sys.argv) > 2:
            sys.stdin.readline()
print(resolve_model(sys.argv[1], None, progress), flush=True)
"""


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(source: Path, *hold: str) -> subprocess.Popen:
    command = [sys.executable, "-c", CONVERT, str(source), *hold]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if not p.name.endswith(".lock"))


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.delenv("TOKENSPEED_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "tokenspeed"
    monkeypatch.setenv("TOKENSPEED_CACHE", "~/elsewhere")
    assert cache_root() == tmp_path / "elsewhere"


def test_two_processes_convert_once(root, tmp_path):
    source = tmp_path / "m.gguf"
    write_gguf(source)
    first = start(source, "hold")
    assert first.stdout.readline() == "converting\n"
    second = start(source)
    time.sleep(1.0)  # it waits for the first one's lock
    assert second.poll() is None
    first.stdin.write("\n")
    first.stdin.flush()
    results = [process.communicate(timeout=30)[0] for process in (first, second)]
    assert first.returncode == second.returncode == 0
    assert results[0] == results[1] and "converting" not in results[1]
    assert names(root) == [Path(results[0].strip()).name]


def test_a_killed_conversion_leaves_nothing_for_good(root, tmp_path):
    source, other = tmp_path / "m.gguf", tmp_path / "other.gguf"
    write_gguf(source)
    shutil.copy(source, other)
    for path in (source, other):
        process = start(path, "hold")
        assert process.stdout.readline() == "converting\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (
        len([n for n in names(root) if n.endswith(BUILDING)]) == 1
    )  # the second start swept the first one's
    made = resolve_model(str(source), None, lambda *a: None)
    assert names(root) == [made.name]


def test_a_changed_file_is_converted_anew_and_a_damaged_result_too(root, tmp_path):
    source = tmp_path / "m.gguf"
    write_gguf(source)
    calls = []
    made = resolve_model(str(source), None, lambda *a: calls.append(a))
    count = len(calls)
    assert resolve_model(str(source), None, lambda *a: calls.append(a)) == made and len(calls) == count > 0
    weights = made / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 1)
    assert resolve_model(str(source), None, lambda *a: None) == made and weights.stat().st_size == size
    os.utime(source, (1, 1))
    assert resolve_model(str(source), None, lambda *a: None) != made
    assert file_key(source, 1) != file_key(source, 2)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full(root, code):
    def build(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise OSError(code, os.strerror(code))

    with pytest.raises(ConfigError, match=r"is full \(7 MiB needed\); set TOKENSPEED_CACHE") as caught:
        build_once("name", build, 7 * 2**20, lambda path: True)
    assert "\n" not in str(caught.value) and names(root) == []


def test_room_is_looked_for_first(root, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 5, 5 * 2**20))
    with pytest.raises(ConfigError, match=r"needs 480 MiB but has 5 MiB free; set TOKENSPEED_CACHE"):
        build_once("name", lambda path: pytest.fail("built"), 480 * 2**20, lambda path: True)
    assert names(root) == []


def test_other_failures_leave_nothing(root):
    for error in (KeyboardInterrupt(), ConfigError("no"), RuntimeError("bug")):

        def build(directory: Path, error: BaseException = error) -> None:
            (directory / "half").write_text("x")
            raise error

        with pytest.raises(type(error)):
            build_once("name", build, 1, lambda path: True)
        assert names(root) == []


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="can't be written"):
        build_once("name", lambda path: None, 1, lambda path: True)
