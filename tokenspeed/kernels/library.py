"""The ops of `tokenspeed.kernels` as torch.ops.tokenspeed.NAME, for torch.compile, torch.export and FakeTensorMode.

`import tokenspeed.kernels.library` registers every op, with a fake implementation that gives shapes and dtypes without
data. The engine calls the plain functions instead, since torch's dispatcher takes microseconds an op. None has a
gradient.

A schema knows no tuples, no dataclasses and no result that may be None. So arguments and results are those of
`tokenspeed.kernels`, save that

- a tuple of tensors is a list, and empty for None;
- `Draw` is the list of its seven tensors, empty for None, then `depth`;
- `ChunkRows` is its three tensors, then two lists of numbers, starts and counts of the chunks;
- `read_slots` and `grow_tree` return tensors of no columns in place of None;
- results are contiguous and share no memory.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace

import torch
from torch import Tensor

from tokenspeed import kernels
from tokenspeed.kernels.registry import forced_names

NAMESPACE = "tokenspeed"


def _register(*mutated: str, run: Callable | None = None) -> Callable[[Callable], Callable]:
    """Registers the op that has the decorated fake implementation's name.

    Args:
        mutated: arguments that are written. run: what runs it, where the schema is not that of the op itself.
    """

    def register(fake: Callable) -> Callable:
        fn = run or getattr(kernels, fake.__name__)
        torch.library.custom_op(f"{NAMESPACE}::{fake.__name__}", _apart(fn), mutates_args=mutated)
        torch.library.register_fake(f"{NAMESPACE}::{fake.__name__}", fake)
        return fake

    return register


def _apart(fn: Callable) -> Callable:
    """fn with contiguous results, each in memory of its own: copied where a kernel has it otherwise."""

    @wraps(fn)
    def run(*args):
        found = fn(*args)
        if found is None:
            return None
        seen, own = {_memory(x) for x in args if isinstance(x, Tensor)}, []
        for x in found if isinstance(found, tuple) else (found,):
            own.append((x.clone() if _memory(x) in seen else x).contiguous())
            seen.add(_memory(x))
        return tuple(own) if isinstance(found, tuple) else own[0]

    return run


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _ints(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int64)


def _floats(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


@_register()
def rms_norm(x: Tensor, weight: Tensor, *_) -> Tensor:
    return x.new_empty(x.shape, dtype=weight.dtype)


@_register("residual")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *_) -> Tensor:
    return weight.new_empty(x.shape)


@_register()
def embed_rms_norm(ids: Tensor, table: Tensor, weight: Tensor, *_) -> tuple[Tensor, Tensor]:
    shape = ids.shape[0], table.shape[1]
    return _floats(table, *shape), weight.new_empty(shape)


@_register()
def silu_and_mul(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@_register()
def sample(logits: Tensor, *_) -> Tensor:
    return _ints(logits, logits.shape[0])


@_register("kv")
def move_kv(*_) -> None:
    pass


@_register()
def linear_invariant(x: Tensor, weight: Tensor, *_) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_register()
def draft_rows(last_indices: Tensor, steps: int, k: int, *_) -> tuple[Tensor, ...]:
    batch = last_indices.shape[0]
    lanes = (_ints(last_indices, steps - 1, batch, k) for _ in range(3))
    return last_indices.new_empty(batch, dtype=torch.int32), _ints(last_indices, batch), *lanes


@_register()
def draft_input(
    tokens: Tensor,
    table: Tensor,
    state: Tensor,
    parents: Tensor | None,
    token_gain: Tensor,
    state_gain: Tensor,
    eps: float,
    normed: bool,
) -> tuple[Tensor, Tensor]:
    rows, size = tokens.shape[0], state.shape[1]
    kept = state_gain if normed else state
    return token_gain.new_empty(rows, 2 * size), kept.new_empty(rows, size)


def _draw(draw: Sequence[Tensor], depth: int) -> kernels.Draw | None:
    return kernels.Draw(*draw, depth) if draw else None


def _top_candidates(
    scores: Tensor, count: int, draw: Sequence[Tensor], depth: int, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return kernels.top_candidates(scores, count, _draw(draw, depth), token_ids)


@_register(run=_top_candidates)
def top_candidates(scores: Tensor, count: int, *_) -> tuple[Tensor, Tensor]:
    return _ints(scores, scores.shape[0], count), _floats(scores, scores.shape[0])


def _linear_candidates(
    x: Tensor,
    weight: Tensor,
    count: int,
    draw: Sequence[Tensor],
    depth: int,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return kernels.linear_candidates(x, weight, count, _draw(draw, depth), token_ids)


@_register(run=_linear_candidates)
def linear_candidates(x: Tensor, weight: Tensor, count: int, *_) -> tuple[Tensor, Tensor]:
    return _ints(x, x.shape[0], count), _floats(x, x.shape[0])


@_register()
def row_dots(x: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    return _floats(x, *indices.shape)


def _grow_tree(
    scores: Tensor,
    ids: Tensor,
    share: Tensor,
    k: int,
    lanes: Sequence[Tensor],
    candidates: Sequence[Tensor],
    step: int,
    last: bool,
    draw: Sequence[Tensor],
    depth: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    more = candidates, step, last, _draw(draw, depth)
    return kernels.grow_tree(scores, ids, share, k, lanes or None, *more) or _lanes(candidates[0], k, last)


@_register("candidates", run=_grow_tree)
def grow_tree(
    scores: Tensor, ids: Tensor, share: Tensor, k: int, lanes, candidates, step, last: bool, *_
) -> tuple[Tensor, ...]:
    return _lanes(candidates[0], k, last)


def _lanes(tokens: Tensor, k: int, last: bool) -> tuple[Tensor, ...]:
    """The next step's, or none of them."""
    shape = tokens.shape[0], 0 if last else k
    return *(_ints(tokens, *shape) for _ in range(4)), _floats(tokens, *shape)


@_register()
def build_tree(
    root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int
) -> tuple[Tensor, ...]:
    batch = root.shape[0]
    return *(_ints(root, batch, nodes) for _ in range(4)), root.new_empty(batch, dtype=torch.bool)


@_register("q", "k", "k_cache", "v_cache")
def rope_store_kv(*_) -> None:
    pass


def _prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    starts: Tensor,
    cu_rows: Tensor,
    chunk_starts: Sequence[int],
    chunk_counts: Sequence[int],
    scale: float,
    window: int | None,
) -> Tensor:
    chunks = list(zip(chunk_starts, chunk_counts, strict=True))
    rows = SimpleNamespace(block_table=block_table, starts=starts, cu_rows=cu_rows, chunks=chunks)
    return kernels.prefill_attention(q, k_cache, v_cache, rows, scale, window)


@_register(run=_prefill_attention)
def prefill_attention(q: Tensor, *_) -> Tensor:
    return q.new_empty(q.shape)


@_register()
def tree_attention(q: Tensor, *_) -> Tensor:
    return q.new_empty(q.shape)


def _rope_tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tail: Sequence[Tensor],
    tail_start: int,
    slots: Tensor | None,
    block_table: Tensor,
    prefix_lens: Tensor,
    mask: Tensor,
    indices: Tensor,
    first: int,
    scale: float,
    window: int | None,
    max_prefix: int | None = None,
) -> Tensor:
    rows = q, k, v, cos_sin, positions, k_cache, v_cache, tail or None, tail_start, slots
    seen = block_table, prefix_lens, mask, indices, first, scale, window, max_prefix
    return kernels.rope_tree_attention(*rows, *seen)


@_register("q", "k", "k_cache", "v_cache", "tail", run=_rope_tree_attention)
def rope_tree_attention(q: Tensor, *_) -> Tensor:
    return q.new_empty(q.shape)


@_register()
def tree_attention_invariant(q: Tensor, *_) -> Tensor:
    return q.new_empty(q.shape)


@_register()
def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_register()
def linear_sums(x: Tensor, weight: Tensor) -> Tensor:
    return _floats(x, _num_sums(x, weight), x.shape[0], weight.shape[0])


def _num_sums(x: Tensor, weight: Tensor) -> int:
    """S of linear_sums: as Triton's kernel cuts K, which CUDA C++ follows; 1 where plain torch runs."""
    if x.device.type != "cuda" or forced_names().get("linear_sums") == "torch":
        return 1
    from tokenspeed.kernels.triton import few_rows  # a CPU process never loads Triton

    return few_rows.num_sums(weight.shape[0], weight.shape[1], x.dtype)


@_register()
def gate_up_silu(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // 2)


@_register("residual")
def add_partials_rms_norm(partials: Tensor, residual: Tensor, weight: Tensor, *_) -> Tensor:
    return weight.new_empty(residual.shape)


@_register()
def norm_linear(residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    return weight.new_empty(residual.shape[0], weight.shape[0])


@_register()
def norm_gate_up_silu(residual: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    return weight.new_empty(residual.shape[0], weight.shape[0] // 2)


@_register("residual")
def linear_add(*_) -> None:
    pass


def _read_slots(
    slots: Tensor, last_tokens: Tensor, lengths: Tensor, block_table: Tensor, aux: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *found, root_aux = kernels.read_slots(slots, last_tokens, lengths, block_table, aux)
    return *found, _floats(slots, slots.shape[0], 0) if root_aux is None else root_aux


@_register(run=_read_slots)
def read_slots(
    slots: Tensor, last_tokens: Tensor, lengths: Tensor, block_table: Tensor, aux: Tensor | None
) -> tuple[Tensor, ...]:
    batch = slots.shape[0]
    table = block_table.new_empty(batch, block_table.shape[1])
    root_aux = _floats(slots, batch, 0) if aux is None else aux.new_empty(batch, aux.shape[1])
    indices32 = slots.new_empty(batch, dtype=torch.int32)
    return _ints(slots, batch), _ints(slots, batch), indices32, table, root_aux


@_register()
def place_nodes(last_indices: Tensor, depths: Tensor, *_) -> tuple[Tensor, ...]:
    return tuple(_ints(depths, *depths.shape) for _ in range(3))


@_register()
def accept(
    tokens: Tensor, parents: Tensor, depths: Tensor, mask: Tensor, sampled: Tensor, width: int
) -> tuple[Tensor, ...]:
    batch = tokens.shape[0]
    path, emitted = (_ints(tokens, batch, width) for _ in range(2))
    return path, _ints(tokens, batch), emitted, tokens.new_empty(batch, dtype=torch.bool)


@_register("last_tokens", "lengths")
def commit(
    slots: Tensor, last_indices: Tensor, table: Tensor, kv_slots: Tensor, path: Tensor, *_
) -> tuple[Tensor, ...]:
    return tuple(_ints(path, *path.shape) for _ in range(4))


@_register("slot_aux", "page_aux")
def keep_aux(aux: Tensor, slots: Tensor, path: Tensor, *_) -> Tensor:
    return aux.new_empty(*path.shape, aux.shape[2])
