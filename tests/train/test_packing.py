"""Batches: what lies where, that nothing is lost, and that a stream can be taken up anywhere."""

import numpy as np
import pytest
from train.train_cases import random_answers

from tokenspeed.train.answers import Answer
from tokenspeed.train.packing import PAGE, TEXTS_PER_ROW, Packer, Position, Shape, pack

SHAPE = Shape(3, 64, 24, 5)


def test_every_text_comes_once_an_epoch_and_starts_lie_in_answers():
    answers = random_answers(90, 1000, 50)
    packer = Packer(answers, SHAPE, 1)
    whole = {a.tokens.tobytes(): a.num_prompt for a in answers}
    seen, possible = [], 0
    for (epoch, _), batch in packer.stream(Position(0, 0)):
        for r in range(SHAPE.num_rows):
            begins = sorted(set(batch.begins[r].tolist()))
            places = [r * SHAPE.length + b for b in begins]
            assert set(places) <= set(batch.cu_rows.tolist()) and all(b % PAGE == 0 for b in begins)
            ends = [*begins[1:], SHAPE.length]
            for begin, end in zip(begins, ends, strict=True):
                found = next(
                    key
                    for size in range(end - begin, 0, -1)
                    if (key := batch.tokens[r, begin : begin + size].astype(np.int32).tobytes()) in whole
                )
                seen.append(found)
                size, num_prompt = len(found) // 4, whole[found]
                for start, count in zip(batch.starts[r], batch.counts[r], strict=True):
                    if count and begin <= start < end:
                        at = start - begin
                        assert num_prompt - 1 <= at and count == min(size - 2 - at, SHAPE.unroll) >= 1
                        possible += 1
        assert (np.diff(batch.cu_rows) >= 0).all() and batch.cu_rows[-1] == SHAPE.num_tokens
        assert all(len(set(row)) == len(row) for row in batch.starts.tolist())
        if epoch == 1:
            break
    assert len(seen) == len(set(seen)) and len(seen) > 0.8 * len(whole)  # the last rows wait
    assert possible > 0.5 * SHAPE.num_starts


def test_a_stream_goes_on_from_any_position():
    packer = Packer(random_answers(60, 100, 50), SHAPE, 4)
    stream = packer.stream(Position(0, 0))
    first = [next(stream) for _ in range(25)]
    assert first[-1][0].epoch >= 1
    for at in (0, 7, 19):
        position, _ = first[at]
        for (expected, batch), (found, again) in zip(first[at + 1 :], packer.stream(position), strict=False):
            assert expected == found
            assert all(np.array_equal(a, b) for a, b in zip(batch, again, strict=True))
    other = next(Packer(random_answers(60, 100, 50), SHAPE, 5).stream(Position(0, 0)))[1]
    assert not np.array_equal(first[0][1].tokens, other.tokens)


def test_best_fit():
    assert pack([5, 4, 3, 6, 2], 8) == [[0, 2], [1], [3, 4]]
    rows = pack([1] * 40, 64)
    assert [len(row) for row in rows] == [TEXTS_PER_ROW, TEXTS_PER_ROW, 8]
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 100, 4000).tolist()
    rows = pack(sizes, 128)
    assert sorted(i for row in rows for i in row) == list(range(4000))
    assert max(sum(sizes[i] for i in row) for row in rows) <= 128
    assert sum(sizes) / (128 * len(rows)) > 0.95


def test_starts_know_the_temperature_of_their_texts():
    texts = [Answer(np.full(20 + i, i + 1, np.int32), 4, i / 10) for i in range(12)]
    batch = next(Packer(texts, SHAPE, 0).stream(Position(0, 0)))[1]
    used = batch.counts > 0
    of_text = np.take_along_axis(batch.tokens, batch.starts, 1)
    assert used.sum() > 10
    np.testing.assert_allclose(batch.temperatures[used], (of_text[used] - 1) / 10, rtol=1e-6)


def test_long_texts_are_cut_and_hopeless_ones_left_out():
    long = Answer(np.arange(200, dtype=np.int32), 10)
    hopeless = Answer(np.arange(200, dtype=np.int32), 62)
    packer = Packer([long, hopeless], SHAPE, 0)
    assert packer.num_texts == 1
    batch = next(packer.stream(Position(0, 0)))[1]
    assert (batch.tokens.sum(1) > 0).sum() == 1
    assert batch.tokens.max() == 63 and batch.counts.max() == SHAPE.unroll
    assert (batch.counts > 0).any(1).sum() == 1  # two rows are empty
    with pytest.raises(ValueError, match="no text"):
        Packer([hopeless], SHAPE, 0)
