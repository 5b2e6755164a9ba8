"""The wheel as a user gets it: built, put into a static index, installed from there with pip and with uv, and
run outside the checkout."""

import functools
import hashlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240  # the demo model is made on its first use


def load_build():
    spec = importlib.util.spec_from_file_location("wheel_build", ROOT / "wheels" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


@pytest.fixture(scope="module", autouse=True)
def pure():
    """No minute of nvcc where there is one: test_cuda_wheel.py has a stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENSPEED_BUILD_CUDA", "0")
        yield


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build.build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def index(wheel, tmp_path_factory):
    """Address of the index, handed out by a web server that knows nothing but files."""
    folder = tmp_path_factory.mktemp("index")
    build.make_index([wheel], folder)
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def environment() -> dict[str, str]:
    """Nothing of the checkout, and no settings of pip or uv that would bring in another index."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "UV_", "PYTHON"))}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "NO_PROXY": "127.0.0.1"}


def make_venv(path: Path) -> Path:
    """An empty venv that also sees what is installed here. Returns its python.

    A line in a .pth file only lengthens sys.path, behind the venv's own packages: what it installs itself
    wins, and an editable install of this checkout, which works through a .pth file of its own, is not seen.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    python = path / "bin" / "python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    inside = subprocess.run(
        [str(python), "-c", asked], check=True, capture_output=True, text=True
    ).stdout.strip()
    outside = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    Path(inside, "dependencies.pth").write_text("\n".join(outside) + "\n")
    return python


@pytest.fixture(scope="module")
def installed(index, wheel, tmp_path_factory) -> Path:
    """bin/ of a venv outside the checkout into which pip has installed the wheel from the index."""
    folder = tmp_path_factory.mktemp("user")
    python = make_venv(folder / "venv")
    report = folder / "report.json"
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--ignore-installed",
    ]
    command += ["--index-url", index, "--no-cache-dir", "--report", str(report), "tokenspeed"]
    done = subprocess.run(command, env=environment(), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (item,) = json.loads(report.read_text())["install"]
    assert item["download_info"]["url"].startswith(index.removesuffix("/simple"))
    assert item["download_info"]["archive_info"]["hashes"]["sha256"] == digest(wheel)
    return python.parent


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_index_is_as_pep_503_wants_it(index, wheel):
    root = urllib.request.urlopen(f"{index}/").read().decode()
    assert re.findall(r'href="([^"]+)"', root) == ["tokenspeed/"]
    page = urllib.request.urlopen(f"{index}/tokenspeed/").read().decode()
    assert re.findall(r'href="([^"]+)"', page) == [f"{wheel.name}#sha256={digest(wheel)}"]
    assert 'data-requires-python="&gt;=3.10"' in page
    core = re.search(r'data-core-metadata="sha256=(\w+)"', page)[1]
    metadata = urllib.request.urlopen(f"{index}/tokenspeed/{wheel.name}.metadata").read()
    assert hashlib.sha256(metadata).hexdigest() == core


def test_names_are_normalised():
    assert [build.normalised(n) for n in ("TokenSpeed", "a_b.c", "x--y_-z")] == [
        "tokenspeed",
        "a-b-c",
        "x-y-z",
    ]


def test_one_tree_gives_one_wheel(wheel, tmp_path):
    assert digest(build.build_wheel(tmp_path)) == digest(wheel)


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"tokenspeed", next(t for t in tops if t.endswith(".dist-info"))}
    assert not [n for n in names if "__pycache__" in n or "/tests/" in n]
    expected = {str(p.relative_to(ROOT)) for p in (ROOT / "tokenspeed").rglob("*.py")}
    assert expected == {n for n in names if n.endswith(".py")}
    assert [n for n in names if n.endswith("LICENSE")]


def test_wheel_holds_the_draft(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    drafts = [n for n in names if n.startswith("tokenspeed/drafts/")]
    assert [n for n in drafts if n.endswith("/config.json")]
    assert [n for n in drafts if n.endswith(".safetensors")]
    tracked = {str(p.relative_to(ROOT)) for p in (ROOT / "tokenspeed" / "drafts").rglob("*") if p.is_file()}
    assert {n for n in tracked if "__pycache__" not in n} == set(drafts)


def test_command_runs_outside_the_checkout(installed, tmp_path):
    from tokenspeed import __version__

    command = [str(installed / "tokenspeed"), "version"]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert __version__ in done.stdout


def test_nothing_is_read_from_the_checkout(installed, tmp_path):
    code = (
        "import sys, tokenspeed, tokenspeed.config, tokenspeed.params; from importlib.resources import files;"
        "print(tokenspeed.__file__);"
        "print([str(p) for p in files('tokenspeed').joinpath('drafts').iterdir() if p.is_dir()]);"
        "print(sys.path)"
    )
    command = [str(installed / "python"), "-c", code]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, drafts, path = done.stdout.splitlines()
    assert Path(file).is_relative_to(installed.parent) and drafts != "[]"
    assert str(ROOT) not in json.loads(path.replace("'", '"'))


def test_uv_takes_the_same_file(index, wheel, tmp_path):
    found = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if not found:
        pytest.skip("uv is not installed")
    python = make_venv(tmp_path / "venv")
    command = [
        found,
        "pip",
        "install",
        "--python",
        str(python),
        "--no-deps",
        "--reinstall",
        "--no-cache",
        "-v",
    ]
    command += ["--default-index", index, "tokenspeed"]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "venv").rglob("tokenspeed-*.dist-info/RECORD")
    inside = {line.split(",")[0] for line in record.read_text().splitlines()}
    assert {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("tokenspeed/")} <= inside


def test_hashes_are_required_where_asked(index, wheel, tmp_path):
    """A requirements file with hashes takes our file and refuses another under its name."""
    python = make_venv(tmp_path / "venv")
    version = wheel.name.split("-")[1]
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--ignore-installed",
    ]
    command += ["--index-url", index, "--no-cache-dir", "--require-hashes", "-r", "requirements.txt"]
    codes = []
    for sha in ("0" * 64, digest(wheel)):
        (tmp_path / "requirements.txt").write_text(f"tokenspeed=={version} --hash=sha256:{sha}\n")
        done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
        codes.append(done.returncode)
    assert codes[0] != 0 and codes[1] == 0


@pytest.mark.timeout(START_SECONDS + 120)
def test_installed_wheel_serves_the_demo(installed, tmp_path):
    """The first thing a user does: serve the demo with its packaged draft, and ask it something."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(installed / "tokenspeed"), "serve", "demo", "--spec", "eagle4", "--port", str(port)]
    command += ["--max-model-len", "512", "--max-num-seqs", "4"]
    log = tmp_path / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment(), cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        wait_healthy(process, port, log)
        answer = post(port, {
            "model": "demo", "temperature": 0, "max_tokens": 24,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
        })  # fmt: skip
        assert "Paris" in answer["choices"][0]["message"]["content"], answer
        assert answer["usage"]["completion_tokens"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def wait_healthy(process: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended:\n{log.read_text()}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    pytest.fail(f"not healthy after {START_SECONDS} s:\n{log.read_text()}")


def post(port: int, body: dict) -> dict:
    address = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
