"""Accept lengths of a draft without decoding: which part of a known continuation its trees hold, at every
position.

Since a round depends on nothing but the text so far, the rounds that decoding would make can be read off a
table of "tokens accepted if a round started here"; on a CPU in float32 they are the rounds of true decoding,
one for one.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokenspeed.config import Shape
from tokenspeed.spec.base import Drafter, DraftTree, Frontier
from tokenspeed.spec.verify import accept

LOOP_BACK, LOOP_NGRAM, LOOP_TIMES = 128, 8, 4
POSITION_BINS = (256, 1024, 2048, 8192)


@dataclass(frozen=True)
class Round:
    """One round of an answer: the index of its root, and how many tokens it emitted."""

    start: int
    emitted: int


@dataclass(frozen=True)
class Answer:
    """A text whose rounds are known, in order; `looping` by `is_looping`, `category` for the report."""

    rounds: tuple[Round, ...]
    looping: bool
    category: str


@dataclass
class Tally:
    """Counts over rounds. `by_depth[d]`: rounds that emitted more than d tokens, d drafted ones right."""

    rounds: int = 0
    tokens: int = 0
    by_depth: Counter = field(default_factory=Counter)

    def add(self, emitted: int) -> None:
        self.rounds += 1
        self.tokens += emitted
        self.by_depth.update(range(1, emitted))

    @property
    def accept_length(self) -> float:
        """Tokens emitted a round, the target's own included; NaN without rounds."""
        return self.tokens / self.rounds if self.rounds else float("nan")

    def rate(self, depth: int) -> float:
        """Share of rounds whose first `depth` drafted tokens were all accepted."""
        return self.by_depth[depth] / self.rounds if self.rounds else float("nan")


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
) -> Tensor:
    """How many drafted tokens a round would accept, for a round that starts at every position of an answer.

    Args:
        drafter, page_size: as in `append_text`; the drafter's pool is overwritten.
        tokens: int64 [n], a prompt and its answer as the target gave it (greedy or sampled).
        aux: [n, A] the target's states over `tokens`, in the drafter's dtype.
        prompt_len: tokens of the prompt, at least 1. batch: positions drafted together.

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
            block_table=table.expand(len(starts), -1),
            max_len=int(starts[-1]) + 1,
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
    last = len(counts) - 1  # the last token is emitted by some round and is no root
    while at < last:
        emitted = min(counts[at] + 1, last - at)
        rounds.append(Round(prompt_len + at, emitted))
        at += emitted
    return tuple(rounds)


def offline_rounds(
    drafter: Drafter,
    tokens: Tensor,
    aux: Tensor,
    prompt_len: int,
    shape: Shape,
    page_size: int,
    category: str = "",
    batch: int = 32,
) -> Answer:
    """`accepted_everywhere` and `simulate` for one text; arguments as there."""
    accepted = accepted_everywhere(drafter, tokens, aux, prompt_len, shape, page_size, batch)
    looping = is_looping(tokens[prompt_len:].tolist())
    return Answer(simulate(accepted, prompt_len), looping, category)


def is_looping(answer: list[int]) -> bool:
    """Whether the last 128 tokens of an answer hold one 8-gram four times or more.

    Loops are easy to draft, so accept lengths are given with and without the answers that loop.
    """
    tail = answer[-LOOP_BACK:]
    grams = Counter(tuple(tail[i : i + LOOP_NGRAM]) for i in range(len(tail) - LOOP_NGRAM + 1))
    return max(grams.values(), default=0) >= LOOP_TIMES


def summarise(answers: Iterable[Answer]) -> dict[str, dict[str, Tally]]:
    """Tallies by group: "all", "category NAME" and "position LOW-HIGH" (of the round's root).

    Returns:
        group -> {"all": over every answer, "no loops": over those that do not loop}.
    """
    groups: dict[str, dict[str, Tally]] = {}
    for answer in answers:
        for round_ in answer.rounds:
            for group in ("all", f"category {answer.category}", f"position {_bin(round_.start)}"):
                tallies = groups.setdefault(group, {"all": Tally(), "no loops": Tally()})
                tallies["all"].add(round_.emitted)
                if not answer.looping:
                    tallies["no loops"].add(round_.emitted)
    return groups


def _bin(position: int) -> str:
    low = 0
    for high in POSITION_BINS:
        if position < high:
            return f"{low}-{high}"
        low = high
    return f"{low}-"
