"""How long a round takes: a table by batch and tree, plus the rows' context; corrected while serving. No torch."""

import math
from bisect import bisect_left

from tokenspeed.config import Shape

# Shares of a deviation that are believed to be this round's own, and every round's: a machine slows down as a whole.
_OWN_RATE, _SHARED_RATE = 0.1, 0.2
_MOST = 0.5  # the largest deviation, a logarithm, that is taken from one round


class Costs:
    """Microseconds of rounds.

    Args:
        table: time of a round by (batch, shape), measured with next to no context; None is a plain round.
            Trees that a batch has no time for are not for it: they take for ever.
        per_token: time of each token of context, by shape.
        padded: a round of another batch takes as long as the next larger one of the table (CUDA graphs);
            else the time is interpolated.

    Raises:
        ValueError: no times, a time that is not positive, or a batch without a plain round.
    """

    def __init__(
        self,
        table: dict[tuple[int, Shape | None], float],
        per_token: dict[Shape | None, float] | None = None,
        padded: bool = True,
    ):
        if not table or min(table.values()) <= 0 or not all(map(math.isfinite, table.values())):
            raise ValueError("times of rounds must be positive numbers")
        self.batches = sorted({batch for batch, _ in table})
        if any((batch, None) not in table for batch in self.batches):
            raise ValueError("every batch needs the time of a plain round")
        self._logs = {key: math.log(time) for key, time in table.items()}
        self._per_token, self._padded = per_token or {}, padded
        self._shared = 0.0  # logarithm of how much slower everything is than the table

    def time(self, batch: int, shape: Shape | None, context: int = 0) -> float:
        """Expected microseconds of a round of `batch` requests with `context` tokens in all."""
        time = self._without_context(batch, shape) + self._per_token.get(shape, 0.0) * context
        return math.exp(self._shared) * time

    def learn(self, batch: int, shape: Shape | None, context: int, elapsed: float) -> None:
        """Books a round that took `elapsed` microseconds. One outlier moves little.

        Most of a deviation moves all times alike: those of shapes that are not in use would grow old otherwise, and
        a machine that has slowed down would make each of them look fast.
        """
        expected = self.time(batch, shape, context)
        if elapsed <= 0 or expected == math.inf:
            return
        off = min(max(math.log(elapsed / expected), -_MOST), _MOST)
        self._shared += _SHARED_RATE * off
        for at in self._around(batch):
            if (at, shape) in self._logs:
                self._logs[at, shape] += _OWN_RATE * off

    def _without_context(self, batch: int, shape: Shape | None) -> float:
        around = self._around(batch)
        if len(around) == 1:
            # Beyond the table a round takes as long as its rows' share of the last one.
            return self._at(around[0], shape) * max(1.0, batch / self.batches[-1])
        low, high = (self._at(at, shape) for at in around)
        if math.inf in (low, high):
            return math.inf
        return low + (high - low) * (batch - around[0]) / (around[1] - around[0])

    def _at(self, batch: int, shape: Shape | None) -> float:
        return math.exp(self._logs.get((batch, shape), math.inf))

    def _around(self, batch: int) -> tuple[int, ...]:
        """The batches of the table that decide about this one."""
        i = bisect_left(self.batches, batch)
        if i == len(self.batches):
            return (self.batches[-1],)
        if self._padded or i == 0 or self.batches[i] == batch:
            return (self.batches[i],)
        return self.batches[i - 1], self.batches[i]
