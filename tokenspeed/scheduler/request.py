"""One request: its tokens, how far it is computed and scheduled, when it ends, and its account of
speculation."""

import array
import enum

from tokenspeed.cache.manager import RequestPages
from tokenspeed.ipc.messages import Finished, Generate, Logprobs
from tokenspeed.spec.gain import Offset
from tokenspeed.spec.options import MAX_STEPS


class Status(enum.Enum):
    WAITING = enum.auto()  # new, or preempted
    RUNNING = enum.auto()  # has a slot and pages
    FINISHED = enum.auto()  # its terminal Output has been made


class Request:
    """Counters of tokens, for a request of P prompt tokens and O output tokens known so far:

    num_input: tokens to prefill: P, or P + O at the time of its last preemption.
    num_scheduled <= num_input: tokens whose prefill was sent to the worker, or found in the prefix cache.
    num_computed <= num_scheduled: those the worker has answered for.
    least, most: bounds on the tokens that steps in flight will add to O.
    """

    __slots__ = (
        "accepted",
        "arrival",
        "held",
        "least",
        "limit",
        "logprobs_of_prompt",
        "max_tokens",
        "most",
        "num_cached",
        "num_computed",
        "num_covered",
        "num_drafted",
        "num_input",
        "num_prompt",
        "num_scheduled",
        "offset",
        "pages_wanted",
        "params",
        "rid",
        "slot",
        "status",
        "stop_ids",
        "tokens",
        "wants_prompt_logprobs",
    )

    def __init__(self, message: Generate, arrival: int, max_model_len: int, eos_token_ids: tuple[int, ...]):
        params = message.params
        self.rid = message.rid
        self.arrival = arrival  # order of arrival, for preemption
        self.params = params
        self.tokens = array.array("i")  # int32, prompt and known output
        self.tokens.frombytes(message.input_ids)
        self.num_prompt = len(self.tokens)
        self.max_tokens: int = params.max_tokens if params.max_tokens is not None else 2**31
        self.limit = min(self.num_prompt + self.max_tokens, max_model_len)  # of num_tokens
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(
            () if params.ignore_eos else eos_token_ids
        )
        self.status = Status.WAITING
        self.slot = -1
        self.held: RequestPages | None = None  # while running
        self.num_covered = 0  # tokens that its pages hold
        self.pages_wanted = 0  # at the last attempt to admit it
        self.num_input = self.num_prompt
        self.num_scheduled = 0
        self.num_computed = 0
        self.num_cached: int | None = None  # prompt tokens found in the prefix cache at the first admission
        self.least = 0
        self.most = 0
        self.wants_prompt_logprobs = params.prompt_logprobs is not None  # and has not got them yet
        self.logprobs_of_prompt: list[Logprobs] = []
        self.num_drafted = 0  # nodes of its trees, without the roots
        self.accepted = [0] * (MAX_STEPS + 1)  # [a] tree rounds that kept a draft tokens
        self.offset = Offset()  # how predictable its text is, for the plan

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def can_decode(self) -> bool:
        """Whether a round more is of use, whatever the steps in flight bring."""
        return len(self.tokens) + self.least < self.limit and self.num_scheduled == self.num_input

    def start(self, slot: int, held: RequestPages) -> None:
        """Takes a slot and the pages of a prefix match."""
        self.status = Status.RUNNING
        self.slot = slot
        self.held = held
        self.num_input = self.num_tokens
        self.num_scheduled = self.num_computed = held.num_cached
        self.logprobs_of_prompt = []
        self.pages_wanted = 0
        if self.num_cached is None:
            self.num_cached = held.num_cached

    def commit(self, new: array.array) -> tuple[int, str | None, int | None]:
        """Appends tokens in order up to the one that ends the request; the rest of the round is dropped.

        Returns how many were kept, the finish reason if it ended, and the stop token that ended it.
        """
        room = self.limit - len(self.tokens)
        if self.stop_ids and not self.stop_ids.isdisjoint(new):
            for i in range(max(0, self.params.min_tokens - self.num_output), min(len(new), room)):
                if new[i] in self.stop_ids:
                    self.tokens.extend(new[: i + 1])
                    return i + 1, "stop", new[i]
        if len(new) >= room:
            self.tokens.extend(new[:room])
            return room, "length", None
        self.tokens.extend(new)
        return len(new), None, None

    def committed_ids(self) -> bytes:
        """int32 ids of the leading tokens that have K/V. While prefill lasts these are the computed ones,
        later all but the last: it was sampled, not yet computed."""
        known = self.num_tokens
        count = min(self.num_computed, known) if self.num_computed < self.num_input else known - 1
        return self.tokens[:count].tobytes()

    def finished(self, reason: str, **details: str | int | None) -> Finished:
        return Finished(
            reason=reason,
            num_prompt=self.num_prompt,
            num_output=self.num_output,
            num_cached=self.num_cached or 0,
            num_rounds=sum(self.accepted),
            num_drafted=self.num_drafted,
            num_accepted=total(self.accepted),
            accepted_per_depth=num_at_least(self.accepted),
            **details,
        )


def total(histogram: list[int]) -> int:
    """The sum of the counted values."""
    return sum(value * count for value, count in enumerate(histogram))


def num_at_least(histogram: list[int]) -> list[int]:
    """[d]: how many of the counted values are at least d + 1, up to the largest of them."""
    out: list[int] = []
    above = 0
    for count in reversed(histogram[1:]):
        above += count
        if above:
            out.append(above)
    return out[::-1]
