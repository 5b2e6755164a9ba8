"""Device state of every request slot: what crosses from one step to the next without the host.

The last row is the dummy slot of padding rows. Its block table holds only the dummy page.
"""

import torch
from torch import Tensor

from tokenspeed.kernels import Draw
from tokenspeed.kernels.reference_round import page_slots
from tokenspeed.params import SamplingParams
from tokenspeed.worker.transfer import to_device

MAX_OVERHANG = 64  # nodes of a tree, which may lie past the context limit


class SlotState:
    """Tensors indexed by slot.

    Args:
        num_slots: requests at once, without the dummy.
        max_model_len: tokens.
        page_size: tokens.
        aux_size: width of the aux states; 0 without a drafter.
    """

    def __init__(self, num_slots: int, max_model_len: int, page_size: int, aux_size: int, dtype, device):
        rows = num_slots + 1
        self.num_slots, self.page_size, self.device = num_slots, page_size, device
        # A round's nodes may lie past the context limit. One column more than that: it always holds the dummy page.
        self.num_columns = -(-(max_model_len + MAX_OVERHANG) // page_size) + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.last_tokens = zeros(rows)  # x_t, sampled, without target K/V
        self.lengths = zeros(rows)  # t + 1
        self.block_table = zeros(rows, self.num_columns, dtype=torch.int32)
        self.aux = zeros(rows, aux_size, dtype=dtype)  # a_{t-1}
        self.num_pages_of = [0] * rows  # host: columns filled
        self.lengths[num_slots] = 2

    @property
    def dummy(self) -> int:
        return self.num_slots

    def clear(self, slots: list[int]) -> None:
        """Forgets the pages of released slots: a stale entry must never be written through."""
        if slots:
            self.block_table.index_fill_(0, to_device(slots, self.device), 0)
        for slot in slots:
            self.num_pages_of[slot] = 0

    def add_pages(self, slots: list[int], pages: list[int]) -> None:
        """Appends pages[i] to the block table of slots[i], in order."""
        if not slots:
            return
        columns = []
        for slot in slots:
            columns.append(self.num_pages_of[slot])
            self.num_pages_of[slot] += 1
        rows, at, new = to_device([slots, columns, pages], self.device)
        self.block_table[rows, at] = new.to(torch.int32)

    def kv_slots(self, table: Tensor, indices: Tensor) -> Tensor:
        """Places of tokens in the pages.

        Args:
            table: int32 [B, P]. indices: int64 [B, n] token indices, >= 0.

        Returns:
            int64 [B, n]; in the dummy page for indices without a page.
        """
        return page_slots(table, indices, self.page_size)


class SamplingState:
    """Sampling parameters by slot, on the device. Rows of edits (penalties, bias, min_tokens) are few: see sampler."""

    def __init__(self, num_slots: int, device):
        rows = num_slots + 1
        self.temperature = torch.zeros(rows, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.device = device

    def set(self, slots: list[int], params: list[SamplingParams]) -> None:
        """All requests of a step at once: each tensor is written in one operation."""
        index = to_device(slots, self.device)

        def write(to: Tensor, values: list) -> None:
            to[index] = to_device(values, self.device, to.dtype)

        write(self.temperature, [0.0 if p.greedy else p.temperature for p in params])
        write(self.top_k, [max(p.top_k, 0) for p in params])
        write(self.top_p, [p.top_p for p in params])
        write(self.min_p, [p.min_p for p in params])
        write(self.seeds, [p.seed for p in params])

    def draw(self, slots: Tensor, positions: Tensor) -> Draw:
        """How the requests in `slots` sample behind `positions`, int64 [B] both."""
        return Draw(
            self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, slots=slots, positions=positions
        )
