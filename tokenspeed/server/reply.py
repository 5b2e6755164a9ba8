"""Answers in OpenAI's forms: pieces of text go in, a whole body or server-sent events come out."""

import codecs
import math
import secrets
import time
from itertools import zip_longest
from typing import Any

import msgspec

from tokenspeed.errors import RequestError
from tokenspeed.ipc.messages import Finished, Text, TokenText

LOWEST_LOGPROB = -9999.0  # what JSON says for minus infinity, as OpenAI's API does
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Choice:
    """What one choice has got so far. In a stream only the counts are kept."""

    def __init__(self, index: int):
        self.index = index
        self.parts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []  # one form a piece, joined in the end
        self.num_prompt = self.num_output = 0
        self.finished: Finished | None = None
        self.stop_reason: str | int | None = None
        self.started = False
        self.offset = 0  # characters before the next token, for text_offset
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")


class Reply:
    """One response. `keep` every piece and take the `body` in the end, or let `Events` stream it.

    Subclasses say how a choice and a delta look. An error that ends one choice is raised.
    """

    kind = chunk_kind = prefix = ""

    def __init__(self, model: str, num_choices: int, choices_per_prompt: int, spec_metrics: bool = False):
        self.head = {
            "id": f"{self.prefix}{secrets.token_hex(12)}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        self.choices = [Choice(i) for i in range(num_choices)]
        self.choices_per_prompt = choices_per_prompt
        self.spec_metrics = spec_metrics
        self.logprobs = False

    # ---- forms

    def choice_body(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, text: str, first: bool) -> dict[str, Any]:
        raise NotImplementedError

    def logprobs_form(self, choice: Choice, piece: Text) -> dict[str, Any]:
        raise NotImplementedError

    # ---- taking pieces

    def feed(self, choice: Choice, piece: Text) -> dict[str, Any] | None:
        """Counts, and returns the piece's log-probabilities in their form. Raises RequestError."""
        choice.num_output += len(piece.token_ids) // 4
        if piece.prompt_token_ids:
            choice.num_prompt = len(piece.prompt_token_ids) // 4
        if (end := piece.finished) is not None:
            if end.reason == "error":
                raise RequestError(end.message or "generation failed", end.param, end.status, end.code)
            choice.finished, choice.stop_reason = end, piece.stop_reason
            choice.num_prompt, choice.num_output = end.num_prompt, end.num_output
        return self.logprobs_form(choice, piece) if self.logprobs else None

    def keep(self, choice: Choice, piece: Text) -> None:
        """Takes a piece of an answer that goes out whole."""
        logprobs = self.feed(choice, piece)
        choice.parts.append(piece.text)
        if logprobs is not None:
            choice.logprobs.append(logprobs)

    def body(self) -> bytes:
        body = {**self.head, "choices": [self.choice_body(c) for c in self.choices], "usage": self.usage()}
        if self.spec_metrics:
            body["spec_metrics"] = self.spec_summary()
        return _encode(body)

    # ---- account

    def usage(self) -> dict[str, Any]:
        """Each prompt counts once, however many choices it has."""
        firsts = self.choices[:: self.choices_per_prompt]
        prompt = sum(c.num_prompt for c in firsts)
        output = sum(c.num_output for c in self.choices)
        cached = sum(c.finished.num_cached for c in firsts if c.finished is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def spec_summary(self) -> dict[str, Any]:
        """Speculation in this response; accept_length counts the token that each round yields anyway."""
        ends = [c.finished for c in self.choices if c.finished is not None]
        per_depth = zip_longest(*(e.accepted_per_depth for e in ends), fillvalue=0)
        rounds, accepted = sum(e.num_rounds for e in ends), sum(e.num_accepted for e in ends)
        return {
            "num_rounds": rounds,
            "num_drafted": sum(e.num_drafted for e in ends),
            "num_accepted": accepted,
            "accept_length": 1 + accepted / rounds if rounds else None,
            "accepted_per_depth": [sum(counts) for counts in per_depth],
        }


class Events:
    """The same answer as server-sent events, one for each piece that says something new."""

    def __init__(self, reply: Reply, include_usage: bool, continuous_usage: bool):
        self.reply, self.include_usage, self.continuous_usage = reply, include_usage, continuous_usage
        self._open = b"data: " + _encode({**reply.head, "object": reply.chunk_kind})[:-1]
        self._plain_end = b',"usage":null}\n\n' if include_usage and not continuous_usage else b"}\n\n"

    def piece(self, choice: Choice, piece: Text) -> bytes:
        """Empty when the piece has nothing to show yet. Raises RequestError."""
        logprobs = self.reply.feed(choice, piece)
        first, choice.started = not choice.started, True
        if not (piece.text or first or piece.finished or (logprobs is not None and _says(piece))):
            return b""
        form = {"index": choice.index, **self.reply.delta(piece.text, first), "logprobs": logprobs}
        form["finish_reason"] = None if choice.finished is None else choice.finished.reason
        if choice.finished is not None:
            form["stop_reason"] = choice.stop_reason
        return b"".join((self._open, b',"choices":[', _encode(form), b"]", self._end()))

    def last(self) -> bytes:
        """The chunk of the usage, if asked for, and [DONE]."""
        if not self.include_usage:
            return DONE
        more = {"choices": [], "usage": self.reply.usage()}
        if self.reply.spec_metrics:
            more["spec_metrics"] = self.reply.spec_summary()
        return self._open + b"," + _encode(more)[1:] + b"\n\n" + DONE

    def _end(self) -> bytes:
        """Usage on every chunk if asked for; the speculation's account on the last one."""
        ended = self.reply.spec_metrics and not self.include_usage and self._all_finished()
        if not (self.continuous_usage or ended):
            return self._plain_end
        more = {"usage": self.reply.usage()} if self.continuous_usage else {}
        if ended:
            more["spec_metrics"] = self.reply.spec_summary()
        return b"," + _encode(more)[1:] + b"\n\n"

    def _all_finished(self) -> bool:
        return all(c.finished is not None for c in self.reply.choices)


class ChatReply(Reply):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def choice_body(self, choice: Choice) -> dict[str, Any]:
        content = [entry for form in choice.logprobs for entry in form["content"]]
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.parts), "refusal": None},
            "logprobs": {"content": content, "refusal": None} if self.logprobs else None,
            "finish_reason": choice.finished.reason if choice.finished else None,
            "stop_reason": choice.stop_reason,
        }

    def delta(self, text: str, first: bool) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def logprobs_form(self, choice: Choice, piece: Text) -> dict[str, Any]:
        return {"content": [_chat_entry(t) for t in piece.logprobs], "refusal": None}


class CompletionReply(Reply):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def choice_body(self, choice: Choice) -> dict[str, Any]:
        joined = {k: [x for form in choice.logprobs for x in form[k]] for k in _COMPLETION_KEYS}
        return {
            "index": choice.index,
            "text": "".join(choice.parts),
            "logprobs": joined if self.logprobs else None,
            "finish_reason": choice.finished.reason if choice.finished else None,
            "stop_reason": choice.stop_reason,
        }

    def delta(self, text: str, first: bool) -> dict[str, Any]:
        return {"text": text}

    def logprobs_form(self, choice: Choice, piece: Text) -> dict[str, Any]:
        form: dict[str, Any] = {k: [] for k in _COMPLETION_KEYS}
        for token in (*piece.prompt_logprobs, *piece.logprobs):
            unknown = math.isnan(token.logprob)  # the first token of a prompt has nothing before it
            top = {text: _number(logprob) for _, text, _, logprob in token.top}
            top.setdefault(token.text, _number(token.logprob))
            form["tokens"].append(token.text)
            form["token_logprobs"].append(None if unknown else _number(token.logprob))
            form["top_logprobs"].append(None if unknown else top)
            form["text_offset"].append(choice.offset)
            choice.offset += len(choice.decoder.decode(token.data))
        return form


_COMPLETION_KEYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def _chat_entry(token: TokenText) -> dict[str, Any]:
    top = [
        {"token": text, "logprob": _number(logprob), "bytes": list(data)}
        for _, text, data, logprob in token.top
    ]
    number = _number(token.logprob)
    return {"token": token.text, "logprob": number, "bytes": list(token.data), "top_logprobs": top}


def _number(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _says(piece: Text) -> bool:
    return bool(piece.logprobs or piece.prompt_logprobs)
