"""What a benchmark asks: real prompts from a JSON lines file or from the package."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.bench.prompts import BUILTIN
from tokenspeed.errors import ConfigError

FORMS = '{"prompt": ...}, {"messages": [...]}, {"question": ...} or {"turns": [...]}'


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer, and the group it is reported under."""

    category: str
    messages: tuple[dict[str, Any], ...]
    licence: str | None = None


def load_prompts(dataset: str, limit: int | None = None) -> list[Prompt]:
    """Prompts of `dataset`: "builtin", or a .jsonl(.gz) file of FORMS, with a category, set or source, and
    a licence, if any.

    Args:
        limit: how many; taken evenly over the file, so that every part of it is there. For more than that
            the file is repeated (and a server with a prefix cache will know the repeats).

    Raises:
        ConfigError: no such file, a line of another form, no prompts.
    """
    prompts = _builtin() if dataset == "builtin" else _read(Path(dataset))
    if not prompts:
        raise ConfigError(f"{dataset} holds no prompts")
    if limit is None:
        return prompts
    if limit > len(prompts):
        return [prompts[i % len(prompts)] for i in range(limit)]
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def _builtin() -> list[Prompt]:
    return [Prompt(category, _user(text)) for category, texts in BUILTIN.items() for text in texts]


def _read(path: Path) -> list[Prompt]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            return [_prompt(line, f"{path} line {n}") for n, line in enumerate(file, 1) if line.strip()]
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"{path} can't be read ({error}); give a .jsonl file or 'builtin'") from None


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    row = row if isinstance(row, dict) else {}
    category = str(row.get("category") or row.get("set") or row.get("source") or "all")
    licence = row.get("licence") and str(row["licence"])
    text = row.get("prompt", row.get("question"))
    turns, messages = row.get("turns"), row.get("messages")
    if isinstance(turns, list) and turns:  # of a conversation in turns, the first
        text = turns[0]
    if isinstance(text, str) and text:
        return Prompt(category, _user(text), licence)
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
        return Prompt(category, tuple(messages), licence)
    raise ConfigError(f"{where} must be {FORMS}")


def _user(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)
