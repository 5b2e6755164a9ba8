"""Self-attention around whoever keeps K/V: projection to q, k and v, their norms, output projection."""

from collections.abc import Callable

from torch import Tensor

from tokenspeed.layers import few_rows
from tokenspeed.layers.linear import ColumnParallel, RowParallel
from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.parameter import Params, Placement

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # attention.base.Attention


class SelfAttention:
    """Grouped-query attention.

    Args:
        in_features: width of the rows that qkv reads (2H in an EAGLE-3 draft).
        out_features: width of the rows that come out.
        qk_norm_eps: RMSNorm over each head of q and k before the rotation (Qwen3), or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        place: Placement,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
    ):
        self.num_heads = place.tp.share(num_heads, "num_attention_heads")
        self.num_kv_heads = place.tp.share(num_kv_heads, "num_key_value_heads")
        self.head_dim = head_dim
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = ColumnParallel(in_features, parts, place, qkv_bias, few_rows.linear(place, qkv_bias))
        self.o = RowParallel("o_proj", q_size, out_features, place, o_bias)
        self.q_norm = RMSNorm(head_dim, qk_norm_eps, place) if qk_norm_eps is not None else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps, place) if qk_norm_eps is not None else None

    def apply(self, layer: int, x: Tensor, attn: Attend) -> Tensor:
        """x [T, in_features] -> [T, out_features], or partial sums of it (RowParallel.apply).

        `layer` is the layer's index in the KV pool.
        """
        return self.o.apply(self._attend(layer, self.qkv.apply(x), attn))

    def add_apply(self, layer: int, qkv: Tensor, residual: Tensor, attn: Attend) -> None:
        """residual [T, out_features] += what `apply` makes of qkv [T, ...], the output of `self.qkv`.

        Where `few_rows.small_rows` allows it.
        """
        self.o.add_apply(self._attend(layer, qkv, attn), residual)

    def _attend(self, layer: int, qkv: Tensor, attn: Attend) -> Tensor:
        """[T, Hq * D]. attn gets q [T, Hq, D], k and v [T, Hkv, D], not rotated yet; rows may be strided."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)  # q, k and v heads one after another
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None:
            q, k = self.q_norm.apply(q), self.k_norm.apply(k)
        return attn(layer, q, k, v).reshape(qkv.shape[0], -1)

    def params(self, prefix: str) -> Params:
        found = self.qkv.params(prefix) | self.o.params(prefix)
        if self.q_norm is not None:
            found |= self.q_norm.params(f"{prefix}q_norm.") | self.k_norm.params(f"{prefix}k_norm.")
        return found
