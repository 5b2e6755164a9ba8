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
from tokenspeed.spec.verify import Accepted, accept
from tokenspeed.structured.matchers import Asked, Matchers
from tokenspeed.worker.prefill import ChunkTensors
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

    def packed(self) -> Tensor:
        """What the host wants, in one tensor for one copy: int64 [B, S + 3] of tokens, count, failed."""
        return torch.cat([self.tokens, self.counts[:, None], self.failed[:, None].long()], 1)


@dataclass
class PrefillResult:
    """Of T rows and F samples."""

    tokens: Tensor  # int64 [F]
    failed: Tensor  # bool [F]
    last_logits: Tensor  # float32 [F, V] raw
    hidden: Tensor  # [T, H]

    def packed(self) -> Tensor:
        """What the host wants, in one tensor for one copy: int64 [F, 2] of token, failed."""
        return torch.stack([self.tokens, self.failed.long()], 1)


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
        # Of plain rounds' trees: parents and depths, masks.
        self._zeros, self._ones = torch.arange(2, device=state.device)[:, None, None].repeat(
            1, state.num_slots + 1, 1
        )

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
        state, size = self.state, self.state.page_size
        aux = None if self.drafter is None else state.aux
        last_tokens, last_index, prefix_lens, table, aux = kernels.read_slots(
            slots, state.last_tokens, state.lengths, state.block_table, aux
        )
        if shape is None or self.drafter is None:
            tree = self._root(last_tokens)
        else:
            draw = self.sampling.draw(slots, last_index)
            tree = self.drafter.propose(Frontier(last_tokens, aux, last_index, table, max_len, draw), shape)
        asked = self.matchers.ask(host_slots, tree.tokens, tree.parents)
        batch, num_nodes = tree.tokens.shape
        positions, next_positions, kv_slots = kernels.place_nodes(last_index, tree.depths, table, size)
        rows = TreeRows(
            positions=positions.flatten(),
            slots=kv_slots.flatten(),
            block_table=table,
            prefix_lens=prefix_lens,
            mask=tree.mask,
            indices=positions,
            max_prefix=max_len,
            parents=tree.parents,
            depths=tree.depths,
        )
        hidden, aux = self.model.forward(
            tree.tokens.flatten(), rows.positions, self.backend.tree(self.pool, rows), self.aux_layers
        )
        logits = self.model.logits(hidden).view(batch, num_nodes, -1)
        sampled = self._sample(logits, slots, host_slots, tree, next_positions, asked)
        kept = accept(tree, sampled, None if shape is None else shape.steps)
        source, target, indices, places = kernels.commit(
            slots,
            last_index,
            table,
            kv_slots,
            kept.path,
            kept.count,
            kept.tokens,
            state.last_tokens,
            state.lengths,
            size,
        )
        if num_nodes > 1:
            kernels.move_kv(self.pool.flat(), source.flatten(), target.flatten(), source.shape[1])
        if self.drafter is not None:
            self._append_kept(slots, kept, target, indices, places, aux.view(batch, num_nodes, -1))
        failed = kept.failed
        if tree.nan is not None:  # in the same tensor, so that it costs no copy of its own
            failed = failed.view(torch.int8).add(tree.nan.view(torch.int8), alpha=DRAFT_NAN)
        if host_slots:
            self.edits.count(host_slots, kept.tokens, kept.count)
            self.matchers.count(host_slots, kept.tokens, kept.count)
        return RoundResult(kept.tokens, kept.count, failed, logits, kept.path)

    def _append_kept(
        self, slots: Tensor, kept: Accepted, target: Tensor, indices: Tensor, places: Tensor, aux: Tensor
    ) -> None:
        """Draft K/V of the emitted tokens; aux states of the last one and of pages that the kept path fills."""
        state = self.state
        aux = kernels.keep_aux(
            aux, slots, kept.path, kept.count, target, state.aux, self.page_aux, state.page_size
        )
        self.drafter.append(kept.tokens.flatten(), aux.flatten(0, 1), indices.flatten(), places.flatten())

    def _root(self, tokens: Tensor) -> DraftTree:
        """Trees of the root alone: plain decoding."""
        zeros = self._zeros[: len(tokens)]
        return DraftTree(tokens[:, None], zeros, zeros, self._ones[: len(tokens)])

    # ---- prefill

    def prefill(self, chunks: ChunkTensors, host_slots: list[int]) -> PrefillResult:
        """Computes chunks of prompts and samples the first token of those that end.

        Args:
            chunks: padded or not. host_slots: slots of the samples, for rows with logit edits or a matcher; empty
                under capture.
        """
        state, slots, positions = self.state, chunks.sample_slots, chunks.sample_positions
        rows = chunks.rows(state)
        hidden, aux = self.model.forward(
            chunks.tokens, rows.positions, self.backend.prefill(self.pool, rows), self.aux_layers
        )
        if self.drafter is not None:
            self._append_prompt(chunks, rows, aux)
        if not len(slots):
            return PrefillResult(slots, slots.bool(), hidden.new_zeros(0, 1, dtype=torch.float32), hidden)
        logits = self.model.logits(hidden[chunks.sample_rows])
        tree = self._root(state.last_tokens[slots])
        asked = self.matchers.ask(host_slots, tree.tokens, tree.parents)
        sampled = self._sample(logits[:, None], slots, host_slots, tree, positions[:, None], asked)[:, 0]
        failed, sampled = sampled < 0, sampled.clamp(min=0)
        state.last_tokens[slots] = sampled
        state.lengths[slots] = positions + 1
        if self.drafter is not None:
            places = state.kv_slots(state.block_table[slots], positions[:, None])[:, 0]
            self.drafter.append(sampled, aux[chunks.sample_rows], positions, places)
        if host_slots:
            self.edits.count(host_slots, sampled[:, None], torch.ones_like(sampled))
            self.matchers.count(host_slots, sampled[:, None], torch.ones_like(sampled))
        return PrefillResult(sampled, failed, logits, hidden)

    def _append_prompt(self, chunks: ChunkTensors, rows: PrefillRows, aux: Tensor) -> None:
        """Draft K/V of the chunks' tokens: the row of x_i takes a_{i-1}, at a chunk's start from the slot's state."""
        state, slots = self.state, chunks.slots
        carried = state.aux[slots]
        # One row more than there are: empty chunks may begin behind the last.
        before = aux.new_empty(len(aux) + 1, aux.shape[1])
        before[1:] = aux
        before[chunks.cu_rows[:-1]] = carried
        places = torch.where(rows.positions > 0, rows.slots, 0)  # index 0 has no row
        self.drafter.append(chunks.tokens, before[:-1], rows.positions, places)
        # The dummy slot keeps what it has: a request's NaN must not get into padding.
        state.aux[slots] = torch.where((slots == state.dummy)[:, None], carried, aux[chunks.last_rows])
        size = state.page_size
        pages = torch.where(rows.slots % size == size - 1, rows.slots // size, 0)
        self.page_aux[pages] = aux

    def resume(self, slots: Tensor, pages: Tensor) -> None:
        """After prefix hits whose last pages are `pages`: the next draft rows' aux states. int64 [R] both."""
        self.state.aux[slots] = self.page_aux[pages]

    # ---- sampling

    def _sample(
        self,
        logits: Tensor,
        slots: Tensor,
        host_slots: list[int],
        tree: DraftTree,
        positions: Tensor,
        asked: Asked | None,
    ) -> Tensor:
        """logits [B, N, V] -> tokens int64 [B, N], -1 where the logits are NaN or nothing can be drawn."""
        batch, num_nodes, vocab = logits.shape
        edited = self.edits.apply(logits, host_slots, tree.tokens, tree.mask, positions)
        if asked is not None:
            edited = logits.clone() if edited is logits else edited
            self.matchers.apply(asked, edited)
        params = self.sampling
        return kernels.sample(
            edited.view(batch * num_nodes, vocab),
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.seeds,
            positions.flatten(),
            slots,
        ).view(batch, num_nodes)
