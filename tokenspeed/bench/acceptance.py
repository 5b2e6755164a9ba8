"""Accept lengths of finished answers: by category, depth and position, with and without answers that loop."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LOOP_WINDOW, LOOP_NGRAM, LOOP_TIMES = 128, 8, 4


@dataclass(frozen=True)
class Record:
    """One answer's account. `per_depth[d]`: rounds in which the draft token of depth d + 1 was kept."""

    category: str
    num_prompt: int
    token_ids: tuple[int, ...]
    rounds: int
    drafted: int
    accepted: int
    per_depth: tuple[int, ...]

    @property
    def loops(self) -> bool:
        return loops(self.token_ids)


def loops(token_ids: Sequence[int]) -> bool:
    """Whether the last 128 tokens hold one 8-gram four times or more (overlapping ones count)."""
    tail = tuple(token_ids[-LOOP_WINDOW:])
    seen: dict[tuple[int, ...], int] = {}
    for i in range(len(tail) - LOOP_NGRAM + 1):
        gram = tail[i : i + LOOP_NGRAM]
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] >= LOOP_TIMES:
            return True
    return False


def accept_length(records: Iterable[Record]) -> float | None:
    """Tokens a target forward emits on average, the bonus token included; None without rounds."""
    rows = list(records)
    rounds = sum(r.rounds for r in rows)
    return 1 + sum(r.accepted for r in rows) / rounds if rounds else None


def by_depth(records: Iterable[Record]) -> list[float]:
    """Share of rounds in which depth 1, 2, ... was accepted."""
    rows = list(records)
    rounds = sum(r.rounds for r in rows)
    depths = max((len(r.per_depth) for r in rows), default=0)
    return (
        [sum(r.per_depth[d] for r in rows if d < len(r.per_depth)) / rounds for d in range(depths)]
        if rounds
        else []
    )


def position_bin(record: Record) -> str:
    """By the middle of the answer: its absolute position in tokens."""
    middle = record.num_prompt + len(record.token_ids) // 2
    for low, high in ((0, 256), (256, 1024), (1024, 2048)):
        if middle < high:
            return f"{low}-{high}"
    return "2048-"


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """All of `table` as plain data; each entry tells all answers and those that do not loop."""
    whole = [r for r in records if not r.loops]
    return {
        "num_answers": len(records),
        "num_looping": len(records) - len(whole),
        "all": _entry(records),
        "by_category": _grouped(records, lambda r: r.category),
        "by_position": _grouped(records, position_bin),
        "by_depth": {"all": by_depth(records), "no_loops": by_depth(whole)},
    }


def table(found: dict[str, Any]) -> str:
    """`summary` for people: accept length of all answers / of those without loops."""
    lines = [f"{'':<16}{'answers':>8}{'looping':>9}{'accept length':>16}{'without loops':>16}"]
    rows = [("all", found["all"])]
    rows += sorted(found["by_category"].items())
    rows += [(f"position {name}", entry) for name, entry in found["by_position"].items()]
    for name, entry in rows:
        share = entry["num_looping"] / max(entry["num_answers"], 1)
        lines.append(
            f"{name:<16}{entry['num_answers']:>8}{share:>9.0%}{_number(entry['accept_length']):>16}"
            f"{_number(entry['accept_length_no_loops']):>16}"
        )
    lines.append("")
    lines.append(f"{'depth':<16}{'accepted':>8}{'without loops':>16}")
    plain = found["by_depth"]["no_loops"]
    for depth, share in enumerate(found["by_depth"]["all"], 1):
        other = f"{plain[depth - 1]:.1%}" if depth <= len(plain) else "-"
        lines.append(f"{depth:<16}{share:>8.1%}{other:>16}")
    return "\n".join(lines)


def _entry(records: Sequence[Record]) -> dict[str, Any]:
    whole = [r for r in records if not r.loops]
    return {
        "num_answers": len(records),
        "num_looping": len(records) - len(whole),
        "rounds": sum(r.rounds for r in records),
        "drafted": sum(r.drafted for r in records),
        "accepted": sum(r.accepted for r in records),
        "accept_length": accept_length(records),
        "accept_length_no_loops": accept_length(whole),
    }


def _grouped(records: Sequence[Record], key: Callable[[Record], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return {name: _entry(rows) for name, rows in sorted(groups.items(), key=lambda item: _order(item[0]))}


def _order(name: str) -> tuple[int, str]:
    start = name.split("-")[0]
    return (int(start), name) if start.isdigit() else (0, name)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
