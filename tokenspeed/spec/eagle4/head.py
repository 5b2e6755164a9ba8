"""The draft's output heads: which tokens of a row may be its children, with their scores, by the whole vocabulary's
logits or by a low-rank head. Draft scores decide how much is accepted, never which tokens come out."""

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed import kernels
from tokenspeed.kernels import Draw
from tokenspeed.layers.embedding import Head, VocabTable
from tokenspeed.layers.few_rows import most_rows
from tokenspeed.layers.linear import ColumnParallel
from tokenspeed.layers.parameter import Params, Placement

_NUM_CANDIDATES = 64  # of a full head: so many scores are ranked once more, exactly
_MAX_RANK = 256  # of a low-rank head whose scores are scanned where they are computed


class Candidates(NamedTuple):
    """C tokens of each of R rows, what `kernels.grow_tree` ranks. By id, but for d2t's order."""

    scores: Tensor  # float32 [R, C] logits
    ids: Tensor  # int64 [R, C] target ids, in range always
    share: Tensor  # float32 [R] log of the share of the row's whole mass that they hold; NaN for a row with a NaN


class FullHead:
    """Exact logits of every token the draft knows.

    Args:
        head: of V_draft tokens, the draft's own or the target's.
        token_ids: int64 [V_draft] target id of each draft id (d2t); None where they are the same.
    """

    def __init__(self, head: Head, token_ids: Tensor | None):
        self.token_ids, self._head = token_ids, head

    @property
    def num_tokens(self) -> int:
        """The most children that a row can have."""
        return self._head.table.vocab_size

    def candidates(self, out: Tensor, k: int, draw: Draw | None = None) -> Candidates:
        """out [R, H] -> at least k candidates of each row, those with the largest logits.

        Args:
            draw: of the children's tokens. For a row that will be drawn at a temperature, the best are those that the
                noise would choose if the target thought as the draft does.
        """
        logits = self._head.apply(out)
        count = min(max(k, _NUM_CANDIDATES), logits.shape[1])
        places, share = kernels.top_candidates(logits, count, draw, self.token_ids)
        return Candidates(logits.gather(1, places), _target_ids(places, self.token_ids), share)


class CandidateHead:
    """A rank-r head picks c candidates, whose rows of lm_head give exact logits (EAGLE4.md).

    Args:
        table: [V_draft, H] rows of lm_head, the draft's own or one that the target or the draft's embedding
            shares.
        token_ids: as for FullHead.
        rank: r. num_candidates: c.
    """

    def __init__(
        self, table: VocabTable, token_ids: Tensor | None, rank: int, num_candidates: int, place: Placement
    ):
        self.table, self.token_ids, self.num_candidates = table, token_ids, num_candidates
        hidden = table.weight.shape[1]
        self._down = ColumnParallel(hidden, {"efficient_lm_head_down_proj": rank}, place)
        self._up = ColumnParallel(rank, {"efficient_lm_head": table.vocab_size}, place)
        self._few_rows = most_rows("linear_candidates", place, False) if rank <= _MAX_RANK else 0

    @property
    def num_tokens(self) -> int:
        return self.num_candidates

    def params(self) -> Params:
        return self._down.params("") | self._up.params("")

    def candidates(self, out: Tensor, k: int, draw: Draw | None = None) -> Candidates:
        """As FullHead.candidates, k <= c: the c best by the low-rank scores, with their exact logits.

        Of the low-rank scores only the ratio of masses, `share`, counts: training by KL leaves them a free constant.
        """
        places, share = self._places(out, draw)
        logits = kernels.row_dots(out, self.table.weight, places)
        return Candidates(logits, _target_ids(places, self.token_ids), share)

    def holds_best(self, out: Tensor) -> Tensor:
        """out [R, H] -> bool [R], whether the token that a full head would rank first is a candidate.

        For evaluation: it scores every token exactly. One of several best is enough.
        """
        exact = _dot_all(out, self.table.weight)
        places, _ = self._places(out)
        return exact.gather(1, places).amax(1) == exact.amax(1)

    def _places(self, out: Tensor, draw: Draw | None = None) -> tuple[Tensor, Tensor]:
        """The c best of each row by the low-rank scores, int64 [R, c], and their share of all mass, float32 [R]."""
        low = self._down.apply(out)
        if low.shape[0] <= self._few_rows:
            return kernels.linear_candidates(low, self._up.weight, self.num_candidates, draw, self.token_ids)
        return kernels.top_candidates(self._up.apply(low), self.num_candidates, draw, self.token_ids)


def _dot_all(out: Tensor, table: Tensor) -> Tensor:
    """float32 [R, V]: rows of `out` [R, H] with every row of `table` [V, H], summed in float32."""
    if out.is_cuda and out.dtype != torch.float32:
        return torch.mm(out, table.t(), out_dtype=torch.float32)
    return out.float() @ table.float().t()


def _target_ids(ids: Tensor, token_ids: Tensor | None) -> Tensor:
    return ids if token_ids is None else token_ids[ids]
