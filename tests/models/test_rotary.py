"""RoPE tables against transformers' own rotary modules, for each kind that is supported."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from tokenspeed.layers.rotary import rope_table
from tokenspeed.models.config import parse_rope

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0)
KINDS = {
    "default": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=2.5),
    "llama3": LLAMA3 | dict(original_max_position_embeddings=512),
    "llama3-own-bands": LLAMA3
    | dict(original_max_position_embeddings=256, low_freq_factor=2.0, high_freq_factor=9.0),
    "yarn": YARN | dict(original_max_position_embeddings=512),
    "yarn-attention-factor": YARN | dict(original_max_position_embeddings=512, attention_factor=0.75),
    "yarn-mscale": YARN | dict(original_max_position_embeddings=512, mscale=1.0, mscale_all_dim=0.8),
    "yarn-betas": YARN | dict(original_max_position_embeddings=1024, beta_fast=16, beta_slow=2),
    "yarn-untruncated": YARN | dict(original_max_position_embeddings=512, truncate=False),
    "yarn-no-original": YARN,
}


@pytest.mark.parametrize("head_dim, theta", [(64, 1e4), (128, 5e5), (10, 1e6)])
@pytest.mark.parametrize("parameters", KINDS.values(), ids=KINDS.keys())
def test_table_equals_transformers(parameters, head_dim, theta):
    parameters = parameters | {"rope_theta": theta}
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_parameters=dict(parameters),
    )
    positions = torch.arange(3000)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions[None])
    table = rope_table(parse_rope({"rope_parameters": parameters}, 2048), head_dim, 3000, torch.device("cpu"))
    assert table.dtype == torch.float32 and table.shape == (3000, head_dim)
    # A frequency's last bit turns into an angle of position * 6e-8.
    torch.testing.assert_close(table[:, : head_dim // 2], cos[0, :, : head_dim // 2], atol=1e-3, rtol=0)
    torch.testing.assert_close(table[:, head_dim // 2 :], sin[0, :, : head_dim // 2], atol=1e-3, rtol=0)
    torch.testing.assert_close(table[:64, : head_dim // 2], cos[0, :64, : head_dim // 2], atol=1e-5, rtol=0)


def test_unscaled_table_has_transformers_bits():
    config = Qwen3Config(hidden_size=256, num_attention_heads=2, head_dim=128, rope_theta=1e6)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), torch.arange(9000)[None])
    table = rope_table(parse_rope({"rope_theta": 1e6}, 1), 128, 9000, torch.device("cpu"))
    assert torch.equal(table, torch.cat((cos[0, :, :64], sin[0, :, :64]), dim=-1))


def test_older_spelling_of_scaling_gives_the_same_table():
    old = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    assert parse_rope(old, 128) == parse_rope(new, 128)
