"""The draft's output heads: the K best tokens of a row with their log-probabilities, over the whole
vocabulary or over the candidates of a low-rank head. Draft scores decide how much is accepted, never which
tokens come out."""

import torch
from torch import Tensor

from tokenspeed import kernels
from tokenspeed.layers.embedding import Head, VocabTable
from tokenspeed.layers.linear import ColumnParallel
from tokenspeed.layers.parameter import Params, Placement


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
        """The most that topk can give."""
        return self._head.table.vocab_size

    def topk(self, out: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """out [R, H] -> target ids int64 [R, k] and log-probabilities float32 [R, k], best first.

        Equal scores go by lower draft id. A row with a NaN gets -inf throughout; ids are in range always.
        """
        logits = self._head.apply(out)
        ids = largest(logits, k)
        logprobs = logits.gather(1, ids) - logits.logsumexp(1, keepdim=True)
        return _target_ids(ids, self.token_ids), _nan_last(logprobs)


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

    @property
    def num_tokens(self) -> int:
        return self.num_candidates

    def params(self) -> Params:
        return self._down.params("") | self._up.params("")

    def topk(self, out: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As FullHead.topk, k <= c.

        Log-probabilities are those among the candidates, times the share of all mass that the low-rank
        scores give the candidates. Only that ratio of theirs counts: training by KL leaves them a free
            constant.
        """
        candidates, share = self._candidates(out)
        logits = kernels.row_dots(out, self.table.weight, candidates)
        ids, logprobs = kernels.best_candidates(logits, candidates, share, k)
        return _target_ids(ids, self.token_ids), logprobs

    def holds_best(self, out: Tensor) -> Tensor:
        """out [R, H] -> bool [R], whether the token that a full head would rank first is a candidate.

        For evaluation: it scores every token exactly. One of several best is enough.
        """
        exact = _dot_all(out, self.table.weight)
        candidates, _ = self._candidates(out)
        return exact.gather(1, candidates).amax(1) == exact.amax(1)

    def _candidates(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """The c best of each row by the low-rank scores, int64 [R, c], and their share of all mass, float32 [R]."""
        return kernels.top_candidates(self._up.apply(self._down.apply(out)), self.num_candidates)


def largest(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores of each row, best first, equal ones by lower index: int64 [R, k].

    torch.topk leaves ties open. Here blocks of a row are ranked by their maxima first: each of the k best
    lies in one of the k best blocks. A block that holds a NaN ranks last.

    Args:
        scores: float32 [R, V], V >= k.
    """
    rows, size = scores.shape
    block = 1 << max(1, round((size / k) ** 0.5).bit_length() - 1)
    num_blocks = size // block
    if num_blocks <= k:
        return (
            torch.nan_to_num(scores, nan=-torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :k]
        )
    blocks = scores[:, : num_blocks * block].unflatten(1, (num_blocks, block))
    best = (
        torch.nan_to_num(blocks.amax(2), nan=-torch.inf)
        .sort(dim=1, descending=True, stable=True)
        .indices[:, :k]
    )
    best = best.sort(1).values  # by index again, for the next stable sort
    inside = torch.arange(block, device=scores.device)
    places = (best[:, :, None] * block + inside).view(rows, k * block)
    rest = torch.arange(num_blocks * block, size, device=scores.device).expand(rows, -1)
    places = torch.cat([places, rest], 1)
    found = torch.nan_to_num(scores.gather(1, places), nan=-torch.inf)
    return places.gather(1, found.sort(dim=1, descending=True, stable=True).indices[:, :k])


def _dot_all(out: Tensor, table: Tensor) -> Tensor:
    """float32 [R, V]: rows of `out` [R, H] with every row of `table` [V, H], summed in float32."""
    if out.is_cuda and out.dtype != torch.float32:
        return torch.mm(out, table.t(), out_dtype=torch.float32)
    return out.float() @ table.float().t()


def _target_ids(ids: Tensor, token_ids: Tensor | None) -> Tensor:
    return ids if token_ids is None else token_ids[ids]


def _nan_last(logprobs: Tensor) -> Tensor:
    return torch.nan_to_num(logprobs, nan=-torch.inf, neginf=-torch.inf, posinf=0.0)
