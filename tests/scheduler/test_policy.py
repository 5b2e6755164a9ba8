"""Chunk budget, reservation and refusal as plain functions."""

from array import array

import pytest
from fake_ring import generate

from tokenspeed.config import Shape
from tokenspeed.metrics import COUNTERS
from tokenspeed.scheduler import policy
from tokenspeed.scheduler.counters import Counters
from tokenspeed.scheduler.request import Request, num_at_least, total


def shares(budget: int, remaining: list[int]) -> list[int]:
    """Tokens for each prompt, in order of arrival."""
    requests = [Request(generate(i, [1], max_tokens=1), i, 100, ()) for i in range(len(remaining))]
    chunks = policy.ChunkBudget(budget, len(remaining))
    for request, count in zip(requests, remaining, strict=True):
        chunks.take(request, count)
    out = {request.rid: count for request, count in chunks.close()}
    return [out.get(i, 0) for i in range(len(remaining))]


@pytest.mark.parametrize(
    ("remaining", "want"),
    [
        ([100], [100]),
        ([300], [128]),
        ([10, 20, 30], [10, 20, 30]),
        ([128, 1], [128, 0]),
        ([300, 20], [108, 20]),  # a quarter, 32, was kept; 12 of it go back
        ([300, 20, 400, 12, 1], [96, 20, 0, 12, 0]),
        ([300, 33], [128, 0]),  # too long for the quarter
        ([100, 300, 5], [100, 28, 0]),  # 28 are left, less than the quarter: first come, first served
        ([20, 300, 32], [20, 76, 32]),
    ],
)
def test_chunk_budget(remaining, want):
    assert shares(128, remaining) == want
    assert sum(want) <= 128


def test_chunk_budget_wastes_nothing():
    for budget in (1, 2, 3, 4, 7, 100):
        for remaining in ([1000], [1000, 1000], [1000, 1, 1000], [3, 1000, 2, 5], [1, 2, 3]):
            assert sum(shares(budget, remaining)) == min(budget, sum(remaining))
            assert shares(budget, remaining)[0] > 0


@pytest.mark.parametrize(
    ("new", "want"),
    [
        ([5, 7, 6], (3, None, None)),  # 7 as the second output token is too early
        ([5, 5, 7, 6], (4, None, None)),  # and as the third: three others must come first
        ([5, 5, 5, 7, 6], (4, "stop", 7)),
        ([5, 7, 5, 9, 6], (4, "stop", 9)),
        ([5, 5, 5, 5, 5, 7], (6, "stop", 7)),  # both ends at once: the stop token counts
        ([5, 5, 5, 5, 5, 5, 7], (6, "length", None)),
    ],
)
def test_where_a_round_is_cut(new, want):
    message = generate(1, [7, 9], max_tokens=6, min_tokens=3, stop_token_ids=(9,))
    request = Request(message, 0, 100, (7,))
    assert request.commit(array("i", new)) == want
    assert request.tokens.tolist() == [7, 9, *new[: want[0]]] and request.num_output == want[0]


def test_headroom():
    assert policy.headroom(0, Shape(3, 2, 6), 16) == 0
    assert policy.headroom(5, None, 16) == 5
    assert policy.headroom(5, Shape(8, 4, 16), 16) == 10


def test_histogram_to_depths():
    values = (0, 2, 2, 3, 1)
    histogram = [values.count(i) for i in range(9)]
    assert num_at_least(histogram) == [4, 3, 1] and total(histogram) == 8
    assert num_at_least([]) == num_at_least([5]) == [] and total([5]) == 0


def test_counters_have_the_names_of_the_metrics():
    assert set(Counters().as_dict()) == set(COUNTERS)


def test_prompts_are_held_for_others_but_not_long():
    few, many = policy.Gathering(), policy.Gathering()
    assert not few.holds(1, 0) and not few.holds(1, 8)  # one for eight
    assert [many.holds(1, 64) for _ in range(7)] == [True] * 4 + [False, True, True]
    assert not many.holds(8, 64)  # and the steps count anew
    assert [many.holds(7, 64) for _ in range(5)] == [True] * 4 + [False]
