"""The wire format: round trips, golden bytes, and what each link refuses."""

import typing

import msgspec
import pytest

from tokenspeed.ipc import messages as m
from tokenspeed.params import SamplingParams

LINKS = {
    "tokenizer": m.ToTokenizer,
    "scheduler": m.ToScheduler,
    "worker": m.ToWorker,
    "server": m.ToServer,
    "launcher": m.ToLauncher,
}
PARAMS = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    seed=-(2**63),
    logit_bias={3: -1.5},
    stop=("a", "é"),
    stop_token_ids=(1, 2),
    allowed_token_ids=(1, 2, 3),
    bad_words=("x",),
    bad_words_token_ids=((1, 2), (3,)),
).resolved()
LOGPROBS = [m.Logprobs(-0.25, [1, 2], [-0.25, -3.0]), m.Logprobs(float("-inf"))]
FINISHED = m.Finished("stop", 5, 6, 4, 2, "m", "max_tokens", 400, 3, 9, 2, [2, 1])
EXAMPLES = [
    m.Tokenize(1, PARAMS, messages=b"[]", echo=True),
    m.TokenizeOnly(2, text="hello"),
    m.DetokenizeOnly(3, m.pack([1, -1, 2**31 - 1])),
    m.Abort(2**63 - 1),
    m.Generate(4, m.pack([5, 6]), PARAMS),
    m.StopString(5, 12),
    m.Step(
        6,
        m.pack([1]),
        [m.Admit(0, m.pack([1, 2, 3]), 2, 0, PARAMS)],
        m.pack([0]),
        m.pack([9]),
        m.pack([0]),
        m.pack([0]),
        m.pack([3]),
        m.pack([2, 3]),
        (8, 4, 16),
    ),
    m.StepDone(
        6, m.pack([1, 2]), m.pack([4, 5, 6]), 1234, {1: LOGPROBS}, {0: LOGPROBS[:1]}, {0: "NaN logits"}
    ),
    m.Tokens([m.Output(1, m.pack([1]), LOGPROBS, LOGPROBS, FINISHED), m.Output(2)]),
    m.Texts(
        [
            m.Text(
                1,
                "x",
                m.pack([1]),
                [m.TokenText(1, "x", b"x", -0.5, [(2, "y", b"y", -1.0)])],
                [],
                FINISHED,
                "a",
            )
        ]
    ),
    m.TokenIds(1, m.pack([1, 2]), ["a", "b"]),
    m.Decoded(1, "\x00é\U0001f600"),
    m.Stats(1, 2, 3, 4, 5, {"steps": 6.0}, [7, 8]),
    m.Ready("worker", {"num_pages": 100, "dtype": "bfloat16", "gib": 1.5}),
    m.Progress("worker", "loading", 1, 2),
    m.Dead("worker", "why", True),
    m.Drain(30.0),
]


def members(union) -> tuple[type, ...]:
    return typing.get_args(union) or (union,)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda x: type(x).__name__)
def test_round_trip_on_every_link_that_carries_it(message):
    data = msgspec.msgpack.encode(message)
    carriers = [union for union in LINKS.values() if type(message) in members(union)]
    assert carriers
    for union in carriers:
        assert msgspec.msgpack.decode(data, type=union) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda x: type(x).__name__)
def test_other_links_refuse_it(message):
    data = msgspec.msgpack.encode(message)
    for union in LINKS.values():
        if type(message) not in members(union):
            with pytest.raises(msgspec.ValidationError):
                msgspec.msgpack.decode(data, type=union)


def test_every_message_has_an_example():
    assert {type(x) for x in EXAMPLES} == {kind for union in LINKS.values() for kind in members(union)}


GOLDEN = {
    m.Abort(7): "92a541626f727407",
    m.StopString(5, 300): "93aa53746f70537472696e6705cd012c",
    m.Drain(0.5): "92a5447261696ecb3fe0000000000000",
    m.Decoded(1, "é"): "94a74465636f64656401a2c3a9a0",
    m.Dead("worker", "x"): "94a444656164a6776f726b6572a178c2",
}


@pytest.mark.parametrize("message", GOLDEN, ids=lambda x: type(x).__name__)
def test_golden_bytes(message):
    """A tag and the fields in order: what an older process of the ring would still read."""
    assert msgspec.msgpack.encode(message).hex() == GOLDEN[message]


def test_golden_step():
    step = m.Step(
        2, m.pack([1]), page_slots=m.pack([0, 0]), page_ids=m.pack([5, 6]), decode_slots=m.pack([0])
    )
    assert msgspec.msgpack.encode(step).hex() == (
        "9ba45374657002"  # 11 elements: tag, number
        "c40401000000"  # release
        "90"  # admit
        "c4080000000000000000"  # page_slots
        "c4080500000006000000"  # page_ids
        "c400c400c400"  # prefill
        "c40400000000"  # decode_slots
        "c0"  # shape
    )


@pytest.mark.parametrize(
    ("link", "value"),
    [
        ("scheduler", ["Abort", "7"]),
        ("scheduler", ["Abort", 1.5]),
        ("scheduler", ["Abort", None]),
        ("scheduler", ["Abort"]),
        ("scheduler", ["StopString", 1]),
        ("scheduler", ["Generate", 1, "text", {}]),
        ("scheduler", ["Generate", 1, b"", {"temperature": "hot"}]),
        ("scheduler", ["StepDone", 1, [1, 2], b""]),
        ("scheduler", ["Unknown", 1]),
        ("scheduler", [1, 2]),
        ("scheduler", {"rid": 1}),
        ("scheduler", "Abort"),
        ("worker", ["Step", 1, b"", [["x"]]]),
        ("worker", ["Step", 1, b"", [], b"", b"", b"", b"", b"", b"", [1, 2]]),
        ("tokenizer", ["Tokens", [["a"]]]),
        ("server", ["Stats", 0, 0, 0, 0, 0, {"a": "b"}]),
        ("launcher", ["Dead", "w", b"bytes"]),
    ],
)
def test_wrong_types_are_refused(link, value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=LINKS[link])


@pytest.mark.parametrize("data", [b"", b"\x93", b"\xc1", b"\x92\xa5Abort\x07\x00", b"not msgpack"])
def test_broken_bytes_are_refused(data):
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(data, type=m.ToScheduler)


def test_a_field_that_a_newer_process_has_added_is_ignored():
    data = msgspec.msgpack.encode(["Abort", 7, "new"])
    assert msgspec.msgpack.decode(data, type=m.ToScheduler) == m.Abort(7)


def test_pack_and_unpack():
    values = [0, 1, -1, 2**31 - 1, -(2**31)]
    assert m.unpack(m.pack(values)) == values and m.unpack(m.pack([])) == []
    assert m.pack([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    with pytest.raises(OverflowError):
        m.pack([2**31])
    with pytest.raises(ValueError):
        m.unpack(b"\x00\x00\x00")
