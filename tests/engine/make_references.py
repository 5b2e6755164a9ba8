"""Writes data/demo_greedy.json: what transformers says to six prompts with the demo model, greedy and in float32.

    make references

and, as the guards of test_demo_references.py, the accept lengths that the packaged draft has with them on a CPU, greedy
and sampled. Another draft in the package wants this command once; nothing else in the tests knows how good the draft
is.
"""

import hashlib
import json
from pathlib import Path

import torch
from harness import Answer, InProcessEngine, greedy

from tokenspeed.hub.demo import SHA256
from tokenspeed.hub.resolve import DEMO_DRAFT, resolve_model
from tokenspeed.params import SamplingParams
from tokenspeed.versions import versions

FILE = Path(__file__).parent / "data" / "demo_greedy.json"
DRAFT_FILES = ("config.json", "model.safetensors")
SHAPE = "8/4/16"
NUM_TOKENS, NUM_GUARD_TOKENS = 32, 64
PROMPTS = (
    "Why does bread rise in the oven?",
    "Write a Python function that removes duplicates from a list and keeps the order.",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Write the first lines of a letter to a friend who has moved to the sea.",
    "Name three differences between a violin and a viola.",
    "Translate into French: the library closes at six, but the café stays open.",
)


def digest(draft: Path) -> str:
    """sha256 of a draft: its config.json and model.safetensors."""
    return hashlib.sha256(b"".join((draft / name).read_bytes() for name in DRAFT_FILES)).hexdigest()


@torch.inference_mode()
def reference(path: Path) -> list[dict]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rows = []
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_TOKENS, do_sample=False)
        answer = out[0, ids.shape[1] :].tolist()
        text = tokenizer.decode(answer)
        rows.append({"prompt": prompt, "prompt_ids": ids[0].tolist(), "token_ids": answer, "text": text})
    return rows


def sampled(num: int, max_tokens: int) -> list[SamplingParams]:
    """Of `num` prompts: temperature 1, seeds 0, 1, ..."""
    return [SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens) for seed in range(num)]


def accept_length(answers: list[Answer]) -> float:
    """Tokens a round, the bonus token included."""
    return 1 + sum(a.finished.num_accepted for a in answers) / sum(a.finished.num_rounds for a in answers)


def main() -> None:
    path = resolve_model("demo", None, lambda *_: None)
    rows = reference(path)
    engine = InProcessEngine(path, spec="eagle4", draft=str(DEMO_DRAFT), spec_shape=SHAPE, max_model_len=1024)
    prompts = [row["prompt_ids"] for row in rows]
    best = engine.generate(prompts, greedy(NUM_GUARD_TOKENS))
    drawn = engine.generate(prompts, sampled(len(prompts), NUM_GUARD_TOKENS))
    data = {
        "command": "make references",
        "model": f"SmolLM2-135M-Instruct, converted from the GGUF with sha256 {SHA256}",
        "versions": versions(),
        "accept_length": {
            "draft": f"{DEMO_DRAFT.name}, sha256 {digest(DEMO_DRAFT)}",
            "device": "cpu",
            "shape": SHAPE,
            "tokens": NUM_GUARD_TOKENS,
            "value": round(accept_length(best), 4),
            "sampled": round(accept_length(drawn), 4),
        },
        "answers": rows,
    }
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
