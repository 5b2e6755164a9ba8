"""What a prefill pass computes: chunks of prompts, as the host knows them and as the device reads them.

A captured pass has a fixed number of tokens, chunks and samples. Padding is all of the dummy slot: tokens too many
are one more chunk, so far before its prompt's beginning that it sees no keys; chunks too many are empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tokenspeed.attention.base import PrefillRows
from tokenspeed.worker.state import SlotState
from tokenspeed.worker.transfer import to_device

SIZES = (128, 256, 384, 512, 768, 1024)  # tokens of captured passes
MAX_CHUNKS = 16  # of a captured pass, the padding aside


@dataclass(frozen=True)
class Chunks:
    """C chunks of prompts with T tokens, and F samples, on the host."""

    tokens: Tensor  # int64 [T], one chunk after another
    slots: list[int]
    starts: list[int]  # position of each chunk's first token
    counts: list[int]  # tokens of each chunk
    samples: list[tuple[int, int, int]]  # row whose logits are sampled; slot and position of the token

    @classmethod
    def of(
        cls, tokens: Tensor, slots: list[int], starts: list[int], counts: list[int], ends: Sequence[int]
    ) -> "Chunks":
        """ends: numbers of the chunks that end their prompt, whose last rows are sampled."""
        rows = list(accumulate(counts))
        samples = [(rows[i] - 1, slots[i], starts[i] + counts[i]) for i in ends]
        return cls(tokens, slots, starts, counts, samples)

    def padded(self, num_tokens: int, num_chunks: int, dummy: int) -> "Chunks":
        """The same with T = num_tokens, C = num_chunks + 1 (the last is the padding) and F = num_chunks."""
        spare = num_tokens - len(self.tokens)
        empty = num_chunks - len(self.slots)
        return Chunks(
            torch.cat((self.tokens, self.tokens.new_zeros(spare))),
            self.slots + [dummy] * (empty + 1),
            self.starts + [0] * empty + [-spare],
            self.counts + [0] * empty + [spare],
            self.samples + [(0, dummy, 1)] * (num_chunks - len(self.samples)),
        )

    def pack(self) -> Tensor:
        """All that `ChunkTensors` reads in one int64 tensor on the host, for one copy."""
        offsets = [0, *accumulate(self.counts)]
        spans = zip(self.starts, self.counts, strict=True)
        positions = [torch.arange(start, start + count) for start, count in spans]
        parts = (
            self.tokens,
            torch.cat(positions).clamp_(min=0),  # of padding
            torch.repeat_interleave(torch.arange(len(self.counts)), torch.tensor(self.counts)),
            self.slots,
            self.starts,
            offsets,
            [max(end - 1, 0) for end in offsets[1:]],
            *([sample[i] for sample in self.samples] for i in range(3)),
        )
        widths = _widths(len(self.tokens), len(self.slots), len(self.samples))
        packed = torch.zeros(sum(map(_even, widths)), dtype=torch.int64)
        for view, part in zip(_split(packed, widths), parts, strict=True):
            view.copy_(torch.as_tensor(part, dtype=torch.int64))
        return packed


class ChunkTensors:
    """The same on the device: views of one tensor.

    Args:
        packed: int64, `chunks.pack()` on the device. Under capture it is a static input: a replay reads what it holds
            then, which other chunks of equal T, C and F have packed; of `chunks` a GPU takes bounds alone.
    """

    def __init__(self, packed: Tensor, chunks: Chunks):
        widths = _widths(len(chunks.tokens), len(chunks.slots), len(chunks.samples))
        (
            self.tokens,  # int64 [T]
            self.positions,  # int64 [T]
            self.numbers,  # int64 [T] which chunk a token is of
            self.slots,  # int64 [C]
            self._starts,  # int64 [C]
            self.cu_rows,  # int64 [C + 1]
            self.last_rows,  # int64 [C]; of no meaning for an empty chunk
            self.sample_rows,  # int64 [F]
            self.sample_slots,  # int64 [F]
            self.sample_positions,  # int64 [F]
        ) = _split(packed, widths)
        self._spans = list(zip(chunks.starts, chunks.counts, strict=True))

    @classmethod
    def of(cls, chunks: Chunks, device: torch.device) -> "ChunkTensors":
        return cls(to_device(chunks.pack(), device), chunks)

    def rows(self, state: SlotState) -> PrefillRows:
        """Where the tokens' K/V lie, and what they see."""
        table, size = state.block_table[self.slots], state.page_size
        pages = table[self.numbers, self.positions // size].long()
        return PrefillRows(
            positions=self.positions,
            slots=pages * size + self.positions % size,
            block_table=table,
            starts=self._starts.to(torch.int32),
            cu_rows=self.cu_rows.to(torch.int32),
            chunks=self._spans,
        )


def _widths(tokens: int, chunks: int, samples: int) -> list[int]:
    """Numbers in each part of a packed pass."""
    return [tokens] * 3 + [chunks, chunks, chunks + 1, chunks] + [samples] * 3


def _split(packed: Tensor, widths: list[int]) -> list[Tensor]:
    """Views of the parts, each at a multiple of 16 bytes: Triton compiles a kernel again for a pointer that is not."""
    parts = packed.split([_even(width) for width in widths])
    return [part[:width] for part, width in zip(parts, widths, strict=True)]


def _even(number: int) -> int:
    return number + number % 2
