"""Texts packed into batches of one fixed shape, with the positions from which the draft is unrolled.

Several texts lie in a row, each from a multiple of PAGE on, so that the target can read them as pages. Order,
packing and starts follow from the seed alone: a run that is continued sees what it would have seen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

PAGE = 8  # tokens; a text wastes half of it on average
TEXTS_PER_ROW = 16  # at most: the number of texts in a batch is one of the fixed shapes
MIN_ANSWER = 4  # tokens: a shorter answer has hardly a round to learn from


class Text(Protocol):
    """A prompt and the target's answer to it, one after the other."""

    tokens: np.ndarray  # int32 [n]
    num_prompt: int
    temperature: float  # of the answer's sampling


@dataclass(frozen=True)
class Shape:
    """Of every batch of a run."""

    num_rows: int
    length: int  # tokens of a row
    num_starts: int  # of a row
    unroll: int  # steps from a start

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.length

    @property
    def num_texts(self) -> int:
        return self.num_rows * TEXTS_PER_ROW


class Batch(NamedTuple):
    """Padding between texts belongs to the text before it; it is read and never learned from."""

    tokens: np.ndarray  # int64 [B, L]
    begins: np.ndarray  # int64 [B, L] where in its row the text of each token begins
    cu_rows: np.ndarray  # int32 [C + 1] begins of all texts in the batch as one row; unused ones are empty
    starts: np.ndarray  # int64 [B, M] places in the row; a round's root is the token after its start
    counts: np.ndarray  # int64 [B, M] steps of the unroll that stay within the text, 0 of unused starts
    temperatures: np.ndarray  # float32 [B, M] of the starts' texts


class Position(NamedTuple):
    """The next batch of a stream."""

    epoch: int
    index: int


class Packer:
    """An endless stream of batches, each text once an epoch.

    Args:
        texts: longer ones are cut at the row's length; those that leave too little answer are left out.

    Raises:
        ValueError: no text is left.
    """

    def __init__(self, texts: Sequence[Text], shape: Shape, seed: int):
        self.shape, self._seed = shape, seed
        self._texts = [
            (text.tokens[: shape.length], text.num_prompt, text.temperature)
            for text in texts
            if text.num_prompt >= 1 and min(len(text.tokens), shape.length) >= text.num_prompt + MIN_ANSWER
        ]
        if not self._texts:
            raise ValueError("no text has an answer of a few tokens within the row's length")

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    def stream(self, position: Position) -> Iterator[tuple[Position, Batch]]:
        """Batches from `position` on, each with the position after it."""
        epoch, index = position
        while True:
            plan = self._plan(epoch)
            for i in range(index, len(plan)):
                rng = np.random.default_rng((self._seed, 1, epoch, i))
                after = Position(epoch, i + 1) if i + 1 < len(plan) else Position(epoch + 1, 0)
                yield after, self._batch(plan[i], rng)
            epoch, index = epoch + 1, 0

    def _plan(self, epoch: int) -> list[list[list[int]]]:
        """Texts by batch and row. The last rows of an epoch wait for its next one, unless there are no more."""
        rng = np.random.default_rng((self._seed, 0, epoch))
        order = rng.permutation(len(self._texts)).tolist()
        rows = pack([-(-len(self._texts[i][0]) // PAGE) for i in order], self.shape.length // PAGE)
        mixed = [[order[i] for i in rows[r]] for r in rng.permutation(len(rows)).tolist()]
        size = self.shape.num_rows
        whole = len(mixed) // size * size
        return [mixed[at : at + size] for at in range(0, whole or len(mixed), size)]

    def _batch(self, rows: list[list[int]], rng: np.random.Generator) -> Batch:
        shape = self.shape
        tokens = np.zeros((shape.num_rows, shape.length), np.int64)
        begins, last = np.zeros_like(tokens), np.zeros_like(tokens)
        possible = np.zeros(tokens.shape, bool)
        temperatures = np.zeros(tokens.shape, np.float32)
        places = []
        for r in range(shape.num_rows):
            at = 0
            for i in rows[r] if r < len(rows) else ():
                text, num_prompt, temperature = self._texts[i]
                end = at + len(text)
                tokens[r, at:end] = text
                temperatures[r, at:] = temperature
                begins[r, at:], last[r, at:] = at, end - 2  # the last token's state predicts what never came
                possible[r, at + num_prompt - 1 : end - 2] = True
                places.append(r * shape.length + at)
                at = -(-end // PAGE) * PAGE
            if not at:
                places.append(r * shape.length)
        cu_rows = np.full(shape.num_texts + 1, shape.num_tokens, np.int32)
        cu_rows[: len(places)] = places
        starts = _choose(possible, shape.num_starts, rng)
        ends = np.take_along_axis(last, starts, 1)
        counts = np.where(np.take_along_axis(possible, starts, 1), np.minimum(ends - starts, shape.unroll), 0)
        return Batch(tokens, begins, cu_rows, starts, counts, np.take_along_axis(temperatures, starts, 1))


def pack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of `sizes` by row: each goes, in turn, where it leaves the least room (best fit)."""
    rows: list[list[int]] = []
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by room left
    rooms = 0  # bit r: some open row has room r
    for i, size in enumerate(sizes):
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(i)
        if room > size and len(rows[row]) < TEXTS_PER_ROW:
            open_rows[room - size].append(row)
            rooms |= 1 << (room - size)
    return rows


def _choose(possible: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` places of each row by lot, possible ones first: int64 [B, count]."""
    lots = rng.random(possible.shape, np.float32) + possible
    return np.argpartition(-lots, min(count, lots.shape[1] - 1), axis=1)[:, :count]
