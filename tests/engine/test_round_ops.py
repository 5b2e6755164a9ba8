"""What a decode round launches on a GPU, counted on a CPU: the GPU's attention with each op of ours as one launch."""

from collections import Counter

import pytest
import torch
from harness import InProcessEngine, greedy
from tiny import make_tiny_draft
from torch.utils._python_dispatch import TorchDispatchMode

from tokenspeed import kernels
from tokenspeed.attention import triton
from tokenspeed.config import Shape
from tokenspeed.kernels import attention_ops, round_ops
from tokenspeed.kernels.registry import Op
from tokenspeed.worker.prefill import Chunks, ChunkTensors

FREE = {"aten::empty.memory_format", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}
SYNCS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique2", "aten::equal"}
MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::mkldnn_linear"}


class Launches(TorchDispatchMode):
    """Counts, of what runs under it, every operation that is neither a view nor an allocation."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.counts, self._inside = Counter(), False
        ops = {**vars(kernels), **vars(attention_ops), **vars(round_ops)}
        for op in [x for x in ops.values() if isinstance(x, Op)]:
            monkeypatch.setitem(op, "cpu", self._one_launch(op.name, op["cpu"]))

    def _one_launch(self, name: str, fn):
        def call(*args):
            self.counts[f"ours::{name}"] += 1
            outer, self._inside = self._inside, True
            try:
                return fn(*args)
            finally:
                self._inside = outer

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if not self._inside and not func.is_view and str(func.name()) not in FREE and name not in FREE:
            index = args[1] if name in ("aten::index", "aten::index_put_") else ()
            if any(x is not None and x.dtype == torch.bool for x in index):
                name += " of bool"
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def small(self) -> int:
        """Operations of torch that are not matrix products."""
        others = (
            n for name, n in self.counts.items() if not name.startswith("ours::") and name not in MATMULS
        )
        return sum(others)

    @property
    def syncs(self) -> list[str]:
        """Operations that make the host wait for a GPU."""
        return [name for name in self.counts if name in SYNCS or name.endswith("of bool")]


@pytest.fixture(scope="module")
def engine(tiny_model_dir, tmp_path_factory):
    target = tiny_model_dir("llama")
    draft = make_tiny_draft(tmp_path_factory.mktemp("draft"), target)
    inner = InProcessEngine(target, spec="eagle4", draft=str(draft), spec_shape="8/4/16", max_num_seqs=4)
    for ids in ([5, 9, 17, 33, 2, 71], [11, 12]):
        inner.submit(ids, greedy(40, ignore_eos=True))
    for _ in range(2):
        inner.advance()
    engine = inner.runner.engine
    engine.backend._tree = engine.backend.draft = engine.drafter._attention = triton.TreeAttention
    return engine


def layers(engine, shape: Shape | None) -> int:
    """Passes through an attention layer in a round."""
    return engine.pool.num_layers + (0 if shape is None else shape.steps)


# Both: 3 copies of aux states, 2 for RoPE positions of appended rows. A tree: 6 masks of the draft's window (1 here;
# one that is longer than the tree costs none), and bits of failures.
@pytest.mark.parametrize(("shape", "most"), [(None, 5), (Shape(8, 4, 16), 12)])
def test_a_round_launches_little_beside_its_kernels(engine, monkeypatch, shape, most):
    slots = torch.tensor([0, 1, engine.state.dummy])
    launches = Launches(monkeypatch)
    with torch.inference_mode(), launches:
        engine.round(slots, [], shape, None)
    assert not launches.syncs
    assert launches.counts["ours::accept"] == 1
    assert launches.counts["ours::rope_tree_attention"] == layers(engine, shape)
    assert launches.counts["ours::rope_store_kv"] == 1  # the draft's rows of what was accepted
    assert not launches.counts["ours::tree_attention"]
    assert launches.small <= most, launches.counts


def test_a_padded_prefill_waits_for_nothing(engine, monkeypatch):
    """As it is captured, of nothing but padding."""
    monkeypatch.setattr(engine.backend, "_prefill", triton.PrefillAttention)
    nothing = Chunks(torch.zeros(0, dtype=torch.int64), [], [], [], []).padded(32, 4, engine.state.dummy)
    packed = nothing.pack()
    launches = Launches(monkeypatch)
    with torch.inference_mode(), launches:
        engine.prefill(ChunkTensors(packed, nothing), []).packed()
    assert not launches.syncs
    assert launches.counts["ours::prefill_attention"] == engine.pool.num_layers
    assert (
        launches.counts["ours::rope_store_kv"] == engine.pool.num_layers + 2
    )  # the draft's rows: prompts, samples
    assert launches.small <= 43, launches.counts


@pytest.mark.parametrize(
    ("wait", "small"),
    [
        (lambda x: x.sum().item(), 2),
        (lambda x: x[x > 0], 2),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[None, 1:].view(-1) + torch.empty(2), 1),
    ],
)
def test_launches_and_syncs_are_noticed(monkeypatch, wait, small):
    launches = Launches(monkeypatch)
    x = torch.arange(3.0)
    with launches:
        wait(x)
    assert launches.small == small and bool(launches.syncs) == ("aten::add" not in launches.counts)
