"""The documents say what the code says: options, links, make targets, files they name."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_options_page_is_up_to_date():
    generator = load(ROOT / "tools" / "gen_options.py")
    assert generator.PAGE.read_text() == generator.page(), "run: make docs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    """Links inside the repository, and files of the package named in backticks."""
    text = document.read_text()
    links = [t for t in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in t]
    missing = [t for t in links if not (document.parent / t).exists()]
    named = re.findall(
        r"`((?:tokenspeed|tests|benchmarks|docs|wheels|docker|csrc|tools)/[\w./-]+\.\w+)`", text
    )
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing, missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_options_that_are_named_exist(document):
    """Each option after `tokenspeed serve` in a document is one of Config's."""
    from dataclasses import fields

    from tokenspeed.config import Config

    known = {name for f in fields(Config) for name in (f"--{f.name.replace('_', '-')}", *f.metadata["names"])}
    known |= {f"--no-{f.name.replace('_', '-')}" for f in fields(Config) if f.type is bool}
    used = set()
    for command in re.findall(r"tokenspeed serve((?:\\\n|[^\n`])*)", document.read_text()):
        used |= set(re.findall(r"(?<!\S)--[a-z][a-z-]*", command))
    assert used <= known, sorted(used - known)


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for document in DOCUMENTS:
        used = set(re.findall(r"`make ([a-z-]+)", document.read_text()))
        assert used <= targets, f"{document.name}: {sorted(used - targets)}"


def test_torch_pins_agree():
    """One range in pyproject.toml and in the set-up script, and a pin inside it."""
    project = (ROOT / "pyproject.toml").read_text()
    script = (ROOT / "tools" / "setup_venv.py").read_text()
    low, high = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', project).groups()
    assert f"torch>=2.{low},<2.{high}" in script
    pin = re.search(r"^torch==2\.(\d+)\.", (ROOT / "constraints-cpu.txt").read_text(), re.M)[1]
    assert int(low) <= int(pin) < int(high)
