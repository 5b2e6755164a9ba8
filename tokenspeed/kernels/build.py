"""Builds csrc into one shared library with nvcc: `python -m tokenspeed.kernels.build`. It takes no GPU."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tokenspeed.errors import ConfigError

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
LIBRARY_ENV = "TOKENSPEED_CUDA_LIBRARY"
ARCHITECTURES = ("90a", "100a", "103a")


def library_path() -> Path:
    """Where the library is looked for: $TOKENSPEED_CUDA_LIBRARY, else beside this file."""
    return Path(os.environ.get(LIBRARY_ENV) or Path(__file__).with_name("libtokenspeed_cuda.so"))


def find_nvcc() -> Path | None:
    """$CUDACXX, else nvcc of the CUDA 13 pip packages in this environment (nvidia-cuda-nvcc), else the one on PATH."""
    packaged = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13" / "bin" / "nvcc"
    found = shutil.which(os.environ.get("CUDACXX") or (packaged if packaged.exists() else "nvcc"))
    return Path(found) if found else None


def missing(major: int, minor: int) -> str | None:
    """What to tell who has a GPU of this compute capability and not the library for it; None: nothing."""
    if f"{major}{minor}a" not in ARCHITECTURES or library_path().exists():
        return None
    how = (
        "python -m tokenspeed.kernels.build" if SOURCES.is_dir() else "pip install . in a checkout, with nvcc"
    )
    return f"the CUDA C++ kernels are not built, so Triton's run in their place; to build them: {how}"


def build(target: Path, architectures: tuple[str, ...] = ARCHITECTURES) -> Path:
    """Compiles every file of csrc/ops for these compute capabilities into `target`.

    Raises:
        ConfigError: no sources, no nvcc, or nvcc's own errors.
    """
    nvcc, sources = find_nvcc(), sorted((SOURCES / "ops").glob("*.cu"))
    if not sources:
        raise ConfigError(f"no CUDA sources in {SOURCES}; build from a source checkout")
    if nvcc is None:
        raise ConfigError("nvcc not found; install a CUDA toolkit or the package nvidia-cuda-nvcc")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(f".{os.getpid()}.so")
    command = [str(nvcc), "-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static"]
    command += ["-I", str(SOURCES / "include"), "-o", str(scratch)]
    for arch in architectures:
        command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    done = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"nvcc failed: {done.stderr.strip() or done.stdout.strip()}")
    scratch.replace(target)
    return target


if __name__ == "__main__":
    try:
        print(build(library_path()))
    except ConfigError as error:
        sys.exit(f"error: {error}")
