"""`SamplingParams`: what a request may ask of sampling, and the one validator of its values."""

import random
from typing import Any

import msgspec

from tokenspeed.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 128
MAX_N = 128
_SYSTEM = random.SystemRandom()
INT32_MAX = 2**31 - 1  # counts and top_k live in int32 arrays
GREEDY_BELOW = 1e-5  # temperatures under this are greedy


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one request. Names and meanings are OpenAI's and vLLM's.

    Logits are changed in this order: repetition, frequency and presence penalties, logit_bias,
    allowed_token_ids, bad words, min_tokens mask, temperature, top_k, top_p (over what top_k kept,
    renormalised), min_p.
    A temperature under 1e-5 is greedy. `seed` keys a counter-based generator together with the absolute
    position of the token, so equal seeds draw equal numbers with speculation on and off and whatever else is
    in the batch.
    """

    n: int = 1
    max_tokens: int | None = 16  # None: to the context limit
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: a random one
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None  # None: all; end-of-sequence tokens are not added
    bad_words: tuple[str, ...] = ()  # their tokens, with and without a space before, never stand in an answer
    # The same as ids; the tokenizer adds bad_words here.
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] | str = ()  # a list is taken too
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives beside the sampled token's own log-probability
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def resolved(self, index: int = 0, seeds: random.Random | None = None) -> "SamplingParams":
        """This, for choice `index` of n: a seed of its own (index 0 keeps the user's), tuples for lists, n = 1.

        seeds: where seeds come from when the user named none (None: the system).
        """
        seed = (seeds or _SYSTEM).getrandbits(63) if self.seed is None else self.seed
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return msgspec.structs.replace(
            self,
            n=1,
            seed=_wrap64(seed + index * 0x9E3779B97F4A7C15),
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words),
            bad_words_token_ids=tuple(tuple(ids) for ids in self.bad_words_token_ids),
        )

    def check(self, vocab_size: int) -> None:
        """Raises RequestError naming the field for a value of a wrong type, not finite, or out of range."""
        check_int("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 0, INT32_MAX)
        check_int("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})", "min_tokens"
            )
        check_float("temperature", self.temperature, 0.0, 2.0)
        check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be greater than 0", "top_p")
        check_int("top_k", self.top_k, -1, INT32_MAX)
        check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**63 - 1)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.0, 2.0)
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty must be greater than 0", "repetition_penalty")
        if not isinstance(self.logit_bias, dict):
            raise RequestError("logit_bias must map token ids to numbers", "logit_bias")
        for token, bias in self.logit_bias.items():
            check_token("logit_bias", token, vocab_size)
            check_float("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, (list, tuple)) or not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must be a list of at least one id", "allowed_token_ids")
            for token in self.allowed_token_ids:
                check_token("allowed_token_ids", token, vocab_size)
        self._check_bad_words(vocab_size)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) for s in stops):
            raise RequestError("stop must be a string or a list of strings", "stop")
        if len(stops) > MAX_STOP_STRINGS:
            raise RequestError(f"stop takes at most {MAX_STOP_STRINGS} strings, not {len(stops)}", "stop")
        if any(not 1 <= len(s) <= MAX_STOP_LENGTH for s in stops):
            raise RequestError(f"each stop string must have 1 to {MAX_STOP_LENGTH} characters", "stop")
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise RequestError("stop_token_ids must be a list of token ids", "stop_token_ids")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
        for token in self.stop_token_ids:
            check_token("stop_token_ids", token, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false", name)

    def _check_bad_words(self, vocab_size: int) -> None:
        words = self.bad_words
        if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) for word in words):
            raise RequestError("bad_words must be a list of strings", "bad_words")
        if any(not 1 <= len(word) <= MAX_STOP_LENGTH for word in words):
            raise RequestError(f"each of bad_words must have 1 to {MAX_STOP_LENGTH} characters", "bad_words")
        sequences = self.bad_words_token_ids
        if not isinstance(sequences, (list, tuple)) or not all(
            isinstance(ids, (list, tuple)) and 1 <= len(ids) <= MAX_STOP_LENGTH for ids in sequences
        ):
            raise RequestError(
                f"bad_words_token_ids must be a list of lists of 1 to {MAX_STOP_LENGTH} token ids",
                "bad_words_token_ids",
            )
        for ids in sequences:
            for token in ids:
                check_token("bad_words_token_ids", token, vocab_size)
        for name, values in (("bad_words", words), ("bad_words_token_ids", sequences)):
            if len(values) > MAX_BAD_WORDS:
                raise RequestError(f"{name} takes at most {MAX_BAD_WORDS}, not {len(values)}", name)


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {value!r}", name)
    if value < low or (high is not None and value > high):
        raise RequestError(f"{name} must be {_range(low, high)}, not {value}", name)


def check_float(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {value!r}", name)
    if not low <= value <= high:  # false for NaN; an int may be too large for math.isfinite
        raise RequestError(f"{name} must be {_range(low, high)}, not {value}", name)


def check_token(name: str, token: Any, vocab_size: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise RequestError(
            f"{name}: token id {token!r} is not in the vocabulary (0 to {vocab_size - 1})", name
        )


def _range(low: float, high: float | None) -> str:
    return f"at least {low}" if high is None else f"from {low} to {high}"


def _wrap64(value: int) -> int:
    """To a signed 64-bit integer, as the generator's key is kept."""
    return (value + 2**63) % 2**64 - 2**63
