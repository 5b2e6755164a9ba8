"""tokenspeed: a lightweight LLM serving engine with an EAGLE-4 speculative drafter.

Importing this package loads no torch: `LLM` and `SamplingParams` arrive on first use.
"""

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str):
    if name == "LLM":
        from tokenspeed.llm import LLM

        return LLM
    if name == "SamplingParams":
        from tokenspeed.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'tokenspeed' has no attribute {name!r}")
