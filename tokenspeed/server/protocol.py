"""What the API accepts: strict request models, and their way to `SamplingParams`.

Types are checked here, values in `SamplingParams.check`. null means default.
"""

import re
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from tokenspeed.errors import RequestError
from tokenspeed.params import MAX_N, SamplingParams, check_token
from tokenspeed.server.errors import shorten

Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_TOKEN_KEY = re.compile(r"-?[0-9]{1,18}")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("must not be empty")
    if all(isinstance(item, str) for item in value) or _is_ids(value) or all(_is_ids(item) for item in value):
        return value
    raise ValueError("must hold only strings, only token ids, or only lists of token ids")


def _check_ids(value: Any) -> Any:
    if not _is_ids(value):
        raise ValueError("must be a list of token ids")
    return value


def _later(value: Any) -> Any:
    """Left to SamplingParams.check, which stops at the first fault of a long list."""
    return value


_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt),
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}),
]
Ids = Annotated[list[int], PlainValidator(_check_ids), WithJsonSchema(_IDS)]
Stop = Annotated[Any, PlainValidator(_later), WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS]})]
Words = Annotated[Any, PlainValidator(_later), WithJsonSchema(_TEXTS)]
TokenIds = Annotated[Any, PlainValidator(_later), WithJsonSchema(_IDS)]
_BIAS_SCHEMA = {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}
LogitBias = Annotated[Any, PlainValidator(_later), WithJsonSchema(_BIAS_SCHEMA)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """What the template renders; whether it knows the role is the template's affair."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
    name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, str]:
        """Parts become lines of one string."""
        content = self.content if isinstance(self.content, str) else "\n".join(p.text for p in self.content)
        named = {k: v for k in ("name", "tool_call_id") if (v := getattr(self, k)) is not None}
        return {"role": self.role, "content": content, **named}


class Sampling(Body):
    """What both generation endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    best_of: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Words | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    user: str | None = None  # identifies the end user to the operator; changes nothing here
    return_spec_metrics: bool | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    def _params(self, vocab_size: int, **special: Any) -> SamplingParams:
        """The values as SamplingParams, checked. `special` holds what the two endpoints do differently."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        if self.best_of is not None and self.best_of != self.num_choices:
            raise RequestError("best_of other than n is not supported", "best_of")
        named = {k: v for k in _PLAIN if (v := getattr(self, k)) is not None} | special
        if self.logit_bias is not None:
            named["logit_bias"] = _token_keys(self.logit_bias, vocab_size)
        params = SamplingParams(**named)
        params.check(vocab_size)
        return params


_PLAIN = (
    "n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words", "stop", "stop_token_ids",
    "ignore_eos", "skip_special_tokens", "include_stop_str_in_output",
)  # fmt: skip


class ChatRequest(Sampling):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None

    @property
    def max_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def params(self, vocab_size: int) -> SamplingParams:
        """Raises RequestError."""
        field = self.max_tokens_field
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.max_tokens is not None and self.max_tokens != limit:
            raise RequestError("max_tokens and max_completion_tokens contradict each other", field)
        if limit is not None and limit < 1:
            raise RequestError(f"{field} must be at least 1, not {limit}", field)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        alternatives = (self.top_logprobs or 0) if self.logprobs else None
        return _renamed(
            {"logprobs": "top_logprobs", "max_tokens": field},
            lambda: self._params(vocab_size, max_tokens=limit, logprobs=alternatives),
        )


class CompletionRequest(Sampling):
    prompt: Prompt
    logprobs: Int | None = None
    echo: bool | None = None

    max_tokens_field: ClassVar[str] = "max_tokens"

    def params(self, vocab_size: int) -> SamplingParams:
        """Raises RequestError."""
        limit = SamplingParams().max_tokens if self.max_tokens is None else self.max_tokens
        if limit == 0 and not self.echo:
            raise RequestError("max_tokens must be at least 1, or 0 with echo: true", "max_tokens")
        of_prompt = self.logprobs if self.echo else None
        return self._params(vocab_size, max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=of_prompt)

    def prompts(self, vocab_size: int) -> list[dict[str, Any]]:
        """One `Generation.add` argument for each prompt. Raises RequestError for no ids or a bad one."""
        prompt = self.prompt
        many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        if len(many) * self.num_choices > MAX_N:
            raise RequestError(
                f"{len(many)} prompts with n = {self.num_choices} are more than {MAX_N} choices", "prompt"
            )
        out: list[dict[str, Any]] = []
        for one in many:
            if isinstance(one, str):
                out.append({"text": one})
            else:
                check_token_ids("prompt", one, vocab_size)
                out.append({"token_ids": one})
        return out


class TokenizeRequest(Body):
    """One of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Ids


def encode_messages(messages: list[ChatMessage]) -> bytes:
    """As the tokenizer process takes them."""
    return msgspec.json.encode([message.plain() for message in messages])


def check_token_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Raises RequestError for no ids at all or one outside the vocabulary."""
    if not ids:
        raise RequestError(f"{name} must hold at least one token id", name)
    for extreme in (min(ids), max(ids)):
        check_token(name, extreme, vocab_size)


def _token_keys(bias: Any, vocab_size: int) -> dict[int, float]:
    """JSON's keys are strings of token ids."""
    if not isinstance(bias, dict):
        raise RequestError("logit_bias must map token ids to numbers", "logit_bias")
    for key in bias:
        if not _TOKEN_KEY.fullmatch(key):
            check_token("logit_bias", shorten(key, 40), vocab_size)
    return {int(key): value for key, value in bias.items()}


def _renamed(names: dict[str, str], make: Any) -> SamplingParams:
    """Calls `make`; an error that names a field as SamplingParams does gets the client's name for it."""
    try:
        return make()
    except RequestError as error:
        if (name := names.get(error.param or "")) is None:
            raise
        message = error.message.replace(error.param or "", name)
        raise RequestError(message, name, error.status, error.code) from None
