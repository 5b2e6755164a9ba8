"""Token embedding and output head, split over the vocabulary."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.distributed.comm import all_gather, all_reduce
from tokenspeed.layers.linear import Linear, Matmul, sums
from tokenspeed.layers.parameter import Param, Params, Placement


class VocabTable:
    """A [V, H] matrix of which each rank holds ceil(V / size) rows; rows past V are zero."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Placement):
        rows = -(-vocab_size // place.tp.size)
        self.vocab_size, self.tp, self.start = vocab_size, place.tp, rows * place.tp.rank
        self.weight = place.empty(rows, hidden_size)
        if self.start + rows > vocab_size:
            self.weight.zero_()

    def params(self, prefix: str) -> Params:
        shape = (self.vocab_size, self.weight.shape[1])
        return {f"{prefix}weight": Param(self.weight, shape, 0, self.start)}


class Embedding:
    """Rows of a table by token id."""

    def __init__(self, table: VocabTable):
        self.table = table

    def apply(self, input_ids: Tensor) -> Tensor:
        """int64 [T] ids below V -> [T, H], a fresh tensor."""
        table = self.table
        if table.tp.size == 1:
            return F.embedding(input_ids, table.weight)
        local = input_ids - table.start
        mine = (local >= 0) & (local < table.weight.shape[0])
        rows = F.embedding(local.where(mine, 0), table.weight)
        return all_reduce(rows * mine[:, None], table.tp)


class Head:
    """Logits over the whole vocabulary, from a table that may be the embedding's."""

    def __init__(self, table: VocabTable, place: Placement):
        self.table = table
        self._linear = Linear(table.weight, None, place, _matmul(place))

    @property
    def packed_bytes(self) -> int:
        """Memory of a packed copy of the table, if there is one."""
        weight = self.table.weight
        return 0 if self._linear.weight is weight else weight.numel() * weight.element_size()

    def apply(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] -> float32 [R, V], contiguous. On a CPU, and where bits may not depend on R, the product
        is rounded to the model's dtype first."""
        logits = self._linear.apply(hidden).float()
        if self.table.tp.size == 1:
            return logits
        return all_gather(logits, self.table.tp)[:, : self.table.vocab_size].contiguous()


def _matmul(place: Placement) -> Matmul:
    if place.dtype == torch.float32 and place.device.type == "cpu":
        return _float32_on_cpu
    return sums(place)  # logits rounded to bfloat16 have two best tokens at one position in fifty


def _float32_on_cpu(x: Tensor, weight: Tensor, bias: None) -> Tensor:
    """x W^T. Written so, 5..15 rows take up to twice as long as W x^T (8 rows, 49152 x 576: 38, 26 ms)."""
    if 4 < x.shape[0] < 16:
        return torch.mm(weight, x.t()).t().contiguous()
    return F.linear(x, weight)
