"""What ops read of a pass's rows beside their numbers: chunks of prompts, and how a row's next token will be drawn."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class ChunkRows(Protocol):
    """Chunks of C prompts, rows one after another."""

    block_table: Tensor  # int32 [C, P] pages of each request
    starts: Tensor  # int32 [C] position of each chunk's first row
    cu_rows: Tensor  # int32 [C + 1] row offsets of the chunks
    chunks: list[tuple[int, int]]  # (start, count) on the host; a GPU takes only the longest count from it


@dataclass(frozen=True)
class Draw:
    """How the target will draw the next token of B requests: what `kernels.sample` will be given then.

    A draft that ranks tokens with the same noise finds the drawn one far more often than one that guesses (coupling
    without communication: Daliri, Musco, Suresh 2024, arXiv 2408.07978). Which token is drawn does not depend on the
    draft.
    """

    temperature: Tensor  # float32 [S]; below 1e-5 there is no noise
    top_k: Tensor  # int32 [S]
    top_p: Tensor  # float32 [S]
    min_p: Tensor  # float32 [S]
    seeds: Tensor  # int64 [S]
    slots: Tensor  # int64 [B], whose settings each request has
    positions: Tensor  # int64 [B]; the drawn token's is `depth` more
    depth: int = 0
