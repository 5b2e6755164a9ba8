"""Which attention a device gets, with all that a forward pass does not change: RoPE table, windows, scale."""

import torch
from torch import Tensor

from tokenspeed.attention import sdpa
from tokenspeed.attention.base import Attention, PrefillRows, TreeRows
from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.errors import ConfigError


class Backend:
    """Makes the attention object of each forward pass.

    Args:
        device: CPU takes plain torch, a GPU the Triton kernels.
        batch_invariant: target passes whose bits for a row depend on its own keys alone.
        cos_sin: float32 [P, D] RoPE table of the target. windows: of each target layer. scale: factor on q.k.
    """

    def __init__(
        self,
        device: torch.device,
        batch_invariant: bool,
        cos_sin: Tensor,
        windows: tuple[int | None, ...],
        scale: float,
    ):
        if device.type == "cpu":
            self._prefill, self._tree, self.draft = (
                sdpa.PrefillAttention,
                sdpa.TreeAttention,
                sdpa.TreeAttention,
            )
        else:
            from tokenspeed.attention import triton

            self._prefill, self.draft = triton.PrefillAttention, triton.TreeAttention
            self._tree = triton.InvariantTreeAttention if batch_invariant else triton.TreeAttention
        if batch_invariant and device.type == "cpu":
            raise ConfigError(
                "--batch-invariant is for GPUs; on a CPU use --dtype float32, where batches do not matter"
            )
        self._cos_sin, self._windows, self._scale = cos_sin, windows, scale

    def prefill(self, pool: KvPool, rows: PrefillRows) -> Attention:
        return self._prefill(pool, rows, self._cos_sin, self._windows, self._scale)

    def tree(self, pool: KvPool, rows: TreeRows) -> Attention:
        return self._tree(pool, rows, self._cos_sin, self._windows, self._scale)
