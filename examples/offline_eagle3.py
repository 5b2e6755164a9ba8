"""Offline generation with an EAGLE-3 draft: python examples/offline_eagle3.py MODEL DRAFT"""

import sys

from tokenspeed import LLM, SamplingParams

PROMPTS = [
    "The three primary colours are",
    "To boil an egg, first",
    "A prime number is",
]


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: python examples/offline_eagle3.py MODEL DRAFT", file=sys.stderr)
        return 2
    model, draft = sys.argv[1:]
    with LLM(
        model=model,
        speculative_config={
            "method": "eagle3",
            "model": draft,
            "num_speculative_tokens": 2,
            "draft_tensor_parallel_size": 1,
        },
    ) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, seed=0))
        for output in outputs:
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
