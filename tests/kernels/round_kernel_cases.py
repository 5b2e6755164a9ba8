"""Cases of the ops around a round's forward pass; see kernel_cases.py. All of them are exact."""

import random
from collections.abc import Callable

import torch

from tokenspeed.kernels import reference_round as reference

PAGE = 16
SHAPES = [(1, 1, 1), (3, 1, 1), (4, 16, 9), (2, 5, 3), (2, 64, 12)]  # requests, nodes, width


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        assert a is b is None or (a.dtype == b.dtype and a.is_contiguous() and torch.equal(a, b))


def on_copies(fn: Callable, *args) -> tuple[tuple, tuple]:
    """What fn returns, and its arguments afterwards."""
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    got = fn(*args)
    return got if isinstance(got, tuple) else (got,), tuple(a for a in args if isinstance(a, torch.Tensor))


def trees(m, batch: int, nodes: int, width: int, vocab: int) -> tuple[torch.Tensor, ...]:
    """Tokens, parents, depths and masks of random depth-first trees; siblings may hold the same token."""
    rng = random.Random(nodes)
    parents, depths, mask = [], [], []
    for _ in range(batch):
        line, up, deep, bits = [0], [0], [0], [1]
        for i in range(1, nodes):
            del line[rng.randint(1, min(len(line), width - 1)) :]
            up.append(line[-1])
            deep.append(len(line))
            bits.append(bits[line[-1]] | (1 << i if i < 63 else -(1 << 63)))
            line.append(i)
        parents.append(up)
        depths.append(deep)
        mask.append(bits)
    return m.ints(0, vocab, batch, nodes), *(m.tensor(x, torch.int64) for x in (parents, depths, mask))


def state(m, batch: int) -> tuple[torch.Tensor, ...]:
    """Slots of `batch` requests, the dummy (7) twice where there is room; then of all slots: last tokens, lengths,
    block table."""
    lengths = [40, 17, 300, 16, 5, 99, 33, 2]
    table, _ = m.pages([length + 70 for length in lengths])
    table[7], table[:, -1] = 0, 0
    slots = m.tensor([5, 3, 7, 7][:batch], torch.int64)
    return slots, m.ints(0, 999, 8), m.tensor(lengths, torch.int64), table


def case_read_slots(fn: Callable, m) -> None:
    for batch, size in ((1, 0), (3, 40), (2, 2500)):
        slots, tokens, lengths, table = state(m, batch)
        aux = m.normal(8, size) if size else None
        args = (slots, tokens, lengths, table, aux)
        same(fn(*args), reference.read_slots(*args))


def case_place_nodes(fn: Callable, m) -> None:
    for batch, nodes, width in SHAPES:
        slots, _, lengths, table = state(m, batch)
        depths = trees(m, batch, nodes, width, 3)[2]
        for add in (0, 62, 400):  # within the pages, up to where they end, and past the table
            args = (lengths[slots] - 1 + add, depths, table[slots], PAGE)
            same(fn(*args), reference.place_nodes(*args))


def case_accept(fn: Callable, m) -> None:
    for batch, nodes, width in SHAPES:
        for vocab in (1, 2, 4):
            tree = trees(m, batch, nodes, width, vocab)
            for low in (0, -1):
                args = (*tree, m.ints(low, vocab, batch, nodes), width)
                same(fn(*args), reference.accept(*args))


def kept(m, batch: int, nodes: int, width: int) -> tuple[torch.Tensor, ...]:
    """Slots and block table of all requests, the last tokens' indices, slots of nodes, then a path of each request's
    tree: nodes, their number, and tokens."""
    slots, last_tokens, lengths, table = state(m, batch)
    last = lengths[slots] - 1
    tree = trees(m, batch, nodes, width, 2)
    places = reference.place_nodes(last, tree[2], table[slots], PAGE)[2]
    path, count, tokens, _ = reference.accept(*tree, m.ints(0, 2, batch, nodes), width)
    return slots, last, table[slots], places, path, count, tokens, last_tokens, lengths


def case_commit(fn: Callable, m) -> None:
    for batch, nodes, width in SHAPES:
        args = (*kept(m, batch, nodes, width), PAGE)
        got, want = on_copies(fn, *args), on_copies(reference.commit, *args)
        same(got[0], want[0])
        (tokens, lengths), (want_tokens, want_lengths) = got[1][-2:], want[1][-2:]
        assert torch.equal(tokens[:7], want_tokens[:7]) and torch.equal(lengths[:7], want_lengths[:7])
        assert lengths[7] == 2


def case_keep_aux(fn: Callable, m) -> None:
    for batch, nodes, width in SHAPES:
        for size in (24, 2500):
            slots, _, _, places, path, count, *_ = kept(m, batch, nodes, width)
            target = places[:, :width].contiguous()
            aux = m.normal(batch, nodes, size), slots, path, count, target
            args = (*aux, m.normal(8, size), m.normal(200, size), PAGE)
            got, want = on_copies(fn, *args), on_copies(reference.keep_aux, *args)
            same(got[0], want[0])
            assert torch.equal(got[1][-2][:7], want[1][-2][:7]) and torch.equal(
                got[1][-1][1:], want[1][-1][1:]
            )
