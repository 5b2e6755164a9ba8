"""Finding nvcc, and what a GPU's owner is told of a library that is not built. Compiling: tests/compile."""

import logging

import pytest
import torch

from tokenspeed.kernels import build
from tokenspeed.worker.setup import tell_missing_kernels

CUDA = torch.device("cuda", 0)


@pytest.fixture
def told(monkeypatch, tmp_path, caplog):
    """What is logged on a GPU of a capability, with the library's place empty or not."""
    caplog.set_level(logging.INFO, "tokenspeed")
    place = tmp_path / "library.so"
    monkeypatch.setenv(build.LIBRARY_ENV, str(place))
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def told(capability: tuple[int, int], built: bool = False, device: torch.device = CUDA) -> list[str]:
        caplog.clear()
        place.touch() if built else place.unlink(missing_ok=True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        tell_missing_kernels(device)
        return [f"{record.levelname}: {record.getMessage()}" for record in caplog.records]

    return told


def test_one_line_where_it_would_run(told, monkeypatch, tmp_path):
    (line,) = told((9, 0))
    assert line.startswith("INFO: the CUDA C++ kernels are not built")
    assert line.endswith("python -m tokenspeed.kernels.build")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "none")
    assert "pip install ." in told((10, 0))[0]


def test_silence_elsewhere(told, monkeypatch):
    assert told((9, 0), built=True) == told((8, 0)) == []
    assert told((9, 0), device=torch.device("cpu")) == []
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm's device type is cuda as well
    assert told((9, 0)) == []


def test_nvcc_that_is_named_comes_first(monkeypatch, tmp_path):
    on_path, packaged, named = (tmp_path / where / "nvcc" for where in ("path", "nvidia/cu13/bin", "named"))
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.delenv("CUDACXX", raising=False)
    assert build.find_nvcc() is None
    for file in (on_path, packaged, named):
        file.parent.mkdir(parents=True)
        file.touch(0o755)
        if file == named:
            monkeypatch.setenv("CUDACXX", str(named))
        assert build.find_nvcc() == file
    named.unlink()
    assert build.find_nvcc() is None
