"""Accept lengths of a draft without decoding: which part of a known continuation its trees hold, at every
position.

Since a round depends on nothing but the text so far, the rounds that decoding would make can be read off a
table of "tokens accepted if a round started here"; on a CPU in float32 they are the rounds of true decoding,
one for one.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed.config import Shape
from tokenspeed.kernels import Draw
from tokenspeed.spec.base import Drafter, DraftTree, Frontier
from tokenspeed.spec.eagle4.drafter import EagleDrafter
from tokenspeed.spec.eagle4.head import CandidateHead, Candidates
from tokenspeed.spec.verify import accept


@dataclass
class Recall:
    """Of the full head's best token by the candidate head, over the best lane of each draft step.

    `rows[d]` counts the rows of step d + 1, `found[d]` those whose candidates hold the token that the full head
    would rank first. Both are empty for a draft without a candidate head.
    """

    rows: list[int] = field(default_factory=list)
    found: list[int] = field(default_factory=list)

    def by_step(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.rows, self.found, strict=True))


class _WatchedHead:
    """Stands before a candidate head for as long as trees are drafted for evaluation."""

    def __init__(self, head: CandidateHead, steps: int, recall: Recall):
        self._head, self._recall, self._calls = head, recall, itertools.cycle(range(steps))
        recall.rows, recall.found = [0] * steps, [0] * steps

    @property
    def num_tokens(self) -> int:
        return self._head.num_tokens

    def candidates(self, out: Tensor, k: int, draw: Draw | None = None) -> Candidates:
        step = next(self._calls)  # one call a step: of the roots, then of K lanes a root, the best one first
        best = out if step == 0 else out[::k]
        self._recall.rows[step] += len(best)
        self._recall.found[step] += int(self._head.holds_best(best).sum())
        return self._head.candidates(out, k, draw)


@contextmanager
def watch_recall(drafter: EagleDrafter, shape: Shape) -> Iterator[Recall]:
    """Counts into what it yields while the drafter proposes trees of `shape`, and of no other."""
    head, recall = drafter.head, Recall()
    if isinstance(head, CandidateHead):
        drafter.head = _WatchedHead(head, shape.steps, recall)
    try:
        yield recall
    finally:
        drafter.head = head


class Round(NamedTuple):
    """One round of an answer: the index of its root, and how many drafted tokens it accepted."""

    start: int
    accepted: int


def append_text(drafter: Drafter, tokens: Tensor, aux: Tensor, page_size: int, chunk: int = 512) -> Tensor:
    """Writes the draft rows of a whole text into pages 1.. of the drafter's pool.

    Args:
        drafter: bound to a pool of at least 1 + ceil(n / page_size) pages.
        tokens: int64 [n]. aux: [n, A] target states by teacher forcing, aux[i] after reading token i.

    Returns:
        The block table int32 [1, P] of the text.
    """
    n, device = len(tokens), tokens.device
    for start in range(1, n, chunk):
        indices = torch.arange(start, min(start + chunk, n), device=device)
        drafter.append(tokens[indices], aux[indices - 1], indices, indices + page_size)
    pages = -(-n // page_size)
    return torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None]


def accepted_everywhere(
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    prompt_len: int,
    shape: Shape,
    page_size: int,
    batch: int = 32,
    draw: Draw | None = None,
) -> Tensor:
    """How many drafted tokens a round would accept, for a round that starts at every position of an answer.

    Args:
        drafter, page_size: as in `append_text`; the drafter's pool is overwritten.
        tokens: int64 [n], a prompt and its answer as the target gave it (greedy or sampled).
        aux: [n, A] the target's states over `tokens`, in the drafter's dtype.
        prompt_len: tokens of the prompt, at least 1. batch: positions drafted together.
        draw: how the answer was sampled, of one request; its positions are not read. None: greedily.

    Returns:
        int64 [n - prompt_len], at j for the round whose root is token prompt_len + j; what follows the end
        of the text counts as not accepted.
    """
    table = append_text(drafter, tokens, aux, page_size)
    n, found = len(tokens), []
    for starts in torch.arange(prompt_len, n, device=tokens.device).split(batch):
        frontier = Frontier(
            last_tokens=tokens[starts],
            aux=aux[starts - 1],
            last_indices=starts,
            block_table=table.repeat(len(starts), 1),
            max_len=int(starts[-1]) + 1,
            draw=draw and replace(draw, slots=draw.slots.expand(len(starts)), positions=starts),
        )
        tree = drafter.propose(frontier, shape)
        found.append(accept(tree, _truth(tree, tokens, starts), shape.steps).count - 1)
    return torch.cat(found) if found else tokens.new_zeros(0)


def _truth(tree: DraftTree, tokens: Tensor, starts: Tensor) -> Tensor:
    """The text's next token for each node, by its depth; -1 past the end: int64 [B, N]."""
    after = starts[:, None] + tree.depths + 1
    return torch.where(after < len(tokens), tokens[after.clamp(max=len(tokens) - 1)], -1)


def simulate(accepted: Tensor, prompt_len: int) -> tuple[Round, ...]:
    """The rounds of decoding one answer.

    The prompt's own pass gives the answer's first token, so the first round's root is token prompt_len, and
    a round emits what it accepts and one token more, as far as the text goes.

    Args:
        accepted: of `accepted_everywhere`.
    """
    rounds, at, counts = [], 0, accepted.tolist()
    while at < len(counts) - 1:  # the last token is emitted by some round and is no root
        rounds.append(Round(prompt_len + at, counts[at]))
        at += counts[at] + 1
    return tuple(rounds)


def offline_rounds(
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    prompt_len: int,
    shape: Shape,
    page_size: int,
    batch: int = 32,
    draw: Draw | None = None,
) -> tuple[Round, ...]:
    """`accepted_everywhere` and `simulate` for one text; arguments as there."""
    accepted = accepted_everywhere(drafter, tokens, aux, prompt_len, shape, page_size, batch, draw)
    return simulate(accepted, prompt_len)
