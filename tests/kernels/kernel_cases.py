"""Cases that every kernel must pass against the torch reference, in Triton's interpreter or on a GPU.

Run as a program, it runs the Triton kernels in the interpreter and prints one JSON line a case: the
interpreter has to be switched on before Triton is first imported, which a process of its own makes sure of.
"""

import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from kernels import draft_kernel_cases, few_rows_cases, rope_attention_cases, round_kernel_cases

from tokenspeed.kernels import reference
from tokenspeed.kernels.registry import OPS

PAGE = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Maker:
    """Random tensors of a dtype, the same ones on every device. quick: as few cases as will do."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0, quick: bool = False):
        self.device, self.dtype, self.quick = device, dtype, quick
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator)
        return values.to(self.device, dtype or self.dtype)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device, dtype)

    def tensor(self, values: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def pages(self, lengths: list[int], spare: int = 1) -> tuple[torch.Tensor, int]:
        """A shuffled block table [B, P] for requests of these lengths, and the number of pages."""
        counts = [-(-n // PAGE) for n in lengths]
        order = (torch.randperm(sum(counts), generator=self.generator) + 1).tolist()
        table = torch.zeros(len(lengths), max(counts) + spare, dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor(order[:count])
            order = order[count:]
        return table.to(self.device), sum(counts) + 1


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.float().cpu(), want.float().cpu(), atol=tolerance, rtol=tolerance)


def case_rms_norm(fn: Callable, m: Maker) -> None:
    for rows, size in ((1, 576), (5, 100), (3, 16)):
        x, weight = m.normal(rows, size), m.normal(size)
        close(fn(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    heads = m.normal(4, 8, 24)[:, 1:6]  # heads of a wider row, as q in qkv
    weight = m.normal(24)
    got = fn(heads, weight, 1e-6)
    assert got.is_contiguous()
    close(got, reference.rms_norm(heads, weight, 1e-6))
    weight = m.normal(5, 24)
    close(fn(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))
    wide = m.normal(3, 64).float()  # the residual stream before the first layer
    got = fn(wide, weight := m.normal(64), 1e-5)
    assert got.dtype == m.dtype
    close(got, reference.rms_norm(wide, weight, 1e-5))
    assert fn(m.normal(0, 32), m.normal(32), 1e-5).shape == (0, 32)


def case_add_rms_norm(fn: Callable, m: Maker) -> None:
    for rows, size in ((1, 576), (4, 96), (0, 64)):
        x, residual, weight = m.normal(rows, size), m.normal(rows, size), m.normal(size)
        other = residual.clone()
        close(fn(x, residual, weight, 1e-5), reference.add_rms_norm(x, other, weight, 1e-5))
        assert torch.equal(residual, other)
    for of_x, of_residual in (
        (m.dtype, torch.float32),
        (torch.float32, torch.float32),
        (torch.float32, m.dtype),
    ):
        x, residual, weight = m.normal(3, 64).to(of_x), m.normal(3, 64).to(of_residual), m.normal(64)
        other = residual.clone()
        got = fn(x, residual, weight, 1e-5)
        assert got.dtype == m.dtype
        close(got, reference.add_rms_norm(x, other, weight, 1e-5))
        assert torch.equal(residual, other)


def case_embed_rms_norm(fn: Callable, m: Maker) -> None:
    ids, table, weight = m.ints(0, 9, 5), m.normal(9, 100), m.normal(100)
    (residual, got), want = fn(ids, table, weight, 1e-5), reference.embed_rms_norm(ids, table, weight, 1e-5)
    assert torch.equal(residual, want[0]) and residual.dtype == torch.float32 and got.dtype == m.dtype
    close(got, want[1])


def case_silu_and_mul(fn: Callable, m: Maker) -> None:
    for rows, size in ((1, 1536), (3, 40)):
        x = m.normal(rows, 2 * size) * 4
        close(fn(x), reference.silu_and_mul(x))


def case_rope_store_kv(fn: Callable, m: Maker) -> None:
    for heads, kv_heads, dim, rows in ((9, 3, 64, 5), (2, 1, 24, 3), (17, 17, 16, 2)):
        qkv = m.normal(rows, heads + 2 * kv_heads, dim)
        other = qkv.clone()
        angles = m.normal(40, dim // 2, dtype=torch.float32)
        cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        positions = m.ints(0, 40, rows)
        slots = m.tensor([37, 0, 5, 16, 31][:rows], torch.int64)
        caches = [torch.zeros(2, 3, PAGE, kv_heads, dim, dtype=m.dtype, device=m.device) for _ in range(2)]
        for tensor, cache, run in ((qkv, caches[0], fn), (other, caches[1], reference.rope_store_kv)):
            parts = tensor.split((heads, kv_heads, kv_heads), 1)
            run(*parts, cos_sin, positions, cache[0], cache[1], slots)
        close(qkv, other)
        close(caches[0], caches[1])
        before = caches[0].clone()
        fn(*qkv.split((heads, kv_heads, kv_heads), 1), cos_sin, positions, *caches[0], None)
        assert torch.equal(caches[0], before)


def chunk_rows(m: Maker, chunks: list[tuple[int, int]]) -> tuple[SimpleNamespace, int]:
    """Chunks (start, count) with shuffled pages, and the number of pages."""
    table, pages = m.pages([start + count for start, count in chunks])
    rows = SimpleNamespace(
        block_table=table,
        starts=m.tensor([start for start, _ in chunks], torch.int32),
        cu_rows=m.tensor([0, *itertools.accumulate(count for _, count in chunks)], torch.int32),
        chunks=chunks,
    )
    return rows, pages


def case_prefill_attention(fn: Callable, m: Maker) -> None:
    shapes = ((9, 3, 64, None), (4, 4, 24, 20), (2, 1, 128, 1))
    for heads, kv_heads, dim, window in shapes:
        # The second as in a captured pass: an empty chunk, padding that sees nothing, only bounds on the host.
        for chunks in ([(0, 1), (0, 70), (16, 32), (75, 5)], [(20, 3), (0, 0), (-66, 66)]):
            rows, pages = chunk_rows(m, chunks)
            count = sum(count for _, count in chunks)
            q = m.normal(count, heads + 1, dim)[:, :heads]
            k, v = m.normal(pages, PAGE, kv_heads, dim), m.normal(pages, PAGE, kv_heads, dim)
            want = reference.prefill_attention(q, k, v, rows, dim**-0.5, window)
            if (0, 0) in chunks:
                rows.chunks = [(0, count)] * len(chunks)
            close(fn(q, k, v, rows, dim**-0.5, window), want)


def tree_inputs(
    m: Maker, prefix: list[int], nodes: int, tail: int, heads: int, kv_heads: int, dim: int, spare: int = 1
) -> dict:
    batch = len(prefix)
    table, pages = m.pages([max(n, 1) for n in prefix], spare)
    lengths = m.tensor(prefix, torch.int32)
    mask = m.ints(-(2**63), 2**63 - 1, batch, nodes)
    mask[0, 0] = -(2**63)  # bit 63 alone: nothing at all where the tail is shorter
    tail_kv = m.normal(2, batch, tail, kv_heads + 1, dim)[:, :, :, :kv_heads]
    return dict(
        q=m.normal(batch, nodes, heads, dim),
        k_cache=m.normal(pages, PAGE, kv_heads, dim),
        v_cache=m.normal(pages, PAGE, kv_heads, dim),
        tail_k=tail_kv[0],
        tail_v=tail_kv[1],
        block_table=table,
        prefix_lens=lengths,
        mask=mask,
        indices=lengths[:, None].long() + m.ints(0, 4, batch, nodes),
    )


def case_tree_attention(fn: Callable, m: Maker) -> None:
    # prefix lengths, nodes, tail, heads, kv heads, head dim, first, window, max_prefix
    cases = (
        ([0, 1, 16, 300], 1, 1, 9, 3, 64, 0, None, 300),
        ([0, 1, 16, 90], 4, 4, 6, 2, 64, 1, None, None),
        ([32, 140], 16, 16, 4, 2, 128, 0, 7, 140),
        ([40, 3], 64, 64, 3, 1, 24, 0, None, 40),
        ([1, 0, 77], 4, 0, 4, 2, 16, 1, 30, 80),
        ([140], 3, 48, 2, 2, 80, 1, 100, None),
    )
    for prefix, nodes, tail, heads, kv_heads, dim, first, window, longest in cases:
        inputs = tree_inputs(m, prefix, nodes, tail, heads, kv_heads, dim)
        inputs |= dict(first=first, scale=dim**-0.5, window=window, max_prefix=longest)
        got = fn(**inputs)
        close(got, reference.tree_attention(**inputs))
        if window is None:  # NaN that others left behind a request's keys, or in the dummy page, is not read
            caches = {name: left_by_others(inputs, name) for name in ("k_cache", "v_cache")}
            assert torch.equal(fn(**{**inputs, **caches}), got)


def left_by_others(inputs: dict, name: str) -> torch.Tensor:
    """A cache with NaN in every slot that holds no key of a request."""
    cache = torch.full_like(inputs[name], torch.nan)
    for table, length in zip(inputs["block_table"], inputs["prefix_lens"].tolist(), strict=True):
        for index in range(length):
            at = int(table[index // PAGE]), index % PAGE
            cache[at] = inputs[name][at]
    return cache


def invariant_inputs(m: Maker, prefix: list[int], nodes: int, heads: int, kv_heads: int, dim: int) -> dict:
    """Trees whose nodes each extend a chain of random earlier ones; node slots follow the prefix."""
    table, pages = m.pages([n + nodes for n in prefix], 0)
    batch = len(prefix)
    lengths = m.tensor(prefix, torch.int32)
    paths = torch.zeros(batch, nodes, nodes, dtype=torch.int64)
    depths = torch.zeros(batch, nodes, dtype=torch.int64)
    host = table.cpu()
    for b, node in itertools.product(range(batch), range(nodes)):
        parent = int(torch.randint(0, node, (), generator=m.generator)) if node else -1
        depths[b, node] = depths[b, parent] + 1 if node else 0
        if node:
            paths[b, node] = paths[b, parent]
        index = prefix[b] + node
        paths[b, node, depths[b, node]] = host[b, index // PAGE] * PAGE + index % PAGE
    return dict(
        q=m.normal(batch, nodes, heads, dim),
        k_cache=m.normal(pages, PAGE, kv_heads, dim),
        v_cache=m.normal(pages, PAGE, kv_heads, dim),
        block_table=table,
        prefix_lens=lengths,
        indices=(lengths.cpu()[:, None] + depths).to(m.device),
        path_slots=paths.to(m.device),
    )


def case_tree_attention_invariant(fn: Callable, m: Maker) -> None:
    for prefix, nodes, heads, kv_heads, dim, window in (
        ([0, 514], 3, 4, 2, 64, None),
        ([3, 70], 1, 4, 2, 24, 40),
        ([511], 4, 2, 1, 128, 300),
    )[: 2 if m.quick else 3]:
        inputs = invariant_inputs(m, prefix, nodes, heads, kv_heads, dim)
        inputs |= dict(scale=dim**-0.5, window=window)
        want = reference.tree_attention_invariant(**inputs)
        got = fn(**inputs, max_prefix=max(prefix))
        close(got, want)
        assert torch.equal(fn(**inputs), got)
        check_invariance(fn, inputs, got)


def check_invariance(fn: Callable, inputs: dict, whole: torch.Tensor) -> None:
    """A node alone, in plain decode with its path in the pages, has its bits of the tree and the batch."""
    node = inputs["q"].shape[1] - 1
    for b in range(inputs["q"].shape[0]):
        length = int(inputs["indices"][b, node])  # keys 0..length, the last its own
        alone = dict(inputs)
        table = inputs["block_table"][b : b + 1].clone()
        k, v = inputs["k_cache"].clone(), inputs["v_cache"].clone()
        prefix = int(inputs["prefix_lens"][b])
        for depth in range(length - prefix):
            at = prefix + depth
            source = int(inputs["path_slots"][b, node, depth])
            for cache, original in ((k, inputs["k_cache"]), (v, inputs["v_cache"])):
                cache[int(table[0, at // PAGE]), at % PAGE] = original.flatten(0, 1)[source]
        own = inputs["path_slots"][b, node, length - prefix].view(1, 1, 1)
        # The own slot may be overwritten by the moves above: give it a page of its own.
        page = torch.zeros_like(k[:1])
        k, v = torch.cat((k, page)), torch.cat((v, page))
        k[-1, 3] = inputs["k_cache"].flatten(0, 1)[int(own)]
        v[-1, 3] = inputs["v_cache"].flatten(0, 1)[int(own)]
        alone |= dict(
            q=inputs["q"][b : b + 1, node : node + 1],
            k_cache=k,
            v_cache=v,
            block_table=table,
            prefix_lens=torch.full_like(inputs["prefix_lens"][:1], length),
            indices=torch.full_like(inputs["indices"][:1, :1], length),
            path_slots=torch.full_like(own, (len(k) - 1) * PAGE + 3),
        )
        assert torch.equal(fn(**alone)[0, 0], whole[b, node])


def sample_inputs(m: Maker, vocab: int) -> list[torch.Tensor]:
    """One row for every kind of request, greedy and degenerate ones included."""
    # temperature, top_k, top_p, min_p
    settings = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.3, 0, 0.9, 0.0),
        (0.8, 50, 0.5, 0.0),
        (2.0, 0, 1.0, 0.2),
        (1.5, 20, 0.95, 0.05),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1e-6, 0.0),
        (5.0, vocab + 1, 0.999, 0.0),
    ]
    rows = len(settings)
    columns = [torch.tensor(column) for column in zip(*settings, strict=True)]
    temperature, top_k, top_p, min_p = columns
    seeds = m.ints(-(2**62), 2**62, rows)
    return [
        m.normal(rows, vocab, dtype=torch.float32) * 3,
        temperature.float().to(m.device),
        top_k.int().to(m.device),
        top_p.float().to(m.device),
        min_p.float().to(m.device),
        seeds,
        m.ints(0, 2**40, rows),
    ]


def case_sample(fn: Callable, m: Maker) -> None:
    for vocab in (17, 5003) if m.quick else (17, 1000, 5003, 49152, 128256):
        for _ in range(1 if m.quick else 5):
            inputs = sample_inputs(m, vocab)
            assert torch.equal(fn(*inputs).cpu(), reference.sample(*[t.cpu() for t in inputs]))
    inputs = sample_inputs(m, 64)
    logits = inputs[0]
    logits[:, 1::3] = -torch.inf
    logits[0, [5, 11]] = torch.inf
    logits[1] = torch.nan
    logits[3, :] = -torch.inf
    logits[4, :] = 1.5
    logits[5, 63] = torch.nan
    got = fn(*inputs)
    assert torch.equal(got.cpu(), reference.sample(*[t.cpu() for t in inputs]))
    assert got[0] == 5 and got[1] == got[3] == got[5] == -1
    slots = m.tensor([3, 0, 6, 2], torch.int64)  # of six rows each
    pairs = m.normal(24, 64, dtype=torch.float32), *inputs[1:6], m.ints(0, 99, 24), slots
    assert torch.equal(fn(*pairs).cpu(), reference.sample(*[t.cpu() for t in pairs]))


def case_move_kv(fn: Callable, m: Maker) -> None:
    for group, size in ((4, 192), (13, 600), (70, 16)):
        kv = m.normal(6, 400, size)
        src = m.tensor([*range(5, 5 + group), *range(200, 200 + group)], torch.int64)
        dst = m.tensor([*range(3, 3 + group), *reversed(range(198, 198 + group))], torch.int64)
        src[0] = dst[0] = 0
        want = kv.clone()
        want[:, dst] = kv[:, src]
        fn(kv, src, dst, group)
        assert torch.equal(kv, want)
    kv = m.normal(2, 50, 8)
    want = kv.clone()
    want[:, [1, 2, 3]] = kv[:, [3, 1, 2]]
    fn(kv, m.tensor([3, 1, 2], torch.int64), m.tensor([1, 2, 3], torch.int64))
    assert torch.equal(kv, want)


def case_linear_invariant(fn: Callable, m: Maker) -> None:
    x, weight, bias = m.normal(35, 200), m.normal(70, 200) / 14, m.normal(70)
    for b in (bias, None):
        whole = fn(x, weight, b)
        want = x.double() @ weight.double().T + (0 if b is None else b.double())
        close(whole, want)
        for rows in (1, 2, 16, 17):
            assert torch.equal(fn(x[:rows], weight, b), whole[:rows])
            assert torch.equal(fn(x[35 - rows :], weight, b), whole[35 - rows :])


_PLACES = (
    globals(),
    *map(vars, (draft_kernel_cases, few_rows_cases, rope_attention_cases, round_kernel_cases)),
)
CASES: dict[str, Callable] = {
    name[5:]: fn for place in _PLACES for name, fn in list(place.items()) if name.startswith("case_")
}


def repair_interpreter() -> None:
    """NumPy 2.4 refuses int() of one-element arrays, which Triton 3.6's interpreter takes as loop bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def run_in_interpreter() -> Iterator[dict]:
    for op, case in CASES.items():
        try:
            case(OPS[op]["triton"].load(), Maker("cpu", torch.float32, quick=True))
        except Exception:  # whatever a kernel raises belongs to its own test
            yield {"op": op, "error": traceback.format_exc()}
        else:
            yield {"op": op, "error": None}


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    repair_interpreter()
    for result in run_in_interpreter():
        print(json.dumps(result), flush=True)
