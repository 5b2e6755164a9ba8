"""The attention classes on a GPU against the torch backend on the CPU, eager and in a CUDA graph."""

from dataclasses import fields, replace

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
    chain_or_tree,
    cos_sin,
)

from tokenspeed.attention import sdpa, triton
from tokenspeed.attention.kv_pool import KvPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def on_gpu(rows):
    values = {f.name: getattr(rows, f.name) for f in fields(rows)}
    return replace(rows, **{k: v.cuda() for k, v in values.items() if isinstance(v, torch.Tensor)})


def pool_on_gpu(pool: KvPool) -> KvPool:
    copy = KvPool(LAYERS, pool.num_pages, pool.page_size, KV_HEADS, DIM, pool.dtype, "cuda")
    copy.data.copy_(pool.data)
    return copy


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", ["TreeAttention", "InvariantTreeAttention"])
@pytest.mark.parametrize("lengths,nodes", [([0, 1, 200, 33], 1), ([3, 170], 16), ([50], 64)])
def test_tree(kind, lengths, nodes):
    s = Sequences(lengths, nodes)
    rows = s.tree(*chain_or_tree(s.generator, len(lengths), nodes))
    pool = pool_on_gpu(s.pool)
    attention = vars(triton)[kind](pool, on_gpu(rows), cos_sin().cuda(), WINDOWS, SCALE)
    expected = sdpa.TreeAttention(s.pool, rows, cos_sin(), WINDOWS, SCALE)
    for layer, qkv in enumerate(s.rows(len(lengths) * nodes)):
        # contiguous() first: cuda() of a view keeps no room between its rows
        got = attention(layer, *(x.contiguous().cuda() for x in qkv))
        check(got, expected(layer, *qkv))
    check(pool.data, s.pool.data)


def test_prefill():
    lengths, counts = [0, 3, 64], [130, 6, 40]
    s = Sequences(lengths, max(counts))
    rows = s.prefill(counts)
    pool = pool_on_gpu(s.pool)
    attention = triton.PrefillAttention(pool, on_gpu(rows), cos_sin().cuda(), WINDOWS, SCALE)
    expected = sdpa.PrefillAttention(s.pool, rows, cos_sin(), WINDOWS, SCALE)
    for layer, qkv in enumerate(s.rows(sum(counts))):
        check(attention(layer, *(x.contiguous().cuda() for x in qkv)), expected(layer, *qkv))
    check(pool.data, s.pool.data)


@pytest.mark.parametrize("kind", ["TreeAttention", "InvariantTreeAttention"])
def test_a_graph_of_the_whole_class(kind):
    """Built and called under capture; replayed with other rows and shorter prefixes."""
    s, nodes = Sequences([60, 90], 8), 8
    rows = s.tree(*chain_or_tree(s.generator, 2, nodes))
    pool, device_rows, table = pool_on_gpu(s.pool), on_gpu(rows), cos_sin().cuda()
    inputs = [x.contiguous().cuda() for x in s.rows(2 * nodes)[0]]

    def run() -> torch.Tensor:
        attention = vars(triton)[kind](pool, device_rows, table, WINDOWS, SCALE)
        return attention(0, *(x.clone() for x in inputs))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed in range(3):
        rows = s.tree(*chain_or_tree(s.generator, 2, nodes))
        if seed == 2:  # shorter prefixes: the same memory, other indices
            s.lengths = [41, 7]
            rows = s.tree(*chain_or_tree(s.generator, 2, nodes))
        for f in fields(rows):
            new, old = getattr(rows, f.name), getattr(device_rows, f.name)
            if isinstance(old, torch.Tensor):
                old.copy_(new)
        qkv = s.rows(2 * nodes)[0]
        for old, new in zip(inputs, qkv, strict=True):
            old.copy_(new)
        graph.replay()
        want = sdpa.TreeAttention(s.pool, rows, cos_sin(), WINDOWS, SCALE)(0, *qkv)
        assert want.shape == (2 * nodes, HEADS, DIM)
        check(out, want)
