"""Every message that crosses a process boundary. Data only: no logic, no torch, no sockets.

Integer arrays travel as little-endian bytes (`pack`, `unpack`). New fields go last, with a default.
"""

import array

import msgspec

from tokenspeed.params import SamplingParams


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False):
    """Base: a msgpack array whose first element is the class name."""


def pack(values) -> bytes:
    """Integers as int32 bytes."""
    return array.array("i", values).tobytes()


def unpack(data: bytes) -> list[int]:
    """int32 bytes as a list of integers. Raises ValueError when the length is not a multiple of 4."""
    out = array.array("i")
    out.frombytes(data)
    return out.tolist()


# ---- server -> tokenizer


class Tokenize(Message):
    """One request for one choice. Exactly one of `messages`, `text` and `token_ids` is set."""

    rid: int
    params: SamplingParams  # resolved: n = 1, a seed, tuples
    messages: bytes | None = None  # JSON list of chat messages, rendered with the chat template
    text: str | None = None
    token_ids: bytes | None = None  # int32
    echo: bool = False  # the answer's text begins with the prompt's
    max_tokens_field: str = "max_tokens"  # how the client called it, for errors


class TokenizeOnly(Message):
    """For /tokenize: answered with `TokenIds`. One of `messages` and `text` is set."""

    rid: int
    messages: bytes | None = None
    text: str | None = None
    add_special_tokens: bool = True


class DetokenizeOnly(Message):
    """For /detokenize: answered with `Decoded`."""

    rid: int
    token_ids: bytes  # int32


class Abort(Message):
    """Also tokenizer -> scheduler. Unknown ids are ignored. The sender wants no further answer."""

    rid: int


# ---- tokenizer -> scheduler


class Generate(Message):
    rid: int
    input_ids: bytes  # int32 [n], n >= 1 and n + 1 <= max_model_len
    params: SamplingParams  # max_tokens is set, n + max_tokens <= max_model_len


class StopString(Message):
    """A stop string has been found: the request ends with finish_reason "stop" and its cache may be kept."""

    rid: int
    num_tokens: int  # output tokens kept, up to and with the one that completed the stop string


# ---- scheduler -> every worker (encoded once, the same bytes to each rank)


class Admit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request takes a slot. After a preemption `input_ids` holds prompt and output so far."""

    slot: int
    input_ids: bytes  # int32 [n]
    num_prompt: int  # of them, prompt tokens (penalties tell prompt from output)
    num_cached: int  # leading tokens whose pages came from the prefix cache; a multiple of the page size, < n
    params: SamplingParams


class Step(Message):
    """One step: apply `release`, `admit`, `pages`, then forward `prefill` chunks, then one round of `decode` rows.

    A prefill row computes input_ids[start : start + count] of its slot; the row whose chunk ends at n samples one
    token. Pages are appended to a slot's block table in order. A decode row emits 1..S+1 tokens.
    """

    step: int
    release: bytes = b""  # int32 [R] slots
    admit: list[Admit] = []
    page_slots: bytes = b""  # int32 [P]
    page_ids: bytes = b""  # int32 [P]
    prefill_slots: bytes = b""  # int32 [C]
    prefill_starts: bytes = b""  # int32 [C]
    prefill_counts: bytes = b""  # int32 [C]
    decode_slots: bytes = b""  # int32 [B]
    shape: tuple[int, int, int] | None = None  # S, K, N of the draft tree; None: a plain round


# ---- worker rank 0 -> scheduler


class Logprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of one token, from the target's raw logits."""

    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class StepDone(Message):
    """Rows stand in the order of Step: prefill rows first, then decode rows."""

    step: int
    counts: bytes  # int32 [C + B] tokens produced (0: an unfinished prefill)
    tokens: bytes  # int32 [sum(counts)]
    elapsed_us: int = 0
    logprobs: dict[int, list[Logprobs]] = {}  # row -> one entry a token, where asked for
    prompt_logprobs: dict[int, list[Logprobs]] = {}  # prefill row -> entries of tokens start+1 .. start+count
    failed: dict[int, str] = {}  # row -> why (NaN logits); its tokens are to be ignored
    graphed: bool = False  # the round was a CUDA graph's replay
    num_nan_drafts: int = 0  # decode rows whose draft logits were NaN; their tokens are good


# ---- scheduler -> tokenizer


class Finished(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a request ended, and its account."""

    reason: str  # "stop" | "length" | "abort" | "error"
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    stop_token: int | None = None  # the end-of-sequence or stop token that ended it
    message: str = ""  # for "error"
    param: str | None = None
    status: int = 500
    num_rounds: int = 0  # decode rounds with a tree
    num_drafted: int = 0  # draft nodes offered in them
    num_accepted: int = 0  # draft tokens kept
    accepted_per_depth: list[int] = []  # [d] rounds in which depth d + 1 was accepted
    code: str | None = None  # OpenAI's error code, for "error"


class Output(msgspec.Struct, array_like=True, frozen=True, gc=False):
    rid: int
    token_ids: bytes = b""  # int32, newly generated; a stop token is included
    logprobs: list[Logprobs] = []
    prompt_logprobs: list[Logprobs] = []  # of prompt tokens 1.., all at once, before the first token
    finished: Finished | None = None


class Tokens(Message):
    outputs: list[Output]


# ---- tokenizer -> server


class TokenText(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A token as logprobs show it: its text and its bytes."""

    token_id: int
    text: str
    data: bytes
    logprob: float
    top: list[tuple[int, str, bytes, float]] = []


class Text(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The next piece of one request. The last one has `finished` set; none follows it."""

    rid: int
    text: str = ""
    token_ids: bytes = b""  # int32, the tokens kept so far that are new in this piece
    logprobs: list[TokenText] = []
    prompt_logprobs: list[TokenText] = []  # first entry: the first prompt token, logprob nan
    finished: Finished | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that matched
    prompt_token_ids: bytes = b""  # int32, in the first piece only


class Texts(Message):
    texts: list[Text]


class TokenIds(Message):
    rid: int
    token_ids: bytes
    token_texts: list[str] = []
    error: str = ""


class Decoded(Message):
    rid: int
    text: str
    error: str = ""


class Stats(Message):
    """scheduler -> server, about every half second and when idle begins: gauges and counters for /metrics."""

    num_running: int = 0
    num_waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    counters: dict[str, float] = {}  # since start: see metrics.py for the names
    spec_accepted_per_pos: list[int] = []
    spec_rounds: dict[str, int] = {}  # by tree, "plain" for none; a round of many requests is one


# ---- lifecycle, any child -> launcher (Ready and Dead also launcher -> server)


class Ready(Message):
    who: str
    info: dict[str, int | float | str] = {}


class Progress(Message):
    """A line or a bar for the person who started the server."""

    who: str
    text: str
    done: int = 0
    total: int = 0


class Dead(Message):
    who: str
    error: str
    user_error: bool = False  # a ConfigError: one line, exit code 2


class Drain(Message):
    """launcher -> server: take no new requests, exit when the open ones have ended."""

    timeout: float


ToTokenizer = Tokenize | TokenizeOnly | DetokenizeOnly | Abort | Tokens
ToScheduler = Generate | StopString | Abort | StepDone
ToWorker = Step
ToServer = Texts | TokenIds | Decoded | Stats | Dead | Drain | Ready
ToLauncher = Ready | Progress | Dead
