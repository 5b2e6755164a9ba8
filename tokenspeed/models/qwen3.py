"""Qwen3, dense: a Llama whose q and k pass an RMSNorm over each head before the rotation."""

from tokenspeed.models.decoder import Decoder


class Qwen3(Decoder):
    """Qwen3ForCausalLM."""
