"""Qwen2 and Qwen2.5: a Llama with biases on q, k and v; a config may give upper layers a window."""

from tokenspeed.models.decoder import Decoder


class Qwen2(Decoder):
    """Qwen2ForCausalLM."""
