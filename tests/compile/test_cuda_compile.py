"""csrc compiles with nvcc for every GPU we name into a library that has our functions; no GPU is needed."""

import ctypes
import hashlib

import pytest
from compile.test_triton_compile import CACHE

from tokenspeed.errors import ConfigError
from tokenspeed.kernels import build

needs_nvcc = pytest.mark.skipif(
    build.find_nvcc() is None, reason="no nvcc on PATH nor in the environment's packages"
)


@pytest.mark.compile
@pytest.mark.timeout(600)
@needs_nvcc
def test_csrc_compiles():
    digest = hashlib.sha256(" ".join((*build.ARCHITECTURES, str(build.find_nvcc()))).encode())
    for path in sorted(p for p in build.SOURCES.rglob("*.cu*") if p.is_file()):
        digest.update(path.read_bytes())
    library = CACHE / f"csrc-{digest.hexdigest()}.so"
    if not library.exists():
        build.build(library)
    loaded = ctypes.CDLL(str(library))
    assert loaded.tokenspeed_add_rms_norm and loaded.tokenspeed_few_rows
    for arch in build.ARCHITECTURES:
        assert f"sm_{arch}".encode() in library.read_bytes()


@pytest.mark.compile
@needs_nvcc
def test_errors_of_nvcc_are_shown(tmp_path, monkeypatch):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "bad.cu").write_text("int main( {")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(ConfigError, match=r"bad\.cu"):
        build.build(tmp_path / "lib.so", ("90a",))
    assert not (tmp_path / "lib.so").exists()
