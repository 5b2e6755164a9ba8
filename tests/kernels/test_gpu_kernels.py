"""The kernels on a GPU: the interpreter's cases in every dtype, and what only real hardware can show."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from kernels.kernel_cases import CASES, Maker, chunk_rows, close, invariant_inputs, tree_inputs

from tokenspeed.kernels import reference
from tokenspeed.kernels.registry import OPS
from tokenspeed.kernels.triton.pdl import has_pdl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", CASES)
def test_kernel_equals_reference(op: str, dtype: torch.dtype):
    CASES[op](OPS[op]["triton"].load(), Maker("cuda", dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_bits_do_not_depend_on_rows(dtype: torch.dtype):
    m = Maker("cuda", dtype)
    x, weight = m.normal(300, 2048), m.normal(1000, 2048) / 45
    linear = OPS["linear_invariant"]["triton"].load()
    whole = linear(x, weight, None)
    for rows in (1, 3, 16, 17, 64, 255):
        assert torch.equal(linear(x[:rows], weight, None), whole[:rows])
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_bits_do_not_depend_on_the_batch(dtype: torch.dtype):
    attend = OPS["tree_attention_invariant"]["triton"].load()
    inputs = invariant_inputs(Maker("cuda", dtype), [0, 37, 1900, 600], 16, 32, 8, 128)
    inputs |= dict(scale=128**-0.5, window=None)
    whole = attend(**inputs)
    for b, n in ((0, 1), (1, 2), (2, 4), (3, 16)):
        part = {
            name: value[b : b + 1, :n].contiguous() if name in ("q", "indices", "path_slots") else value
            for name, value in inputs.items()
        }
        part |= {name: inputs[name][b : b + 1] for name in ("block_table", "prefix_lens")}
        assert torch.equal(attend(**part)[0], whole[b, :n])


def test_a_graph_replays_other_lengths():
    """One captured launch serves whatever the device's lengths, tables and masks say later."""
    attend = OPS["tree_attention"]["triton"].load()
    m = Maker("cuda", torch.bfloat16)
    inputs = tree_inputs(m, [1000, 30, 500, 700], 16, 16, 32, 8, 128)
    fixed = dict(first=0, scale=128**-0.5, window=None, max_prefix=1008)
    attend(**inputs, **fixed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(**inputs, **fixed)
    for lengths in ([1, 0, 3, 2], [1000, 30, 500, 700], [16, 17, 400, 699]):
        inputs["prefix_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        inputs["mask"].copy_(m.ints(0, 2**16, 4, 16))
        graph.replay()
        want = reference.tree_attention(**inputs, **fixed)
        torch.testing.assert_close(out, want, atol=3e-2, rtol=3e-2)


def test_a_graph_of_a_prefill_replays_other_chunks():
    """Captured with padding alone; what is replayed has chunks, empty ones and as much padding as there is room."""
    attend = OPS["prefill_attention"]["triton"].load()
    m, size = Maker("cuda", torch.bfloat16), 384
    padding, _ = chunk_rows(m, [(0, 0)] * 4 + [(-size, size)])
    padding.block_table = torch.zeros(5, 40, dtype=torch.int32, device="cuda")
    q = m.normal(size, 32, 128)
    k, v = m.normal(60, 16, 8, 128), m.normal(60, 16, 8, 128)
    fixed = dict(scale=128**-0.5, window=None)
    assert not attend(q, k, v, padding, **fixed).any()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, padding, **fixed)
    for chunks in (
        [(0, 384), (0, 0), (0, 0), (0, 0), (0, 0)],
        [(100, 100), (0, 0), (0, 0), (0, 0), (-284, 284)],
        [(0, 1), (16, 200), (77, 63), (0, 65), (-55, 55)],
    ):
        rows, _ = chunk_rows(m, chunks)
        padding.block_table.zero_()[:, : rows.block_table.shape[1]] = rows.block_table
        padding.starts.copy_(rows.starts)
        padding.cu_rows.copy_(rows.cu_rows)
        out.fill_(float("nan"))
        graph.replay()
        close(out, reference.prefill_attention(q, k, v, rows, **fixed))


def test_offsets_beyond_32_bits():
    """Pages of more than 2^31 elements: their addresses need 64 bits."""
    dim, kv_heads = 128, 8
    pages = 2**31 // (16 * kv_heads * dim) + 3
    if torch.cuda.mem_get_info()[0] < 3 * pages * 16 * kv_heads * dim * 2:
        pytest.skip("the GPU has too little free memory for two caches of 4 GiB")
    k, v = (torch.zeros(pages, 16, kv_heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    m = Maker("cuda", torch.bfloat16)
    k[-1], v[-1] = m.normal(16, kv_heads, dim), m.normal(16, kv_heads, dim)
    inputs = tree_inputs(m, [16], 4, 4, 32, 8, dim)
    inputs["block_table"][0, 0] = pages - 1
    inputs |= dict(k_cache=k, v_cache=v, first=0, scale=dim**-0.5, window=None)
    got = OPS["tree_attention"]["triton"].load()(**inputs, max_prefix=16)
    inputs |= dict(k_cache=k[-1:], v_cache=v[-1:], block_table=torch.zeros_like(inputs["block_table"]))
    torch.testing.assert_close(got, reference.tree_attention(**inputs), atol=3e-2, rtol=3e-2)


@pytest.mark.skipif(not has_pdl(), reason="this GPU has no programmatic dependent launch")
@pytest.mark.parametrize("rows", (1, 9, 64))
def test_early_starts_change_no_bits(rows: int):
    """Layers in one graph whose buffers are used again and again: every kernel must wait before it reads or writes."""
    m = Maker("cuda", torch.bfloat16)
    weights = [
        [m.normal(n, k) / k**0.5 for n, k in ((1024, 1024), (6144, 1024), (1024, 3072))] for _ in range(4)
    ]
    gain, start, stream = m.normal(1024), m.normal(rows, 1024).float(), m.normal(rows, 1024).float()

    ops = ("linear_rows", "linear_sums", "gate_up_silu", "add_partials_rms_norm")

    def layers(pdl: bool) -> torch.Tensor:
        fn = {op: partial(OPS[op]["triton"].load(), pdl=pdl) for op in ops}
        stream.copy_(start)
        x = gain.expand(rows, -1).contiguous()
        for square, gate_up, down in weights * 4:
            x = fn["add_partials_rms_norm"](
                fn["linear_sums"](fn["linear_rows"](x, square), square), stream, gain, 1e-5
            )
            x = fn["add_partials_rms_norm"](
                fn["linear_sums"](fn["gate_up_silu"](x, gate_up), down), stream, gain, 1e-5
            )
        return x

    check_early_starts(layers)


@pytest.mark.skipif(not has_pdl(), reason="this GPU has no programmatic dependent launch")
@pytest.mark.parametrize("rows", (1, 9, 64))
def test_early_starts_of_a_small_layer_change_no_bits(rows: int):
    m = Maker("cuda", torch.bfloat16)
    weights = [
        [m.normal(n, k) / k**0.5 for n, k in ((576, 576), (576, 576), (3072, 576), (576, 1536))]
        for _ in range(4)
    ]
    gain, start, stream = m.normal(576), m.normal(rows, 576).float(), m.normal(rows, 576).float()
    ops = ("norm_linear", "norm_gate_up_silu", "linear_add", "rms_norm")

    def layers(pdl: bool) -> torch.Tensor:
        fn = {op: partial(OPS[op]["triton"].load(), pdl=pdl) for op in ops}
        stream.copy_(start)
        for qkv, o, gate_up, down in weights * 4:
            fn["linear_add"](fn["norm_linear"](stream, gain, 1e-5, qkv), o, stream)
            fn["linear_add"](fn["norm_gate_up_silu"](stream, gain, 1e-5, gate_up), down, stream)
        return fn["rms_norm"](stream, gain, 1e-5)

    check_early_starts(layers)


def check_early_starts(layers: Callable[[bool], torch.Tensor]) -> None:
    """layers(whether kernels start early) gives the same bits either way, and whenever its graph is replayed."""
    want = layers(False).clone()
    assert want.isfinite().all() and want.abs().max() > 0.1
    assert torch.equal(layers(True), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(True)
    for _ in range(50):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)
