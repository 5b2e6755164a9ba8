"""Tokens to text: against decoding all at once, and stop strings against a search in the whole text."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tokenspeed.params import SamplingParams
from tokenspeed.tokenizer.detokenizer import ByteStream, Detokenizer, StopStrings, WindowStream
from tokenspeed.tokenizer.encoder import BYTE_OF_CHAR, Encoder

TEXTS = [
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 family",
    "naïve 漢字 ok",
    "\U0001f3f3\ufe0f\u200d\U0001f308",
    "",
    "\x00 a\n\n 12",
]


def byte_level() -> Encoder:
    """256 byte tokens, a few merges that join parts of characters, and special tokens."""
    char = {b: c for c, b in BYTE_OF_CHAR.items()}
    vocab = {char[b]: b for b in range(256)}
    merges = []
    for data in (b"\xf0\x9f", b"\x80\x8d\xf0", b"th", b"the", b" a"):
        left, right = "".join(char[b] for b in data[:-1]), char[data[-1]]
        if left in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|ü x|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("漢", special=False)])
    return Encoder(tokenizer)


def sentence_piece() -> Encoder:
    """Spaces as U+2581, bytes as <0xNN>, a leading space stripped: Llama 2's and Mistral's form."""
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}, "\u2581": 257}
    for word in ("\u2581the", "\u2581cat", "s", "a", "\u2581a", "\u2581\u2581", "é"):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return Encoder(tokenizer)


BYTES, PIECES = byte_level(), sentence_piece()


def stream_text(encoder: Encoder, ids: list[int], skip: bool) -> str:
    stream = (ByteStream if encoder.byte_level else WindowStream)(encoder, skip)
    return "".join([stream.push([i]) for i in ids]) + stream.flush()


def test_kinds():
    assert BYTES.byte_level and not PIECES.byte_level


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 280), max_size=40), st.booleans())
def test_byte_level_equals_decode_for_any_ids(ids, skip):
    assert stream_text(BYTES, ids, skip) == BYTES.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.booleans())
def test_texts_come_back(text, skip):
    for encoder in (BYTES, PIECES):
        ids = encoder.encode([text], add_special_tokens=False)[0]
        assert stream_text(encoder, ids, skip) == encoder.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(257, 265), st.sampled_from(["é", "漢", "\U0001f600"])), max_size=20),
    st.booleans(),
)
def test_window_stream_equals_decode(items, skip):
    """Words and whole characters in bytes, special tokens between them, leading spaces."""
    ids = []
    for item in items:
        ids += [item] if isinstance(item, int) else [b + 1 for b in item.encode()]
    assert stream_text(PIECES, ids, skip) == PIECES.decode(ids, skip)


def test_window_stream_gives_up_on_bytes_that_never_end():
    """A broken model may emit continuation bytes for ever; memory and time a token stay bounded."""
    stream = WindowStream(PIECES, True)
    for _ in range(500):
        stream.push([0x80 + 1])
    assert len(stream._ids) < 200


def test_incomplete_characters_are_held_back():
    detokenizer = Detokenizer(BYTES, SamplingParams())
    data = "é\U0001f600".encode()
    assert [detokenizer.push([b]).text for b in data] == ["", "é", "", "", "", "\U0001f600"]
    assert detokenizer.push([0xF0]).text == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("stop", [(), ("never",)])
@pytest.mark.parametrize("text", TEXTS)
def test_any_split_into_rounds_gives_the_same(text, stop):
    """A speculative round brings 1 to 17 tokens."""
    rng = random.Random(0)
    ids = BYTES.encode([text * 5], add_special_tokens=False)[0]
    for _ in range(10):
        detokenizer, out, at = Detokenizer(BYTES, SamplingParams(stop=stop)), [], 0
        while at < len(ids):
            count = rng.randint(1, 17)
            out.append(detokenizer.push(ids[at : at + count]).text)
            at += count
        assert "".join(out) + detokenizer.finish() == text * 5


def reference_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None, int | None]:
    """By search in the whole text: kept text, stop string, its end. The earliest end, then the longest."""
    hits = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not hits:
        return text, None, None
    end, start, stop = min(hits)
    return text[: end if include else start], stop, end


@settings(max_examples=400, deadline=None)
@given(
    st.text("abc", max_size=25),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=25, max_size=25),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_pieces(text, stops, cuts, include):
    expected, stop, end = reference_stop(text, stops, include)
    checker, out, at = StopStrings(stops, include), "", 0
    for number, cut in enumerate(cuts, 1):
        piece = text[at : at + cut]
        at += len(piece)
        new, found = checker.push(piece, number)
        out += new
        assert expected.startswith(out), "text that should be held back went out"
        if found is not None:
            assert found == stop and at - len(piece) < end <= at
            assert out == expected
            return
    assert stop is None or at < end
    assert out + checker.flush("") == text[:at]


def test_held_back_only_as_long_as_needed():
    checker = StopStrings(["<end>"])
    assert checker.push("a <e", 1) == ("a ", None)
    assert checker.push("x <", 2) == ("<ex ", None)
    assert checker.flush("") == "<"
    including = StopStrings(["<end>"], include=True)
    assert including.push("a <e", 1) == ("a <e", None)
    assert including.push("nd> b", 2) == ("nd>", "<end>")


def test_min_tokens_counts_before_looking():
    params = SamplingParams(stop=("b",), min_tokens=3)
    detokenizer = Detokenizer(BYTES, params)
    piece = detokenizer.push(list(b"abbb"))
    assert (piece.text, piece.num_kept, piece.stop) == ("ab", 3, "b")
    # a stop string that lies wholly in the first tokens is past when they are done
    detokenizer = Detokenizer(BYTES, params)
    piece = detokenizer.push(list(b"bba"))
    assert (piece.text, piece.num_kept, piece.stop) == ("bba", 3, None)


def test_stop_inside_a_token_cuts_text_and_tokens():
    the = BYTES.encode(["the"], add_special_tokens=False)[0]
    assert len(the) == 1
    detokenizer = Detokenizer(BYTES, SamplingParams(stop=("h",)))
    piece = detokenizer.push([ord("x"), *the, ord("y")])
    assert (piece.text, piece.num_kept, piece.stop, detokenizer.num_tokens) == ("xt", 2, "h", 2)


def test_every_substring_as_stop(demo_dir: Path):
    """users.md's check of trimming, on the demo model's tokenizer: 200 substrings of a text."""
    encoder = Encoder.load(demo_dir)
    text = "The sky is blue because of Rayleigh scattering — naïve \U0001f600\U0001f600 答え: 42.\n\n1. Done."
    ids = encoder.encode([text], add_special_tokens=False)[0]
    rng = random.Random(1)
    for _ in range(200):
        a = rng.randrange(len(text))
        stop = text[a : a + rng.randint(1, 8)]
        detokenizer = Detokenizer(encoder, SamplingParams(stop=(stop,)))
        piece = detokenizer.push(ids)
        assert piece.text == text[: text.index(stop)] and piece.stop == stop
        kept = encoder.decode(ids[: piece.num_kept], True)
        assert stop in kept and stop not in encoder.decode(ids[: piece.num_kept - 1], True)


def test_token_bytes_are_exact(demo_dir: Path):
    encoder = Encoder.load(demo_dir)
    text = "漢字 and \U0001f469\u200d\U0001f467 naïve"
    ids = encoder.encode([text], add_special_tokens=False)[0]
    assert b"".join(map(encoder.token_bytes, ids)) == text.encode()
    assert encoder.token_text(2) == "<|im_end|>" and encoder.token_bytes(10**6) == b""
    assert json.loads(json.dumps(encoder.token_text(ids[0])))
    assert PIECES.token_bytes(0xC3 + 1) == b"\xc3" and PIECES.token_bytes(258) == b" the"
