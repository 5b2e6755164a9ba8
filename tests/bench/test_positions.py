"""The chats of benchmarks/positions.py: full to the token, each turn once, the question last."""

import pytest

from benchmarks.positions import conversation
from tokenspeed.errors import ConfigError

QUESTION = [{"role": "user", "content": "the last one"}]


def turn(number: int, words: int) -> list[dict[str, str]]:
    answer = " ".join(f"{number}.{word}" for word in range(words))
    return [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": answer}]


def count(messages: list[dict[str, str]]) -> int:
    """A token a word, two more a message."""
    return sum(2 + len(message["content"].split()) for message in messages)


@pytest.mark.parametrize("num_tokens", [18, 40, 41, 46, 47, 100, 150])
def test_a_chat_of_so_many_tokens(num_tokens):
    turns = [turn(number, 20) for number in range(6)]
    chat = conversation(QUESTION, turns, num_tokens, count)
    assert chat[-1:] == QUESTION and count(chat) <= num_tokens
    assert num_tokens - count(chat) < 7  # less than a question and a word with their frames
    roles = [message["role"] for message in chat]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    flat = [message for one in turns for message in one]
    assert chat[:-2] == flat[: len(chat) - 2]
    if len(chat) > 1:
        whole = flat[len(chat) - 2]["content"]
        assert whole.startswith(chat[-2]["content"]) and chat[-2]["content"]


def test_too_few_turns():
    with pytest.raises(ConfigError, match="give more --prompts"):
        conversation(QUESTION, [turn(0, 20)], 100, count)
