"""Forward passes with random rows, and what attention must give for them by the definition, in float64."""

import torch

from tokenspeed.attention.base import PrefillRows, TreeRows
from tokenspeed.attention.kv_pool import KvPool

HEADS, KV_HEADS, DIM, PAGE, LAYERS = 6, 2, 16, 4, 2
WINDOWS = (None, 5)
SCALE = DIM**-0.5


def cos_sin(positions: int = 600) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
    return torch.cat((angles.cos(), angles.sin()), -1)


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """Heads x [heads, DIM] at a position, by complex numbers: another way than the code's."""
    turns = torch.polar(
        torch.ones(DIM // 2).double(), position * 10000.0 ** (-torch.arange(DIM // 2).double() / (DIM // 2))
    )
    out = torch.complex(*x.double().chunk(2, -1)) * turns
    return torch.cat((out.real, out.imag), -1)


def attend(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """One row: q [HEADS, DIM], lists of [KV_HEADS, DIM]."""
    if not keys:
        return torch.zeros_like(q)
    k, v = (torch.stack(x).repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    weights = (torch.einsum("hd,shd->hs", q, k) * SCALE).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v.double())


class Sequences:
    """Requests with random history in a pool, and the same K/V by index on the side."""

    def __init__(self, lengths: list[int], room: int, seed: int = 0, shuffled: bool = True):
        self.generator = torch.Generator().manual_seed(seed)
        self.lengths, self.room = lengths, room
        counts = [-(-(n + room) // PAGE) for n in lengths]
        pages = torch.arange(1, sum(counts) + 1)
        if shuffled:
            pages = pages[torch.randperm(len(pages), generator=self.generator)]
        self.table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32)
        for row, part in enumerate(pages.split(counts)):
            self.table[row, : len(part)] = part
        self.pool = KvPool(LAYERS, sum(counts) + 1, PAGE, KV_HEADS, DIM, torch.float32)
        self.history = {}
        for layer in range(LAYERS):
            for b, length in enumerate(lengths):
                k, v = self.normal(length, KV_HEADS, DIM), self.normal(length, KV_HEADS, DIM)
                keys = [rotated(k[i], i) for i in range(length)]
                self.history[layer, b] = (keys, list(v))
                for i in range(length):
                    slot = self.slot(b, i)
                    self.pool.slots(layer)[0, slot] = keys[i].float()
                    self.pool.slots(layer)[1, slot] = v[i]

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def slot(self, b: int, index: int) -> int:
        return int(self.table[b, index // PAGE]) * PAGE + index % PAGE

    def rows(self, count: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """q, k, v of every layer: views of one fused tensor, as a model's."""
        parts = (HEADS, KV_HEADS, KV_HEADS)
        return [self.normal(count, sum(parts), DIM).split(parts, 1) for _ in range(LAYERS)]

    def tree(self, depths: list[list[int]], masks: list[list[int]]) -> TreeRows:
        """Rows of a target's trees behind the requests' histories."""
        depth, lens = torch.tensor(depths), torch.tensor(self.lengths, dtype=torch.int32)
        nodes = depth.shape[1]
        indices = lens[:, None].long() + depth
        slots = [self.slot(b, n + i) for b, n in enumerate(self.lengths) for i in range(nodes)]
        return TreeRows(
            positions=indices.flatten(),
            slots=torch.tensor(slots),
            block_table=self.table,
            prefix_lens=lens,
            mask=torch.tensor(masks),
            indices=indices,
            depths=depth,
        )

    def prefill(self, counts: list[int]) -> PrefillRows:
        """Chunks behind the requests' histories."""
        chunks = list(zip(self.lengths, counts, strict=True))
        offsets = torch.tensor([0, *counts]).cumsum(0).int()
        where = [(b, start + i) for b, (start, count) in enumerate(chunks) for i in range(count)]
        return PrefillRows(
            positions=torch.tensor([i for _, i in where]),
            slots=torch.tensor([self.slot(b, i) for b, i in where]),
            block_table=self.table,
            starts=torch.tensor(self.lengths, dtype=torch.int32),
            cu_rows=offsets,
            chunks=chunks,
        )

    def want_tree(self, layer: int, qkv: tuple, rows: TreeRows, first: int = 0) -> torch.Tensor:
        """What a target's tree rows must give; a window cuts the history and the tree alike, by index."""
        q, k, v = (x.clone() for x in qkv)
        batch, nodes = rows.mask.shape
        out = []
        for row in range(batch * nodes):
            b, i = divmod(row, nodes)
            own = int(rows.indices[b, i])
            low = first if WINDOWS[layer] is None else max(first, own - WINDOWS[layer] + 1)
            keys, values = (x[low:] for x in self.history[layer, b])
            for j in range(nodes):
                if (int(rows.mask[b, i]) >> j) & 1 and int(rows.indices[b, j]) >= low:
                    keys = [*keys, rotated(k[b * nodes + j], int(rows.positions[b * nodes + j]))]
                    values = [*values, v[b * nodes + j]]
            out.append(attend(rotated(q[row], int(rows.positions[row])), keys, values))
        return torch.stack(out)

    def want_prefill(self, layer: int, qkv: tuple, rows: PrefillRows) -> torch.Tensor:
        q, k, v = (x.clone() for x in qkv)
        out, first = [], 0
        for b, (start, count) in enumerate(rows.chunks):
            keys, values = (list(x) for x in self.history[layer, b])
            keys += [rotated(k[first + i], start + i) for i in range(count)]
            values += list(v[first : first + count])
            for i in range(count):
                own = start + i
                low = 0 if WINDOWS[layer] is None else max(0, own - WINDOWS[layer] + 1)
                out.append(attend(rotated(q[first + i], own), keys[low : own + 1], values[low : own + 1]))
            first += count
        return torch.stack(out)


def chain_or_tree(
    generator: torch.Generator, batch: int, nodes: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Random trees: depths and ancestor masks as signed 64-bit numbers."""
    depths, masks = [], []
    for _ in range(batch):
        depth, mask = [0], [1]
        for node in range(1, nodes):
            parent = int(torch.randint(0, node, (), generator=generator))
            depth.append(depth[parent] + 1)
            mask.append(mask[parent] | 1 << node)
        depths.append(depth)
        masks.append([m - 2**64 if m >= 2**63 else m for m in mask])
    return depths, masks
