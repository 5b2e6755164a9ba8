"""The draft layer of EAGLE-1/2, EAGLE-3, 3.1 and EAGLE-4: features of the target's states in, output rows
out.

A row of index t is made of (a_{t-1}, x_t): the target's states that x_t was sampled from, and x_t
(EAGLE4.md). Papers: EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840).
"""

from dataclasses import replace

import torch
from torch import Tensor

from tokenspeed import kernels
from tokenspeed.distributed.groups import TensorParallel
from tokenspeed.layers import few_rows
from tokenspeed.layers.attention import Attend, SelfAttention
from tokenspeed.layers.embedding import Embedding, VocabTable
from tokenspeed.layers.few_rows import small_rows
from tokenspeed.layers.linear import ColumnParallel
from tokenspeed.layers.mlp import GatedMLP
from tokenspeed.layers.norm import RMSNorm, add
from tokenspeed.layers.parameter import Param, Params, Placement
from tokenspeed.spec.eagle4.formats import DraftConfig

LAYER = 0  # of the draft's KV pool


class DraftModel:
    """One decoder layer with what leads into it and the norm after it. Weights are uninitialised until
    loaded.

    Args:
        config: with `aux_layers` filled in.
        place: device, dtype, ranks.
        embedding: the target's table, or None where the draft has its own.
        o_bias, fc_bias: biases that only the checkpoint's tensors tell of.
        qkv_bias: likewise for EAGLE-1/2.
    """

    def __init__(
        self,
        config: DraftConfig,
        place: Placement,
        embedding: VocabTable | None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        fc_bias: bool = False,
    ):
        self.config, self.place = config, place
        whole = replace(place, tp=TensorParallel())  # small parts that every rank holds
        c, h, eps = config, config.hidden_size, config.rms_norm_eps
        self._own_table = VocabTable(c.vocab_size, h, place) if embedding is None else None
        self.embedding = Embedding(embedding if self._own_table is None else self._own_table)
        width = c.aux_size if c.wide else 2 * h
        self.fc = ColumnParallel(width, {"fc": h}, whole, fc_bias, few_rows.linear(whole, fc_bias))
        self.fc_norm = FeatureNorms(c.num_aux, c.target_hidden_size, eps, place) if c.fc_norm else None
        self.before_fc = RMSNorm(c.aux_size, eps, place) if c.norm_before_fc else None
        self.input_norm = RMSNorm(h, eps, place) if c.wide else None
        self.hidden_norm = RMSNorm(h, eps, place) if c.wide else None
        self.attention = SelfAttention(
            2 * h if c.wide else h, h, c.num_heads, c.num_kv_heads, c.head_dim, place, qkv_bias, o_bias
        )
        self._kv = self.attention.qkv.last(2)
        self.post_norm = RMSNorm(h, eps, place)
        self.mlp = GatedMLP(h, c.intermediate_size, place)
        self.norm = RMSNorm(h, eps, place) if c.wide else None
        self._small_rows = small_rows(place, o_bias, max(h, c.num_heads * c.head_dim, c.intermediate_size))

    def features(self, aux: Tensor) -> Tensor:
        """aux [T, A] target states -> state [T, H] of a first step; fresh for EAGLE-3 and 4, else aux."""
        if not self.config.wide:
            return aux
        if self.fc_norm is not None:
            aux = self.fc_norm.apply(aux)
        if self.before_fc is not None:
            aux = self.before_fc.apply(aux)
        return self.fc.apply(aux)

    def kv(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of rows whose output nobody needs: only the norms and two projections run.

        Args:
            tokens: int64 [T]. state: [T, H] of `features`.

        Returns:
            k (not rotated yet) and v, [T, Hkv, D] both, views of one buffer.
        """
        x, _ = self._input(tokens, state)
        heads = self._kv.apply(x).view(x.shape[0], -1, self.config.head_dim)
        k, v = heads.split(self.attention.num_kv_heads, dim=1)
        return k, v

    def layer(
        self, tokens: Tensor, state: Tensor, attn: Attend, parents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Args:
            tokens: int64 [T]. state: [Q, H] of `features` in a first step, of this method in later ones;
            overwritten. attn: an attention of the draft's own pool, which has one layer.
            parents: int64 [B, K] row of its request's `state` that each row continues; None: its own, Q = T.

        Returns:
            out [T, H] for the head, and the state of the next step, [T, H].
        """
        x, residual = self._input(tokens, state, parents)
        if 0 < len(x) <= self._small_rows:
            self.attention.add_apply(LAYER, self.attention.qkv.apply(x), residual, attn)
            self.mlp.add_apply(residual, self.post_norm)
            out = residual if self.norm is None else self.norm.apply(residual)
        else:
            y = self.post_norm.add_apply(self.attention.apply(LAYER, x, attn), residual)
            y = self.mlp.apply(y)
            out = add(y, residual) if self.norm is None else self.norm.add_apply(y, residual)
        return out, out if self.config.norm_output else residual

    def _input(self, tokens: Tensor, state: Tensor, parents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What qkv reads, and the residual stream that the layer adds to."""
        if self.config.wide and self.place.tp.size == 1 and self.input_norm.rounded:
            norms, normed = (self.input_norm, self.hidden_norm), self.config.norm_before_residual
            gains, eps = (norm.weight for norm in norms), self.config.rms_norm_eps
            return kernels.draft_input(
                tokens, self.embedding.table.weight, state, parents, *gains, eps, normed
            )
        if parents is not None:
            state = _rows_of(state, parents)
        embedded = self.embedding.apply(tokens)
        if not self.config.wide:
            x = self.fc.apply(torch.cat([embedded, state], -1))
            return x, x
        hidden = self.hidden_norm.apply(state)
        x = torch.cat([self.input_norm.apply(embedded), hidden], -1)
        return x, hidden if self.config.norm_before_residual else state

    def params(self) -> Params:
        """Every parameter of the checkpoint but the heads', by canonical name (checkpoint.canonical)."""
        layer = "layers.0."
        parts = {
            "input_norm.": self.before_fc,
            f"{layer}input_layernorm.": self.input_norm,
            f"{layer}hidden_norm.": self.hidden_norm,
            f"{layer}post_attention_layernorm.": self.post_norm,
            f"{layer}self_attn.": self.attention,
            f"{layer}mlp.": self.mlp,
            "norm.": self.norm,
            "embed_tokens.": self._own_table,
            "fc_norm.": self.fc_norm,
            "": self.fc,
        }
        found: Params = {}
        for prefix, part in parts.items():
            if part is not None:
                found |= part.params(prefix)
        return found


def _rows_of(state: Tensor, parents: Tensor) -> Tensor:
    """States of the rows' parents: [B * R, H], int64 [B, K] -> [B * K, H], a fresh tensor."""
    rows = state.view(len(parents), -1, state.shape[1])
    return rows.gather(1, parents[:, :, None].expand(-1, -1, state.shape[1])).flatten(0, 1)


class FeatureNorms:
    """An RMSNorm for each chunk of the features, in one launch for all chunks (EAGLE-3.1's fc_norm)."""

    def __init__(self, chunks: int, size: int, eps: float, place: Placement):
        self.weight, self.eps = place.empty(chunks, size), eps

    def apply(self, aux: Tensor) -> Tensor:
        """aux [T, chunks * size] -> the same shape."""
        return kernels.rms_norm(aux.view(-1, *self.weight.shape), self.weight, self.eps).view(aux.shape)

    def params(self, prefix: str) -> Params:
        return {f"{prefix}{i}.weight": Param(w, tuple(w.shape)) for i, w in enumerate(self.weight)}
