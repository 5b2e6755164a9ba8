"""The dense decoder that every supported family shares: RMSNorm, GQA with RoPE, SwiGLU.

The residual stream is float32 whatever the model's dtype: rounded to bfloat16 after every addition, it alone would be
two fifths of the rounding noise of a pass (docs/exactness.md).
"""

from torch import Tensor

from tokenspeed import kernels
from tokenspeed.attention.base import Attention
from tokenspeed.layers.attention import SelfAttention
from tokenspeed.layers.embedding import Embedding, Head, VocabTable
from tokenspeed.layers.few_rows import small_rows
from tokenspeed.layers.mlp import GatedMLP
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.parameter import Params, Placement
from tokenspeed.models.config import ModelConfig


class DecoderLayer:
    """One layer, in two forms: `apply`, whose last addition to the residual stream is fused with the next norm, by the
    caller; and for few rows of a small model, whose time is launches, `add_apply`, which reads and writes the stream.
    """

    def __init__(self, config: ModelConfig, place: Placement):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.attention = SelfAttention(
            config.hidden_size,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            place,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        )
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, place, config.mlp_bias)

    def apply(self, index: int, normed: Tensor, residual: Tensor, attn: Attention) -> Tensor:
        """Attention and MLP of one layer.

        Args:
            index: the layer's K/V in the pool. normed: [T, H] input_norm of residual.
            residual: float32 [T, H], the stream; attention's output is added in place.

        Returns:
            The MLP's output [T, H], or partial sums of it, which the caller adds to the stream.
        """
        x = self.attention.apply(index, normed, attn)
        return self.mlp.apply(self.post_norm.add_apply(x, residual))

    def add_apply(self, index: int, residual: Tensor, attn: Attention) -> None:
        """Adds attention and MLP to the stream in place, in four launches and attn's, where `few_rows.small_rows`
        allows it. Arguments as of `apply`.
        """
        qkv = self.attention.qkv.norm_apply(residual, self.input_norm)
        self.attention.add_apply(index, qkv, residual, attn)
        self.mlp.add_apply(residual, self.post_norm)

    def params(self, prefix: str) -> Params:
        return {
            **self.input_norm.params(f"{prefix}input_layernorm."),
            **self.attention.params(f"{prefix}self_attn."),
            **self.post_norm.params(f"{prefix}post_attention_layernorm."),
            **self.mlp.params(f"{prefix}mlp."),
        }


class Decoder:
    """A target model. It holds weights only: where K/V lie and what a row sees is `attn`'s business.

    Args:
        config: what to build; weights are uninitialised until `models.weights` has filled them.
        place: device, dtype, ranks, and whether matmuls are batch-invariant.
    """

    prefix = "model."  # of the checkpoint's names, lm_head's aside
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)  # endings of checkpoint names that carry nothing

    def __init__(self, config: ModelConfig, place: Placement):
        self.config, self.place = config, place
        self.num_bytes = 0  # memory of this rank's weights, once loaded
        table = VocabTable(config.vocab_size, config.hidden_size, place)
        self.embedding = Embedding(table)
        self.layers = [DecoderLayer(config, place) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        bias = config.qkv_bias or config.o_bias or config.mlp_bias
        width = max(config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
        self._small_rows = small_rows(place, bias, width)
        tied = config.tie_word_embeddings
        self.head = Head(table if tied else VocabTable(config.vocab_size, config.hidden_size, place), place)
        if tied:
            self.ignored = (*self.ignored, "lm_head.weight")

    def forward(
        self, input_ids: Tensor, positions: Tensor, attn: Attention, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over T rows.

        Args:
            input_ids: int64 [T], each below the vocabulary's size. positions: int64 [T], not read
                here: RoPE is the business of `attn`.
            aux_layers: whose states to return too: i < num_layers is the residual stream after layer i,
                num_layers the final norm's output.

        Returns:
            hidden [T, H] after the final norm; aux [T, len(aux_layers) * H], side by side in the order asked
            for (None when none was).
        """
        residual, x = self._input(input_ids)
        rows, width = residual.shape
        small = 0 < rows <= self._small_rows
        aux = x.new_empty(rows, len(aux_layers), width) if aux_layers else None
        for i, layer in enumerate(self.layers):
            if small:
                layer.add_apply(i, residual, attn)
            else:
                after = self.layers[i + 1].input_norm if i + 1 < len(self.layers) else self.norm
                x = after.add_apply(layer.apply(i, x, residual, attn), residual)
            for j in _places(i, aux_layers):
                aux[:, j] = residual
        if small:
            x = self.norm.apply(residual)
        for j in _places(len(self.layers), aux_layers):
            aux[:, j] = x
        return x, None if aux is None else aux.view(rows, -1)

    def _input(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] -> the residual stream and the first layer's norm of it."""
        table, norm = self.embedding.table, self.layers[0].input_norm
        if table.tp.size == 1 and norm.rounded:
            return kernels.embed_rms_norm(input_ids, table.weight, norm.weight, norm.eps)
        residual = self.embedding.apply(input_ids).float()
        return residual, norm.apply(residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, H] after the final norm -> float32 [R, V]."""
        return self.head.apply(hidden)

    def params(self) -> Params:
        """Every parameter by its name in the checkpoint."""
        found = self.embedding.table.params(f"{self.prefix}embed_tokens.")
        for i, layer in enumerate(self.layers):
            found |= layer.params(f"{self.prefix}layers.{i}.")
        found |= self.norm.params(f"{self.prefix}norm.")
        if not self.config.tie_word_embeddings:
            found |= self.head.table.params("lm_head.")
        return found


def _places(layer: int, aux_layers: tuple[int, ...]) -> list[int]:
    return [j for j, wanted in enumerate(aux_layers) if wanted == layer]
