"""Builds the wheel and a static package index (PEP 503) that any web server can hand out.

    python wheels/build.py [--dist wheels/dist] [--index wheels/index]

The wheel is built from a copy of the sources, so that no left-over of an earlier build gets into it, and with
fixed times, so that one tree gives one sha256.
"""

import argparse
import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "csrc", "tokenspeed")
PAGE = """<!DOCTYPE html>
<html><head><meta name="pypi:repository-version" content="1.0"></head><body>
{}
</body></html>
"""
EPOCH = "1577836800"  # 2020-01-01; a zip can't hold times before 1980


def build_wheel(dist: Path) -> Path:
    """Builds into `dist` and returns the wheel. Needs the packages build, setuptools and wheel."""
    with tempfile.TemporaryDirectory() as temporary:
        tree, made = Path(temporary) / "tree", Path(temporary) / "made"
        tree.mkdir()
        for name in SOURCES:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy2(source, tree / name)
        command = [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(made),
            str(tree),
        ]
        env = {"SOURCE_DATE_EPOCH": EPOCH, **os.environ}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout}\nthe wheel could not be built; the reason stands above")
        (wheel,) = made.glob("*.whl")
        dist.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, dist))


def make_index(wheels: list[Path], index: Path) -> Path:
    """Writes `index`/simple, replacing it, with the wheels inside. Returns the `simple` directory."""
    simple = index / "simple"
    shutil.rmtree(simple, ignore_errors=True)
    projects: dict[str, list[Path]] = defaultdict(list)
    for wheel in sorted(wheels):
        projects[normalised(wheel.name.split("-")[0])].append(wheel)
    for project, files in projects.items():
        folder = simple / project
        folder.mkdir(parents=True)
        links = [publish(wheel, folder) for wheel in files]
        (folder / "index.html").write_text(PAGE.format("\n".join(links)))
    links = [f'<a href="{project}/">{project}</a><br>' for project in sorted(projects)]
    (simple / "index.html").write_text(PAGE.format("\n".join(links)))
    return simple


def publish(wheel: Path, folder: Path) -> str:
    """Copies a wheel and its metadata (PEP 658: so a resolver need not fetch the wheel). Returns its link."""
    raw, metadata = read_metadata(wheel)
    shutil.copy(wheel, folder)
    (folder / f"{wheel.name}.metadata").write_bytes(raw)
    python = html.escape(metadata.get("Requires-Python", ""))
    core = f'data-core-metadata="sha256={sha256(raw)}" data-requires-python="{python}"'
    return f'<a href="{wheel.name}#sha256={sha256(wheel.read_bytes())}" {core}>{wheel.name}</a><br>'


def read_metadata(wheel: Path) -> tuple[bytes, Message]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        raw = archive.read(name)
    return raw, HeaderParser().parsestr(raw.decode())


def normalised(name: str) -> str:
    """A project's name as PEP 503 wants it in an address."""
    return re.sub(r"[-_.]+", "-", name).lower()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="build the wheel and a static package index")
    parser.add_argument("--dist", type=Path, default=ROOT / "wheels" / "dist", help="where wheels are kept")
    parser.add_argument(
        "--index", type=Path, default=ROOT / "wheels" / "index", help="where the index is written"
    )
    args = parser.parse_args()
    wheel = build_wheel(args.dist)
    simple = make_index(sorted(args.dist.glob("*.whl")), args.index)
    print(f"{wheel}\nsha256 {sha256(wheel.read_bytes())}\n{simple}")


if __name__ == "__main__":
    main()
