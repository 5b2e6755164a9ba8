"""Cases of RoPE, store and attention in one; see kernel_cases.py."""

from collections.abc import Callable

import torch

from tokenspeed.kernels import reference
from tokenspeed.kernels.parts import composed
from tokenspeed.kernels.registry import OPS

# prefix lengths, nodes, tail_start (None: no buffer), heads, kv heads, head dim, first, window, max_prefix
CASES = (
    (
        [0, 1, 16, 300],
        1,
        None,
        9,
        3,
        64,
        0,
        None,
        300,
    ),  # several splits; in three of them for one request only
    ([90, 0, 33], 1, None, 4, 2, 24, 0, 20, None),
    ([140, 32], 16, None, 8, 2, 128, 0, 7, 140),
    ([17], 16, None, 4, 4, 32, 0, None, 17),  # no splits
    ([40, 3], 64, None, 3, 1, 16, 0, None, 40),  # several blocks of rows and of the tail
    ([50, 2], 4, 0, 4, 2, 64, 1, None, 64),  # lanes: the buffer's first rows, then those behind others
    ([50, 2], 4, 13, 4, 2, 64, 1, 60, 640),
    ([9], 5, 28, 6, 2, 80, 1, None, None),
)


def rope_inputs(m, page: int, case: tuple, slots: bool = True) -> dict:
    """Arguments of the op; q, k and v are views of one tensor, and every buffer may be written to."""
    prefix, nodes, tail_start, heads, kv_heads, dim, first, window, longest = case
    batch, rows = len(prefix), len(prefix) * nodes
    table, pages = m.pages([length + nodes for length in prefix])
    host = table.cpu()
    places = [(b, n + i) for b, n in enumerate(prefix) for i in range(nodes)]
    at = [int(host[b, i // page]) * page + i % page for b, i in places]
    tail = None
    if tail_start is not None:
        tail = tuple(m.normal(2, batch, tail_start + nodes + 2, kv_heads, dim))
        at = [b * tail[0].shape[1] + tail_start + i - prefix[b] for b, i in places]
    q, k, v = m.normal(rows, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), 1)
    angles = m.normal(60, dim // 2, dtype=torch.float32)
    lengths = m.tensor(prefix, torch.int32)
    mask = m.ints(-(2**63), 2**63 - 1, batch, nodes)
    mask[0, -1] = -(2**63)  # bit 63 alone: nothing at all where the tail is shorter
    return dict(
        q=q,
        k=k,
        v=v,
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1),
        positions=m.ints(0, 60, rows),
        k_cache=m.normal(pages, page, kv_heads, dim),
        v_cache=m.normal(pages, page, kv_heads, dim),
        tail=tail,
        tail_start=tail_start or 0,
        slots=m.tensor(at, torch.int64) if slots else None,
        block_table=table,
        prefix_lens=lengths,
        mask=mask,
        indices=lengths[:, None].long() + m.ints(0, 4, batch, nodes),
        first=first,
        scale=dim**-0.5,
        window=window,
        max_prefix=longest,
    )


def copied(inputs: dict) -> dict:
    """Inputs whose tensors are their own; q, k and v still views of wider rows."""
    wide = torch.cat([inputs[name] for name in "qkv"], 1)
    views = wide.split([inputs[name].shape[1] for name in "qkv"], 1)
    found = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in inputs.items()}
    tail = inputs["tail"] and tuple(t.clone() for t in inputs["tail"])
    return found | dict(zip("qkv", views, strict=True)) | {"tail": tail}


def stored(inputs: dict) -> list[torch.Tensor]:
    return [inputs["k_cache"], inputs["v_cache"], *(inputs["tail"] or ())]


def case_rope_tree_attention(fn: Callable, m) -> None:
    apart = [OPS[op]["triton"].load() for op in ("rope_store_kv", "tree_attention")]
    for case in CASES:
        check(fn, apart, m, rope_inputs(m, 16, case))
    check(fn, apart, m, rope_inputs(m, 16, ([0, 90], 1, None, 4, 2, 64, 1, None, 90), slots=False))
    # q and k with a norm of their own, as Qwen3 has it, lie in other tensors than v
    inputs = rope_inputs(m, 16, ([20, 150], 3, None, 4, 2, 64, 0, None, 160))
    inputs |= {name: inputs[name].contiguous() for name in "qk"}
    check(fn, apart, m, inputs)
    # NaN comes through the combination, past splits that hold no keys, and stays with its request
    inputs = rope_inputs(m, 16, ([300, 5], 1, None, 4, 2, 64, 0, None, 2000))
    inputs["q"][0] = torch.nan
    assert fn(**inputs).isnan().flatten(1).all(1).tolist() == [True, False]


def check(fn: Callable, apart: list[Callable], m, inputs: dict) -> None:
    """The reference's numbers, and the bits of rope_store_kv and tree_attention one after another."""
    mine, theirs, want = (copied(inputs) for _ in range(3))
    got, pair = fn(**mine), composed(*apart, **theirs)
    assert torch.equal(got, pair)
    assert all(torch.equal(a, b) for a, b in zip(stored(mine), stored(theirs), strict=True))
    expected = reference.rope_tree_attention(**want)
    atol = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[m.dtype]
    for a, b in zip((got, *stored(mine)), (expected, *stored(want)), strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=atol)
