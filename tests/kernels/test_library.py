"""torch.ops.tokenspeed: schema and fake implementation of every op, and a compiled function of two."""

import inspect
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from kernels.kernel_cases import CASES, Maker
from kernels.rope_attention_cases import CASES as ROPE_CASES
from kernels.rope_attention_cases import rope_inputs
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import tokenspeed.kernels.library  # noqa: F401  (registers them)
from tokenspeed import kernels
from tokenspeed.kernels import round_ops
from tokenspeed.kernels.registry import ENV, OPS

CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
ops = torch.ops.tokenspeed


def copied(tree):
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def calls_of(op: str) -> Iterator[dict]:
    """Arguments by name that the op's cases have for it: the first of each kind (which are None, and dtypes)."""
    maker = Maker("cpu", torch.bfloat16, quick=True)
    if op == "rope_tree_attention":  # its cases compare Triton's kernels with each other
        return [rope_inputs(maker, 16, ROPE_CASES[i]) for i in (1, 6)]
    function, kinds = getattr(kernels, op), {}

    def recorded(*args, **options):
        call = inspect.signature(function).bind(*args, **options)
        call.apply_defaults()
        kind = str([x.dtype if isinstance(x, torch.Tensor) else type(x) for x in call.args])
        kinds.setdefault(kind, copied(call.arguments))
        return function(*args, **options)

    try:
        CASES[op](recorded, maker)
    except (AssertionError, RuntimeError):
        assert kinds  # the reference lacks what cases ask of kernels, as a row's bits that are its own
    return list(kinds.values())


def in_schema(arguments: dict) -> Iterator:
    """A call of the plain function as torch.ops.tokenspeed takes it."""
    for name, value in arguments.items():
        if name == "draw":
            *tensors, depth = vars(value).values() if value else (0,)
            yield from (tensors, depth)
        elif name == "rows":
            yield from (value.block_table, value.starts, value.cu_rows)
            yield from map(list, zip(*value.chunks, strict=True))
        elif name in ("lanes", "candidates", "tail"):
            yield list(value or ())
        else:
            yield value


def tensors(tree) -> list[torch.Tensor]:
    """Its tensors, without those of no columns, which stand for None."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.shape[-1]]


@pytest.mark.parametrize("op", OPS)
def test_schema_and_fake(op):
    for call in calls_of(op):
        args = tuple(in_schema(call))
        torch.library.opcheck(getattr(ops, op).default, args, test_utils=CHECKS)
        mine, theirs = copied(args), copied(call)
        got, want = getattr(ops, op)(*mine), getattr(kernels, op)(**theirs)
        written = tuple(in_schema(theirs))
        for a, b in zip(tensors((got, mine)), tensors((want, written)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_every_op_is_registered():
    assert {name for name in dir(ops) if name in OPS} == set(OPS)


def test_results_in_shared_memory_become_apart(monkeypatch):
    """Triton's kernels write several results into one buffer, which torch.library forbids."""
    size, whole = (2, 3), torch.arange(18).view(3, 2, 3)
    monkeypatch.setitem(round_ops._place_nodes, "cpu", lambda *args: whole.unbind())
    zeros = torch.zeros(size, dtype=torch.int64)
    got = ops.place_nodes(zeros[:, 0], zeros, zeros.int(), 16)
    assert torch.equal(torch.stack(got), whole)
    assert len({x.untyped_storage().data_ptr() for x in got}) == 3


def test_a_state_that_is_passed_on_is_copied():
    table, state, gain = torch.ones(4, 8), torch.randn(2, 8), torch.ones(8)
    _, kept = ops.draft_input(torch.tensor([1, 3]), table, state, None, gain, gain, 1e-5, False)
    assert torch.equal(kept, state) and kept.data_ptr() != state.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(576, 576), (576, 1536), (4096, 4096), (4096, 14336), (70, 200)])
def test_parts_of_a_sum_on_a_gpu(monkeypatch, shape, dtype):
    """As many as Triton's launcher has room for; one where plain torch was asked for."""
    few_rows = pytest.importorskip("tokenspeed.kernels.triton.few_rows", reason="no triton here")
    monkeypatch.setattr(few_rows, "_launch", lambda *args: None)
    want = few_rows.linear_sums(torch.empty(3, shape[1], dtype=dtype), torch.empty(shape, dtype=dtype)).shape
    monkeypatch.delenv(ENV, raising=False)
    with FakeTensorMode():
        x, weight = (torch.empty(s, dtype=dtype, device="cuda") for s in ((3, shape[1]), shape))
        assert ops.linear_sums(x, weight).shape == want
        monkeypatch.setenv(ENV, "linear_sums=torch")
        assert ops.linear_sums(x, weight).shape == (1, 3, shape[0])


def test_a_compiled_function_gives_the_same():
    def half_a_layer(x, weight, residual, gain):
        sums = ops.linear_sums(x, weight)
        return ops.add_partials_rms_norm(sums, residual, gain, 1e-5)

    maker = Maker("cpu", torch.float32)
    args = maker.normal(3, 64), maker.normal(48, 64), maker.normal(3, 48), maker.normal(48)
    mine, theirs = copied(args), copied(args)
    got = torch.compile(half_a_layer, fullgraph=True, backend="eager")(*mine)
    assert torch.equal(got, half_a_layer(*theirs)) and torch.equal(mine[2], theirs[2])
    sums = kernels.linear_sums(args[0], args[1])
    assert torch.equal(got, kernels.add_partials_rms_norm(sums, args[2], args[3], 1e-5))


def test_only_who_asks_has_them():
    code = """
import torch, tokenspeed.kernels
print(hasattr(torch.ops.tokenspeed, "sample"))
import tokenspeed.kernels.library
print(hasattr(torch.ops.tokenspeed, "sample"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
