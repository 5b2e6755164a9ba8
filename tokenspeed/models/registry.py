"""Which class builds a checkpoint's architecture. A family's module is imported when it is asked for."""

import importlib

from tokenspeed.models.config import ARCHITECTURES
from tokenspeed.models.decoder import Decoder

CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # family (its module) -> class


def decoder_class(architecture: str) -> type[Decoder]:
    """The class for an architecture that `load_model_config` has accepted."""
    family = ARCHITECTURES[architecture]
    return getattr(importlib.import_module(f"tokenspeed.models.{family}"), CLASSES[family])
