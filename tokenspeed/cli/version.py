"""`tokenspeed version`: what is installed, without importing any of it."""

import platform
import subprocess
from collections.abc import Sequence
from importlib import metadata

from tokenspeed import __version__
from tokenspeed.errors import ConfigError

PACKAGES = ("torch", "triton", "transformers")


def run(argv: Sequence[str]) -> int:
    """Prints the versions. Returns 0."""
    if argv:
        raise ConfigError(f"tokenspeed version takes no arguments, not {argv[0]!r}")
    for name, version in versions().items():
        print(f"{name:<13}{version}")
    for name in gpu_names() or ["none"]:
        print(f"{'gpu':<13}{name}")
    return 0


def versions() -> dict[str, str]:
    """Versions of tokenspeed, Python and the packages that matter; "not installed" where one is missing."""
    found = {"tokenspeed": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def gpu_names() -> list[str]:
    """Names of the NVIDIA GPUs that nvidia-smi lists; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
