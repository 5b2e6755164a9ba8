"""Training prompts that share words with an evaluation prompt: found by 13-grams, to be left out."""

import re
from collections.abc import Iterable, Iterator

NGRAM = 13  # words
_WORD = re.compile(r"\w+")


class Overlap:
    """Knows the n-grams of evaluation texts, in lower case, whatever stands between the words.

    A text of fewer than 13 words has no 13-gram; it is known as a whole.
    """

    def __init__(self, texts: Iterable[str]):
        self._grams: set[tuple[str, ...]] = set()
        for text in texts:
            self._grams.update(_grams(text))

    def shares(self, text: str) -> bool:
        """Whether `text` has an n-gram in common with an evaluation text, or is one of the short ones."""
        return any(gram in self._grams for gram in _grams(text))


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    words = _WORD.findall(text.lower())
    for i in range(max(len(words) - NGRAM + 1, min(len(words), 1))):
        yield tuple(words[i : i + NGRAM])
