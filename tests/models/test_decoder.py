"""Logits and every layer's output against transformers, for each family and what its config can change."""

import pytest
import torch
from dense_attention import NUM_TOKENS, DenseCausal, tokens
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tokenspeed.attention.base import PrefillRows
from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.attention.select import Backend
from tokenspeed.layers.linear import can_pack
from tokenspeed.layers.rotary import rope_table
from tokenspeed.models.config import load_model_config
from tokenspeed.models.weights import load_model

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", dict(tie_word_embeddings=True)),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-mha": ("llama", dict(num_key_value_heads=4)),
    "llama-mqa-wide-heads": ("llama", dict(num_key_value_heads=1, head_dim=40)),
    "llama-eight-heads-of-10": ("llama", dict(num_attention_heads=8, num_key_value_heads=2, head_dim=10)),
    "llama-linear-rope": (
        "llama",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=3.0)),
    ),
    "llama-llama3-rope": ("llama", dict(rope_parameters=LLAMA3)),
    "llama-one-layer": ("llama", dict(num_hidden_layers=1)),
    "mistral-window": ("mistral", dict(sliding_window=7)),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2-upper-windows": ("qwen2", dict(use_sliding_window=True, sliding_window=9, max_window_layers=2)),
    "qwen3": ("qwen3", {}),
    "qwen3-bias-yarn": (
        "qwen3",
        dict(
            attention_bias=True,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16
            ),
        ),
    ),
    "qwen3-mixed-windows": (
        "qwen3",
        dict(
            use_sliding_window=True, sliding_window=5, layer_types=["full_attention", "sliding_attention"] * 2
        ),
    ),
}


def reference(path, input_ids, dtype=torch.float32):
    """transformers' logits [T, V] and the states after each layer [T, H], the final norm's last."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    states = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, out: states.append(out[0]))
    model.model.norm.register_forward_hook(lambda module, args, out: states.append(out[0]))
    return model(input_ids[None]).logits[0].float(), states


@pytest.mark.parametrize("kind, overrides", CASES.values(), ids=CASES.keys())
@torch.no_grad()
def test_logits_and_layer_outputs_equal_transformers(tiny_model_dir, kind, overrides):
    path, input_ids = tiny_model_dir(kind, **overrides), tokens()
    logits, states = reference(path, input_ids)
    config = load_model_config(path)
    model = load_model(path, config, "cpu", torch.float32)
    positions, layers = torch.arange(NUM_TOKENS), tuple(range(config.num_layers + 1))
    hidden, aux = model.forward(input_ids, positions, DenseCausal(config, NUM_TOKENS), layers)
    assert aux.shape == (NUM_TOKENS, len(layers) * config.hidden_size)
    assert len(states) == len(layers)
    for ours, theirs in zip(aux.chunk(len(layers), dim=-1), states, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden, states[-1], atol=1e-4, rtol=1e-4)
    assert model.logits(hidden).dtype == torch.float32
    torch.testing.assert_close(model.logits(hidden), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "qwen3-mixed-windows", "qwen2-upper-windows"])
@torch.no_grad()
def test_paged_chunks_equal_transformers(tiny_model_dir, case):
    """The same through the attention that serves: a prompt in two chunks over scattered pages."""
    kind, overrides = CASES[case]
    path, input_ids = tiny_model_dir(kind, **overrides), tokens(1)
    logits, _ = reference(path, input_ids)
    config = load_model_config(path)
    model = load_model(path, config, "cpu", torch.float32)
    table = rope_table(config.rope, config.head_dim, 64, torch.device("cpu"))
    backend = Backend(torch.device("cpu"), False, table, config.windows, config.head_dim**-0.5)
    pool = KvPool(config.num_layers, 8, 16, config.num_kv_heads, config.head_dim, torch.float32)
    pages, found = torch.tensor([5, 2, 7]), []
    for start, end in ((0, 29), (29, NUM_TOKENS)):
        positions = torch.arange(start, end)
        rows = PrefillRows(
            positions=positions,
            slots=pages[positions // 16] * 16 + positions % 16,
            block_table=pages[None].int(),
            starts=torch.tensor([start], dtype=torch.int32),
            cu_rows=torch.tensor([0, end - start], dtype=torch.int32),
            chunks=[(start, end - start)],
        )
        hidden, aux = model.forward(input_ids[start:end], positions, backend.prefill(pool, rows))
        assert aux is None
        found.append(model.logits(hidden))
    torch.testing.assert_close(torch.cat(found), logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_aux_states_come_in_the_order_asked_for(tiny_model_dir):
    path, input_ids = tiny_model_dir("llama"), tokens()
    config = load_model_config(path)
    model = load_model(path, config, "cpu", torch.float32)
    attn = DenseCausal(config, NUM_TOKENS)

    def run(layers):
        return model.forward(input_ids, torch.arange(NUM_TOKENS), attn, layers)

    states = run(tuple(range(5)))[1].chunk(5, dim=-1)
    assert torch.equal(run((4, 1, 3, 1))[1], torch.cat([states[i] for i in (4, 1, 3, 1)], dim=-1))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@torch.no_grad()
def test_bfloat16_stays_near_transformers(tiny_model_dir, kind):
    """Rounding happens where transformers rounds, so bfloat16 differs from it far less than from float32."""
    path, input_ids = tiny_model_dir(kind), tokens()
    exact, _ = reference(path, input_ids)
    theirs, _ = reference(path, input_ids, torch.bfloat16)
    config = load_model_config(path)
    model = load_model(path, config, "cpu", torch.bfloat16)
    hidden, _ = model.forward(input_ids, torch.arange(NUM_TOKENS), DenseCausal(config, NUM_TOKENS))
    ours = model.logits(hidden)
    own_error = (theirs - exact).norm() / exact.norm()
    assert hidden.dtype == torch.bfloat16 and own_error < 0.05
    assert (ours - theirs).norm() / exact.norm() < own_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 15, 16, 24, 25, 70])
@torch.no_grad()
def test_linear_forms_give_one_function(tiny_model_dir, dtype, rows):
    """Whichever product a CPU takes for a number of rows: the same function, and contiguous rows."""
    path = tiny_model_dir("llama", attention_bias=True)
    stored = {k: v.double() for k, v in load_file(path / "model.safetensors").items()}
    qkv_weight, qkv_bias = (
        torch.cat([stored[f"model.layers.0.self_attn.{p}_proj.{what}"] for p in "qkv"])
        for what in ("weight", "bias")
    )
    model = load_model(path, load_model_config(path), "cpu", dtype)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
    qkv = model.layers[0].attention.qkv
    tolerance = dict(atol=1e-4, rtol=1e-4) if dtype == torch.float32 else dict(atol=0.05, rtol=0.02)
    for ours, exact in (
        (qkv.apply(x), x.double() @ qkv_weight.t() + qkv_bias),
        (model.logits(x), x.double() @ model.head.table.weight.double().t()),
    ):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.double(), exact, **tolerance)


def test_one_copy_of_tied_weights(tiny_model_dir):
    path = tiny_model_dir("llama", tie_word_embeddings=True)
    model = load_model(path, load_model_config(path), "cpu", torch.bfloat16)
    assert model.head.table is model.embedding.table
    stored = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(path).parameters())
    copy = model.config.vocab_size * model.config.hidden_size if can_pack() else 0  # lm_head, packed
    assert model.num_bytes == 2 * (stored + copy)
