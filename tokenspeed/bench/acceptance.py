"""Accept lengths of finished answers: by category, depth and position, with and without answers that loop."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LOOP_WINDOW, LOOP_NGRAM, LOOP_TIMES = 128, 8, 4
POSITION_BINS = (256, 1024, 2048, 8192)


@dataclass(frozen=True)
class Record:
    """One answer's account.

    `per_depth[d]`: rounds in which the draft token of depth d + 1 was kept. `spans`: (position of the round's
    root, draft tokens kept) of each round; empty where only the sums are known. `recall[d]`: rows of draft step
    d + 1, and how many of them had the full head's best token among the candidates of the draft's head.
    """

    category: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    rounds: int
    drafted: int
    accepted: int
    per_depth: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] = ()
    recall: tuple[tuple[int, int], ...] = ()

    @property
    def loops(self) -> bool:
        return loops(self.token_ids)


def loops(token_ids: Sequence[int]) -> bool:
    """Whether the last 128 tokens hold one 8-gram four times or more (overlapping ones count).

    Loops are easy to draft, so accept lengths are given with and without the answers that loop.
    """
    tail = tuple(token_ids[-LOOP_WINDOW:])
    seen: dict[tuple[int, ...], int] = {}
    for i in range(len(tail) - LOOP_NGRAM + 1):
        gram = tail[i : i + LOOP_NGRAM]
        seen[gram] = seen.get(gram, 0) + 1
        if seen[gram] >= LOOP_TIMES:
            return True
    return False


def per_depth(accepted: Sequence[int]) -> tuple[int, ...]:
    """[d]: how many of the rounds kept the draft token of depth d + 1; `accepted`: tokens kept by each."""
    return tuple(sum(kept > d for kept in accepted) for d in range(max(accepted, default=0)))


def accept_length(records: Iterable[Record]) -> float | None:
    """Tokens a target forward emits on average, the bonus token included; None without rounds."""
    rows = list(records)
    return _length(sum(r.rounds for r in rows), sum(r.accepted for r in rows))


def by_depth(records: Iterable[Record]) -> list[float]:
    """Share of rounds in which depth 1, 2, ... was accepted."""
    rows = list(records)
    rounds = sum(r.rounds for r in rows)
    depths = max((len(r.per_depth) for r in rows), default=0)
    if not rounds:
        return []
    return [sum(r.per_depth[d] for r in rows if d < len(r.per_depth)) / rounds for d in range(depths)]


def by_position(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Accept lengths by the position of a round's root, of the records that know it."""
    counts: dict[int, list[int]] = {}  # bin -> rounds, accepted, and both without loops
    for record in records:
        looping = record.loops
        for start, accepted in record.spans:
            number = sum(start >= end for end in POSITION_BINS)
            found = counts.setdefault(number, [0, 0, 0, 0])
            new = (1, accepted, *((0, 0) if looping else (1, accepted)))
            found[:] = [a + b for a, b in zip(found, new, strict=True)]
    return {
        _bin_name(number): {
            "rounds": rounds,
            "accepted": accepted,
            "accept_length": _length(rounds, accepted),
            "accept_length_no_loops": _length(plain_rounds, plain_accepted),
        }
        for number, (rounds, accepted, plain_rounds, plain_accepted) in sorted(counts.items())
    }


def recall(records: Iterable[Record]) -> dict[str, Any] | None:
    """Share of rows whose candidates held the full head's best token, over all draft steps and by step.

    None for drafts without a candidate head, and for accounts that did not look.
    """
    steps: list[list[int]] = []
    for record in records:
        steps += [[0, 0] for _ in record.recall[len(steps) :]]
        for total, (rows, found) in zip(steps, record.recall, strict=False):
            total[0] += rows
            total[1] += found
    rows, found = (sum(total[i] for total in steps) for i in (0, 1))
    if not rows:
        return None
    return {"rows": rows, "all": found / rows, "by_step": [found / rows for rows, found in steps if rows]}


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """All of `table` as plain data; each entry tells all answers and those that do not loop."""
    whole = [r for r in records if not r.loops]
    return {
        "num_answers": len(records),
        "num_looping": len(records) - len(whole),
        "all": _entry(records),
        "by_category": _grouped(records, lambda r: r.category),
        "by_position": by_position(records),
        "by_depth": {"all": by_depth(records), "no_loops": by_depth(whole)},
        "recall": recall(records),
    }


def agreement(decoded: Sequence[Record], offline: Sequence[Record]) -> dict[str, Any]:
    """How far two accounts of the same answers agree.

    Returns:
        num_other_rounds: answers whose rounds, or what they kept by depth, differ.
        largest_difference: of two accept lengths, over all answers and over each category, and `where`.
        relative: the difference over all answers, as a share of the decoded accept length.
    """
    same = [(a.rounds, a.accepted, a.per_depth) == (b.rounds, b.accepted, b.per_depth)
            for a, b in zip(decoded, offline, strict=True)]  # fmt: skip
    groups: dict[str, tuple[list[Record], list[Record]]] = {"all": (list(decoded), list(offline))}
    for a, b in zip(decoded, offline, strict=True):
        pair = groups.setdefault(f"category {a.category}", ([], []))
        pair[0].append(a)
        pair[1].append(b)
    lengths = {name: (accept_length(a) or 1.0, accept_length(b) or 1.0) for name, (a, b) in groups.items()}
    where = max(lengths, key=lambda name: abs(lengths[name][0] - lengths[name][1]))
    ours, theirs = lengths["all"]
    return {
        "num_answers": len(same),
        "num_other_rounds": same.count(False),
        "largest_difference": abs(lengths[where][0] - lengths[where][1]),
        "where": where,
        "relative": abs(ours - theirs) / ours,
    }


def table(sources: dict[str, dict[str, Any]]) -> str:
    """Summaries of the same answers side by side, for people: accept length of all and without loops.

    Args:
        sources: name of a way to count ("decoded", "offline") -> `summary`.
    """
    first = next(iter(sources.values()))
    columns = "".join(f"{name:>12}{'no loops':>10}" for name in sources)
    lines = [f"{'accept length':<24}{'answers':>8}{'looping':>9}{columns}"]
    rows = [("all", [source["all"] for source in sources.values()])]
    for kind, group in (("", "by_category"), ("position ", "by_position")):
        found = [source[group] for source in sources.values()]
        names = dict.fromkeys(name for entries in found for name in entries)
        rows += [(kind + name, [entries.get(name, {}) for entries in found]) for name in names]
    lines += [f"{name:<24}{_answers(entries[0])}{''.join(map(_lengths, entries))}" for name, entries in rows]
    lines += ["", f"{'accepted at depth':<24}{'':>17}{columns}"]
    depths = max(len(s["by_depth"]["all"]) for s in sources.values())
    for depth in range(depths):
        cells = "".join(
            f"{_share(s['by_depth']['all'], depth):>12}{_share(s['by_depth']['no_loops'], depth):>10}"
            for s in sources.values()
        )
        lines.append(f"{depth + 1:<24}{'':>17}{cells}")
    for found in filter(None, (s["recall"] for s in sources.values())):
        by_step = " ".join(f"{share:.1%}" for share in found["by_step"])
        lines.append(
            f"the candidates hold the full head's best token: {found['all']:.2%} (by step: {by_step})"
        )
    lines.append(f"{first['num_looping']} of {first['num_answers']} answers loop")
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
    return {name: _entry(rows) for name, rows in sorted(groups.items())}


def _length(rounds: int, accepted: int) -> float | None:
    return 1 + accepted / rounds if rounds else None


def _bin_name(number: int) -> str:
    low = POSITION_BINS[number - 1] if number else 0
    return f"{low}-{POSITION_BINS[number]}" if number < len(POSITION_BINS) else f"{low}-"


def _answers(entry: dict[str, Any]) -> str:
    if "num_answers" not in entry:
        return f"{'':>17}"
    return f"{entry['num_answers']:>8}{entry['num_looping'] / max(entry['num_answers'], 1):>9.0%}"


def _lengths(entry: dict[str, Any]) -> str:
    all_of, whole = entry.get("accept_length"), entry.get("accept_length_no_loops")
    return f"{_number(all_of):>12}{_number(whole):>10}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(shares: Sequence[float], depth: int) -> str:
    return f"{shares[depth]:.1%}" if depth < len(shares) else "-"
