"""Output heads: against float64 softmax over everything, against what a target draws, with ties and NaN."""

import pytest
import torch

from tokenspeed import kernels
from tokenspeed.kernels import Draw
from tokenspeed.kernels.reference_draft import best_candidates
from tokenspeed.layers.embedding import Head, VocabTable
from tokenspeed.layers.parameter import Placement
from tokenspeed.spec.eagle4.head import CandidateHead, FullHead

CPU = Placement(torch.device("cpu"), torch.float32)
V, H = 301, 24


def table(seed: int = 0, rows: int = V) -> VocabTable:
    out = VocabTable(rows, H, CPU)
    out.weight.copy_(torch.randn(rows, H, generator=torch.Generator().manual_seed(seed)))
    return out


def rows(count: int = 5) -> torch.Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(9))


def candidate_head(rank: int, c: int, offset: float = 0.0, token_ids=None) -> CandidateHead:
    """Factors by truncated SVD of the table; `offset` adds a constant to every low-rank score of `rows()`."""
    full = table()
    head = CandidateHead(full, token_ids, rank, c, CPU)
    u, s, vh = torch.linalg.svd(full.weight, full_matrices=False)
    params = head.params()
    up, down = u[:, :rank] * s[:rank], vh[:rank]
    if offset:  # a direction of `down` that every row has in equal measure
        extra = torch.linalg.pinv(rows()) @ torch.ones(len(rows()))
        up, down = torch.cat([up[:, :-1], torch.full((V, 1), offset)], 1), torch.cat([down[:-1], extra[None]])
    params["efficient_lm_head.weight"].load(up)
    params["efficient_lm_head_down_proj.weight"].load(down)
    return head


def topk(head, out: torch.Tensor, k: int, draw: Draw | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's k best ids and their log-probabilities, as a tree takes them."""
    return best_candidates(*head.candidates(out, k, draw), k, draw)


@pytest.mark.parametrize("k", [1, 4, 64])
def test_full_head(k):
    head = FullHead(Head(table(), CPU), None)
    ids, logprobs = topk(head, rows(), k)
    exact = (rows().double() @ table().weight.double().t()).log_softmax(1)
    best = exact.sort(1, descending=True)
    assert torch.equal(ids, best.indices[:, :k]) and logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), best.values[:, :k], atol=1e-5, rtol=1e-5)


def test_full_head_of_a_reduced_vocabulary():
    token_ids = torch.arange(50) * 3 + 1
    ids, logprobs = topk(FullHead(Head(table(1, 50), CPU), token_ids), rows(), 3)
    exact = (rows() @ table(1, 50).weight.t()).log_softmax(1)
    assert torch.equal(ids, exact.topk(3).indices * 3 + 1)
    torch.testing.assert_close(logprobs, exact.topk(3).values)


def test_candidate_head_with_all_candidates_is_the_full_head():
    full, low = FullHead(Head(table(), CPU), None), candidate_head(H, V)
    (a, x), (b, y) = topk(full, rows(), 8), topk(low, rows(), 8)
    assert torch.equal(a, b)
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_candidate_head_of_full_rank_gives_exact_logprobs():
    """Exact low-rank scores make the candidates' share exact: log-probabilities over the whole vocabulary."""
    full, low = FullHead(Head(table(), CPU), None), candidate_head(H, 16)
    (a, x), (b, y) = topk(full, rows(), 8), topk(low, rows(), 8)
    assert torch.equal(a, b)
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_a_constant_in_the_low_rank_scores_changes_nothing():
    (a, x), (b, y) = (topk(candidate_head(12, 16, offset), rows(), 8) for offset in (0.001, 30.0))
    assert torch.equal(a, b)
    torch.testing.assert_close(x, y, atol=1e-3, rtol=1e-3)


def test_candidate_head_by_its_definition():
    head = candidate_head(10, 20, token_ids=torch.arange(V) + 1000)
    params = head.params()
    low = rows().double() @ params["efficient_lm_head_down_proj.weight"].target.double().t()
    low = low @ params["efficient_lm_head.weight"].target.double().t()
    ids, logprobs = topk(head, rows(), 5)
    for r in range(5):
        c = low[r].topk(20).indices
        exact = (table().weight.double()[c] @ rows()[r].double()).softmax(0) * (
            low[r][c].exp().sum() / low[r].exp().sum()
        )
        order = exact.argsort(descending=True)[:5]
        assert ids[r].tolist() == (c[order] + 1000).tolist()
        torch.testing.assert_close(logprobs[r].double(), exact[order].log(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [lambda: FullHead(Head(table(), CPU), None), lambda: candidate_head(12, 40)])
def test_nan_and_zero_rows(make):
    out = rows(3)
    out[0], out[1] = torch.nan, 0.0
    ids, logprobs = topk(make(), out, 6)
    assert int(ids.min()) >= 0 and int(ids.max()) < V
    assert (logprobs[0] == -torch.inf).all() and torch.isfinite(logprobs[1:]).all()
    assert ids[1].tolist() == sorted(ids[1].tolist())  # all scores are equal: by id
    assert all(len(set(r)) == 6 for r in ids.tolist())


def test_ties_of_the_full_head_go_to_the_lowest_ids():
    assert (
        topk(FullHead(Head(table(1, 50), CPU), None), torch.zeros(2, H), 9)[0].tolist()
        == [list(range(9))] * 2
    )


NO_FILTER = (0, 1.0, 0.0)
FILTERS = [NO_FILTER, (5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (20, 0.9, 0.02)]  # top_k, top_p, min_p


def draw_of(filters: list[tuple[int, float, float]], depth: int) -> Draw:
    """90 requests, each in a slot of its own, with a seed of its own, at temperature 0, 0.3 or 1."""
    g = torch.Generator().manual_seed(depth)
    top_k, top_p, min_p = zip(*(filters * 90)[:90], strict=True)
    return Draw(
        torch.tensor([0.0, 0.3, 1.0]).repeat_interleave(30),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.randint(-(2**62), 2**62, (90,), generator=g),
        slots=torch.randperm(90, generator=g),
        positions=torch.randint(0, 3000, (90,), generator=g),
        depth=depth,
    )


def share_drawn(head: FullHead | CandidateHead, size: int, filters: list, depth: int, each: int) -> float:
    """In how many rows the draft says what a target with the same scores draws; `each` rows a request.

    Args:
        head: of the first `size` rows of table().
    """
    draw = draw_of(filters, depth)
    out = torch.randn(90 * each, H, generator=torch.Generator().manual_seed(each)) / 3
    scores = out @ table().weight[:size].t()
    if head.token_ids is not None:  # what the draft does not know, the target never says
        every = torch.full((len(out), int(head.token_ids.max()) + 1), -torch.inf)
        scores = every.index_copy(1, head.token_ids, scores)
    positions = (draw.positions + depth).repeat_interleave(each)
    settings = (draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.seeds)
    drawn = kernels.sample(scores, *settings, positions, draw.slots)
    ids, logprobs = topk(head, out, 1, draw)
    assert (logprobs <= 0).all() and torch.isfinite(logprobs).all()
    best, _ = topk(head, out, 1)
    greedy = (draw.temperature[draw.slots] == 0).repeat_interleave(each)
    assert torch.equal(ids[greedy], best[greedy])
    assert (best[~greedy, 0] == drawn[~greedy]).float().mean() < 0.8  # noise must choose, or it shows nothing
    return float((ids[:, 0] == drawn).float().mean())


def full_head(size: int, token_ids: torch.Tensor | None) -> FullHead:
    part = VocabTable(size, H, CPU)
    part.weight.copy_(table().weight[:size])
    return FullHead(Head(part, CPU), token_ids)


def vocabularies(size: int) -> list[torch.Tensor | None]:
    """Draft ids are the target's, or are mapped to some of them."""
    return [None, torch.arange(size) * 3 + 2]


ROWS = pytest.mark.parametrize("depth, each", [(1, 1), (3, 4)])


@ROWS
@pytest.mark.parametrize("size", [60, V])  # all are candidates, a part
def test_the_best_token_is_what_the_target_draws(size, depth, each):
    for token_ids in vocabularies(size):
        assert share_drawn(full_head(size, token_ids), size, [NO_FILTER], depth, each) == 1.0


@ROWS
def test_so_it_is_by_the_low_rank_scores(depth, each):
    for token_ids in vocabularies(V):
        assert share_drawn(candidate_head(H, 16, token_ids=token_ids), V, [NO_FILTER], depth, each) == 1.0


@ROWS
def test_filters_hide_what_the_target_does_not_draw(depth, each):
    """Nearly always: a dropped candidate loses 10, and the noise of a hot row may exceed that."""
    for token_ids in vocabularies(60):
        assert share_drawn(full_head(60, token_ids), 60, FILTERS, depth, each) > 0.99


def test_holds_best_by_its_definition():
    """Against sets of candidates that are counted out, at a rank and a number of candidates that miss some."""
    head, many = candidate_head(3, 6), torch.randn(200, H, generator=torch.Generator().manual_seed(7))
    params = head.params()
    low = many.double() @ params["efficient_lm_head_down_proj.weight"].target.double().t()
    low = low @ params["efficient_lm_head.weight"].target.double().t()
    best = (many.double() @ table().weight.double().t()).argmax(1)
    expected = [int(best[r]) in low[r].topk(6).indices.tolist() for r in range(200)]
    assert head.holds_best(many).tolist() == expected and 20 < sum(expected) < 180
    assert candidate_head(H, 1).holds_best(many).all()
    assert head.holds_best(torch.full((1, H), torch.nan)).tolist() == [False]
