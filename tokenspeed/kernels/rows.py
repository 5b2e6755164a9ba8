"""What the prefill op reads of a forward pass's rows (attention.base.PrefillRows has it)."""

from typing import Protocol

from torch import Tensor


class ChunkRows(Protocol):
    """Chunks of C prompts, rows one after another."""

    block_table: Tensor  # int32 [C, P] pages of each request
    starts: Tensor  # int32 [C] position of each chunk's first row
    cu_rows: Tensor  # int32 [C + 1] row offsets of the chunks
    chunks: list[tuple[int, int]]  # (start, count) on the host; a GPU takes only the longest count from it
