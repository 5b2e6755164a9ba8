"""setup.py: the CUDA library goes into the wheel where nvcc is found, with a stand-in for nvcc."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "tokenspeed/kernels/libtokenspeed_cuda.so"
PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")
WORKS = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""
FAILS = """#!/bin/sh
printf 'ptxas: unknown GPU\\nand more\\n' >&2
exit 1
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Sources without the packaged drafts, which take the most time to pack."""
    tree = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("csrc", "tokenspeed"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "drafts")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    return tree


@pytest.fixture
def make(tree, tmp_path):
    """Calls a hook of the build backend; returns whether it succeeded, the file if any, and what was said."""

    def make(hook: str, nvcc: str | None, choice: str = "") -> tuple[bool, Path | None, str]:
        compiler = tmp_path / "nvcc"
        if nvcc:
            compiler.write_text(nvcc)
            compiler.chmod(0o755)
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
        env = {**os.environ, "CUDACXX": str(compiler), "TOKENSPEED_BUILD_CUDA": choice}
        done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=env, capture_output=True, text=True)
        files = [p for p in out.glob("*") if p.is_file()]
        return done.returncode == 0, files[0] if files else None, done.stdout + done.stderr

    yield make
    (tree / LIBRARY).unlink(missing_ok=True)


def metadata(wheel: Path) -> str:
    archive = zipfile.ZipFile(wheel)
    return archive.read(next(n for n in archive.namelist() if n.endswith("/WHEEL"))).decode()


def lines_about_it(said: str) -> list[str]:
    return [line for line in said.splitlines() if "going on without the CUDA library" in line]


def test_with_nvcc_the_library_is_inside(make):
    done, wheel, said = make("build_wheel", WORKS)
    assert done and wheel.name.endswith(f"-py3-none-{PLATFORM}.whl"), said
    assert "Root-Is-Purelib: false" in metadata(wheel) and f"Tag: py3-none-{PLATFORM}" in metadata(wheel)
    assert zipfile.ZipFile(wheel).read(LIBRARY) == b"built\n"
    assert not [n for n in zipfile.ZipFile(wheel).namelist() if ".data/" in n or n.startswith("csrc")]
    assert lines_about_it(said) == []
    # Nothing of it is left for a wheel that shall not have it.
    done, wheel, said = make("build_wheel", WORKS, "0")
    assert done and wheel.name.endswith("-py3-none-any.whl"), said
    assert "Root-Is-Purelib: true" in metadata(wheel) and LIBRARY not in zipfile.ZipFile(wheel).namelist()


@pytest.mark.parametrize(
    ("nvcc", "reason"), [(None, "nvcc not found"), (FAILS, "ptxas: unknown GPU")], ids=["none", "fails"]
)
def test_without_it_goes_on_unless_demanded(make, nvcc, reason):
    done, wheel, said = make("build_wheel", nvcc)
    assert done and wheel.name.endswith("-py3-none-any.whl"), said
    assert LIBRARY not in zipfile.ZipFile(wheel).namelist()
    (line,) = lines_about_it(said)
    assert reason in line
    done, wheel, said = make("build_wheel", nvcc, "1")
    assert not done and wheel is None and f"error: {reason}" in said.replace("nvcc failed: ", "")


def test_a_wrong_choice_is_named(make):
    done, _, said = make("build_wheel", WORKS, "yes")
    assert not done and "TOKENSPEED_BUILD_CUDA is 'yes'" in said


def test_an_editable_install_builds_on_demand_only(make, tree):
    done, _, said = make("build_editable", WORKS)
    assert done and not (tree / LIBRARY).exists(), said
    done, wheel, said = make("build_editable", WORKS, "1")
    assert done and (tree / LIBRARY).read_text() == "built\n", said
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not make("build_editable", FAILS, "1")[0]


def test_a_source_archive_can_build_it(make):
    done, archive, said = make("build_sdist", None)
    assert done, said
    listed = subprocess.run(["tar", "tf", archive], capture_output=True, text=True, check=True).stdout
    inside = {line.partition("/")[2] for line in listed.splitlines()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.cu*")}
    assert sources and sources | {"setup.py"} <= inside
