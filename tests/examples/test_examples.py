"""The programs in examples/ run as they stand, with tiny models and a fake server."""

import runpy
from pathlib import Path

import pytest
from bench.fake_openai import Behaviour, running

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """run("name", *argv) -> (exit code, what it printed)."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def start(name: str, *argv: object) -> tuple[int, str]:
        path = str(EXAMPLES / f"{name}.py")
        monkeypatch.setattr("sys.argv", [path, *map(str, argv)])
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(path, run_name="__main__")
        return exit.value.code, capsys.readouterr().out

    return start


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_offline_generation(run, tiny_model_dir, tiny_draft_dir, method):
    target = tiny_model_dir("llama")
    code, out = run(f"offline_{method}", target, tiny_draft_dir(target, method))
    lines = out.splitlines()
    assert code == 0 and len(lines) == 3
    assert all(line.partition(" -> ")[2].strip("'\"") for line in lines)


def test_acceptance(run, tiny_model_dir, tiny_draft_dir):
    target = tiny_model_dir("llama")
    code, out = run("acceptance", target, tiny_draft_dir(target))
    assert code == 0 and out.count("accept length") == 3 and "vowels" in out


def test_a_streamed_answer(run):
    with running(Behaviour()) as url:
        code, out = run("stream_chat", "Hello?", url)
    assert code == 0 and out.splitlines() == ["one two three four five six ", "(6 tokens)"]


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_without_arguments_the_usage_is_shown(run, name):
    assert run(name)[0] == 2
