"""Which tree a round uses: the pinned one, or the one that brings most tokens a second now. No torch (scheduler)."""

import math
from collections.abc import Sequence
from typing import Protocol

from tokenspeed.config import Shape
from tokenspeed.spec.calibration import decode
from tokenspeed.spec.choose import priors_of
from tokenspeed.spec.cost import Costs
from tokenspeed.spec.gain import Gain, Offset

_HYSTERESIS = 1.02  # another shape has to be so much faster than the last one
# and a tree than plain rounds, by 1/500 for each request: prompts that come one by one, tokens past the end of an
# answer and host work are no part of a round's time, and on an H200 a promise of 1.2x at 160 requests was a loss.
_MARGIN_ROW = 1 / 500
_PROBE_SHARE = 0.01  # of the time goes into seeing whether speculation pays again
_COMPARE_SHARE = 0.005  # and into each shape that is not the best, while one is used
_PROBE_LEAST = 8  # rounds between two tries of a shape


class Row(Protocol):
    """What a plan looks at in a request."""

    offset: Offset

    @property
    def num_tokens(self) -> int: ...


class StaticPlan:
    """One shape for every round of at most `plain_above` requests (None: of any size); else plain rounds."""

    def __init__(self, shape: Shape | None, plain_above: int | None = None):
        self.shape, self.plain_above = shape, plain_above
        self.expected_tokens = 0.0  # nothing is expected

    def choose(self, rows: Sequence[Row]) -> Shape | None:
        """The tree for a round of these requests; None is a plain round."""
        if self.plain_above is not None and len(rows) > self.plain_above:
            return None
        return self.shape

    def observe(self, shape: Shape | None, rows: Sequence[tuple[Row, int]], elapsed_us: int | None) -> None:
        """Nothing is learnt."""


class AdaptivePlan:
    """The shape with most expected tokens a second, plain rounds included.

    Now and then a round is spent on another shape: so rarely that little is lost, and often enough to notice that
    the text has changed or that a prior was wrong.

    Args:
        gain, costs: what rounds bring and take; both learn from `observe`.
        shapes: the trees to choose from. plain_above: as in StaticPlan.
    """

    def __init__(self, gain: Gain, costs: Costs, shapes: Sequence[Shape], plain_above: int | None = None):
        self.gain, self.costs, self.plain_above = gain, costs, plain_above
        self._shapes = tuple(shapes)
        self._last: Shape | None = None
        self._rounds = 0
        self._tried = dict.fromkeys(self._shapes, 0)  # number of the last round that used it
        self.expected_tokens = 0.0  # of every row of a round with a tree, since the start

    def choose(self, rows: Sequence[Row]) -> Shape | None:
        """The tree for a round of these requests; None is a plain round."""
        if self.plain_above is not None and len(rows) > self.plain_above:
            return None
        self._rounds += 1
        context = sum(row.num_tokens for row in rows)
        levels = self.gain.levels(row.offset for row in rows)
        every = {s: self.costs.time(len(rows), s, context) for s in (None, *self._shapes)}
        times = {s: time for s, time in every.items() if time < math.inf}
        tokens = {s: self.gain.tokens(s, levels) for s in times}
        tokens[None] *= 1 + _MARGIN_ROW * len(rows)
        speeds = {s: tokens[s] / times[s] for s in times}
        best = max(speeds, key=speeds.__getitem__)
        if speeds[best] < _HYSTERESIS * speeds.get(self._last, 0.0):
            best = self._last
        self._last = best
        chosen = self._due(best, times, tokens) or best
        if chosen is not None:
            self._tried[chosen] = self._rounds
        return chosen

    def observe(self, shape: Shape | None, rows: Sequence[tuple[Row, int]], elapsed_us: int | None) -> None:
        """Learns from a round.

        Args:
            shape: its tree. rows: each request with the number of draft tokens that were accepted.
            elapsed_us: its time; None where other work was part of it.
        """
        if shape is None:
            self.gain.pass_by()
        elif rows:
            self.expected_tokens += self.gain.update(shape, [(row.offset, taken) for row, taken in rows])
        if elapsed_us and rows:
            context = sum(row.num_tokens for row, _ in rows)
            self.costs.learn(len(rows), shape, context, elapsed_us)

    def _due(self, best: Shape | None, times: dict, tokens: dict) -> Shape | None:
        """A shape whose turn it is to be tried, the best one aside."""
        others = [s for s in times if s not in (best, None)]
        share = _COMPARE_SHARE
        if best is None and others:  # any tree tells how predictable the text is: take the most promising
            others, share = [max(others, key=lambda s: tokens[s] / times[s])], _PROBE_SHARE
        for shape in others:
            # Rounds of the best kind that are lost by one round of this one.
            loss = times[shape] / times[best] - tokens[shape] / tokens[best]
            if self._rounds - self._tried[shape] >= max(_PROBE_LEAST, loss / share):
                return shape
        return None


def plan_for(
    shapes: Sequence[Shape], plain_above: int | None, calibration: str | None
) -> StaticPlan | AdaptivePlan:
    """The plan of a server: adaptive where the worker has timed its rounds (`spec.calibration.encode`)."""
    if calibration is None:
        return StaticPlan(shapes[0] if shapes else None, plain_above)
    found = decode(calibration)
    table = {(batch, Shape(*size) if size else None): us for batch, size, us in found.times}
    per_token = {Shape(*size) if size else None: us for size, us in found.per_token}
    trees = list(dict.fromkeys(shape for _, shape in table if shape))
    gain = Gain(priors_of(found))
    return AdaptivePlan(gain, Costs(table, per_token, found.padded), trees, plain_above)
