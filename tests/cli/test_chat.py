"""The terminal chat against a fake server: streaming, history, commands, Ctrl-C, errors."""

import httpx
import pytest
from bench.fake_openai import Behaviour, running

from tokenspeed.cli import chat, main
from tokenspeed.errors import ConfigError

SAMPLING = {"temperature": 0.5, "max_tokens": 9}


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
def url(behaviour):
    with running(behaviour) as address:
        yield address


def talk(monkeypatch, url, *lines, argv=()):
    waiting = iter(lines)

    def read(prompt):
        line = next(waiting, EOFError)
        if isinstance(line, type):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    return main(["chat", "--url", url, *argv])


def test_a_conversation(behaviour, url, monkeypatch, capsys):
    argv = ["--system", "be brief", "--max-tokens", "9", "--temperature", "0.5"]
    assert talk(monkeypatch, url, "hello", "", "more", "/reset", "new", "/help", "/exit", argv=argv) == 0
    out = capsys.readouterr().out
    assert out.count("one two three four five six") == 3 and "6 tokens" in out and "tok/s" in out
    assert "accept length" not in out
    roles = [[m["role"] for m in body["messages"]] for body in behaviour.bodies]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert behaviour.bodies[1]["messages"][2]["content"] == "one two three four five six "
    assert behaviour.bodies[0]["temperature"] == 0.5 and behaviour.bodies[0]["max_tokens"] == 9


def test_acceptance_of_our_server(behaviour, url, monkeypatch, capsys):
    behaviour.owner = "tokenspeed"
    assert talk(monkeypatch, url, "hello") == 0
    assert "accept length 3.00" in capsys.readouterr().out


def test_a_server_without_stream_options(behaviour, url, monkeypatch, capsys):
    behaviour.stream_options = False
    assert talk(monkeypatch, url, "hello", "more") == 0
    assert capsys.readouterr().out.count("one two") == 2
    assert len(behaviour.bodies) == 3  # refused once, then not asked for


def test_ctrl_c_stops_the_answer_and_keeps_what_came(url):
    def write(piece):
        raise KeyboardInterrupt

    with chat.open_chat(url, None, None, SAMPLING) as talk_:
        assert "stopped" in talk_.ask("hello", write)
        assert talk_.history[-1] == {"role": "assistant", "content": "one "}
        assert "6 tokens" in talk_.ask("again", lambda piece: None)  # the connection still serves


def test_ctrl_c_at_the_prompt_leaves(url, monkeypatch):
    assert talk(monkeypatch, url, KeyboardInterrupt) == 130


@pytest.mark.parametrize(
    ("fail", "words"),
    [("refuse", "answers 503: no room"), ("midway", "the engine died"), ("garbage", "not JSON")],
)
def test_a_failed_answer_leaves_the_history_alone(behaviour, url, fail, words, monkeypatch, capsys):
    with chat.open_chat(url, None, None, SAMPLING) as talk_:
        behaviour.fail = fail
        with pytest.raises(ConfigError, match=words):
            talk_.ask("hello", lambda piece: None)
        assert talk_.history == []
    assert talk(monkeypatch, url, "hello") == 0
    assert f"(error: {'the server ' if fail == 'refuse' else ''}" in capsys.readouterr().out


def test_a_lost_connection(behaviour, url):
    with chat.open_chat(url, None, None, SAMPLING) as talk_:
        behaviour.fail = "cut"
        with pytest.raises(httpx.HTTPError):
            talk_.ask("hello", lambda piece: None)
        assert talk_.history == []


def test_no_server_is_one_line(behaviour, url, capsys):
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    assert (
        "no server answers at http://127.0.0.1:9" in (err := capsys.readouterr().err) and err.count("\n") == 1
    )
    behaviour.key = "secret"
    assert main(["chat", "--url", url, "--api-key", "wrong"]) == 2
    assert "401: wrong key" in capsys.readouterr().err
    behaviour.key, behaviour.models = None, ()
    assert main(["chat", "--url", url]) == 2
    assert "lists no models" in capsys.readouterr().err
