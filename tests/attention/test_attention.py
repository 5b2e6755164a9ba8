"""Both attention backends against float64 by the definition; on a CPU the kernel ops are references."""

from types import ModuleType

import pytest
import torch
from attention.attention_cases import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SCALE,
    WINDOWS,
    Sequences,
    attend,
    chain_or_tree,
    cos_sin,
    rotated,
)

from tokenspeed.attention import sdpa, triton
from tokenspeed.attention.base import TreeRows
from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.attention.tree_rows import path_slots

BACKENDS = pytest.mark.parametrize("backend", [sdpa, triton], ids=["sdpa", "triton"])


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@BACKENDS
@pytest.mark.parametrize(
    "lengths,counts,shuffled",
    [([0], [9], True), ([0], [9], False), ([6], [11], False), ([0, 3, 8], [1, 6, 4], True)],
)
def test_prefill(backend: ModuleType, lengths, counts, shuffled):
    s = Sequences(lengths, max(counts), shuffled=shuffled)
    rows = s.prefill(counts)
    attention = backend.PrefillAttention(s.pool, rows, cos_sin(), WINDOWS, SCALE)
    for layer, qkv in enumerate(s.rows(sum(counts))):
        want = s.want_prefill(layer, qkv, rows)
        got = attention(layer, *qkv)
        assert got.shape == (sum(counts), HEADS, DIM)
        same(got, want)


@BACKENDS
@pytest.mark.parametrize(
    "lengths,nodes,shuffled",
    [
        ([0], 1, True),
        ([7], 1, False),
        ([8], 5, False),
        ([12], 5, True),
        ([0, 1, 9, 4], 1, True),
        ([3, 17], 8, True),
        ([5], 64, True),
    ],
)
def test_tree(backend: ModuleType, lengths, nodes, shuffled):
    s = Sequences(lengths, nodes, shuffled=shuffled)
    rows = s.tree(*chain_or_tree(s.generator, len(lengths), nodes))
    attention = backend.TreeAttention(s.pool, rows, cos_sin(), WINDOWS, SCALE)
    for layer, qkv in enumerate(s.rows(len(lengths) * nodes)):
        want = s.want_tree(layer, qkv, rows)
        v = qkv[2].clone()
        same(attention(layer, *qkv).view(want.shape), want)
        assert torch.equal(s.pool.slots(layer)[1][rows.slots], v)


@pytest.mark.parametrize("lengths,nodes", [([6], 1), ([0, 1, 9], 1), ([3, 17], 8)])
def test_invariant_tree(lengths, nodes):
    s = Sequences(lengths, nodes)
    rows = s.tree(*chain_or_tree(s.generator, len(lengths), nodes))
    attention = triton.InvariantTreeAttention(s.pool, rows, cos_sin(), WINDOWS, SCALE)
    for layer, qkv in enumerate(s.rows(len(lengths) * nodes)):
        want = s.want_tree(layer, qkv, rows)
        same(attention(layer, *qkv), want)


def test_paths_of_a_tree():
    s = Sequences([3], 4)
    rows = s.tree([[0, 1, 1, 2]], [[1, 3, 5, 13]])
    a, b, c, d = rows.slots.tolist()
    assert path_slots(rows).tolist() == [[[a, 0, 0, 0], [a, b, 0, 0], [a, c, 0, 0], [a, c, d, 0]]]
    with pytest.raises(ValueError, match="depths"):
        path_slots(TreeRows(**{**vars(rows), "depths": None}))
    with pytest.raises(ValueError, match="need slots"):
        triton.InvariantTreeAttention(
            s.pool, TreeRows(**{**vars(rows), "slots": None}), cos_sin(), WINDOWS, SCALE
        )


@BACKENDS
def test_padding_rows_stay_finite(backend: ModuleType):
    """A padding request: no prefix, dummy slots, an empty mask, in a batch with a real one."""
    s = Sequences([5, 0], 1)
    rows = s.tree([[0], [0]], [[1], [0]])
    rows.slots[1], rows.positions[1], rows.block_table = 0, 0, s.table.clone()
    rows.block_table[1] = 0
    qkv = s.rows(2)[0]
    want = s.want_tree(0, qkv, rows)
    got = backend.TreeAttention(s.pool, rows, cos_sin(), WINDOWS, SCALE)(0, *qkv)
    same(got, want)
    assert got[1].eq(0).all()


@BACKENDS
def test_what_others_left_in_the_pages_is_not_read(backend: ModuleType):
    """NaN wherever no row of the requests lies: behind the shorter one's rows and in the dummy page."""
    s = Sequences([3, 17], 5)
    s.pool.data.fill_(torch.nan)
    for (layer, b), (keys, values) in s.history.items():
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            s.pool.slots(layer)[0, s.slot(b, i)], s.pool.slots(layer)[1, s.slot(b, i)] = k.float(), v
    rows = s.tree(*chain_or_tree(s.generator, 2, 5))
    attention = backend.TreeAttention(s.pool, rows, cos_sin(), WINDOWS, SCALE)
    for layer, qkv in enumerate(s.rows(10)):
        want = s.want_tree(layer, qkv, rows)
        same(attention(layer, *qkv).view(want.shape), want)


def lanes(s: Sequences, nodes: int, step: int, mask: list[list[int]]) -> TreeRows:
    lens = torch.tensor(s.lengths, dtype=torch.int32)
    indices = (lens[:, None] + step).expand(-1, nodes).long()
    return TreeRows(indices.flatten(), None, s.table, lens, torch.tensor(mask), indices)


@BACKENDS
@pytest.mark.parametrize("lengths,shuffled", [([1], True), ([9], False), ([0, 6, 13], True)])
def test_draft_lanes(backend: ModuleType, lengths, shuffled):
    """A root step over pages alone, then two steps of K lanes whose K/V lie in the side buffer."""
    s, batch, k = Sequences(lengths, 1, shuffled=shuffled), len(lengths), 3
    root = lanes(s, 1, 0, [[0]] * batch)
    qkv = s.rows(batch)[0]
    want = s.want_tree(0, qkv, root, first=1)
    same(backend.TreeAttention(s.pool, root, cos_sin(), WINDOWS, SCALE, first=1)(0, *qkv), want)

    tail = [torch.zeros(batch, 2 * k, KV_HEADS, DIM) for _ in range(2)]
    seen: list[list[tuple]] = [[] for _ in lengths]
    masks = [[[0b001, 0b010, 0b100]] * batch, [[0b001001, 0b010001, 0b100100]] * batch]
    for step, mask in enumerate(masks):
        rows = lanes(s, k, step + 1, mask)
        q, key, value = (x.clone() for x in s.rows(batch * k)[0])
        for row in range(batch * k):
            seen[row // k].append((rotated(key[row], int(rows.positions[row])), value[row].clone()))
        want = []
        for row in range(batch * k):
            b, bits = row // k, mask[row // k][row % k]
            keys, values = (x[1:] for x in s.history[0, b])
            picked = [kv for j, kv in enumerate(seen[b]) if bits >> j & 1]
            extended = rotated(q[row], int(rows.positions[row]))
            want.append(attend_row(extended, keys, values, picked))
        attention = backend.TreeAttention(
            s.pool, rows, cos_sin(), (None, None), SCALE, first=1, tail=tuple(tail), tail_start=step * k
        )
        same(attention(0, q, key, value), torch.stack(want))


def attend_row(q: torch.Tensor, keys: list, values: list, tail: list[tuple]) -> torch.Tensor:
    return attend(q, keys + [k for k, _ in tail], values + [v for _, v in tail])


def test_pool_layout():
    pool = KvPool(LAYERS, 3, 4, KV_HEADS, DIM, torch.bfloat16)
    assert pool.data.eq(0).all()
    pool.layer(1)[1][2, 3] = 7
    assert pool.slots(1)[1, 11].eq(7).all() and pool.flat()[3, 11].eq(7).all()
    assert pool.flat().shape == (LAYERS * 2, 12, KV_HEADS * DIM)
    assert pool.data.nbytes == 3 * KvPool.page_bytes(LAYERS, 4, KV_HEADS, DIM, torch.bfloat16)
