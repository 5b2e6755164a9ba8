"""An inflated model gives the logits of the original (transformers' Llama), an inflated draft its outputs."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import benchmarks.inflate as inflate_module
from benchmarks.inflate import SHAPES, Dims, inflate, inflate_directory, inflated_config, parse_dims
from tokenspeed.errors import ConfigError

OLD = Dims(hidden=24, layers=2, heads=6, kv_heads=2, head_dim=8, intermediate=40)
NEW = Dims(hidden=64, layers=3, heads=16, kv_heads=4, head_dim=16, intermediate=96)
VOCAB = 50


def target_config(tied: bool = True) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": OLD.hidden,
        "intermediate_size": OLD.intermediate,
        "num_hidden_layers": OLD.layers,
        "num_attention_heads": OLD.heads,
        "num_key_value_heads": OLD.kv_heads,
        "head_dim": OLD.head_dim,
        "rms_norm_eps": 1e-3,  # large, so that a wrong eps would show
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "tie_word_embeddings": tied,
    }


def llama(config: dict, dtype=torch.float64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config)).to(dtype).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 1.5)
            else:
                value.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_hidden_states_are_equal(tied):
    config = target_config(tied)
    small = llama(config)
    state = {k: v for k, v in small.state_dict().items() if not (tied and k == "lm_head.weight")}
    big = LlamaForCausalLM(LlamaConfig(**inflated_config(config, NEW))).to(torch.float64).eval()
    tensors = dict(inflate(config, list(state), state.__getitem__, NEW, dtype=torch.float64))
    missing, unexpected = big.load_state_dict(tensors, strict=False)
    assert unexpected == [] and missing == (["lm_head.weight"] if tied else [])
    big.tie_weights()
    ids = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = (m(ids, output_hidden_states=True) for m in (small, big))
    tolerance = 1e-4 * a.logits.std().item()  # transformers works norms and RoPE out in float32
    torch.testing.assert_close(b.logits, a.logits, rtol=1e-4, atol=tolerance)
    for i in range(OLD.layers):
        torch.testing.assert_close(
            b.hidden_states[i][..., : OLD.hidden], a.hidden_states[i], rtol=1e-4, atol=1e-5
        )
        assert not b.hidden_states[i][..., OLD.hidden :].any()


def test_spare_rows_hold_noise_and_added_layers_add_nothing():
    config = target_config()
    state = {k: v for k, v in llama(config).state_dict().items() if k != "lm_head.weight"}
    tensors = dict(inflate(config, list(state), state.__getitem__, NEW, dtype=torch.float32))
    assert not tensors["model.layers.2.self_attn.o_proj.weight"].any()
    assert not tensors["model.layers.2.mlp.down_proj.weight"].any()
    assert tensors["model.layers.0.mlp.gate_proj.weight"][OLD.intermediate :].count_nonzero() > 0
    assert tensors["model.layers.0.self_attn.k_proj.weight"].count_nonzero() > 0.99 * 64 * 64
    again = dict(inflate(config, list(state), state.__getitem__, NEW, dtype=torch.float32))
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


def draft_config() -> dict:
    config = target_config()
    config.update(
        architectures=["LlamaForCausalLMEagle4"],
        num_hidden_layers=1,
        target_hidden_size=OLD.hidden,
        eagle_aux_hidden_state_layer_ids=[0, 1],
        candidate_head={"rank": 4, "num_candidates": 8},
        acceptance={"2/1/3": [0.75, 0.5]},
    )
    return config


def draft_tensors() -> dict[str, torch.Tensor]:
    h, q, kv, f = OLD.hidden, OLD.heads * OLD.head_dim, OLD.kv_heads * OLD.head_dim, OLD.intermediate
    shapes = {
        "fc.weight": (h, 2 * h),
        "fc_norm.0.weight": (h,),
        "fc_norm.1.weight": (h,),
        "layers.0.input_layernorm.weight": (h,),
        "layers.0.hidden_norm.weight": (h,),
        "layers.0.self_attn.q_proj.weight": (q, 2 * h),
        "layers.0.self_attn.k_proj.weight": (kv, 2 * h),
        "layers.0.self_attn.v_proj.weight": (kv, 2 * h),
        "layers.0.self_attn.o_proj.weight": (h, q),
        "layers.0.post_attention_layernorm.weight": (h,),
        "layers.0.mlp.gate_proj.weight": (f, h),
        "layers.0.mlp.up_proj.weight": (f, h),
        "layers.0.mlp.down_proj.weight": (h, f),
        "norm.weight": (h,),
        "efficient_lm_head.weight": (VOCAB, 4),
        "efficient_lm_head_down_proj.weight": (4, h),
    }
    g = torch.Generator().manual_seed(2)
    return {k: torch.randn(v, generator=g, dtype=torch.float64) * 0.3 for k, v in shapes.items()}


def draft_forward(w, config, embed, tokens, aux):
    """Dense and causal: tokens [T], aux: list of [T, H] -> out [T, H], low-rank logits [T, V]."""
    heads, kv, d = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps, length = config["rms_norm_eps"], len(tokens)

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w[name + ".weight"]

    def linear(x, name):
        return x @ w[name + ".weight"].T

    frequency = config["rope_parameters"]["rope_theta"] ** (-torch.arange(0, d, 2).double() / d)
    angle = torch.arange(length)[:, None] * torch.cat([frequency, frequency])

    def rotate(x):
        half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x * angle.cos()[:, None] + half * angle.sin()[:, None]

    g = linear(torch.cat([norm(x, f"fc_norm.{i}") for i, x in enumerate(aux)], -1), "fc")
    u = torch.cat([norm(embed[tokens], "layers.0.input_layernorm"), norm(g, "layers.0.hidden_norm")], -1)
    at = "layers.0.self_attn."
    q, k = (rotate(linear(u, at + n).view(length, -1, d)) for n in ("q_proj", "k_proj"))
    v = linear(u, at + "v_proj").view(length, kv, d)
    k, v = (x.repeat_interleave(heads // kv, 1).transpose(0, 1) for x in (k, v))
    y = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)
    y = g + linear(y.transpose(0, 1).reshape(length, -1), at + "o_proj")
    z = norm(y, "layers.0.post_attention_layernorm")
    y = y + linear(
        F.silu(linear(z, "layers.0.mlp.gate_proj")) * linear(z, "layers.0.mlp.up_proj"),
        "layers.0.mlp.down_proj",
    )
    out = norm(y, "norm")
    return out, linear(linear(out, "efficient_lm_head_down_proj"), "efficient_lm_head")


def test_an_inflated_draft_states_the_same_acceptance():
    config = draft_config()
    assert inflated_config(config, NEW)["acceptance"] == config["acceptance"]


def test_draft_outputs_are_equal():
    config, w = draft_config(), draft_tensors()
    new_config = inflated_config(config, NEW)
    assert new_config["num_hidden_layers"] == 1 and new_config["target_hidden_size"] == NEW.hidden
    assert new_config["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    big = dict(inflate(config, list(w), w.__getitem__, NEW, dtype=torch.float64))
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (20,), generator=g)
    embed = torch.randn(VOCAB, OLD.hidden, generator=g, dtype=torch.float64)
    aux = [torch.randn(20, OLD.hidden, generator=g, dtype=torch.float64) for _ in range(2)]

    def pad(x):
        return F.pad(x, (0, NEW.hidden - OLD.hidden))

    out, scores = draft_forward(w, config, embed, tokens, aux)
    big_out, big_scores = draft_forward(big, new_config, pad(embed), tokens, [pad(x) for x in aux])
    torch.testing.assert_close(big_out, pad(out), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(big_scores, scores, rtol=1e-6, atol=1e-9)


def test_directories(tmp_path, monkeypatch):
    monkeypatch.setattr(inflate_module, "SHARD_BYTES", 40_000)
    config = target_config()
    source, out = tmp_path / "small", tmp_path / "big"
    source.mkdir()
    state = {k: v.bfloat16() for k, v in llama(config).state_dict().items() if k != "lm_head.weight"}
    save_file(state, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text("{}")
    size = inflate_directory(source, out, NEW)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sum((out / f).stat().st_size for f in files) >= size == index["metadata"]["total_size"]
    assert {k for f in files for k in load_file(out / f)} == set(index["weight_map"])
    assert (out / "tokenizer.json").read_text() == "{}"
    small = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    big = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert big.config.num_hidden_layers == 3
    ids = torch.arange(30)[None]
    with torch.no_grad():
        a, b = small(ids).logits, big(ids).logits
    assert (a - b).abs().max() < 0.05 * a.std()  # weights were rounded to bfloat16 once more


@pytest.mark.parametrize(
    ("change", "new", "words"),
    [
        ({}, Dims(16, 3, 16, 4, 16, 96), "hidden size"),
        ({}, Dims(64, 1, 16, 4, 16, 96), "layers"),
        ({}, Dims(64, 3, 8, 4, 16, 96), "query heads"),
        ({}, Dims(64, 3, 16, 4, 12, 96), "head_dim"),
        ({"attention_bias": True}, NEW, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, NEW, "yarn"),
        ({"architectures": ["Qwen2ForCausalLM"]}, NEW, "Qwen2ForCausalLM"),
    ],
)
def test_what_can_not_be_inflated_is_refused(change, new, words):
    with pytest.raises(ConfigError, match=words):
        inflated_config(target_config() | change, new)


def test_shapes():
    assert parse_dims("llama-8b") == SHAPES["llama-8b"] == parse_dims("4096/32/32/8/128/14336")
    for bad in ("llama-9b", "1/2/3", "4096/32/32/8/128/0"):
        with pytest.raises(ConfigError, match="--shape"):
            parse_dims(bad)
