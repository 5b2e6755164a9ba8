"""Writes docs/options.md from the fields of `Config`, so that the page can't say anything else than the code.

python tools/gen_options.py [--check]
"""

import argparse
import sys
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "options.md"
HEAD = """# Options

Made from `tokenspeed/config.py` by `make docs`. These are the options of `tokenspeed serve`; the first name
of each, as in `max_model_len`, is also a keyword argument of `LLM(...)`. A dash as default means: none, or
chosen at start.
"""


def rows(group: str, config: type) -> list[str]:
    """Markdown table rows of the options of one group, in the order of the class."""
    return [row(f) for f in fields(config) if f.metadata["group"] == group]


def row(field: Field) -> str:
    meta = field.metadata
    flags = ", ".join(f"`{name}`" for name in (f"--{field.name.replace('_', '-')}", *meta["names"]))
    text = meta["help"] + (f" ({', '.join(map(str, meta['choices']))})" if meta["choices"] else "")
    return f"| {flags} | {shown(field.default)} | {text.replace('|', chr(92) + '|')} |"


def shown(default: Any) -> str:
    if default is None or default == ():
        return "-"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def page() -> str:
    """The whole page as Markdown."""
    sys.path.insert(0, str(ROOT))
    from tokenspeed.config import Config

    groups = dict.fromkeys(f.metadata["group"] for f in fields(Config))
    parts = [HEAD]
    for group in groups:
        parts += [
            f"\n## {group.capitalize()}\n",
            "| option | default | meaning |",
            "|---|---|---|",
            *rows(group, Config),
        ]
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="make docs/options.md from Config")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when the page is out of date"
    )
    text = page()
    if parser.parse_args().check:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
