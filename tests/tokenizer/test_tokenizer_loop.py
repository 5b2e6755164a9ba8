"""The tokenizer loop between fakes of its neighbours: checks, stop strings, echo, logprobs, one end each."""

import json
import math
import threading
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tokenspeed.ipc.messages import (
    Abort,
    DetokenizeOnly,
    Finished,
    Generate,
    Logprobs,
    Output,
    StopString,
    Texts,
    Tokenize,
    TokenizeOnly,
    Tokens,
    ToServer,
    pack,
    unpack,
)
from tokenspeed.params import SamplingParams
from tokenspeed.tokenizer.chat import ChatTemplate
from tokenspeed.tokenizer.encoder import BYTE_OF_CHAR, Encoder
from tokenspeed.tokenizer.process import LONG_POLL_MS, TokenizerLoop

EOS = 256
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


class Sink(list):
    send = list.append


def encoder(template: str | None = TEMPLATE) -> Encoder:
    """One token a byte: ids are readable."""
    tokenizer = Tokenizer(models.BPE(vocab=dict(BYTE_OF_CHAR), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return Encoder(tokenizer, ChatTemplate(template, {}) if template else None)


ENCODER = encoder()


class Bench:
    def __init__(self, max_model_len=100, enc=ENCODER):
        resolved = SimpleNamespace(max_model_len=max_model_len, model=SimpleNamespace(vocab_size=260))
        self.scheduler, self.server = Sink(), Sink()
        self.loop = TokenizerLoop(resolved, enc, self.scheduler, self.server)

    def handle(self, *messages):
        self.loop.handle(messages)
        while self.loop.wait_ms is not None:
            self.loop.handle([])

    def start(self, rid=1, text="hi", echo=False, **params):
        self.handle(Tokenize(rid, SamplingParams(**params), text=text, echo=echo))

    def out(self, data: bytes | list[int] = b"", rid=1, finished=None, **more):
        self.handle(Tokens([Output(rid, pack(list(data)), finished=finished, **more)]))

    def texts(self, rid=1):
        return [t for m in self.server if isinstance(m, Texts) for t in m.texts if t.rid == rid]

    def text(self, rid=1):
        return "".join(t.text for t in self.texts(rid))

    def ids(self, rid=1):
        return [i for t in self.texts(rid) for i in unpack(t.token_ids)]

    def end(self, rid=1):
        ends = [t for t in self.texts(rid) if t.finished is not None]
        assert len(ends) == 1 and self.texts(rid)[-1] is ends[0]
        return ends[0]


def test_a_request_from_prompt_to_end():
    bench = Bench()
    bench.start(text="hé", max_tokens=5)
    (generate,) = bench.scheduler
    assert isinstance(generate, Generate) and unpack(generate.input_ids) == list("hé".encode())
    assert generate.params.max_tokens == 5
    bench.out("ü".encode()[:1])
    bench.out("üab".encode()[1:])
    bench.out([ord("c"), EOS], finished=Finished("stop", 3, 5, stop_token=EOS, num_rounds=2, num_accepted=3))
    assert bench.text() == "üabc" and bench.ids() == [*"üabc".encode(), EOS]
    end = bench.end()
    assert end.finished.num_rounds == 2 and end.stop_reason is None
    assert unpack(bench.texts()[0].prompt_token_ids) == list("hé".encode())
    assert not bench.texts()[1].prompt_token_ids
    bench.out(b"late")  # of an id that is gone
    assert len(bench.texts()) == 3
    for message in bench.server:  # what is sent decodes as what the server takes
        msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToServer)


def test_chat_prompt():
    bench = Bench()
    messages = json.dumps([{"role": "user", "content": "hi"}]).encode()
    bench.handle(Tokenize(1, SamplingParams(), messages=messages))
    assert bytes(unpack(bench.scheduler[0].input_ids)) == b"user:hi;"
    bench = Bench(enc=encoder(None))
    bench.handle(Tokenize(1, SamplingParams(), messages=messages))
    error = bench.end().finished
    assert (error.reason, error.status, error.param) == (
        "error",
        400,
        "messages",
    ) and "no chat template" in error.message


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        (dict(text=""), "prompt", "at least one token"),
        (dict(token_ids=pack([])), "prompt", "at least one token"),
        (dict(token_ids=pack([1, 260])), "prompt", "260 in prompt is not in the vocabulary"),
        (dict(token_ids=pack([-1])), "prompt", "-1 in prompt"),
        (dict(text="x" * 100), "prompt", "maximum context length is 100 tokens. However, your prompt has"),
        (dict(text="x" * 10**7), "prompt", "at least"),
        (dict(token_ids=pack([1] * 100)), "prompt", "your prompt has 100 tokens"),
        (
            dict(messages=b'[{"role": "user", "content": "%s"}]' % (b"y" * 200)),
            "messages",
            "maximum context length",
        ),
        (dict(messages=b'[{"role": "user", "content": 5}]' * 2), "messages", "not valid JSON"),
        (dict(text="x" * 90), "max_completion_tokens", "you requested 106 tokens"),
        (dict(text="bad \ud800"), "prompt", "surrogate"),
    ],
)
def test_what_cannot_be_served_is_told(message, param, says):
    bench = Bench()
    bench.handle(Tokenize(7, SamplingParams(), max_tokens_field="max_completion_tokens", **message))
    error = bench.end(7).finished
    assert (error.reason, error.status, error.param) == ("error", 400, param)
    assert says in error.message
    assert (error.code == "context_length_exceeded") == ("maximum context length" in error.message)
    assert not bench.scheduler


def test_the_longest_prompt_that_fits_and_no_limit():
    bench = Bench()
    bench.start(rid=1, text="x" * 99, max_tokens=1)
    bench.start(rid=2, text="x" * 99, max_tokens=None)
    bench.start(rid=3, text="x" * 9, max_tokens=None)
    assert [g.params.max_tokens for g in bench.scheduler] == [1, 1, 91]
    bench.start(rid=4, text="x" * 90, max_tokens=None, min_tokens=11)
    assert bench.end(4).finished.param == "min_tokens"


def test_bad_words_become_ids():
    bench = Bench()
    bench.start(bad_words=("ab", " c"), bad_words_token_ids=((1, 2),))
    params = bench.scheduler[0].params
    assert params.bad_words == ()
    assert set(params.bad_words_token_ids) == {(1, 2), tuple(b"ab"), tuple(b" ab"), tuple(b" c")}
    bench.start(rid=2, bad_words=("\ud800",))
    assert bench.end(2).finished.param == "bad_words" and len(bench.scheduler) == 1


def test_one_bad_prompt_among_many():
    bench = Bench()
    bench.handle(*[Tokenize(i, SamplingParams(), text="x" * (200 if i == 3 else i + 1)) for i in range(6)])
    assert [g.rid for g in bench.scheduler] == [0, 1, 2, 4, 5]
    assert bench.end(3).finished.reason == "error"


def test_stop_string_ends_at_once_and_the_account_follows():
    bench = Bench()
    bench.start(stop=("END",), logprobs=0)
    logprobs = [Logprobs(-float(i)) for i in range(8)]
    bench.out(b"ab ENDxy", logprobs=logprobs)
    assert bench.text() == "ab " and bytes(bench.ids()) == b"ab END"
    assert [len(t.logprobs) for t in bench.texts()] == [6] and bench.texts()[0].finished is None
    assert bench.scheduler[-1] == StopString(1, 6)
    bench.out(b"more")  # rounds in flight
    assert len(bench.texts()) == 1
    bench.out(b"!", finished=Finished("abort", 2, 13, num_cached=1, num_rounds=4, num_drafted=9))
    end = bench.end()
    assert end.stop_reason == "END" and end.text == ""
    assert end.finished == Finished("stop", 2, 6, num_cached=1, num_rounds=4, num_drafted=9)
    assert bench.text() == "ab " and bytes(bench.ids()) == b"ab END"
    assert len([m for m in bench.scheduler if isinstance(m, StopString)]) == 1


def test_stop_string_in_the_last_output():
    bench = Bench()
    bench.start(stop=("END",), include_stop_str_in_output=True)
    bench.out(b"a EN")
    bench.out(b"Dzz", finished=Finished("length", 2, 7, message="", num_rounds=1))
    end = bench.end()
    assert bench.text() == "a END" and bytes(bench.ids()) == b"a END"
    assert (end.finished.reason, end.finished.num_output, end.stop_reason) == ("stop", 5, "END")
    assert not [m for m in bench.scheduler if isinstance(m, StopString)]


def test_held_back_text_comes_out_at_the_end():
    bench = Bench()
    bench.start(stop=("<end>",))
    bench.out(b"a <en")
    assert bench.text() == "a " and len(bench.ids()) == 5
    bench.out(b"", finished=Finished("length", 2, 5))
    assert bench.text() == "a <en"


def test_stop_token_shows_no_text_unless_wanted():
    for include, text in ((False, "ab"), (True, "ab;")):
        bench = Bench()
        bench.start(stop_token_ids=(ord(";"),), include_stop_str_in_output=include)
        bench.out(b"ab;", finished=Finished("stop", 2, 3, stop_token=ord(";")))
        assert bench.text() == text and bench.end().stop_reason == ord(";") and len(bench.ids()) == 3
    bench = Bench()
    bench.start(stop=("b",))
    bench.out(b"ab;", finished=Finished("stop", 2, 3, stop_token=ord(";")))
    end = bench.end()
    assert bench.text() == "a" and end.stop_reason == "b"
    assert end.finished.num_output == 2 and end.finished.stop_token is None


def test_abort_forgets_and_is_passed_on():
    bench = Bench()
    bench.start(rid=1)
    bench.handle(Abort(1))
    bench.out(b"x", finished=Finished("abort"))
    assert bench.scheduler[-1] == Abort(1) and not bench.server
    bench.handle(Tokenize(2, SamplingParams(), text="a"), Abort(2), Abort(99))
    assert [type(m) for m in bench.scheduler[2:]] == [Abort, Abort]


def test_error_of_the_scheduler_is_passed_on():
    bench = Bench()
    bench.start(echo=True)
    bench.out(finished=Finished("error", message="no room", status=503))
    assert bench.end().finished.status == 503 and bench.text() == ""


def test_echo_and_max_tokens_0():
    bench = Bench()
    bench.start(text="hé", echo=True)
    bench.out(b"x")
    bench.out(b"y", finished=Finished("length", 3, 2))
    assert [t.text for t in bench.texts()] == ["héx", "y"]
    bench.start(rid=2, text="abc", echo=True, max_tokens=0)
    end = bench.end(2)
    assert (
        end.text == "abc" and end.finished == Finished("length", num_prompt=3) and len(bench.scheduler) == 1
    )
    bench.handle(Tokenize(3, SamplingParams(max_tokens=0), token_ids=pack(list(b"ids")), echo=True))
    assert bench.end(3).text == "ids" and unpack(bench.end(3).prompt_token_ids) == list(b"ids")
    bench.start(rid=4, text="abc", echo=True, max_tokens=0, prompt_logprobs=1)
    assert bench.scheduler[-1].rid == 4 and bench.scheduler[-1].params.max_tokens == 0


def test_logprobs_show_tokens_as_text_and_bytes():
    bench = Bench()
    bench.start(text="hi", logprobs=2, prompt_logprobs=1)
    bench.out(
        "é".encode(),
        logprobs=[Logprobs(-0.5, [0xC3, EOS], [-0.5, -1.5]), Logprobs(-0.25)],
        prompt_logprobs=[Logprobs(-2.0, [ord("i")], [-2.0])],
    )
    (text,) = bench.texts()
    first, second = text.logprobs
    assert (first.token_id, first.text, first.data, first.logprob) == (0xC3, "\ufffd", b"\xc3", -0.5)
    assert first.top == [(0xC3, "\ufffd", b"\xc3", -0.5), (EOS, "<eos>", b"<eos>", -1.5)]
    assert first.data + second.data == "é".encode()
    assert [p.text for p in text.prompt_logprobs] == ["h", "i"]
    assert math.isnan(text.prompt_logprobs[0].logprob) and text.prompt_logprobs[1].logprob == -2.0
    bench.start(rid=2, text="h", prompt_logprobs=0)  # one token: nothing to compute, still one entry
    bench.out(b"x", rid=2)
    bench.out(b"y", rid=2)
    assert [len(t.prompt_logprobs) for t in bench.texts(2)] == [1, 0]


def test_tokenize_and_detokenize_only():
    bench = Bench()
    bench.handle(
        TokenizeOnly(1, text="hé"),
        TokenizeOnly(2, messages=b'[{"role": "u", "content": "x"}]'),
        TokenizeOnly(3, messages=b"{}"),
        TokenizeOnly(4, text="x" * 1000),
        TokenizeOnly(5, text=""),
        DetokenizeOnly(6, pack([*"hé".encode(), EOS])),
        DetokenizeOnly(7, pack([999])),
        DetokenizeOnly(8, b""),
    )
    got = {m.rid: m for m in bench.server}
    assert unpack(got[1].token_ids) == list("hé".encode()) and got[1].token_texts == ["h", "\ufffd", "\ufffd"]
    assert bytes(unpack(got[2].token_ids)) == b"u:x;"
    assert "messages must be a list" in got[3].error
    assert len(unpack(got[4].token_ids)) == 1000 and got[5].token_ids == b"" and not got[5].error
    assert got[6].text == "hé<eos>" and "999" in got[7].error and got[8].text == "" and not got[8].error


def test_broken_messages_end_the_process():
    bench = Bench()
    with pytest.raises(ValueError):
        bench.handle(Tokenize(1, SamplingParams(), token_ids=b"123"))
    with pytest.raises(AssertionError):
        bench.handle(Tokenize(1, SamplingParams()))


def test_outputs_go_out_before_and_between_long_prompts(monkeypatch):
    monkeypatch.setattr("tokenspeed.tokenizer.process.MAX_BATCH_CHARS", 100)
    bench = Bench()
    bench.start()
    prompts = [Tokenize(i, SamplingParams(), text="x" * 60) for i in (2, 3, 4)]
    bench.loop.handle([*prompts, Tokens([Output(1, pack(list(b"a")))])])
    assert bench.text() == "a" and [g.rid for g in bench.scheduler] == [1, 2] and bench.loop.wait_ms == 0
    bench.loop.handle([Tokens([Output(1, pack(list(b"b")))]), Abort(4)])
    assert bench.text() == "ab" and [g.rid for g in bench.scheduler if isinstance(g, Generate)] == [1, 2, 3]
    assert bench.loop.wait_ms is None


def test_a_very_long_prompt_does_not_hold_up_the_others(monkeypatch):
    monkeypatch.setattr("tokenspeed.tokenizer.process.MAX_BATCH_CHARS", 50)
    slow, hold = encoder(), threading.Event()
    encode = slow.encode

    def held_up(texts, special):
        if len(texts[0]) > 50:
            hold.wait(10)
        return encode(texts, special)

    monkeypatch.setattr(slow, "encode", held_up)
    bench = Bench(enc=slow)
    bench.loop.handle([Tokenize(i, SamplingParams(), text="x" * 60) for i in (1, 2, 3)])
    for _ in range(2):
        bench.loop.handle([])
    bench.loop.handle([Tokenize(4, SamplingParams(), text="short"), Abort(2)])
    assert [type(m) for m in bench.scheduler] == [Abort, Generate] and bench.loop.wait_ms == LONG_POLL_MS
    assert not bench.server
    monkeypatch.setattr("tokenspeed.tokenizer.process.SIGN_SECONDS", 0.0)
    bench.loop.handle([])
    assert bench.server == [Texts([])]  # a sign of life for the server's watchdog
    hold.set()
    bench.handle()
    assert sorted(m.rid for m in bench.scheduler if isinstance(m, Generate)) == [1, 3, 4]


def test_a_failure_in_the_thread_ends_the_process(monkeypatch):
    monkeypatch.setattr("tokenspeed.tokenizer.process.MAX_BATCH_CHARS", 5)
    broken = encoder()
    monkeypatch.setattr(broken, "encode", lambda texts, special: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        Bench(enc=broken).start(text="long enough")


@settings(max_examples=150, deadline=None)
@given(
    st.binary(min_size=1, max_size=30),
    st.lists(st.integers(1, 17), min_size=30, max_size=30),
    st.lists(st.text("ab\x80é", min_size=1, max_size=3), max_size=3),
    st.integers(0, 5),
    st.sampled_from(["length", "stop", "abort"]),
)
def test_counts_always_agree(data, cuts, stops, lag, reason):
    """Whatever the rounds and stop strings: one end; ids = logprobs = usage; text is the decoded ids, cut."""
    bench, at, stopped_for = Bench(), 0, 0
    bench.start(stop=tuple(stops), logprobs=0, max_tokens=30)
    for cut in cuts:
        chunk = data[at : at + cut]
        at += len(chunk)
        if any(isinstance(m, StopString) for m in bench.scheduler):
            stopped_for += 1
        last = at >= len(data) or stopped_for > lag
        finished = Finished(reason, 2, at) if last else None
        bench.out(chunk, finished=finished, logprobs=[Logprobs(0.0)] * len(chunk))
        if last:
            break
    end, ids = bench.end(), bench.ids()
    assert len(ids) == sum(len(t.logprobs) for t in bench.texts()) == end.finished.num_output
    whole = ENCODER.decode(ids, True)
    if end.stop_reason is None:
        assert bench.text() == whole and end.finished.reason == reason
    else:
        assert end.finished.reason == "stop"
        assert bench.text() + end.stop_reason == whole[: len(bench.text()) + len(end.stop_reason)]
