"""Cases of the drafting ops; see kernel_cases.py."""

import itertools
import math
from collections.abc import Callable

import torch

from tokenspeed.kernels import Draw
from tokenspeed.kernels import reference_draft as reference
from tokenspeed.kernels.philox import gumbel, vocab_words

SHAPES = [(1, 1, 2), (4, 1, 5), (1, 4, 5), (3, 2, 4), (8, 4, 16), (5, 16, 64), (7, 10, 60)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    atol = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.dtype]
    torch.testing.assert_close(got, want, atol=atol, rtol=atol)


def case_top_candidates(fn: Callable, m) -> None:
    for rows, size, count in (
        (2, 49152 // (16 if m.quick else 1), 64),
        (3, 1000, 16),
        (1, 40, 16),
        (2, 17, 17),
    ):
        for scores in (m.normal(rows, size) * 3, (m.normal(rows, size) * 3).bfloat16()):
            places, share = fn(scores, count)
            want, want_share = reference.top_candidates(scores, count)
            assert torch.all(places[:, 1:] > places[:, :-1]) and places.dtype == torch.int64
            # Which of the last ones is taken may differ where they are equal, their values may not.
            got, best = (scores.gather(1, p).float().sort(1).values for p in (places, want))
            assert torch.equal(got, best)
            torch.testing.assert_close(share, want_share, atol=1e-5, rtol=1e-5)
    scores = m.normal(3, 300)
    scores[0, 7], scores[1] = torch.nan, -torch.inf
    scores[1, 5], scores[2] = 1.0, 0.5
    places, share = fn(scores, 8)
    assert torch.isnan(share[0]) and int(places.min()) >= 0 and int(places.max()) < 300
    assert 5 in places[1].tolist() and all(len(set(row)) == 8 for row in places.tolist())
    torch.testing.assert_close(
        share[1:], torch.tensor([1.0, 8 / 300], device=share.device).log(), atol=1e-5, rtol=0
    )
    candidates_by_noise(fn, m)


def draw_of(m, temperature: list[float], slots: list[int], depth: int = 3) -> Draw:
    """Settings by slot, with some filters, and requests in some slots."""
    size = len(temperature)
    top_p = [1.0, 0.8, 0.5, 1.0, 0.95][:size]
    return Draw(
        m.tensor(temperature, torch.float32),
        m.tensor([0, 0, 7, 20, 0][:size], torch.int32),
        m.tensor(top_p, torch.float32),
        m.tensor([0.0, 0.0, 0.0, 0.05, 0.2][:size], torch.float32),
        m.ints(-(2**62), 2**62, size),
        m.tensor(slots, torch.int64),
        m.ints(0, 3000, len(slots)),
        depth,
    )


def noise_of(draw: Draw, rows: int, tokens: torch.Tensor) -> torch.Tensor:
    """Temperature times noise of each row's tokens, [R, C], as `sample` draws it."""
    each = rows // len(draw.slots)
    slots, positions = (x.repeat_interleave(each) for x in (draw.slots, draw.positions + draw.depth))
    words = vocab_words(draw.seeds[slots], positions, int(tokens.max()) + 1)
    heat = torch.where(draw.temperature >= 1e-5, draw.temperature, 0.0)
    return heat[slots, None] * gumbel(words).gather(1, tokens.expand(rows, -1))


def candidates_by_noise(fn: Callable, m) -> None:
    draw = draw_of(m, [1.0, 0.0, 0.4, 1.5, 0.7], [3, 1, 0])
    for each, size, count in ((1, 4096 if m.quick else 49152, 64), (4, 1000, 16), (2, 40, 16), (1, 17, 17)):
        rows = each * 3
        for scores in (m.normal(rows, size) * 3, (m.normal(rows, size) * 3).bfloat16()):
            for ids in (None, torch.arange(size, device=scores.device) * 2 + 1):
                places, share = fn(scores, count, draw, ids)
                tokens = torch.arange(size, device=scores.device) if ids is None else ids
                whole = scores.float() + noise_of(draw, rows, tokens[None])
                found, best = whole.gather(1, places), whole.topk(count).values
                assert torch.all(places[:, 1:] > places[:, :-1]) and int(places.max()) < size
                slack = best.abs() * (2**-7 if scores.dtype == torch.bfloat16 else 1e-5) + 1e-5
                assert torch.all(found.sort(1, descending=True).values >= best - slack)
                want = found.logsumexp(1) - whole.logsumexp(1)
                torch.testing.assert_close(share, want, atol=1e-4, rtol=1e-4)
                greedy = slice(each, 2 * each)  # slot 1
                assert torch.equal(places[greedy], fn(scores[greedy], count)[0])


def ranked(fn: Callable, scores, ids, share, k: int, batch: int, draw: Draw | None = None):
    """The children that grow_tree records in step 0, of one row a request, or in step 1: ids, scores [R, k]."""
    first, device = len(scores) == batch, scores.device
    size = (batch, k + (0 if first else k * k))
    tree = [
        torch.zeros(size, dtype=kind, device=device) for kind in (torch.int64, torch.float32, torch.int64)
    ]
    lanes = None
    if not first:  # lanes whose scores are 0, so that their children have their own
        zeros = torch.zeros(batch, k, dtype=torch.int64, device=device)
        lanes = (zeros, zeros.float(), zeros)
    fn(scores, ids, share, k, lanes, tuple(tree), 0 if first else 1, True, draw)
    return tree[0][:, -len(scores) * k // batch :].reshape(-1, k), tree[1][
        :, -len(scores) * k // batch :
    ].reshape(-1, k)


def best_by_noise(fn: Callable, m) -> None:
    draw = draw_of(m, [1.0, 0.0, 0.4, 1.5, 0.7], [3, 1, 0, 4, 2])
    for each, count, k in ((4, 64, 4), (1, 10, 10), (3, 33, 3)):
        rows = 5 * each
        scores, share = m.normal(rows, count, dtype=torch.float32) * 3, m.normal(rows, dtype=torch.float32)
        ids = torch.stack([torch.randperm(5000, generator=m.generator)[:count] for _ in range(rows)])
        ids, share = ids.to(scores.device), -share.abs()
        got = ranked(fn, scores, ids, share, k, 5, draw)
        noise = noise_of(draw, rows, ids)
        for r in range(rows):
            slot = int(draw.slots[r // each])
            kept = (
                kept_by_filters(draw, slot, scores[r].tolist())
                if draw.temperature[slot] > 0
                else [True] * count
            )
            lost = torch.tensor([0.0 if kept_here else 10.0 for kept_here in kept], device=scores.device)
            want = (scores[r] + noise[r] - lost).log_softmax(0) + share[r]
            order = want.sort(descending=True, stable=True)
            torch.testing.assert_close(got[1][r], order.values[:k].clamp(max=0), atol=2e-5, rtol=2e-5)
            assert got[0][r].tolist() == ids[r][order.indices[:k]].tolist()


def kept_by_filters(draw: Draw, slot: int, scores: list[float]) -> list[bool]:
    """Which tokens top-k, top-p and min-p keep, in plain Python and float64."""
    heat, k = float(draw.temperature[slot]), int(draw.top_k[slot])
    p, floor = float(draw.top_p[slot]), float(draw.min_p[slot])
    weights = [math.exp((score - max(scores)) / heat) for score in scores]
    total, kept = sum(weights), []
    for mine in weights:
        above = [other for other in weights if other > mine]
        in_nucleus = p >= 1 or sum(above) / total < p
        kept.append((not k or len(above) < k) and in_nucleus and mine >= floor)
    return kept


def case_linear_candidates(fn: Callable, m) -> None:
    draw = draw_of(m, [1.0, 0.0, 0.4, 1.5, 0.7], [3, 1, 0])
    for rows, size, rank, count in (
        (3, 600 if m.quick else 49152, 96, 20 if m.quick else 64),
        (12, 300, 20, 16),
        (3, 17, 200, 17),
        (66, 130, 12, 9),
    ):
        x, weight = m.normal(rows, rank), m.normal(size, rank) * (3 / rank**0.5)
        scores = x.double() @ weight.double().T
        slack = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 0.3}[m.dtype]  # scores reach 15
        twice = torch.arange(size, device=x.device) * 2 + 1
        for drawn, ids in ((None, None), (draw, None), (draw, twice)):
            places, share = fn(x, weight, count, drawn, ids)
            tokens = torch.arange(size, device=x.device) if ids is None else ids
            whole = scores if drawn is None else scores + noise_of(draw, rows, tokens[None])
            assert torch.all(places[:, 1:] > places[:, :-1]) and int(places.max()) < size
            found, best = whole.gather(1, places), whole.topk(count).values
            assert torch.all(found.sort(1, descending=True).values >= best - slack)
            want = found.logsumexp(1) - whole.logsumexp(1)
            torch.testing.assert_close(share.double(), want, atol=slack / 6, rtol=0)
            if drawn is None:
                plain = places
            greedy = slice(rows // 3, rows // 3 * 2)  # slot 1
            assert torch.equal(places[greedy], plain[greedy])
    x, weight = m.normal(3, 32), m.normal(300, 32)
    x[0, 7], x[1] = torch.nan, 0.0
    places, share = fn(x, weight, 8)
    assert torch.isnan(share[0]) and int(places.min()) >= 0 and int(places.max()) < 300
    assert all(len(set(row)) == 8 for row in places.tolist())
    assert abs(float(share[1]) - math.log(8 / 300)) < 1e-5


def case_row_dots(fn: Callable, m) -> None:
    for rows, count, hidden in ((1, 64, 576), (4, 9, 700), (2, 3, 5000)):
        x, table = m.normal(rows, hidden) / 8, m.normal(200, hidden) / 8
        places = m.ints(0, 200, rows, count)
        want = (table.double()[places] * x.double()[:, None]).sum(-1)
        torch.testing.assert_close(fn(x, table, places).double(), want, atol=1e-3, rtol=1e-3)


def best_of_rows(fn: Callable, m) -> None:
    """Which candidates become children, with ties, NaN and -inf among the scores."""
    for rows, count, k in ((4, 64, 4), (1, 10, 10), (3, 33, 3), (16, 64, 16), (2, 100, 70)):
        batch = 1 if rows == k else rows
        scores = m.normal(rows, count, dtype=torch.float32)
        scores[:, : count // 2] = scores[:, : count // 2].round()  # ties, and zeros of both signs
        ids, share = m.ints(0, 5000, rows, count), -m.normal(rows, dtype=torch.float32).abs()
        got = ranked(fn, scores, ids, share, k, batch)
        want = reference.best_candidates(scores, ids, share, k)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=1e-5)
    scores = m.normal(4, 12, dtype=torch.float32)
    scores[0, 3], scores[3, 2:] = torch.nan, -torch.inf
    share = m.tensor([0.0, float("nan"), 0.0, 0.0], torch.float32)
    ids = torch.arange(48, device=scores.device).view(4, 12)
    for batch in (4, 1):  # rows of their own, or lanes of one tree
        got = ranked(fn, scores, ids, share, 4, batch)
        assert torch.all(got[1][:2] == -torch.inf) and torch.isfinite(got[1][2]).all()
        assert torch.isfinite(got[1][3, :2]).all() and torch.all(got[1][3, 2:] == -torch.inf)
        order = scores.nan_to_num(nan=-torch.inf).sort(dim=1, descending=True, stable=True).indices
        assert torch.equal(got[0], ids.gather(1, order[:, :4]))
    best_by_noise(fn, m)


def drawn(m, kind: str, batch: int, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Candidates of a draft step's rows: scores, ids, share."""
    count = max(k, 24)
    scores, share = (
        m.normal(batch * rows, count, dtype=torch.float32) * 2,
        m.tensor([0.0] * batch * rows, torch.float32),
    )
    if kind == "ties":  # within a row, and between rows of the same scores
        scores = (
            scores[:1]
            .round()[:, torch.randperm(count, generator=m.generator).to(m.device)]
            .repeat(batch * rows, 1)
        )
    if kind == "nan":
        scores[0] = torch.nan
        scores[-1, 1:] = -torch.inf
    return scores, m.ints(0, 9999, batch * rows, count), share


def grown(fn: Callable, m, kind: str, batch: int, steps: int, k: int) -> tuple[torch.Tensor, ...]:
    """Candidates after all steps, each checked against the reference, which goes on from the same lanes."""
    size = (batch, k + (steps - 1) * k * k)
    device = m.device
    candidates, others = (
        (
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(size, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
        )
        for _ in range(2)
    )
    lanes = None
    for step in range(steps):
        args = (*drawn(m, kind, batch, k if step else 1, k), k, lanes)
        got = fn(*args, candidates, step, step + 1 == steps)
        want = reference.grow_tree(*args, others, step, step + 1 == steps)
        assert same_lanes(candidates, others)
        for mine, its in zip(candidates, others, strict=True):  # both go on from the same scores
            mine.copy_(its)
        if want is None:
            assert got is None and step + 1 == steps
        else:
            assert same_lanes((got[0], got[4], *got[1:4]), (want[0], want[4], *want[1:4]))
            lanes = (want[3], want[4], want[2])
    return candidates


def same_lanes(got: tuple, want: tuple) -> bool:
    """Whether whole numbers are equal, and scores but for rounding."""
    for a, b in zip(got, want, strict=True):
        if a.dtype == torch.float32:
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
        elif not torch.equal(a, b):
            return False
    return True


def case_grow_tree(fn: Callable, m) -> None:
    for kind in ("random", "ties", "nan"):
        for steps, k, _ in SHAPES[1::2] if m.quick else SHAPES:
            grown(fn, m, kind, 2, steps, k)
    best_of_rows(fn, m)


def case_build_tree(fn: Callable, m) -> None:
    for kind in ("random", "ties", "nan"):
        for steps, k, nodes in SHAPES[::2] if m.quick else SHAPES:
            candidates = grown(reference.grow_tree, m, kind, 3, steps, k)
            root = m.ints(0, 99, 3)
            got, want = (build(root, *candidates, nodes) for build in (fn, reference.build_tree))
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # Of 40 + 40 * 40 candidates, the very last is as good as its parent.
    number = torch.arange(40 + 40 * 40, device=m.device)[None]
    scores = torch.where((number < 40) | (number == number.max()), -1.0, -5.0)
    candidates = number + 7, scores, torch.where(number < 40, -1, number // 40 - 1)
    got, want = (build(number[:, 0], *candidates, 64) for build in (fn, reference.build_tree))
    assert (want[0] == number.max() + 7).any()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def case_draft_rows(fn: Callable, m) -> None:
    last = m.tensor([7, 0, 1, 300], torch.int64)
    for steps, k, _ in SHAPES:
        got, want = fn(last, steps, k, 200), reference.draft_rows(last, steps, k, 200)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def case_draft_input(fn: Callable, m) -> None:
    for size in (24, 576):
        table, gains = m.normal(50, size), (m.normal(size), m.normal(size))
        tokens, parents = m.ints(0, 50, 6), m.ints(0, 4, 2, 3)
        for (state, of), normed in itertools.product(
            ((m.normal(6, size), None), (m.normal(8, size), parents)), (False, True)
        ):
            args = (tokens, table, state, of, *gains, 1e-5, normed)
            for a, b in zip(fn(*args), reference.draft_input(*args), strict=True):
                close(a, b)
