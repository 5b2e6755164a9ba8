"""Token ids to text, bit by bit: characters split over tokens are held back, stop strings found in place."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tokenspeed.params import SamplingParams
from tokenspeed.tokenizer.encoder import Encoder

REPLACEMENT = "\ufffd"
MAX_WINDOW = 64  # tokens decoded again at each step while no character ends; a character has at most 4 bytes


class TextStream(Protocol):
    """The text of a growing list of tokens. All pieces and the flush joined are the decoded whole."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class ByteStream:
    """For byte-level tokenizers: a token is bytes, the text is their UTF-8. Equal to decoding all at once."""

    def __init__(self, encoder: Encoder, skip_special_tokens: bool):
        self._bytes = encoder.token_bytes
        self._skip = encoder.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._bytes(i) for i in token_ids if i not in self._skip]))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class WindowStream:
    """For any decoder: decodes the last tokens with and without the new one.

    The window begins at a token after which the text was whole, so that a decoder which looks at neighbours
    (a leading space to strip, bytes that join to a character) sees them. U+FFFD at the end is held back.
    """

    def __init__(self, encoder: Encoder, skip_special_tokens: bool):
        self._encoder, self._skip = encoder, skip_special_tokens
        self._ids: list[int] = []  # the window
        self._num_context = 0  # leading ids of the window whose text is out and whole
        self._sent = 0  # characters of the window's text that are out

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._encoder.decode(self._ids, self._skip)
        whole = text.rstrip(REPLACEMENT)
        if whole != text and len(self._ids) - self._num_context <= MAX_WINDOW:
            new = whole[self._sent :]
            self._sent = max(self._sent, len(whole))
            return new
        new, self._sent = text[self._sent :], len(text)
        later = self._ids[self._num_context :]
        if context := self._encoder.decode(
            later, self._skip
        ):  # context without text would lose a leading space
            self._ids, self._num_context, self._sent = later, len(later), len(context)
        return new

    def flush(self) -> str:
        return self._encoder.decode(self._ids, self._skip)[self._sent :]


class StopStrings:
    """Finds the stop string that is completed first, and holds back text that may be the beginning of one.

    The result does not depend on how the text is cut into pieces: the occurrence with the earliest end wins,
    of those the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False, min_tokens: int = 0):
        self._stops, self._include, self._min_tokens = tuple(stops), include, min_tokens
        self._longest = max(map(len, self._stops), default=0)
        self._first = {s[0] for s in self._stops}
        self._tail = ""  # the longest end of the text so far that begins a stop string
        self._sent = 0  # characters of the tail that are out already (all of them with `include`)

    def push(self, piece: str, num_tokens: int) -> tuple[str, str | None]:
        """The text that may go out, and the stop string that `piece`, of token `num_tokens`, ended."""
        window, sent = self._tail + piece, self._sent
        if piece and num_tokens >= self._min_tokens and (hit := self._find(window, len(self._tail))):
            start, stop = hit
            self._tail, self._sent = "", 0
            end = start + len(stop) if self._include else start
            return window[sent:end], stop
        self._tail = self._beginning(window)
        self._sent = len(self._tail) if self._include else 0
        return window[sent : len(window) - len(self._tail) + self._sent], None

    def flush(self, piece: str) -> str:
        """The rest of the text, when the request has ended for another reason."""
        out = self._tail[self._sent :] + piece
        self._tail, self._sent = "", 0
        return out

    def _find(self, window: str, old: int) -> tuple[int, str] | None:
        """(start, stop string) of the first occurrence that ends after the `old` leading characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _beginning(self, window: str) -> str:
        for start in range(max(0, len(window) - self._longest + 1), len(window)):
            if window[start] in self._first and any(s.startswith(window[start:]) for s in self._stops):
                return window[start:]
        return ""


class Piece(NamedTuple):
    """What a batch of new tokens gave."""

    text: str
    num_kept: int  # of the tokens pushed
    stop: str | None = None  # the stop string that the last kept token completed


class Detokenizer:
    """One request's way from tokens to text."""

    def __init__(self, encoder: Encoder, params: SamplingParams):
        stream = ByteStream if encoder.byte_level else WindowStream
        self._stream: TextStream = stream(encoder, params.skip_special_tokens)
        stop = tuple(params.stop)
        self._stops = (
            StopStrings(stop, params.include_stop_str_in_output, params.min_tokens) if stop else None
        )
        self.num_tokens = 0  # output tokens kept

    def push(self, token_ids: Sequence[int]) -> Piece:
        """Adds tokens until a stop string is complete; one after the other where there are stop strings."""
        if self._stops is None:
            self.num_tokens += len(token_ids)
            return Piece(self._stream.push(token_ids), len(token_ids))
        out = []
        for count, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            text, stop = self._stops.push(self._stream.push([token_id]), self.num_tokens)
            out.append(text)
            if stop is not None:
                return Piece("".join(out), count, stop)
        return Piece("".join(out), len(token_ids))

    def skip(self) -> None:
        """Counts a token that shows no text: the one that ended the request."""
        self.num_tokens += 1

    def finish(self) -> str:
        """What was held back."""
        rest = self._stream.flush()
        return rest if self._stops is None else self._stops.flush(rest)
