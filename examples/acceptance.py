"""How well the draft did on each request: python examples/acceptance.py MODEL DRAFT [METHOD]"""

import sys

from tokenspeed import LLM, SamplingParams

QUESTIONS = [
    "Write a haiku about rain.",
    "What is 17 times 23? Show the steps.",
    "Write a Python function that counts the vowels of a string.",
]


def main() -> int:
    if len(sys.argv) not in (3, 4):
        print("usage: python examples/acceptance.py MODEL DRAFT [eagle|eagle3|eagle4]", file=sys.stderr)
        return 2
    model, draft, method = [*sys.argv[1:], "eagle4"][:3]
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    # One tree in every round: left to itself the engine gives up a draft that does not pay here.
    with LLM(model=model, spec=method, draft=draft, spec_shape="4/2/8") as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=128))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        seen, rounds = output.metrics, output.metrics["num_rounds"]
        print(f"\n{question}\n  {len(output.outputs[0].token_ids)} tokens in {rounds} rounds with a draft")
        if rounds:
            depths = "  ".join(f"{n / rounds:.0%}" for n in seen["accepted_per_depth"])
            print(f"  accept length {seen['accept_length']:.2f}; accepted at depth 1, 2, ...: {depths}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
