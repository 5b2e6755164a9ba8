"""Llama and Mistral: the plain decoder. Mistral's window and Llama's optional biases come with the config."""

from tokenspeed.models.decoder import Decoder


class Llama(Decoder):
    """LlamaForCausalLM and MistralForCausalLM."""
