"""The two passes: a prefill of chunks, and one decode round. Device tensors only.

A round (docs/architecture.md): the drafter proposes a tree from (x_t, a_{t-1}), the target runs all nodes, every
node is sampled, and the path that agrees with the samples is kept: its K/V move to the front, the draft's K/V of
its tokens are appended.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed import kernels
from tokenspeed.attention.base import PrefillRows, TreeRows
from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.attention.select import Backend
from tokenspeed.config import Shape
from tokenspeed.models.decoder import Decoder
from tokenspeed.sampling.edits import LogitEdits
from tokenspeed.spec.base import Drafter, DraftTree, Frontier
from tokenspeed.spec.verify import accept
from tokenspeed.structured.matchers import Asked, Matchers
from tokenspeed.worker.state import SamplingState, SlotState

# Of RoundResult.failed. A row of the target's fails its request; a draft's only costs acceptance.
TARGET_NAN, DRAFT_NAN = 1, 2


@dataclass
class RoundResult:
    """Of B decode rows."""

    tokens: Tensor  # int64 [B, S + 1] emitted; the first counts[b] are valid
    counts: Tensor  # int64 [B]
    failed: Tensor  # [B] whose logits were NaN: bit TARGET_NAN, bit DRAFT_NAN; bool where nothing is drafted
    logits: Tensor  # float32 [B, N, V] raw, of every node
    path: Tensor  # int64 [B, S + 1] kept nodes


@dataclass
class PrefillResult:
    """Of C chunks. Sampled are those F chunks that end their prompt."""

    tokens: Tensor  # int64 [F]
    failed: Tensor  # bool [F]
    last_logits: Tensor  # float32 [F, V] raw
    hidden: Tensor  # [T, H]


class Engine:
    """Target, drafter, memory and slot state of one GPU (or CPU)."""

    def __init__(
        self,
        model: Decoder,
        drafter: Drafter | None,
        pool: KvPool,
        backend: Backend,
        state: SlotState,
        sampling: SamplingState,
        edits: LogitEdits,
        matchers: Matchers,
    ):
        self.model, self.drafter, self.pool, self.backend = model, drafter, pool, backend
        self.state, self.sampling, self.edits, self.matchers = state, sampling, edits, matchers
        self.aux_layers = () if drafter is None else drafter.aux_layers
        pages = pool.num_pages
        # Aux states of each page's last token, so that the first draft row after a prefix hit can be made.
        self.page_aux = torch.zeros(pages, state.aux.shape[1], dtype=state.aux.dtype, device=state.device)

    # ---- decode

    def round(
        self, slots: Tensor, host_slots: list[int], shape: Shape | None, max_len: int | None
    ) -> RoundResult:
        """One decode round, in three segments: draft; forward; sample and extend.

        Between the last two the host fills a mask for each node of a request with a matcher.

        Args:
            slots: int64 [B]. host_slots: the same, for rows with logit edits or a matcher; empty under capture.
            shape: the tree, or None for a plain round. max_len: host bound on the rows' lengths.
        """
        state = self.state
        last_index = state.lengths[slots] - 1  # t
        table = state.block_table[slots]
        last_tokens = state.last_tokens[slots]
        if shape is None or self.drafter is None:
            tree = _root(last_tokens)
        else:
            tree = self.drafter.propose(
                Frontier(last_tokens, state.aux[slots], last_index, table, max_len), shape
            )
        asked = self.matchers.ask(host_slots, tree.tokens, tree.parents)
        num_nodes = tree.tokens.shape[1]
        nodes = torch.arange(num_nodes, device=slots.device)
        indices = last_index[:, None] + nodes
        positions = last_index[:, None] + tree.depths
        kv_slots = state.kv_slots(table, indices)
        rows = TreeRows(
            positions=positions.flatten(),
            slots=kv_slots.flatten(),
            block_table=table,
            prefix_lens=last_index.to(torch.int32),
            mask=tree.mask,
            indices=positions,
            max_prefix=max_len,
            parents=tree.parents,
            depths=tree.depths,
        )
        hidden, aux = self.model.forward(
            tree.tokens.flatten(), rows.positions, self.backend.tree(self.pool, rows), self.aux_layers
        )
        logits = self.model.logits(hidden).view(len(slots), num_nodes, -1)
        sampled, failed = self._sample(logits, slots, host_slots, tree, positions + 1, asked)
        kept = accept(tree, sampled, None if shape is None else shape.steps)
        width = kept.path.shape[1]
        steps = torch.arange(width, device=slots.device)
        valid = steps < kept.count[:, None]
        if num_nodes > 1:
            source = kv_slots.gather(1, kept.path)
            target = torch.where(valid, kv_slots[:, :width], source)
            kernels.move_kv(self.pool.flat(), source.flatten(), target.flatten(), width)
        if self.drafter is not None:
            self._append_kept(slots, table, last_index, kept, valid, aux.view(len(slots), num_nodes, -1))
        state.last_tokens[slots] = kept.last
        state.lengths[slots] += kept.count
        state.lengths[state.dummy :].fill_(2)
        failed = failed.gather(1, kept.path).any(1)
        if tree.nan is not None:  # in the same tensor, so that it costs no copy of its own
            failed = failed | tree.nan * DRAFT_NAN
        if host_slots:
            self.edits.count(host_slots, kept.tokens, kept.count)
            self.matchers.count(host_slots, kept.tokens, kept.count)
        return RoundResult(kept.tokens, kept.count, failed, logits, kept.path)

    def _append_kept(
        self, slots: Tensor, table: Tensor, last_index: Tensor, kept, valid: Tensor, aux: Tensor
    ) -> None:
        """Draft K/V of the emitted tokens; aux states of the last one and of pages that the kept path fills."""
        width = valid.shape[1]
        steps = torch.arange(width, device=slots.device)
        path_aux = aux.gather(1, kept.path[:, :, None].expand(-1, -1, aux.shape[2]))  # a_t .. of kept nodes
        indices = last_index[:, None] + 1 + steps  # of the emitted tokens
        rows = torch.where(valid, self.state.kv_slots(table, indices), 0)
        self.drafter.append(kept.tokens.flatten(), path_aux.flatten(0, 1), indices.flatten(), rows.flatten())
        self.state.aux[slots] = path_aux.gather(
            1, (kept.count - 1)[:, None, None].expand(-1, 1, aux.shape[2])
        ).squeeze(1)
        places = self.state.kv_slots(table, indices - 1)
        size = self.state.page_size
        pages = torch.where(valid & (places % size == size - 1), places // size, 0)
        self.page_aux[pages.flatten()] = path_aux.flatten(0, 1)

    # ---- prefill

    def prefill(
        self,
        tokens: Tensor,
        rows: PrefillRows,
        slots: Tensor,
        ends: Tensor,
        host_slots: list[int],
    ) -> PrefillResult:
        """Computes chunks of prompts and samples the first token of those that end.

        Args:
            tokens: int64 [T]. rows: their places; C chunks. slots: int64 [C].
            ends: int64 [F] numbers of the chunks that end their prompt. host_slots: slots of those, in order.
        """
        state = self.state
        hidden, aux = self.model.forward(
            tokens, rows.positions, self.backend.prefill(self.pool, rows), self.aux_layers
        )
        last_rows = rows.cu_rows[1:].long() - 1
        if self.drafter is not None:
            self._append_prompt(tokens, rows, slots, aux, last_rows)
        end_rows, end_slots = last_rows[ends], slots[ends]
        logits = (
            self.model.logits(hidden[end_rows])
            if len(host_slots)
            else hidden.new_zeros(0, 1, dtype=torch.float32)
        )
        if not host_slots:
            return PrefillResult(ends, ends.bool(), logits, hidden)
        positions = rows.positions[end_rows] + 1
        tree = _root(state.last_tokens[end_slots])
        asked = self.matchers.ask(host_slots, tree.tokens, tree.parents)
        sampled, failed = self._sample(
            logits[:, None], end_slots, host_slots, tree, positions[:, None], asked
        )
        sampled = sampled[:, 0]
        state.last_tokens[end_slots] = sampled
        state.lengths[end_slots] = positions + 1
        if self.drafter is not None:
            places = state.kv_slots(state.block_table[end_slots], positions[:, None])[:, 0]
            self.drafter.append(sampled, aux[end_rows], positions, places)
        self.edits.count(host_slots, sampled[:, None], torch.ones_like(sampled))
        self.matchers.count(host_slots, sampled[:, None], torch.ones_like(sampled))
        return PrefillResult(sampled, failed[:, 0], logits, hidden)

    def _append_prompt(
        self, tokens: Tensor, rows: PrefillRows, slots: Tensor, aux: Tensor, last_rows: Tensor
    ) -> None:
        """Draft K/V of the chunks' tokens: the row of x_i takes a_{i-1}, at a chunk's start from the slot's state."""
        state = self.state
        before = torch.roll(aux, 1, 0)
        before[rows.cu_rows[:-1].long()] = state.aux[slots]
        places = torch.where(rows.positions > 0, rows.slots, 0)  # index 0 has no row
        self.drafter.append(tokens, before, rows.positions, places)
        state.aux[slots] = aux[last_rows]
        size = state.page_size
        pages = torch.where(rows.slots % size == size - 1, rows.slots // size, 0)
        self.page_aux[pages] = aux

    def resume(self, slot: int, page: int) -> None:
        """After a prefix hit whose last page is `page`: the next draft row's aux states."""
        self.state.aux[slot] = self.page_aux[page]

    # ---- sampling

    def _sample(
        self,
        logits: Tensor,
        slots: Tensor,
        host_slots: list[int],
        tree: DraftTree,
        positions: Tensor,
        asked: Asked | None,
    ) -> tuple[Tensor, Tensor]:
        """logits [B, N, V] -> tokens int64 [B, N] (0 where nothing can be drawn), failed bool [B, N]."""
        batch, num_nodes, vocab = logits.shape
        failed = logits.amax(-1).isnan()
        edited = self.edits.apply(logits, host_slots, tree.tokens, tree.mask, positions)
        if asked is not None:
            edited = logits.clone() if edited is logits else edited
            self.matchers.apply(asked, edited)
        params = self.sampling

        def per_node(values: Tensor) -> Tensor:
            return values[slots].repeat_interleave(num_nodes)

        sampled = kernels.sample(
            edited.view(batch * num_nodes, vocab),
            per_node(params.temperature),
            per_node(params.top_k),
            per_node(params.top_p),
            per_node(params.min_p),
            per_node(params.seeds),
            positions.flatten(),
        ).view(batch, num_nodes)
        return sampled.clamp(min=0), failed | (sampled < 0)


def _root(tokens: Tensor) -> DraftTree:
    """Trees of the root alone: plain decoding."""
    zeros = torch.zeros_like(tokens)[:, None]
    return DraftTree(tokens[:, None], zeros, zeros, zeros + 1)
