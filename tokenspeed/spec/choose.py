"""The few trees worth keeping for each batch, of many that were timed. No torch."""

import math
from collections.abc import Mapping, Sequence

from tokenspeed.config import Shape
from tokenspeed.spec.calibration import Calibration, size_of
from tokenspeed.spec.gain import Gain, Offset, prior_for

NUM_TREES = 3  # and plain rounds
# How predictable a text may be beside the one that acceptance was measured on, in logits.
LEVELS = (0.0, -1.0, 1.0)


def expected_speed(
    calibration: Calibration, context: int = 0, level: float = 0.0
) -> dict[tuple[int, Shape | None], float]:
    """Expected tokens a second of each batch and tree, where every request has `context` tokens."""
    per_token = dict(calibration.per_token)
    gain = Gain(priors_of(calibration))
    found: dict[tuple[int, Shape | None], float] = {}
    for batch, size, us in calibration.times:
        shape = Shape(*size) if size else None
        time = us + per_token.get(size, 0.0) * batch * context
        found[batch, shape] = gain.tokens(shape, gain.levels([Offset(level)] * batch)) / time * 1e6
    return found


def priors_of(calibration: Calibration) -> dict[Shape, tuple[float, ...]]:
    """Acceptance by depth of every tree that was timed, measured or guessed."""
    measured = {Shape(*size): tuple(prior) for size, prior in calibration.priors}
    shapes = {Shape(*size) for _, size, _ in calibration.times if size}
    return {shape: prior_for(shape, measured) for shape in shapes}


def choose(calibration: Calibration, context: int) -> Calibration:
    """Keeps of each batch the trees that are best for usual, for hard and for easy text, then the next best.

    Args:
        context: tokens of a request, about.
    """
    speeds = [expected_speed(calibration, context, level) for level in LEVELS]
    kept: dict[int, list[Shape]] = {}
    for batch, shapes in calibration.ladder().items():
        ranked = [sorted(shapes, key=lambda s: -found[batch, s]) for found in speeds]
        order = dict.fromkeys([ranking[0] for ranking in ranked if ranking] + ranked[0])
        kept[batch] = list(order)[:NUM_TREES]
    used = {size_of(shape) for shapes in kept.values() for shape in shapes}
    return Calibration(
        times=[t for t in calibration.times if t[1] is None or Shape(*t[1]) in kept[t[0]]],
        per_token=[(size, us) for size, us in calibration.per_token if size is None or size in used],
        priors=[(size, prior) for size, prior in calibration.priors if size in used],
        padded=calibration.padded,
    )


def acceptance(accepted: Mapping[Shape, Sequence[int]]) -> list[tuple[tuple[int, int, int], list[float]]]:
    """Priors from rounds: for each tree the accepted counts of its rounds -> acceptance by depth.

    Half a success and half a failure are added to each depth, so that none is 0 or 1.
    """
    found = []
    for shape, counts in accepted.items():
        reached = [sum(count >= depth for count in counts) for depth in range(shape.steps + 1)]
        prior = [(reached[d + 1] + 0.5) / (reached[d] + 1.0) for d in range(shape.steps)]
        assert all(0.0 < p < 1.0 and math.isfinite(p) for p in prior)
        found.append((size_of(shape), [round(p, 4) for p in prior]))
    return found
