"""Attention over the rows of one forward pass, without pages: what models are tested with."""

import torch
import torch.nn.functional as F

from tokenspeed.layers.rotary import rope_table

NUM_TOKENS = 48


class DenseCausal:
    """Attention over the rows of one call, positions 0..T-1, written with a full mask."""

    def __init__(self, config, num_tokens: int):
        table = rope_table(config.rope, config.head_dim, num_tokens, torch.device("cpu"))
        self.cos, self.sin = (half[:, None] for half in table.chunk(2, dim=-1))
        rows = torch.arange(num_tokens)
        self.distance = rows[:, None] - rows
        self.windows, self.scale = config.windows, config.head_dim**-0.5

    def rotate(self, x):
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), dim=-1).to(x.dtype)

    def __call__(self, layer, q, k, v):
        window = self.windows[layer]
        seen = (self.distance >= 0) & (self.distance < (window or len(self.distance)))
        q, k, v = (x.transpose(0, 1) for x in (self.rotate(q), self.rotate(k), v))
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, seen, scale=self.scale).transpose(0, 1)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 300, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed))
