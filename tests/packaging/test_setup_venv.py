"""tools/setup_venv.py: no CUDA libraries without a GPU, nothing done twice, clear words when it fails."""

import http.server
import importlib.util
import json
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(monkeypatch, tmp_path):
    """The script as a module, with a venv of its own and every command recorded instead of run."""
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "tools" / "setup_venv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.calls = []
    monkeypatch.setattr(module, "call", module.calls.append)
    monkeypatch.setattr(module, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(module, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "reachable", lambda index: False)
    monkeypatch.setattr(module, "make_venv", module.PYTHON.touch)
    monkeypatch.setattr(module, "planned", lambda arguments: ["torch", "sympy"])
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setattr(module, "AMD_DRIVER", tmp_path / "kfd")
    return module


def run(setup, monkeypatch, *arguments: str) -> list[str]:
    """Runs the script; returns the commands as lines."""
    setup.calls.clear()
    monkeypatch.setattr("sys.argv", ["setup_venv.py", *arguments])
    setup.main()
    return [" ".join(command) for command in setup.calls]


def test_no_gpu_takes_the_pinned_torch(setup, monkeypatch):
    torch, project = run(setup, monkeypatch)
    assert torch.endswith("torch==2.13.0") and "--index-url" not in torch
    assert "-c constraints-cpu.txt" in project and project.endswith("-e .")


def test_cpu_index_is_used_where_it_answers(setup, monkeypatch):
    monkeypatch.setattr(setup, "reachable", lambda index: True)
    torch, project = run(setup, monkeypatch)
    assert f"--index-url {setup.TORCH_CPU_INDEX}" in torch
    assert "--index-url" not in project


def test_cuda_libraries_are_refused_without_a_gpu(setup, monkeypatch):
    monkeypatch.setattr(setup, "planned", lambda arguments: ["torch", "nvidia-cublas", "triton"])
    with pytest.raises(SystemExit, match=r"no GPU here.*nvidia-cublas.*TORCH_CPU_INDEX"):
        run(setup, monkeypatch)
    assert setup.calls == [] and not setup.STAMP.exists()


def test_second_run_does_nothing_and_extras_add_up(setup, monkeypatch):
    assert run(setup, monkeypatch)
    assert run(setup, monkeypatch) == []
    assert run(setup, monkeypatch, "--extra", "test")[-1].endswith("-e .[test]")
    assert run(setup, monkeypatch) == run(setup, monkeypatch, "--extra", "test") == []
    assert run(setup, monkeypatch, "--extra", "bench")[-1].endswith("-e .[bench,test]")
    assert json.loads(setup.STAMP.read_text())["extras"] == ["bench", "test"]


def test_changed_requirements_run_it_again(setup, monkeypatch):
    run(setup, monkeypatch)
    monkeypatch.setattr(setup, "INPUTS", (*setup.INPUTS, "LICENSE"))
    assert run(setup, monkeypatch)


def test_gpu_takes_the_cuda_build(setup, monkeypatch):
    monkeypatch.setenv("TORCH", "cuda")
    done = []
    monkeypatch.setattr(setup.subprocess, "run", lambda command, **_: done.append(command) or Failed)
    (project,) = run(setup, monkeypatch)  # the extra can't be had, so it is left out the second time
    assert done[0][-1] == ".[cuda]" and project.endswith("-e .") and "constraints-cpu" not in project


class Failed:
    returncode = 1


def test_amd_gpu_asks_for_an_index(setup, monkeypatch):
    setup.AMD_DRIVER.touch()
    with pytest.raises(SystemExit, match="AMD GPU found: set TORCH"):
        run(setup, monkeypatch)
    monkeypatch.setenv("TORCH", "https://example.invalid/rocm")
    torch, _ = run(setup, monkeypatch)
    assert "--index-url https://example.invalid/rocm" in torch


def test_old_python_gets_a_sentence(setup, monkeypatch):
    monkeypatch.setattr(setup.sys, "version_info", (3, 8, 1))
    with pytest.raises(SystemExit, match=r"Python 3.10 or later is needed, this is 3.8"):
        run(setup, monkeypatch)


def test_reachable():
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "tools" / "setup_venv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Found) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/whl/"
        assert module.reachable(address)
        server.shutdown()
    assert not module.reachable(address)


class Found(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/whl/torch/" else 404)
        self.end_headers()

    def log_message(self, *args):
        pass
