"""Where an answer begins to repeat itself: the last 128 tokens hold one 8-gram four times (as in `bench`)."""

import numpy as np

from tokenspeed.bench.acceptance import LOOP_NGRAM, LOOP_TIMES, LOOP_WINDOW

_FACTORS = np.array([pow(0x9E3779B97F4A7C15, i + 1, 2**64) for i in range(LOOP_NGRAM)], dtype=np.uint64)


def looping(windows: np.ndarray) -> np.ndarray:
    """Which of these texts loop at their ends.

    Args:
        windows: integers [B, 128], the last tokens of each. Texts that are shorter have numbers before them
            that occur nowhere else in the row.

    Returns:
        bool [B].
    """
    keys = np.sort(_keys(windows), axis=1)
    return (keys[:, LOOP_TIMES - 1 :] == keys[:, : 1 - LOOP_TIMES]).any(1)


def loop_end(tokens: np.ndarray) -> int | None:
    """How many of the tokens (int32 [n]) there are when a loop has first shown itself; None: no loop."""
    if len(tokens) < LOOP_NGRAM:
        return None
    keys = _keys(tokens[None])[0]
    order = np.argsort(keys, kind="stable")  # equal n-grams side by side, by place
    first, last = order[: 1 - LOOP_TIMES], order[LOOP_TIMES - 1 :]
    near = (keys[first] == keys[last]) & (last - first <= LOOP_WINDOW - LOOP_NGRAM)
    return int(last[near].min()) + LOOP_NGRAM if near.any() else None


def _keys(texts: np.ndarray) -> np.ndarray:
    """uint64 [B, n - 7]: a hash of each 8-gram of texts [B, n]."""
    values = texts.astype(np.uint64)
    width = texts.shape[1] - LOOP_NGRAM + 1
    keys = np.zeros((len(texts), width), dtype=np.uint64)
    for i, factor in enumerate(_FACTORS):
        keys += (values[:, i : i + width] + np.uint64(1)) * factor
    return keys
