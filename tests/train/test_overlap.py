"""13-grams shared with evaluation prompts."""

import random

from tokenspeed.train.overlap import Overlap

WORDS = [f"word{i}" for i in range(60)]


def brute(known: list[list[str]], words: list[str]) -> bool:
    """By the definition, over lists of words."""
    windows = [words[i : i + 13] for i in range(len(words) - 12)]
    return any(w == text[i : i + 13] for text in known for i in range(len(text) - 12) for w in windows)


def test_twelve_words_are_free_and_thirteen_are_not():
    overlap = Overlap([" ".join(WORDS[:30])])
    assert not overlap.shares(" ".join(["start", *WORDS[5:17], "end", "of", "text"]))
    assert overlap.shares(" ".join(["start", *WORDS[5:18], "end", "of", "text"]))
    assert not overlap.shares(" ".join([*WORDS[5:11], "other", *WORDS[11:18]]))
    assert overlap.shares(" ".join(WORDS[:13])) and overlap.shares(" ".join(WORDS[17:30]))


def test_case_punctuation_and_lines_do_not_hide_a_text():
    overlap = Overlap(
        ["Write a Python function that takes two sorted lists, and returns one sorted list: merge(a, b)."]
    )
    assert overlap.shares(
        "please WRITE a python\nfunction that takes\ttwo sorted lists and returns one 'sorted' list!"
    )
    assert not overlap.shares("please write a python function")


def test_short_evaluation_texts_count_as_a_whole():
    overlap = Overlap(["What is 7 + 5?", "", "..."])
    assert overlap.shares("what is 7+5")
    assert not overlap.shares("What is 7 + 5? And what is 9 + 4?")
    assert not overlap.shares("") and not overlap.shares("!!!")
    assert not Overlap([]).shares("What is 7 + 5?")


def test_agrees_with_the_definition_on_random_texts():
    rng = random.Random(5)
    known = [[rng.choice("ab") for _ in range(rng.randint(13, 60))] for _ in range(6)]
    overlap = Overlap(map(" ".join, known))
    texts = [[rng.choice("ab") for _ in range(rng.randint(13, 40))] for _ in range(400)]
    found = [overlap.shares(" ".join(words)) for words in texts]
    assert found == [brute(known, words) for words in texts]
    assert 20 < sum(found) < 380
