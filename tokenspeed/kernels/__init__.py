"""The ops that models, attention and sampling are made of: a function each, whichever kernel runs.

T is a number of rows, H a hidden size, B requests, N tree nodes of a request, D the head dimension. Tensors
are contiguous in their last dimension; other strides are free unless said. `registry` picks the kernel.
"""

from torch import Tensor

from tokenspeed.kernels.attention_ops import prefill_attention as prefill_attention
from tokenspeed.kernels.attention_ops import rope_store_kv as rope_store_kv
from tokenspeed.kernels.attention_ops import rope_tree_attention as rope_tree_attention
from tokenspeed.kernels.attention_ops import tree_attention as tree_attention
from tokenspeed.kernels.attention_ops import tree_attention_invariant as tree_attention_invariant
from tokenspeed.kernels.few_rows_ops import SMALL_K as SMALL_K
from tokenspeed.kernels.few_rows_ops import add_partials_rms_norm as add_partials_rms_norm
from tokenspeed.kernels.few_rows_ops import gate_up_silu as gate_up_silu
from tokenspeed.kernels.few_rows_ops import linear_add as linear_add
from tokenspeed.kernels.few_rows_ops import linear_rows as linear_rows
from tokenspeed.kernels.few_rows_ops import linear_sums as linear_sums
from tokenspeed.kernels.few_rows_ops import norm_gate_up_silu as norm_gate_up_silu
from tokenspeed.kernels.few_rows_ops import norm_linear as norm_linear
from tokenspeed.kernels.registry import Op
from tokenspeed.kernels.round_ops import accept as accept
from tokenspeed.kernels.round_ops import commit as commit
from tokenspeed.kernels.round_ops import keep_aux as keep_aux
from tokenspeed.kernels.round_ops import place_nodes as place_nodes
from tokenspeed.kernels.round_ops import read_slots as read_slots
from tokenspeed.kernels.rows import Draw as Draw

_rms_norm = Op("rms_norm")
_add_rms_norm = Op("add_rms_norm")
_embed_rms_norm = Op("embed_rms_norm")
_silu_and_mul = Op("silu_and_mul")
_sample = Op("sample")
_move_kv = Op("move_kv")
_linear_invariant = Op("linear_invariant")
_draft_rows = Op("draft_rows")
_draft_input = Op("draft_input")
_top_candidates = Op("top_candidates")
_linear_candidates = Op("linear_candidates")
_row_dots = Op("row_dots")
_grow_tree = Op("grow_tree")
_build_tree = Op("build_tree")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps), in float32, cast to x's dtype, times weight (Zhang and Sennrich 2019).

    Args:
        x: [T, H], or [T, heads, H] with any strides, as for the norm of q or k.
        weight: [H], or [heads, H], a weight of each head's own.

    Returns:
        A new contiguous tensor of x's shape and the weight's dtype.
    """
    return _rms_norm[x.device.type](x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x, in place and rounded to its dtype; returns rms_norm(residual, weight, eps).

    Args:
        x: [T, H]. residual: [T, H], overwritten. weight: [H]. Each may have a dtype of its own.

    Returns:
        [T, H] of the weight's dtype.
    """
    return _add_rms_norm[x.device.type](x, residual, weight, eps)


def embed_rms_norm(ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows of a table as the residual stream begins, and rms_norm of them.

    Args:
        ids: int64 [T]. table: [V, H], contiguous. weight: [H].

    Returns:
        residual float32 [T, H], and its norm [T, H] of the weight's dtype.
    """
    return _embed_rms_norm[ids.device.type](ids, table, weight, eps)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU: silu(gate) * up of gate_up = [gate | up] (Shazeer 2020).

    Args:
        gate_up: [T, 2 I].

    Returns:
        [T, I] of the same dtype. Whether silu is rounded to it before the product is left open.
    """
    return _silu_and_mul[gate_up.device.type](gate_up)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    slots: Tensor | None = None,
) -> Tensor:
    """Draws one token a row, reproducibly: the noise of a token depends on (seed, position, token id) alone.

    Below a temperature of 1e-5: argmax, the lowest id on ties. Else, on logits / temperature: keep the
    logits >= the k-th largest; of those the smallest set {p >= threshold} with mass >= top_p; drop p <
    min_p * max p; then the Gumbel-max trick, argmax(logit - log e) with e = Exp(1) noise from
    Philox-4x32-10 (Salmon et al. 2011): key = seed, counter = (token // 4, position low, position high, 0),
    word token % 4.

    Args:
        logits: float32 [R, V].
        temperature, top_p, min_p: float32 [S]. top_k: int32 [S], 0: off. seeds: int64 [S]. positions: int64 [R].
        slots: int64 [B], whose settings each R / B rows, side by side, have; None: S = R, each row its own.

    Returns:
        int64 [R]; -1 for a row that has failed: a NaN is among its logits, or all are -inf.
    """
    return _sample[logits.device.type](logits, temperature, top_k, top_p, min_p, seeds, positions, slots)


def move_kv(kv: Tensor, src: Tensor, dst: Tensor, group: int | None = None) -> None:
    """kv[:, dst] = kv[:, src], as if every read came before every write.

    Args:
        kv: [L, num_slots, E], contiguous, written in place. src, dst: int64 [M]; equal pairs cost nothing.
        group: moves of one request, side by side; only within a group may a dst be another's src. None: M.
    """
    _move_kv[kv.device.type](kv, src, dst, group)


def linear_invariant(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias; the bits of a row do not depend on T.

    Args:
        x: [T, K]. weight: [N, K]. bias: [N] or None.

    Returns:
        [T, N] of x's dtype.
    """
    return _linear_invariant[x.device.type](x, weight, bias)


def draft_rows(
    last_indices: Tensor, steps: int, k: int, num_positions: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Where the rows of B draft trees stand: one root each, then K lanes a step. A row of index t has position t - 1.

    Args:
        last_indices: int64 [B] of the roots. num_positions: of the RoPE table, which bounds positions.

    Returns:
        Keys that are in the pages int32 [B]; the roots' positions int64 [B]; of the lanes, int64 [S - 1, B, K] each:
        indices, positions, and rows in a side buffer of (S - 1) K rows a request.
    """
    return _draft_rows[last_indices.device.type](last_indices, steps, k, num_positions)


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
    """What a draft layer reads: rms_norm of tokens' embeddings beside rms_norm of states.

    Args:
        tokens: int64 [T]. table: [V, H]. state: [Q, H]; parents: int64 [B, K], T = B K: which of its request's Q / B
            rows of `state` each row has; None: Q = T, each its own. token_gain, state_gain: [H], of the two norms.

    Returns:
        [T, 2 H]; and a row's state [T, H], `normed` or as it is, to be overwritten (without parents perhaps `state`).
    """
    return _draft_input[tokens.device.type](
        tokens, table, state, parents, token_gain, state_gain, eps, normed
    )


def top_candidates(
    scores: Tensor, count: int, draw: Draw | None = None, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row, and the share of the row's mass that they hold.

    Args:
        scores: [R, V], count <= V.
        draw: of B requests, R / B rows each, side by side. A row that will be drawn at a temperature goes by
            score + temperature * the noise of `sample` in place of its scores.
        token_ids: int64 [V] what `sample` calls the tokens; None: 0..V-1.

    Returns:
        places int64 [R, count], ascending; of scores equal to the least one any may be left out.
        share: float32 [R], logsumexp of these less logsumexp of all; NaN for a row with a NaN.
    """
    return _top_candidates[scores.device.type](scores, count, draw, token_ids)


def linear_candidates(
    x: Tensor, weight: Tensor, count: int, draw: Draw | None = None, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """top_candidates of x @ weight.T, rounded to x's dtype, for few rows and a small K.

    Args:
        x: [R, K]. weight: [V, K], of x's dtype. count, draw, token_ids: as for `top_candidates`.

    Returns:
        As `top_candidates`.
    """
    return _linear_candidates[x.device.type](x, weight, count, draw, token_ids)


def row_dots(x: Tensor, table: Tensor, indices: Tensor) -> Tensor:
    """float32 [R, C]: row r of x [R, H] with rows indices[r] (int64 [R, C]) of table [V, H], contiguous."""
    return _row_dots[x.device.type](x, table, indices)


def grow_tree(
    scores: Tensor,
    ids: Tensor,
    share: Tensor,
    k: int,
    lanes: tuple[Tensor, Tensor, Tensor] | None,
    candidates: tuple[Tensor, Tensor, Tensor],
    step: int,
    last: bool,
    draw: Draw | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """One step of B draft trees: the K best of each row's C tokens are its children, and of all a tree's new children
    the K best are the next step's lanes. Of equal ones the first is better.

    Args:
        scores: float32 [B R, C] logits, C >= K; R = 1 (the root) in step 0, then K. ids: int64 [B R, C] the tokens.
        share: float32 [B R], added to log_softmax(scores), which gives log-probabilities, at most 0. A NaN there or
            in a row makes the row's -inf, still in the order of the scores.
        lanes: of the rows: candidate numbers int64, cumulative scores float32, and masks int64, [B, K] each;
            None in step 0.
        candidates: tokens int64, cumulative scores float32 and parents int64 (a candidate number; -1: the root), each
            [B, K + (S - 1) K^2]. Written here, child c of row l of step i at K + (i - 1) K^2 + l K + c.
        last: nothing follows.
        draw: as for `top_candidates`. Tokens that the request's top-k, top-p or min-p would drop, were there no
            others, lose 10.

    Returns:
        Of the next lanes, [B, K] each: tokens, rows of this step that they continue, masks (bit j: row j of all lanes
        so far, itself included), candidate numbers, scores. None in the last step.
    """
    return _grow_tree[scores.device.type](scores, ids, share, k, lanes, candidates, step, last, draw)


def build_tree(
    root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keeps the N - 1 best candidates of each tree and numbers them depth-first, the best child first.

    Args:
        root: int64 [B] the token at the root. tokens, scores, parents: as grow_tree's candidates; a parent has a lower
            number than its child, and no lower score. nodes: N, at most 64.

    Returns:
        tokens, parents, depths and masks (bit j: node j is an ancestor, or the node itself): int64 [B, N]; bool [B],
        whether a candidate's score is -inf, which nothing but NaN makes of the best log-probabilities.
    """
    return _build_tree[root.device.type](root, tokens, scores, parents, nodes)
