"""Which of many timed trees are kept, and acceptance by depth from rounds."""

import pytest

from tokenspeed.config import Shape
from tokenspeed.spec.calibration import Calibration, size_of
from tokenspeed.spec.choose import NUM_TREES, acceptance, choose, expected_speed, priors_of
from tokenspeed.spec.gain import default_prior, prior_for

LONG, MIDDLE, SHORT, WORST = Shape(12, 4, 16), Shape(5, 4, 8), Shape(2, 1, 3), Shape(8, 4, 16)
TIMES = {LONG: 200.0, MIDDLE: 140.0, SHORT: 115.0, WORST: 900.0}


def measured(**more) -> Calibration:
    times = [(b, size_of(s), us * (1 + b / 64)) for b in (1, 8) for s, us in TIMES.items()]
    return Calibration([*((b, None, 100.0) for b in (1, 8)), *times], **more)


def test_expected_speed_is_tokens_over_time():
    found = measured(per_token=[(None, 0.1)], priors=[(size_of(SHORT), [0.5, 0.25])])
    speeds = expected_speed(found, context=100)
    assert speeds[8, None] == pytest.approx(8 / (100 + 0.1 * 8 * 100) * 1e6)
    assert speeds[1, SHORT] == pytest.approx((1 + 0.5 + 0.5 * 0.25) / (115 * (1 + 1 / 64)) * 1e6)
    assert priors_of(measured())[LONG] == default_prior(LONG)


def test_a_tree_that_is_not_named_gets_what_the_most_similar_one_has():
    known = {LONG: (0.9, 0.8, *[0.7] * 10), SHORT: (0.6, 0.5)}
    assert prior_for(SHORT, known) == (0.6, 0.5)
    assert prior_for(Shape(3, 1, 4), known) == (0.6, 0.5, 0.5)
    assert prior_for(WORST, known) == (0.9, 0.8, *[0.7] * 6)
    found = measured(priors=[(size_of(s), list(p)) for s, p in known.items()])
    assert priors_of(found) == {s: prior_for(s, known) for s in TIMES}


def test_the_best_for_usual_hard_and_easy_text_are_kept():
    found = measured(priors=[(size_of(s), [0.7] * s.steps) for s in TIMES], per_token=[(size_of(WORST), 1.0)])
    kept = choose(found, 0)
    assert {batch: set(trees) for batch, trees in kept.ladder().items()} == {
        b: {LONG, MIDDLE, SHORT} for b in (1, 8)
    }
    assert len(kept.ladder()[1]) == NUM_TREES and kept.per_token == []
    assert {size for size, _ in kept.priors} == {size_of(s) for s in (LONG, MIDDLE, SHORT)}
    assert [t for t in kept.times if t[1] is None] == [t for t in found.times if t[1] is None]


def test_a_batch_without_trees_stays_plain():
    assert choose(Calibration([(1, None, 5.0)]), 0).ladder() == {1: ()}


def test_acceptance_by_depth():
    """Of 100 rounds 60 accept one token or more, and 30 of them both."""
    ((size, prior),) = acceptance({SHORT: [0] * 40 + [1] * 30 + [2] * 30})
    assert size == size_of(SHORT) and prior == pytest.approx([60.5 / 101, 30.5 / 61], abs=1e-4)
    assert all(0 < p < 1 for _, prior in acceptance({LONG: [12], MIDDLE: [0], SHORT: []}) for p in prior)
