"""The draft as training sees it: parameters under their checkpoint names, and one forward that unrolls every
round start of a batch the way the engine drafts a chain.

Training-time test of EAGLE-3 (arXiv 2503.01840), section 3: a later step is fed the draft's own state, and
attends the committed rows up to its start and its own earlier steps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.layers.rotary import rope_table
from tokenspeed.spec.eagle4.checkpoint import parameters
from tokenspeed.spec.eagle4.formats import DraftConfig
from tokenspeed.train.target import Inputs

_LAYER = "layers.0."
_ATTENTION, _MLP = _LAYER + "self_attn.", _LAYER + "mlp."
# Standard deviations of the first weights: what adds to the stream starts smaller than what reads it.
_SCALES = {"o_proj": 0.02, "down_proj": 0.02, "fc": 0.01}
_SCALE = 0.03
_ALIGN = 8  # a row of scores is padded to so many, which half-precision products want


class TrainableDraft:
    """Float32 master weights of an EAGLE-4 draft that shares the target's embedding.

    Args:
        config: wide, with fc_norm, without a norm before fc and without biases.
        embedding: [V, H] of the target; its dtype is that of every product.
        norm: [H], the target's final norm, where the draft's own begins.
        length: tokens of the longest text.
        seed: of the first weights, which are the same on every device.
    """

    def __init__(
        self, config: DraftConfig, embedding: Tensor, norm: Tensor, length: int, unroll: int, seed: int
    ):
        self.config, self.unroll_steps = config, unroll
        self._embedding, self.device = embedding, embedding.device
        self.params = {
            name: tensor.to(self.device).requires_grad_()
            for name, tensor in _first_weights(config, norm.detach().float().cpu(), seed).items()
        }
        self._cos_sin = rope_table(config.rope, config.head_dim, length + unroll, self.device)
        self._columns = torch.arange(length, device=self.device)

    def unroll(self, inputs: Inputs, aux: Tensor) -> Tensor:
        """Drafts from every start along the text: step i of start p reads token p + 1 + i.

        Args:
            aux: [B, L, A] the target's states after each token of `inputs`.

        Returns:
            out [B, S, M, H] for the head, in the embedding's dtype. What unused starts and steps past the
            text's end give has no meaning.
        """
        w = {name: p.to(self._embedding.dtype) for name, p in self.params.items()}
        length, heads = inputs.tokens.shape[1], self.config.num_heads
        g = self._features(w, aux)
        x = self._inputs(w, inputs.tokens.roll(-1, 1), g)  # the row of column p is made of a_p and x_{p+1}
        positions = self._columns - inputs.begins
        keys = self._rotate(self._heads(w, x, "k_proj"), positions).transpose(1, 2)  # [B, Hkv, L, D]
        values = self._heads(w, x, "v_proj").transpose(1, 2)

        starts = inputs.starts
        begins = inputs.begins.gather(1, starts)
        state = g.gather(1, starts[:, :, None].expand(-1, -1, g.shape[2]))
        own: list[tuple[Tensor, Tensor]] = []  # K and V of each step after the first, [B, M, Hkv, D]
        outs = []
        for i in range(self.unroll_steps):
            tokens = inputs.tokens.gather(1, (starts + 1 + i).clamp(max=length - 1))
            x = self._inputs(w, tokens, state)
            at = starts - begins + i
            q = self._rotate(self._heads(w, x, "q_proj"), at)
            if i:
                own.append((self._rotate(self._heads(w, x, "k_proj"), at), self._heads(w, x, "v_proj")))
            bias = self._committed_bias(begins, starts, i, q.dtype)
            attended = self._attend(q, keys, values, bias, own[-self._own_seen(i) :] if i else [])
            out, state = self._layer(w, state, attended.reshape(*x.shape[:2], heads * self.config.head_dim))
            outs.append(out)
        return torch.stack(outs, 1)

    def _features(self, w: dict[str, Tensor], aux: Tensor) -> Tensor:
        chunks = aux.chunk(self.config.num_aux, -1)
        normed = [self._norm(w, f"fc_norm.{i}", chunk) for i, chunk in enumerate(chunks)]
        return F.linear(torch.cat(normed, -1), w["fc.weight"])

    def _inputs(self, w: dict[str, Tensor], tokens: Tensor, state: Tensor) -> Tensor:
        """What q, k and v are made of: [B, R, 2H]."""
        embedded = F.embedding(tokens, self._embedding)
        return torch.cat(
            [
                self._norm(w, _LAYER + "input_layernorm", embedded),
                self._norm(w, _LAYER + "hidden_norm", state),
            ],
            -1,
        )

    def _layer(self, w: dict[str, Tensor], state: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Output for the head, and the state of the next step."""
        y = state + F.linear(attended, w[_ATTENTION + "o_proj.weight"])
        z = self._norm(w, _LAYER + "post_attention_layernorm", y)
        gate, up = (F.linear(z, w[f"{_MLP}{name}_proj.weight"]) for name in ("gate", "up"))
        y = y + F.linear(F.silu(gate) * up, w[_MLP + "down_proj.weight"])
        out = self._norm(w, "norm", y)
        return out, out if self.config.norm_output else y

    def _norm(self, w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name + ".weight"], self.config.rms_norm_eps)

    def _heads(self, w: dict[str, Tensor], x: Tensor, name: str) -> Tensor:
        """[B, R, heads, D]."""
        return F.linear(x, w[f"{_ATTENTION}{name}.weight"]).unflatten(-1, (-1, self.config.head_dim))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE of x [B, R, heads, D] at positions [B, R], in float32 as the engine's kernel does it."""
        cos, sin = self._cos_sin[positions][:, :, None].chunk(2, -1)
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def _committed_bias(self, begins: Tensor, starts: Tensor, step: int, dtype: torch.dtype) -> Tensor:
        """0 where a start's row of `step` sees a committed row, else -inf: [B, 1, 1, M, L]."""
        low = begins
        if self.config.window is not None:
            low = torch.maximum(begins, starts + step - self.config.window + 1)
        seen = (self._columns >= low[:, :, None]) & (self._columns <= starts[:, :, None])
        bias = torch.zeros(seen.shape, dtype=dtype, device=self.device).masked_fill_(~seen, -torch.inf)
        return bias[:, None, None]

    def _own_seen(self, step: int) -> int:
        """How many of its own rows a row of `step` sees, itself included."""
        return step if self.config.window is None else min(step, self.config.window)

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, own: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attention over a text's committed rows and a start's own, under one softmax: [B, M, Hq, D]."""
        batch, count, num_heads, dim = q.shape
        kv_heads, length = keys.shape[1], keys.shape[2]
        group = num_heads // kv_heads
        q = (q * dim**-0.5).view(batch, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        scores = (q.flatten(2, 3) @ keys.transpose(2, 3)).view(batch, kv_heads, group, count, length) + bias
        if not own:
            probs = scores.softmax(-1).flatten(2, 3)
            return _by_start((probs @ values).view(q.shape))
        own_keys, own_values = (
            torch.stack(part, 3).transpose(1, 2)[:, :, None]  # [B, Hkv, 1, M, i, D]
            for part in zip(*own, strict=True)
        )
        own_scores = (q[..., None, :] * own_keys).sum(-1)
        own_scores = F.pad(own_scores, (0, -(length + len(own)) % _ALIGN), value=-torch.inf)
        probs = torch.cat([scores, own_scores], -1).softmax(-1)
        committed, ours = probs[..., :length], probs[..., length : length + len(own)]
        attended = (committed.flatten(2, 3) @ values).view(q.shape)
        return _by_start(attended + (ours[..., None] * own_values).sum(-2))


def _by_start(x: Tensor) -> Tensor:
    """[B, Hkv, G, M, D] -> [B, M, Hq, D]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _first_weights(config: DraftConfig, norm: Tensor, seed: int) -> dict[str, Tensor]:
    """Norms of one, small matrices, and an fc that lets the last aux layer through unchanged."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in parameters(config, frozenset()).items():
        if not parameter.required or name.startswith("efficient_lm_head"):
            continue
        if len(parameter.shape) == 1:
            weights[name] = torch.ones(parameter.shape)
            continue
        scale = _SCALES.get(name.split(".")[-2], _SCALE)
        weights[name] = torch.randn(parameter.shape, generator=generator) * scale
    weights["norm.weight"] = norm.clone()
    fc = weights["fc.weight"]
    fc[:, -fc.shape[0] :] += torch.eye(fc.shape[0])
    return weights
