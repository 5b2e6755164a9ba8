"""Few cases that hold every pair of choices: a covering array of strength 2, made greedily."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

Choice = tuple[str, Any]  # factor, level
Case = dict[str, Any]  # a level for each factor
Pair = frozenset[Choice]
Allowed = Callable[[Case], bool]  # whether a case, which may lack factors yet, can be; forbids pairs only


def pairs(case: Mapping[str, Any]) -> set[Pair]:
    return {frozenset(two) for two in combinations(case.items(), 2)}


def all_pairs(factors: Mapping[str, Sequence], allowed: Allowed) -> list[Pair]:
    """Every pair of levels of two factors that may stand together."""
    return [
        frozenset([(a, x), (b, y)])
        for a, b in combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
        if allowed({a: x, b: y})
    ]


def covering(factors: Mapping[str, Sequence], allowed: Allowed) -> list[Case]:
    """Cases that hold every pair of `all_pairs`; the same at each call.

    A case begins with a pair that nothing holds yet, of the level with most such pairs. Each other factor takes
    the level that adds most of them; where several do, the one whose pairs have been used least.
    """
    used = Counter(dict.fromkeys(all_pairs(factors, allowed), 0))
    cases: list[Case] = []
    while left := [pair for pair, times in used.items() if not times]:
        wanted = Counter(choice for pair in left for choice in pair)
        level = max(((name, x) for name in factors for x in factors[name]), key=wanted.__getitem__)
        seeds = [pair for pair in left if level in pair]
        case = max(
            (_completed(dict(seed), factors, allowed, used) for seed in seeds), key=lambda c: _worth(c, used)
        )
        used.update(pairs(case))
        cases.append(case)
    return cases


def cut(cases: Sequence[Case], count: int) -> list[Case]:
    """`count` of the cases: every level as soon as may be, then as many pairs as may be."""
    chosen: list[Case] = []
    levels: set[Choice] = set()
    held: set[Pair] = set()
    while len(chosen) < count:
        best = max(cases, key=lambda case: (len(case.items() - levels), len(pairs(case) - held)))
        chosen.append(best)
        levels |= best.items()
        held |= pairs(best)
    return chosen


def _completed(case: Case, factors: Mapping[str, Sequence], allowed: Allowed, used: Counter) -> Case:
    for name, levels in factors.items():
        if name not in case:
            options = filter(allowed, ({**case, name: level} for level in levels))
            case = max(options, key=lambda option: _worth(option, used))
    return {name: case[name] for name in factors}


def _worth(case: Case, used: Counter) -> tuple[int, int]:
    times = [used[pair] for pair in pairs(case)]
    return times.count(0), -sum(times)
