"""docs/known-bugs.md names tests that exist, and leaves no row without one or the reason why there is none."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "known-bugs.md"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| B\d\d ", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    assert len(named) > 40
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).exists() or name not in functions(ROOT / file)
    ]
    assert not missing, missing


def test_every_row_is_held():
    assert len(rows()) == len({row[0] for row in rows()}) >= 23
    for number, report, _, _, held in rows():
        assert "://" in report, number
        assert "::test_" in held or "none" in held, number
