"""Made-up drafts and targets, and an independent dense forward of a draft, for the tests of this folder."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.attention.sdpa import TreeAttention
from tokenspeed.layers.parameter import Placement
from tokenspeed.models.config import ModelConfig, RopeConfig
from tokenspeed.models.decoder import Decoder
from tokenspeed.spec.eagle4.config import check_draft
from tokenspeed.spec.eagle4.load import load_drafter

VOCAB, HIDDEN, LAYERS = 97, 32, 8
PAGE, CONTEXT = 4, 128  # of the drafters made here
PACKAGED = Path(__file__).parents[2] / "tokenspeed" / "drafts" / "smollm2-135m-eagle4"


def target_config(**changes) -> ModelConfig:
    fields = dict(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_layers=LAYERS,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=256,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(None,) * LAYERS,
    )
    return ModelConfig(**{**fields, **changes})


def make_target(seed: int = 0, config: ModelConfig | None = None) -> Decoder:
    """A float32 target with random weights."""
    target = Decoder(config or target_config(), Placement(torch.device("cpu"), torch.float32))
    generator = torch.Generator().manual_seed(seed)
    for parameter in target.params().values():
        parameter.target.normal_(generator=generator).mul_(0.2)
    return target


EAGLE4 = {
    "architectures": ["LlamaForCausalLMEagle4"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "sliding_window": 9,
    "eagle_aux_hidden_state_layer_ids": [0, 3, 6],
    "fc_norm": True,
    "norm_output": True,
    "tie_embed_to_target": True,
    "tie_lm_head_to_target": True,
    "candidate_head": {"rank": 12, "num_candidates": 24},
}
EAGLE3 = {
    **{
        k: v
        for k, v in EAGLE4.items()
        if not k.startswith("tie_") and k not in ("candidate_head", "sliding_window")
    },
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 50,
    "fc_norm": False,
    "norm_output": False,
}
EAGLE = {
    k: v
    for k, v in EAGLE4.items()
    if k in ("model_type", "num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size",
             "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
             "rope_theta", "max_position_embeddings")
} | {"architectures": ["LlamaForCausalLM"]}  # fmt: skip


def speculators(**changes) -> dict:
    """EAGLE3 in the nested layout. Its layer ids name inputs of layers, which are outputs 1, 3 and 4."""
    layer = {
        k: EAGLE3[k]
        for k in EAGLE3
        if k
        in (
            "num_hidden_layers",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "hidden_act",
            "rms_norm_eps",
            "max_position_embeddings",
            "model_type",
        )
    }
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 50,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "norm_before_residual": True,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/b"}},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "target_hidden_size": None,
        "transformer_layer_config": layer,
        **changes,
    }  # fmt: skip


def make_weights(raw: dict, seed: int = 1) -> dict[str, Tensor]:
    """Random float32 tensors for a config, under canonical names."""
    g = torch.Generator().manual_seed(seed)
    h, i, v = raw["hidden_size"], raw["intermediate_size"], raw.get("draft_vocab_size", raw["vocab_size"])
    q, k = raw["num_attention_heads"] * raw["head_dim"], raw["num_key_value_heads"] * raw["head_dim"]
    wide = "eagle_aux_hidden_state_layer_ids" in raw
    aux = len(raw.get("eagle_aux_hidden_state_layer_ids", ())) * raw.get("target_hidden_size", h)
    x = 2 * h if wide else h
    sizes = {
        "layers.0.self_attn.q_proj.weight": (q, x),
        "layers.0.self_attn.k_proj.weight": (k, x),
        "layers.0.self_attn.v_proj.weight": (k, x),
        "layers.0.self_attn.o_proj.weight": (h, q),
        "layers.0.mlp.gate_proj.weight": (i, h),
        "layers.0.mlp.up_proj.weight": (i, h),
        "layers.0.mlp.down_proj.weight": (h, i),
        "layers.0.post_attention_layernorm.weight": (h,),
        "fc.weight": (h, aux if wide else 2 * h),
    }
    if wide:
        sizes |= {f"layers.0.{n}.weight": (h,) for n in ("input_layernorm", "hidden_norm")} | {
            "norm.weight": (h,)
        }
    else:
        sizes |= {"fc.bias": (h,)}
    if raw.get("fc_norm"):
        sizes |= {f"fc_norm.{j}.weight": (aux // 3,) for j in range(3)}
    if raw.get("norm_before_fc"):
        sizes["input_norm.weight"] = (aux,)
    if raw.get("attention_bias"):
        sizes |= {
            f"layers.0.self_attn.{n}_proj.bias": (s,) for n, s in (("q", q), ("k", k), ("v", k), ("o", h))
        }
    if head := raw.get("candidate_head"):
        sizes["efficient_lm_head.weight"] = (v, head["rank"])
        sizes["efficient_lm_head_down_proj.weight"] = (head["rank"], h)
    if wide and not raw.get("tie_lm_head_to_target"):
        sizes["lm_head.weight"] = (v, h)
    if wide and not raw.get("tie_embed_to_target"):
        sizes["embed_tokens.weight"] = (raw["vocab_size"], h)
    weights = {
        n: torch.randn(s, generator=g) * (0.3 if len(s) == 2 else 0.2) + (len(s) == 1)
        for n, s in sizes.items()
    }
    if v < raw["vocab_size"]:
        ids = torch.randperm(raw["vocab_size"], generator=g)[:v].sort().values
        weights["d2t"] = ids - torch.arange(v)
        weights["t2d"] = torch.zeros(raw["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    return weights


def write_draft(
    path: Path, raw: dict, weights: dict[str, Tensor] | None = None, names=None
) -> dict[str, Tensor]:
    """Writes a checkpoint directory; `names` maps canonical names to those in the file."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    weights = make_weights(raw) if weights is None else weights
    save_file(
        {(names(n) if names else n): t.contiguous() for n, t in weights.items()}, path / "model.safetensors"
    )
    return weights


def make_drafter(
    path: Path, base: dict, changes: dict, attention=TreeAttention, written: dict | None = None, names=None
):
    """A bound drafter loaded from a made-up checkpoint, and its dense reference; None drops a key.

    written: the config.json that says the same in another layout. names: as in write_draft.
    """
    raw = {k: v for k, v in {**base, **changes}.items() if v is not None}
    target = make_target()
    weights = write_draft(path, written or raw, make_weights(raw), names)
    method = "eagle" if base is EAGLE else "eagle3" if base is EAGLE3 else "eagle4"
    config = check_draft(path, method, target.config, path)
    drafter = load_drafter(path, config, target, attention, CONTEXT)
    drafter.bind(KvPool(1, 40, PAGE, config.num_kv_heads, config.head_dim, torch.float32))
    return drafter, DenseDraft(raw, weights, target)


class DenseDraft:
    """A draft in plain float32 torch: lists of K/V rows, dense masks, one row at a time."""

    def __init__(
        self, raw: dict, weights: dict[str, Tensor], target: Decoder | None, embed=None, lm_head=None
    ):
        self.raw, self.w = raw, {n: t.float() if t.is_floating_point() else t for n, t in weights.items()}
        self.wide = "layers.0.hidden_norm.weight" in weights
        self.embed = self.w.get("embed_tokens.weight", target.embedding.table.weight if target else embed)
        self.lm_head = self.w.get("lm_head.weight", target.head.table.weight if target else lm_head)
        self.window = raw.get("sliding_window")
        self.heads, self.kv_heads, self.dim = (
            raw[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        self.inv = raw["rope_theta"] ** (-torch.arange(0, self.dim, 2).float() / self.dim)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.raw["rms_norm_eps"])
            * self.w[name + ".weight"]
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.w[name + ".weight"].t()
        return y + self.w[name + ".bias"] if name + ".bias" in self.w else y

    def rotate(self, x: Tensor, position: int) -> Tensor:
        angle = position * self.inv
        a, b = x[..., : self.dim // 2], x[..., self.dim // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def features(self, aux: Tensor) -> Tensor:
        if not self.wide:
            return aux
        if self.raw.get("fc_norm"):
            aux = torch.cat([self.norm(c, f"fc_norm.{i}") for i, c in enumerate(aux.chunk(3, -1))], -1)
        if self.raw.get("norm_before_fc"):
            aux = self.norm(aux, "input_norm")
        return self.linear(aux, "fc")

    def row(self, token: int, state: Tensor, index: int, before: list) -> tuple[Tensor, Tensor, tuple]:
        """A row that may see `before`, a list of (index, k, v). Returns out, next state, own triple."""
        embedded = self.embed[token]
        if self.wide:
            hidden = self.norm(state, "layers.0.hidden_norm")
            x = torch.cat([self.norm(embedded, "layers.0.input_layernorm"), hidden])
            residual = hidden if self.raw.get("norm_before_residual") else state
        else:
            x = residual = self.linear(torch.cat([embedded, state]), "fc")
        attn = "layers.0.self_attn."
        q = self.rotate(self.linear(x, attn + "q_proj").view(self.heads, self.dim), index - 1)
        k = self.rotate(self.linear(x, attn + "k_proj").view(self.kv_heads, self.dim), index - 1)
        v = self.linear(x, attn + "v_proj").view(self.kv_heads, self.dim)
        own = (index, k, v)
        seen = [r for r in [*before, own] if self.window is None or r[0] > index - self.window]
        keys = torch.stack([r[1] for r in seen]).repeat_interleave(self.heads // self.kv_heads, 1)
        values = torch.stack([r[2] for r in seen]).repeat_interleave(self.heads // self.kv_heads, 1)
        weights = (torch.einsum("hd,shd->hs", q, keys) / self.dim**0.5).softmax(-1)
        y = residual + self.linear(torch.einsum("hs,shd->hd", weights, values).flatten(), attn + "o_proj")
        z = self.norm(y, "layers.0.post_attention_layernorm")
        mlp = "layers.0.mlp."
        y = y + self.linear(
            F.silu(self.linear(z, mlp + "gate_proj")) * self.linear(z, mlp + "up_proj"), mlp + "down_proj"
        )
        if not self.wide:
            return y, y, own
        out = self.norm(y, "norm")
        return out, out if self.raw.get("norm_output") else y, own

    def committed(self, tokens: Tensor, aux: Tensor) -> list:
        """Rows of indices 1..t of tokens x_0..x_t; aux [t, A] holds a_0..a_{t-1}."""
        g, rows = self.features(aux), []
        for t in range(1, len(tokens)):
            rows.append(self.row(int(tokens[t]), g[t - 1], t, rows)[2])
        return rows

    def best(self, out: Tensor, k: int) -> list[tuple[int, float]]:
        """The k best tokens of an output row with their log-probabilities, by the definition in EAGLE4.md."""
        if head := self.raw.get("candidate_head"):
            low = (
                self.w["efficient_lm_head.weight"] @ (self.w["efficient_lm_head_down_proj.weight"] @ out)
            ).double()
            ids = low.topk(head["num_candidates"]).indices
            share = low[ids].exp().sum() / low.exp().sum()
            scores = ((self.lm_head[ids] @ out).double().softmax(0) * share).log()
        else:
            logits = (self.lm_head @ out).double()
            ids, scores = torch.arange(len(logits)), logits.log_softmax(0)
        order = sorted(range(len(ids)), key=lambda i: (-float(scores[i]), int(ids[i])))[:k]
        if "d2t" in self.w:
            ids = ids + self.w["d2t"][ids]
        return [(int(ids[i]), float(scores[i])) for i in order]


def python_tree(root: int, shape, children) -> tuple[list[int], list[int]]:
    """The tree of EAGLE4.md by lists and recursion in float64.

    Args:
        children: path of (token, ...) below the root -> [(token, log-probability)] * K.

    Returns:
        tokens and parents of the N nodes, depth-first, best child first.
    """
    steps, k, n = shape.steps, shape.topk, shape.nodes

    def clean(value: float) -> float:
        return float("-inf") if value != value else min(value, 0.0)

    candidates = []  # (score, parent candidate, token, path)
    lanes = [(0.0, -1, ())]
    for _ in range(steps):
        new = []
        for score, number, path in lanes:
            for token, logprob in children(path):
                new.append(
                    (score + clean(logprob), number, token, (*path, token), len(candidates) + len(new))
                )
        candidates += new
        picked = sorted(new, key=lambda c: (-c[0], c[4]))[:k]
        lanes = [(c[0], c[4], c[3]) for c in picked]
    kept = sorted(candidates, key=lambda c: (-c[0], c[4]))[: n - 1]
    tokens, parents = [root], [0]

    def visit(number: int, place: int) -> None:
        for c in kept:  # best first
            if c[1] == number:
                tokens.append(c[2])
                parents.append(place)
                visit(c[4], len(tokens) - 1)

    visit(-1, 0)
    return tokens, parents
