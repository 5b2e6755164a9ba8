"""Prefill passes padded to the size of a graph: bit for bit what they compute unpadded, and nothing else.

On a CPU the padded pass is run as it is, where a GPU replays a graph.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from harness import InProcessEngine, greedy
from torch.overrides import TorchFunctionMode

from tokenspeed.params import SamplingParams
from tokenspeed.worker.engine import Engine
from tokenspeed.worker.graph import GraphSet
from tokenspeed.worker.prefill import MAX_CHUNKS, Chunks, ChunkTensors

SIZES = (32, 64, 96)
LENGTHS = [*range(1, 6)] * 3 + [70]


class Padded:
    """Stands in for worker.graph.GraphSet, with no rounds: pads as it does, and keeps what it was asked."""

    buckets, prefills, num_chunks = (0,), SIZES, MAX_CHUNKS
    covers_prefill = GraphSet.covers_prefill

    def __init__(self, engine: Engine):
        self.engine, self.seen = engine, []

    def covers(self, batch: int, shape) -> bool:
        return False

    def replay_prefill(self, chunks: Chunks) -> torch.Tensor:
        self.seen.append(chunks)
        dummy = self.engine.state.dummy
        padded = chunks.padded(next(n for n in SIZES if n >= len(chunks.tokens)), self.num_chunks, dummy)
        before = [self.engine.state.lengths[dummy].item(), self.engine.state.aux[dummy].clone()]
        result = self.engine.prefill(ChunkTensors.of(padded, self.engine.state.device), [])
        assert self.engine.state.lengths[dummy] == before[0]
        assert torch.equal(self.engine.state.aux[dummy], before[1])
        return result.packed()[: len(chunks.samples)]


class FixedRows(TorchFunctionMode):
    """A product of 32 rows rounds otherwise than one of 31 on a CPU. Here all have 128."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, *others = args
        return func(F.pad(x, (0, 0, 0, 128 - len(x))), *others)[: len(x)].clone()


@pytest.fixture(autouse=True)
def fixed_rows():
    with FixedRows():
        yield


def text(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=[None, "eagle4"])
def make(request, tiny_model_dir, tiny_draft_dir):
    target = tiny_model_dir("llama")
    draft = {"spec": "eagle4", "draft": str(tiny_draft_dir(target)), "spec_shape": "3/2/6"}

    def engine(**options) -> InProcessEngine:
        return InProcessEngine(target, max_num_seqs=20, **(draft if request.param else {}), **options)

    return engine


def both(make: Callable, prompts: list[list[list[int]]], max_tokens: int = 6, **options) -> list[Chunks]:
    """Two engines, one of them padding, go side by side through lists of prompts. Returns the padded passes."""
    exact, padded = make(**options), make(**options)
    graphs = padded.runner.graphs = Padded(padded.runner.engine)
    spoil(padded.runner.engine)
    params = [greedy(max_tokens), SamplingParams(temperature=1.0, seed=3, max_tokens=max_tokens)]
    for wave in prompts:
        for i, ids in enumerate(wave):
            for engine in (exact, padded):
                engine.submit(ids, params[i % 2])
        while not exact.scheduler.is_idle:
            exact.advance()
            padded.advance()
            same(exact.runner.engine, padded.runner.engine)
        assert padded.scheduler.is_idle
        for a, b in zip(exact.answers.values(), padded.answers.values(), strict=True):
            assert a.token_ids == b.token_ids and a.finished.num_accepted == b.finished.num_accepted
    return graphs.seen


def spoil(engine: Engine) -> None:
    """NaN wherever padding reads or writes and no request may."""
    engine.pool.data[:, :, 0] = torch.nan
    engine.page_aux[0] = torch.nan
    if engine.drafter is not None:
        engine.drafter._pool.data[:, :, 0] = torch.nan


def same(exact: Engine, padded: Engine) -> None:
    """Everything but the dummy slot (the last) and page (the first), to the bit."""
    for name in ("last_tokens", "lengths", "block_table", "aux"):
        a, b = (getattr(engine.state, name)[:-1] for engine in (exact, padded))
        assert torch.equal(a, b), name
    assert torch.equal(exact.pool.data[:, :, 1:], padded.pool.data[:, :, 1:])
    assert torch.equal(exact.page_aux[1:], padded.page_aux[1:])
    if exact.drafter is not None:
        assert torch.equal(exact.drafter._pool.data[:, :, 1:], padded.drafter._pool.data[:, :, 1:])


def test_lengths_and_prefix_hits(make):
    """One prompt a pass: single tokens, a page more or less, a pass that is full; then the same and longer ones."""
    prompts = [text(n, n) for n in (1, 2, 16, 17, 31, 32, 33, 64, 96)]
    seen = both(make, [[p] for p in [*prompts, *prompts, *(p + text(5, 1) for p in prompts)]])
    assert {len(chunks.tokens) for chunks in seen} >= {1, *SIZES}
    assert any(chunks.starts[0] for chunks in seen)


def test_many_chunks(make):
    """16 at once, of which one does not end its prompt; 20 are one pass too many."""
    seen = both(
        make, [[text(n, n) for n in LENGTHS], [text(n, n) for n in range(1, 21)]], max_num_batched_tokens=96
    )
    assert any(len(c.slots) == MAX_CHUNKS > len(c.samples) and len(c.tokens) == SIZES[-1] for c in seen)


def test_chunks_that_do_not_end_their_prompt(make):
    seen = both(
        make, [[text(80, 0), text(3, 1), text(50, 2)], [text(80, 0) + text(9, 3)]], max_num_batched_tokens=24
    )
    assert any(not chunks.samples for chunks in seen)
    assert any(len(chunks.slots) > len(chunks.samples) > 0 for chunks in seen)


def test_preempted_requests(make):
    """Too few pages for all: the newest give way and are computed again."""
    wave = [text(8 + n, n) for n in range(6)]
    seen = both(make, [wave], max_tokens=40, kv_cache_tokens=192, max_model_len=96)
    assert sum(len(chunks.slots) for chunks in seen) > len(wave)


def test_larger_passes_are_not_covered(make):
    assert not both(make, [[text(97, 0)]])


def test_a_request_of_nan_leaves_no_trace(make):
    """Its rows are NaN from the first layer on; nothing of them gets into the dummy slot or a neighbour."""
    engine = make()
    graphs = engine.runner.graphs = Padded(engine.runner.engine)
    model = engine.runner.engine.model
    forward, bad = model.forward, text(40, 9)

    def spoiled(ids, *args):
        hidden, aux = forward(ids, *args)
        if ids[: len(bad)].tolist() == bad:
            for states in (hidden, aux):
                if states is not None:
                    states[: len(bad)] = float("nan")
        return hidden, aux

    prompts = [bad, text(10, 1), text(14, 2)]
    expected = make().generate(prompts[1:], greedy(12))
    model.forward = spoiled
    try:
        first, *rest = engine.generate(prompts, greedy(12))
    finally:
        del model.forward
    assert len(graphs.seen[0].slots) == 3
    assert first.finished.reason == "error"
    assert [a.token_ids for a in rest] == [a.token_ids for a in expected]
    assert not engine.runner.engine.state.aux[-1].isnan().any()
