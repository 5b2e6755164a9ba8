"""Structured output: which tokens a matcher lets follow each node of a draft tree.

A seam: nothing that a client can ask for makes a matcher yet. Requests that have one cost a wait for the tree in each
round, others nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tokenspeed.params import SamplingParams

WORD = 32  # tokens in an element of a mask


class Matcher(Protocol):
    """What one answer may look like, on the host. It knows what it has accepted, and can go back."""

    def accept(self, token: int) -> bool:
        """Goes on by a token. False for one that may not come here, and then nothing has changed.

        After the end of a match every token is accepted and allowed: what follows it is never shown.
        """
        ...

    def rollback(self, count: int) -> None:
        """Forgets the last `count` accepted tokens."""
        ...

    def fill_mask(self, mask: Tensor) -> None:
        """Writes which tokens may come next: int32 [ceil(V / 32)] on the host, bit t % 32 of element t // 32."""
        ...


def fill_tree(matcher: Matcher, tokens: Sequence[int], parents: Sequence[int], masks: Tensor) -> None:
    """Masks of what may follow each node: depth first, with `rollback` on the way up.

    Args:
        matcher: has accepted everything up to and with node 0, and is left so.
        tokens, parents: of N nodes, parents first.
        masks: int32 [N, ceil(V / 32)] of zeros. Nodes that can't be reached, their token being none that may
            come, keep them.
    """
    children: list[list[int]] = [[] for _ in tokens]
    for node in range(1, len(tokens)):
        children[parents[node]].append(node)

    def fill(node: int) -> None:  # as deep as the tree
        matcher.fill_mask(masks[node])
        for child in children[node]:
            if matcher.accept(tokens[child]):
                fill(child)
                matcher.rollback(1)

    fill(0)


@dataclass
class Asked:
    """Trees on their way to the host."""

    slots: dict[int, int]  # row of the batch -> its slot, where that has a matcher
    tokens: dict[int, Tensor]  # row -> int64 [N] on the host, valid once `copied` has passed
    parents: dict[int, Tensor]
    copied: torch.cuda.Event | None


class Matchers:
    """Matchers by slot. The trees are read while the target computes them (`ask`, later `apply`).

    Args:
        make: a request's matcher; None where it wants none.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, make: Callable[[SamplingParams], Matcher | None]
    ):
        self.vocab_size, self.device, self.make = vocab_size, device, make
        self._matchers: dict[int, Matcher] = {}
        self._emitted: dict[int, tuple[Tensor, Tensor]] = {}  # on the host; not accepted yet

    def admit(self, slot: int, output: Sequence[int], params: SamplingParams) -> None:
        """`output`: what the request has answered before a preemption."""
        self.release(slot)
        if (matcher := self.make(params)) is not None:
            self._matchers[slot] = matcher
            for token in output:
                matcher.accept(token)

    def release(self, slot: int) -> None:
        self._matchers.pop(slot, None)
        self._emitted.pop(slot, None)

    def any(self, slots: Sequence[int]) -> bool:
        return not self._matchers.keys().isdisjoint(slots)

    def ask(self, slots: Sequence[int], tokens: Tensor, parents: Tensor) -> Asked | None:
        """Starts to read the trees of requests with a matcher; None where there is none.

        Args:
            slots: of the B rows. tokens, parents: int64 [B, N].
        """
        rows = {row: slot for row, slot in enumerate(slots) if slot in self._matchers}
        if not rows:
            return None
        copies = [{row: self._to_host(x[row]) for row in rows} for x in (tokens, parents)]
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        return Asked(rows, *copies, copied)

    def apply(self, asked: Asked, logits: Tensor) -> None:
        """Sets what may not come to -inf in logits, float32 [B, N, V]. Waits for the trees, not for the target."""
        if asked.copied is not None:
            asked.copied.synchronize()
        masks = torch.zeros(len(asked.slots), logits.shape[1], -(-self.vocab_size // WORD), dtype=torch.int32)
        for mask, (row, slot) in zip(masks, asked.slots.items(), strict=True):
            self._catch_up(slot)
            fill_tree(self._matchers[slot], asked.tokens[row].tolist(), asked.parents[row].tolist(), mask)
        for row, allowed in zip(asked.slots, self._allowed(masks.to(self.device)), strict=True):
            logits[row].masked_fill_(~allowed, float("-inf"))

    def count(self, slots: Sequence[int], tokens: Tensor, counts: Tensor) -> None:
        """Emitted tokens, int64 [B, n], the first counts[b] of a row: accepted when the next tree is there."""
        for row, slot in enumerate(slots):
            if slot in self._matchers:
                self._emitted[slot] = self._to_host(tokens[row]), self._to_host(counts[row])

    def _catch_up(self, slot: int) -> None:
        """Emitted tokens were drawn from masked logits; one that is refused is a failed row's, which ends anyway."""
        if slot in self._emitted:
            tokens, count = self._emitted.pop(slot)
            for token in tokens[: int(count)].tolist():
                self._matchers[slot].accept(token)

    def _allowed(self, masks: Tensor) -> Tensor:
        """Bits to bool [..., V]."""
        ids = torch.arange(self.vocab_size, device=masks.device)
        return (masks[..., ids // WORD] >> (ids % WORD).to(torch.int32) & 1).bool()

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A copy in flight: valid once an event that is recorded later has passed."""
        if tensor.device.type != "cuda":
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host
