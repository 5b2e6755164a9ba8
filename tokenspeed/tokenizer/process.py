"""The tokenizer process: prompts in, text out. Templates, encoding, length checks, decoding, stop strings."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from tokenspeed.config import Resolved
from tokenspeed.errors import RequestError
from tokenspeed.ipc.channel import Pull, Push, address
from tokenspeed.ipc.messages import (
    Abort,
    Decoded,
    DetokenizeOnly,
    Finished,
    Generate,
    Logprobs,
    Output,
    StopString,
    Text,
    Texts,
    TokenIds,
    Tokenize,
    TokenizeOnly,
    Tokens,
    TokenText,
    ToScheduler,
    ToServer,
    ToTokenizer,
    pack,
    unpack,
)
from tokenspeed.ipc.process import Child
from tokenspeed.params import SamplingParams
from tokenspeed.tokenizer.detokenizer import Detokenizer, Piece
from tokenspeed.tokenizer.encoder import Encoder, check_text

MAX_BATCH_CHARS = 1 << 14  # prompts encoded at once; a longer one is encoded by a thread of its own
LONG_POLL_MS = 5  # how often to look whether that thread is done
SIGN_SECONDS = 0.5  # how often to tell the server's watchdog that the thread is at work


class Sender(Protocol):
    def send(self, message: msgspec.Struct) -> None: ...


@dataclass
class Prompt:
    """A prompt on its way to token ids: `ids`, or `text` that is still to be encoded."""

    message: Tokenize | TokenizeOnly
    param: str  # the field to name in errors
    text: str | None = None
    add_special_tokens: bool = False
    ids: list[int] | None = None


@dataclass
class Request:
    """A request that the scheduler holds."""

    params: SamplingParams
    prompt_ids: bytes  # int32
    echo: str  # text to put before the first piece
    detokenizer: Detokenizer
    started: bool = False  # the first piece is out
    stop: str | None = None  # the stop string found; the scheduler's closing output is still to come


class TokenizerLoop:
    """All state of the process. Nothing here blocks; long prompts are encoded aside, so that streams go on.

    Every request gets exactly one `Text` with `finished`, unless the server aborts it. When a stop string is
    found its text goes out at once, and `finished` when the scheduler closes the request with its account.
    """

    def __init__(self, resolved: Resolved, encoder: Encoder, to_scheduler: Sender, to_server: Sender):
        self._encoder, self._to_scheduler, self._to_server = encoder, to_scheduler, to_server
        self._max_model_len, self._vocab_size = resolved.max_model_len, resolved.model.vocab_size
        self._requests: dict[int, Request] = {}
        self._prompts: list[Prompt] = []
        self._long: dict[int, tuple[Prompt, Future[None]]] = {}  # by rid: in the thread
        self._thread = ThreadPoolExecutor(1, "encode")
        self._sign_at = time.monotonic()

    @property
    def wait_ms(self) -> int | None:
        """How long `run` may wait for messages: prompts may be waiting, or be in the thread."""
        return 0 if self._prompts else LONG_POLL_MS if self._long else None

    def handle(self, messages: Sequence[msgspec.Struct]) -> None:
        """Takes all messages, sends out new text, then encodes the next batch of prompts.

        Raises:
            Anything that is no `RequestError`: a broken invariant, the process ends.
        """
        texts: list[Text] = []
        for message in messages:
            if isinstance(message, Tokens):
                texts += [text for output in message.outputs if (text := self._output(output)) is not None]
            elif isinstance(message, Abort):
                self._abort(message)
            elif isinstance(message, DetokenizeOnly):
                self._to_server.send(self._decode(message))
            elif isinstance(message, (Tokenize, TokenizeOnly)):
                texts += self._checked(message, self._take, message)
        self._send(texts)
        self._encode()

    # ---- prompts

    def _take(self, message: Tokenize | TokenizeOnly) -> None:
        """Queues a prompt. Raises RequestError."""
        if message.messages is not None:
            if self._encoder.chat is None:
                raise RequestError("this model has no chat template; use /v1/completions", "messages")
            prompt = Prompt(message, "messages", self._encoder.chat.render(message.messages))
        elif message.text is not None:
            special = isinstance(message, Tokenize) or message.add_special_tokens
            prompt = Prompt(message, "prompt", message.text, special)
        else:
            assert isinstance(message, Tokenize) and message.token_ids is not None, "a prompt of no kind"
            prompt = Prompt(message, "prompt", ids=unpack(message.token_ids))
        if prompt.text is not None:
            check_text(prompt.text, prompt.param)
            least = self._encoder.least_tokens(prompt.text)
            if isinstance(message, Tokenize) and least >= self._max_model_len:
                raise self._too_long(f"at least {least}", prompt.param)
        self._prompts.append(prompt)

    def _encode(self) -> None:
        """Encodes the next batch of prompts, and sends on what the thread has done."""
        batch, chars = [], 0
        for prompt in self._prompts:
            chars += len(prompt.text or "")
            if batch and chars > MAX_BATCH_CHARS:
                break
            batch.append(prompt)
        del self._prompts[: len(batch)]
        if len(batch) == 1 and chars > MAX_BATCH_CHARS:
            prompt = batch.pop()
            self._long[prompt.message.rid] = (prompt, self._thread.submit(_fill_ids, self._encoder, [prompt]))
        _fill_ids(self._encoder, batch)
        for rid in [rid for rid, (_, future) in self._long.items() if future.done()]:
            prompt, future = self._long.pop(rid)
            future.result()  # raises what the thread has raised
            batch.append(prompt)
        texts: list[Text] = []
        for prompt in batch:
            texts += self._checked(prompt.message, self._admit, prompt)
        self._send(texts)
        if self._long and time.monotonic() > self._sign_at + SIGN_SECONDS:
            self._sign_at = time.monotonic()
            self._to_server.send(Texts([]))

    def _admit(self, prompt: Prompt) -> Text | None:
        """Sends an encoded prompt on. Returns the answer if none is to be generated. Raises RequestError."""
        message, ids = prompt.message, prompt.ids
        assert ids is not None
        if isinstance(message, TokenizeOnly):
            self._to_server.send(TokenIds(message.rid, pack(ids), [self._encoder.token_text(i) for i in ids]))
            return None
        params = self._fit(message, ids, prompt.param)
        echo = ""
        if message.echo:
            given = prompt.text
            echo = self._encoder.decode(ids, params.skip_special_tokens) if given is None else given
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            finished = Finished("length", num_prompt=len(ids))
            return Text(message.rid, echo, finished=finished, prompt_token_ids=pack(ids))
        request = Request(params, pack(ids), echo, Detokenizer(self._encoder, params))
        self._requests[message.rid] = request
        self._to_scheduler.send(Generate(message.rid, request.prompt_ids, params))
        return None

    def _fit(self, message: Tokenize, ids: list[int], param: str) -> SamplingParams:
        """The parameters with max_tokens set. Raises RequestError if prompt or answer can't fit."""
        n, limit, params = len(ids), self._max_model_len, self._with_word_ids(message.params)
        if n == 0:
            raise RequestError(f"{param} must hold at least one token", param)
        if n + 1 > limit:
            raise self._too_long(str(n), param)
        self._check_ids(ids, param)
        if params.max_tokens is None:
            params = msgspec.structs.replace(params, max_tokens=limit - n)
            if params.min_tokens > limit - n:
                raise RequestError(
                    f"min_tokens ({params.min_tokens}) is more than the {limit - n} tokens that fit here",
                    "min_tokens",
                )
        elif n + params.max_tokens > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{n + params.max_tokens} tokens ({n} in the prompt, {params.max_tokens} in the answer). "
                f"Please reduce the prompt or {message.max_tokens_field}.",
                message.max_tokens_field,
                code="context_length_exceeded",
            )
        return params

    def _with_word_ids(self, params: SamplingParams) -> SamplingParams:
        """The parameters with bad_words as token ids, which is how the worker takes them. Raises RequestError."""
        if not params.bad_words:
            return params
        sequences = list(params.bad_words_token_ids)
        for word in params.bad_words:
            check_text(word, "bad_words")
            if not (found := self._encoder.encode_word(word)):
                raise RequestError(f"bad_words: {word!r} has no tokens", "bad_words")
            sequences += found
        return msgspec.structs.replace(params, bad_words=(), bad_words_token_ids=tuple(sequences))

    def _too_long(self, count: str, param: str) -> RequestError:
        return RequestError(
            f"This model's maximum context length is {self._max_model_len} tokens. However, your prompt has "
            f"{count} tokens, and the answer needs at least one. Please reduce the prompt.",
            param,
            code="context_length_exceeded",
        )

    def _check_ids(self, ids: list[int], param: str) -> None:
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise RequestError(
                f"token id {wrong} in {param} is not in the vocabulary (0 to {self._vocab_size - 1})", param
            )

    def _checked(
        self, message: Tokenize | TokenizeOnly, step: Callable[[Any], Text | None], argument: Any
    ) -> list[Text]:
        """Runs a step of a prompt. A `RequestError` becomes the request's last answer."""
        try:
            text = step(argument)
            return [] if text is None else [text]
        except RequestError as error:
            if isinstance(message, TokenizeOnly):
                self._to_server.send(TokenIds(message.rid, b"", error=error.message))
                return []
            finished = Finished(
                "error", message=error.message, param=error.param, status=error.status, code=error.code
            )
            return [Text(message.rid, finished=finished)]

    def _decode(self, message: DetokenizeOnly) -> Decoded:
        ids = unpack(message.token_ids)
        try:
            if ids:
                self._check_ids(ids, "tokens")
            return Decoded(message.rid, self._encoder.decode(ids, skip_special_tokens=False))
        except RequestError as error:
            return Decoded(message.rid, "", error.message)

    def _abort(self, message: Abort) -> None:
        self._requests.pop(message.rid, None)
        self._long.pop(message.rid, None)
        self._prompts = [p for p in self._prompts if p.message.rid != message.rid]
        self._to_scheduler.send(message)

    # ---- answers

    def _output(self, output: Output) -> Text | None:
        """The next piece of a request; None if there is nothing to say (aborted, or awaiting its account)."""
        request = self._requests.get(output.rid)
        if request is None:
            return None
        finished = output.finished
        if finished is not None:
            del self._requests[output.rid]
        if request.stop is not None:
            return None if finished is None else Text(output.rid, **_closing(request, finished))
        ids = unpack(output.token_ids)
        piece = self._push(request, ids, finished)
        if piece.stop is not None:
            request.stop = piece.stop
            if finished is None:
                self._to_scheduler.send(StopString(output.rid, request.detokenizer.num_tokens))
        first = not request.started
        request.started = True
        text = piece.text
        if finished is not None and piece.stop is None:
            text += request.detokenizer.finish()
        if not (first or finished or output.logprobs or output.prompt_logprobs):  # nearly all pieces
            return Text(output.rid, text, output.token_ids[: 4 * piece.num_kept])
        return Text(
            output.rid,
            text=request.echo + text if first and (finished is None or finished.reason != "error") else text,
            token_ids=output.token_ids[: 4 * piece.num_kept],
            logprobs=[
                self._shown(i, lp) for i, lp in zip(ids[: piece.num_kept], output.logprobs, strict=False)
            ],
            prompt_logprobs=self._prompt_logprobs(request, output.prompt_logprobs, first),
            prompt_token_ids=request.prompt_ids if first else b"",
            **({} if finished is None else _closing(request, finished)),
        )

    def _push(self, request: Request, ids: list[int], finished: Finished | None) -> Piece:
        """New tokens to text. The token that ended the request shows none, unless the client wants it."""
        detokenizer = request.detokenizer
        ended = finished is not None and finished.stop_token is not None and bool(ids)
        if not ended or request.params.include_stop_str_in_output:
            return detokenizer.push(ids)
        piece = detokenizer.push(ids[:-1])
        if piece.stop is not None:
            return piece
        detokenizer.skip()
        return Piece(piece.text, len(ids))

    def _shown(self, token_id: int, entry: Logprobs) -> TokenText:
        top = [
            (i, self._encoder.token_text(i), self._encoder.token_bytes(i), logprob)
            for i, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        text, data = self._encoder.token_text(token_id), self._encoder.token_bytes(token_id)
        return TokenText(token_id, text, data, entry.logprob, top)

    def _prompt_logprobs(self, request: Request, entries: list[Logprobs], first: bool) -> list[TokenText]:
        """One for each prompt token; nothing comes before the first, so its logprob is nan."""
        alone = first and len(request.prompt_ids) == 4
        if request.params.prompt_logprobs is None or not (entries or alone):
            return []
        ids = unpack(request.prompt_ids)
        return [self._shown(i, lp) for i, lp in zip(ids, [Logprobs(math.nan), *entries], strict=True)]

    def _send(self, texts: list[Text]) -> None:
        if texts:
            self._to_server.send(Texts(texts))


def _fill_ids(encoder: Encoder, prompts: list[Prompt]) -> None:
    """Encodes those prompts that are text. Also called in the thread."""
    for special in (False, True):
        group = [p for p in prompts if p.text is not None and p.add_special_tokens == special]
        if group:
            encoded = encoder.encode([p.text for p in group if p.text is not None], special)
            for prompt, ids in zip(group, encoded, strict=True):
                prompt.ids = ids


def _closing(request: Request, finished: Finished) -> dict[str, Finished | str | int | None]:
    """`finished` and `stop_reason` of the last piece. A stop string found here outweighs any other reason."""
    if request.stop is not None:
        kept = request.detokenizer.num_tokens
        finished = msgspec.structs.replace(
            finished, reason="stop", num_output=kept, stop_token=None, message="", param=None, code=None
        )
        return {"finished": finished, "stop_reason": request.stop}
    token = finished.stop_token
    return {"finished": finished, "stop_reason": token if token in request.params.stop_token_ids else None}


def run(child: Child) -> None:
    """The process: receives at tokenizer.sock, sends to scheduler and server; ends by error or signal."""
    resolved = child.resolved
    pull = Pull(address(resolved.run_dir, "tokenizer"), ToTokenizer)
    to_scheduler = Push(address(resolved.run_dir, "scheduler"), ToScheduler)
    to_server = Push(address(resolved.run_dir, "server"), ToServer)
    loop = TokenizerLoop(resolved, Encoder.load(resolved.model_dir), to_scheduler, to_server)
    child.ready()
    while True:
        first = pull.recv(loop.wait_ms)
        loop.handle(([] if first is None else [first]) + pull.drain())
