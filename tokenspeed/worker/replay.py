"""Reads known texts with a target and its drafter, without decoding: which rounds would have made them.

The prompt and its answer go through the target in chunks (teacher forcing), which gives the states that the
drafter works from; `spec.evaluate` then drafts at every position of the answer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed.attention.base import PrefillRows
from tokenspeed.config import Shape
from tokenspeed.params import SamplingParams
from tokenspeed.spec.evaluate import Round, offline_rounds
from tokenspeed.worker.engine import Engine

CHUNK = 512  # tokens a pass of the target
MIN_PAGES = 4  # of a KV pool, the dummy page aside


def pool_tokens(longest: int, page_size: int) -> int:
    """Tokens of KV that `replay` needs for texts of up to `longest` tokens."""
    return max(-(-longest // page_size), MIN_PAGES) * page_size


@torch.inference_mode()
def replay(
    engine: Engine,
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    shape: Shape,
    params: SamplingParams | None = None,
) -> tuple[Round, ...]:
    """The rounds in which decoding with `shape` would give the answer `token_ids` to a prompt.

    Overwrites the engine's K/V from page 1 on, so nothing else may run on it. In float32 on a CPU the rounds
    are those of true decoding; elsewhere they differ where the kernels' rounding turns a near-tie.

    Args:
        engine: with a drafter, and a KV pool of `pool_tokens` of the whole text.
        params: with which the answer was sampled, seed and all; None: greedily.
    """
    tokens = torch.tensor([*prompt_ids, *token_ids], device=engine.state.device)
    page_size = engine.pool.page_size
    draw = None
    if params is not None:
        engine.sampling.set([0], [params])
        draw = engine.sampling.draw(tokens.new_zeros(1), tokens.new_zeros(1))
    aux = read(engine, tokens)
    return offline_rounds(engine.drafter, tokens, aux, len(prompt_ids), shape, page_size, draw=draw)


@torch.inference_mode()
def read(engine: Engine, tokens: Tensor) -> Tensor:
    """The target's aux states over a text: int64 [n] -> [n, A], the state after each token."""
    pages = -(-len(tokens) // engine.pool.page_size)
    table = torch.arange(1, pages + 1, dtype=torch.int32, device=tokens.device)[None]
    found = []
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        rows = _rows(start, len(chunk), table, engine.pool.page_size)
        attention = engine.backend.prefill(engine.pool, rows)
        found.append(engine.model.forward(chunk, rows.positions, attention, engine.aux_layers)[1])
    return torch.cat(found)


def _rows(start: int, count: int, table: Tensor, page_size: int) -> PrefillRows:
    """One chunk of one text that lies in pages 1, 2, ..."""
    positions = torch.arange(start, start + count, device=table.device)
    return PrefillRows(
        positions=positions,
        slots=positions + page_size,
        block_table=table,
        starts=torch.tensor([start], dtype=torch.int32, device=table.device),
        cu_rows=torch.tensor([0, count], dtype=torch.int32, device=table.device),
        chunks=[(start, count)],
    )
