"""What is installed, and which GPUs there are, without importing any of it."""

import platform
import subprocess
from importlib import metadata

from tokenspeed import __version__

PACKAGES = ("torch", "triton", "transformers")


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
