"""The command: quick help, exit codes, one line for a user's mistake, torch only where needed."""

import importlib.util
import resource
import subprocess
import sys
import types

import pytest

import tokenspeed.cli
from tokenspeed.cli import main
from tokenspeed.config import Config
from tokenspeed.errors import ConfigError, EngineDead, RequestError


def run(*argv, python=()):
    command = [sys.executable, *python, "-m", "tokenspeed", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("argv", [["--help"], ["version"]])
def test_quick(argv):
    """In CPU time: what else the machine does is not the command's doing."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run(*argv).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


@pytest.mark.parametrize(
    "argv", [["--help"], ["version"], ["serve", "--help"], ["chat", "--help"], ["bench", "serve", "--help"],
             ["bench", "offline", "--help"], ["draft", "eval", "--help"], ["draft", "convert"]],
)  # fmt: skip
def test_no_torch(argv):
    program = (
        "import sys; from tokenspeed.cli import main; main(sys.argv[1:]); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program, *argv], capture_output=True).returncode == 0


def test_control_plane_modules_of_this_area_load_no_torch():
    names = [
        "log",
        "progress",
        "spec.plan",
        "bench.client",
        "bench.report",
        "bench.offline",
        "bench.acceptance",
        "bench.counters",
    ]
    program = "import sys, importlib\n"
    program += "".join(f"importlib.import_module('tokenspeed.{name}')\n" for name in names)
    assert (
        subprocess.run([sys.executable, "-c", program + "sys.exit('torch' in sys.modules)"]).returncode == 0
    )


def test_version_says_what_is_there():
    text = run("--version").stdout
    for word in ("tokenspeed", "python", "torch", "triton", "gpu"):
        assert word in text
    assert run("version", "x").returncode == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["srve"], "unknown command 'srve'; did you mean serve?"),
        (["zzz"], "unknown command 'zzz'; commands: serve"),
        (["serve", "--port", "x"], "--port"),
        (["bench"], "tokenspeed bench serve|offline"),
        (["bench", "x"], "unknown bench 'x'"),
        (["bench", "serve", "--concurrency", "0"], "must be at least 1, not 0"),
        (["bench", "serve", "--temperature", "3"], "--temperature must be from 0.0 to 2.0"),
        (["draft"], "tokenspeed draft eval"),
        (["draft", "export"], "the following arguments are required: RUN_DIR, --output"),
        (["draft", "train"], "the following arguments are required: MODEL, --data, --output"),
        (["draft", "eval", "m", "--shape", "8/4"], "--spec-shape"),
        (["chat", "--max-tokens", "0"], "must be at least 1"),
    ],
)
def test_mistakes(argv, words, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tokenspeed: error: ") and words in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("two\nlines"), 2),
        (RequestError("bad"), 2),
        (EngineDead("gone"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(0), 0),
    ],
)
def test_exit_codes(error, code, monkeypatch, capsys):
    def fail(argv):
        raise error

    monkeypatch.setattr(tokenspeed.cli, "_run", fail)
    assert main([]) == code
    assert capsys.readouterr().err.count("\n") <= 1


def test_without_arguments_the_commands_are_listed(capsys):
    assert main([]) == 2
    assert "serve" in capsys.readouterr().out
    assert main(["--help"]) == 0


@pytest.mark.parametrize("argv", [["serve", "m"], ["bench", "offline", "m"], ["draft", "eval", "m"]])
def test_without_torch_one_line_says_how_to_install_it(argv, monkeypatch, capsys):
    plain = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torch" else plain(name, *a)
    )
    assert main(argv) == 2
    assert "pip install torch" in capsys.readouterr().err


def test_serve_hands_the_config_to_the_launcher(monkeypatch):
    launch = types.ModuleType("tokenspeed.launch")
    seen = []
    launch.serve = lambda config: seen.append(config) or 7
    monkeypatch.setitem(sys.modules, "tokenspeed.launch", launch)
    monkeypatch.delenv("TOKENSPEED_API_KEY", raising=False)
    assert main(["serve", "m", "--spec", "eagle4", "--port", "0"]) == 7
    assert seen == [Config(model="m", spec="eagle4", port=0)]
