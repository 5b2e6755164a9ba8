"""Makes .venv with tokenspeed (editable) and what it needs; done at once when nothing has changed since.

    python3 tools/setup_venv.py [--extra NAME]...

The one hard part is torch. Its plain Linux build brings several GB of CUDA libraries, so a machine without a
GPU takes the CPU build: from TORCH_CPU_INDEX where that answers, else from where pip is set up to look, and
never a build that would bring CUDA libraries. The environment variable TORCH overrides the choice: cpu, cuda,
or the address of an index. Standard library only; an old Python gets a sentence, not a traceback, so there is
no 3.10 syntax in here.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "tokenspeed-setup.json"
INPUTS = ("pyproject.toml", "constraints.txt", "constraints-cpu.txt", "tools/setup_venv.py")
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX") or "https://download.pytorch.org/whl/cpu"
TORCH_RANGE = "torch>=2.11,<2.15"  # as in pyproject.toml
PROBE_SECONDS = 3
AMD_DRIVER = Path("/dev/kfd")


def main() -> None:
    parser = argparse.ArgumentParser(description="make .venv and install tokenspeed into it")
    parser.add_argument(
        "--extra", action="append", default=[], help="an extra of pyproject.toml; may be repeated"
    )
    extras = set(parser.parse_args().extra)
    if sys.version_info < (3, 10):  # noqa: UP036  (that is the point)
        version = ".".join(map(str, sys.version_info[:2]))
        fail(f"Python 3.10 or later is needed, this is {version}; name another: make PYTHON=python3.12 ...")
    lock = os.open(str(ROOT), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `make serve` and `make test` may start together
        set_up(os.environ.get("TORCH") or detect(), extras)
    finally:
        os.close(lock)


def set_up(choice: str, extras: set) -> None:
    """Does what is missing. `choice` is cpu, cuda or the address of an index."""
    key, stamp = fingerprint(choice), read_stamp()
    if stamp.get("key") == key and extras <= set(stamp["extras"]):
        return
    extras = extras | set(stamp.get("extras", ()))
    STAMP.unlink(missing_ok=True)  # a set-up that is cut short runs again
    make_venv()
    constraints = ["-c", "constraints.txt"]
    if choice == "cpu":
        constraints += ["-c", "constraints-cpu.txt"]
        install_cpu_torch()
    elif choice != "cuda":
        pip("--index-url", choice, TORCH_RANGE)
    install_project(extras, constraints, optional={"cuda"} if choice == "cuda" else set())
    STAMP.write_text(json.dumps({"key": key, "extras": sorted(extras)}))


def detect() -> str:
    """cpu or cuda. An AMD GPU needs the address of an index, since its ROCm version decides which."""
    if (
        shutil.which("nvidia-smi")
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    ):
        return "cuda"
    if AMD_DRIVER.exists():
        fail(
            "AMD GPU found: set TORCH to the address of PyTorch's index for your ROCm version, or TORCH=cpu; "
            "docker/Dockerfile.rocm is the easier way"
        )
    return "cpu"


def fingerprint(choice: str) -> str:
    digest = hashlib.sha256(repr((choice, sys.version_info[:2], str(ROOT))).encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def read_stamp() -> dict:
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if PYTHON.exists() else {}


def make_venv() -> None:
    """Makes .venv, or keeps one of this same version of Python. Its pip is made new enough."""
    test = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    if not (PYTHON.exists() and subprocess.run([str(PYTHON), "-c", test]).returncode == 0):
        try:
            import ensurepip  # noqa: F401  (Debian keeps it in a package of its own)
        except ImportError:
            fail("this Python can't make a venv; on Debian and Ubuntu: apt-get install python3-venv")
        say(f"making {VENV} with Python {sys.version.split()[0]}")
        call([sys.executable, "-m", "venv", "--clear", str(VENV)])
    pip("--upgrade", "pip>=24.1")  # older ones fetch whole wheels to answer a dry run


def install_cpu_torch() -> None:
    pins = (ROOT / "constraints-cpu.txt").read_text().splitlines()
    pin = next(line for line in pins if line.startswith("torch=="))  # alone: a CUDA build pins another triton
    index = ["--index-url", TORCH_CPU_INDEX] if reachable(TORCH_CPU_INDEX) else []
    wanted = [*index, "-c", "constraints.txt", pin]
    heavy = [name for name in planned(wanted) if name.startswith(("nvidia-", "cuda-"))]
    if heavy:
        fail(
            f"no GPU here, and pip would install a torch with CUDA libraries ({heavy[0]}, ...). "
            "Set TORCH_CPU_INDEX to an index with CPU builds of torch, or TORCH=cuda to take it all the same"
        )
    pip(*wanted)


def reachable(index: str) -> bool:
    try:
        with urllib.request.urlopen(index.rstrip("/") + "/torch/", timeout=PROBE_SECONDS):
            return True
    except (OSError, ValueError):
        say(f"{index} does not answer; torch comes from where pip is set up to look")
        return False


def planned(arguments: list) -> list:
    """Names of the packages that pip would install; nothing of them is fetched but metadata."""
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", *arguments]
    done = subprocess.run(command, cwd=str(ROOT), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        fail("pip finds no torch to install (its message stands above)")
    return [item["metadata"]["name"].lower().replace("_", "-") for item in json.loads(done.stdout)["install"]]


def install_project(extras: set, constraints: list, optional: set) -> None:
    """Editable, with the extras; the optional ones may be left out."""
    install = [str(PYTHON), "-m", "pip", "install", "--quiet"]
    if shutil.which("uv"):
        install = ["uv", "pip", "install", "--quiet", "--python", str(PYTHON)]
    say("installing tokenspeed and its dependencies")
    command = [*install, *constraints, "-e", target(extras | optional)]
    if optional:
        if subprocess.run(command, cwd=str(ROOT)).returncode == 0:
            return
        say(f"the extra {', '.join(optional)} can't be installed here; going on without it")
    call([*install, *constraints, "-e", target(extras)])


def target(extras: set) -> str:
    return f".[{','.join(sorted(extras))}]" if extras else "."


def pip(*arguments: str) -> None:
    call([str(PYTHON), "-m", "pip", "install", "--quiet", *arguments])


def call(command: list) -> None:
    if subprocess.run(command, cwd=str(ROOT)).returncode:
        fail(f"this failed: {' '.join(command)}")


def say(text: str) -> None:
    sys.stderr.write(f"setup: {text}\n")


def fail(text: str) -> None:
    sys.exit(f"setup: {text}")


if __name__ == "__main__":
    main()
