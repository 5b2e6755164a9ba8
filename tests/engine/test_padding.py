"""B27: rows that fill a batch up to a captured size change nothing and write nowhere but into the dummy page.

On a CPU the same padding is done by hand, round by round, where a GPU replays a graph.
"""

import pytest
import torch
from harness import InProcessEngine, greedy

from tokenspeed.config import Shape
from tokenspeed.params import SamplingParams
from tokenspeed.worker.engine import Engine
from tokenspeed.worker.prefill import Chunks

BUCKETS = (1, 4, 8, 16)
COUNTS = (1, 2, 3, 5, 7, 9)
LENGTHS = [9, 4, 14, 6, 11, 3, 12, 8, 13]  # of the answers; a batch shrinks through the buckets
PROMPTS = [[(7 * i + 13 * j + j * j) % 297 + 3 for j in range(3 + 5 * i)] for i in range(max(COUNTS))]


class Padded:
    """Stands in for worker.graph.GraphSet: pads as it does, and looks at what each round leaves alone."""

    def __init__(self, engine: Engine):
        self.engine, self.num_padded = engine, 0

    def covers(self, batch: int, shape: Shape | None) -> bool:
        return batch <= BUCKETS[-1]

    def covers_prefill(self, chunks: Chunks) -> bool:
        return False

    def replay(self, slots: list[int], shape: Shape | None) -> torch.Tensor:
        batch, state = len(slots), self.engine.state
        padding = [state.dummy] * (next(b for b in BUCKETS if b >= batch) - batch)
        self.num_padded += len(padding)
        before = self._others(slots)
        result = self.engine.round(torch.tensor(slots + padding), [], shape, None)
        for name, value in self._others(slots).items():
            assert torch.equal(value, before[name]), name
        return result.packed()[:batch]

    def _others(self, slots: list[int]) -> dict[str, torch.Tensor]:
        """Copies of all that belongs to none of `slots`, the dummy page and slot left out."""
        engine, state = self.engine, self.engine.state
        pages = torch.ones(engine.pool.num_pages, dtype=torch.bool)
        pages[state.block_table[slots].flatten().long()] = False
        pages[0] = False
        rest = [slot for slot in range(state.num_slots) if slot not in slots]
        found = {
            name: getattr(state, name)[rest] for name in ("last_tokens", "lengths", "block_table", "aux")
        }
        found |= {"K/V": engine.pool.data[:, :, pages], "aux of pages": engine.page_aux[pages]}
        if engine.drafter is not None:
            found["K/V of the draft"] = engine.drafter._pool.data[:, :, pages]
        return found


@pytest.mark.parametrize("shape", [None, "4/4/16", "3/1/4"])
def test_padding_rows_change_nothing(tiny_model_dir, tiny_draft_dir, shape):
    target = tiny_model_dir("llama")
    draft = {"spec": "eagle4", "draft": str(tiny_draft_dir(target)), "spec_shape": shape} if shape else {}
    exact, padded = (InProcessEngine(target, max_num_seqs=16, **draft) for _ in range(2))
    rounds = padded.runner.graphs = Padded(padded.runner.engine)
    for count in COUNTS:
        params = [greedy(n, ignore_eos=True) for n in LENGTHS[:count]]
        params[-1] = SamplingParams(max_tokens=LENGTHS[count - 1], seed=count, ignore_eos=True)
        want, got = (engine.generate(PROMPTS[:count], params) for engine in (exact, padded))
        assert [a.token_ids for a in got] == [a.token_ids for a in want]
        assert [a.finished.num_accepted for a in got] == [a.finished.num_accepted for a in want]
        assert [a.finished.num_rounds for a in got] == [a.finished.num_rounds for a in want]
    assert rounds.num_padded > 20
