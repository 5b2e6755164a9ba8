"""Who is let in, who gets how much of a step, who has to give way."""

from collections.abc import Iterable

from tokenspeed.config import Shape
from tokenspeed.ipc.messages import Finished
from tokenspeed.scheduler.request import Request
from tokenspeed.spec.options import MAX_NODES

MAX_PASSED_OVER = (
    8  # waiting prompts that don't fit into the rest of a step before the search for others ends
)


class Gathering:
    """Holds waiting prompts until others come, for a few steps.

    A prefill is a pass of its own over the weights, which every request that decodes waits for, be it of one prompt or
    of ten; and with speculation answers end one by one, so a full server would run one beside every round.
    """

    MOST = 4  # steps
    SHARE = 8  # no longer than until there is one for so many requests that decode

    def __init__(self) -> None:
        self._steps = 0  # for which they have been held

    def holds(self, num_waiting: int, num_decoding: int) -> bool:
        """Whether a step that prefills nothing else leaves them waiting; asked once a step."""
        held = self._steps < self.MOST and num_waiting * self.SHARE < num_decoding
        self._steps = self._steps + 1 if held else 0
        return held


class ChunkBudget:
    """Shares a step's prefill tokens among prompts, which ask in order of arrival.

    The first that does not fit is cut, and leaves a quarter of the budget to prompts behind it that end in
    this step: a short prompt waits for no long one. What they leave over goes back to the one that was cut.
    """

    def __init__(self, budget: int, num_prompts: int):
        """num_prompts: how many may ask."""
        self.left = budget
        self.chunks: list[tuple[Request, int]] = []  # and its number of tokens
        self._reserve = budget // 4 if num_prompts > 1 else 0
        self._cut: tuple[int, int] | None = (
            None  # chunk that was cut, and how many tokens it would still take
        )

    def offer(self, remaining: int) -> int:
        """Tokens that a prompt with `remaining` ones to compute may have in this step; 0: it has to wait."""
        if remaining <= self.left:
            return remaining
        if self._cut:
            return 0
        return self.left - self._reserve if self.left > self._reserve else self.left

    def take(self, request: Request, remaining: int) -> None:
        """Books what `offer` says."""
        count = self.offer(remaining)
        if count == 0:
            return
        if count < remaining:
            self._cut = len(self.chunks), remaining - count
        self.chunks.append((request, count))
        self.left -= count

    def close(self) -> list[tuple[Request, int]]:
        """The chunks of the step."""
        if self._cut and self.left:
            at, more = self._cut
            request, count = self.chunks[at]
            self.chunks[at] = request, count + min(more, self.left)
        return self.chunks


def tokens_to_cover(upper: int, shape: Shape | None, limit: int, max_model_len: int) -> int:
    """Tokens that the pages of a row must hold before a round (or the end of a prefill).

    The last token, at index upper - 1 at most, gets its K/V in this round, and the one that follows it its
    draft row. Without a tree nothing is written for tokens that `limit` rules out. The nodes of a tree lie at
    indices upper - 1 and on, whatever their depth: one that is kept may stand past the limit, so its page must
    be there.

    Args:
        upper: the most tokens that the request may have by then. limit: the most it may ever have.
    """
    if shape is None:
        return max(min(upper + 1, limit - 1), 1)
    return min(upper - 1 + max(shape.nodes, shape.steps + 2), max_model_len + MAX_NODES)


def headroom(num_running: int, shape: Shape | None, page_size: int) -> int:
    """Pages to leave free at an admission: what the running requests may take in their next round. Without it
    a new request would soon push out another, or itself."""
    tokens = shape.steps + shape.nodes if shape else 1
    return num_running * -(-tokens // page_size)


def victim(running: Iterable[Request]) -> Request:
    """Whom to preempt when pages run out: the one that arrived last, so that the oldest always gets on."""
    return max(running, key=lambda request: request.arrival)


def refusal(request: Request, room: int, max_model_len: int) -> Finished | None:
    """For a request that could never run, even alone. room: tokens that the whole KV pool holds."""
    prompt, wanted = request.num_prompt, request.max_tokens
    longest = max_model_len - min(wanted, 1)
    if not 1 <= prompt <= longest:
        return request.finished("error", message=f"the prompt must have 1 to {longest} tokens", status=400)
    if prompt + max(0, wanted - 1) <= room:  # the last token's K/V is never stored
        return None
    if prompt > room:
        why = f"the prompt has {prompt} tokens, but the KV pool of this server holds only {room}"
        return request.finished("error", message=why, status=400)
    asked = f"the prompt ({prompt} tokens) and max_tokens ({wanted})"
    why = f"{asked} need more than the KV pool of this server holds ({room} tokens); lower max_tokens"
    return request.finished("error", message=why, param="max_tokens", status=400)
