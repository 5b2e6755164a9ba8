"""The K/V memory of all layers: one allocation of pages."""

import torch
from torch import Tensor


class KvPool:
    """Pages of K and V of `num_layers` layers. Page 0 is the dummy page.

    Args:
        num_pages: pages, the dummy one included. page_size: tokens a page.
        num_kv_heads, head_dim: of one layer's K (and V). dtype, device: of the memory.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        shape = (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim)
        # Zeros, since a masked key still enters a product: 0 * NaN would be NaN.
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [(layer[0], layer[1]) for layer in self.data]
        self._slots = [layer.flatten(1, 2) for layer in self.data]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer, each [num_pages, page_size, num_kv_heads, head_dim]."""
        return self._layers[index]

    def slots(self, index: int) -> Tensor:
        """K and V of a layer by slot: [2, num_slots, num_kv_heads, head_dim]."""
        return self._slots[index]

    def flat(self) -> Tensor:
        """Every layer's K and V by slot: [num_layers * 2, num_slots, num_kv_heads * head_dim]."""
        return self.data.view(self.num_layers * 2, self.num_slots, -1)

    @staticmethod
    def page_bytes(
        num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one page takes in all layers."""
        return num_layers * 2 * page_size * num_kv_heads * head_dim * dtype.itemsize
