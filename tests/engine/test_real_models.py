"""Real models and real prompts in float32: transformers' tokens, and the same ones with every way to speculate."""

import numpy as np
import pytest
import torch
from exactness_results import note
from harness import Answer, InProcessEngine, greedy
from tiny import make_tiny_draft

from benchmarks.models import fetch_model
from benchmarks.prompts import prompts as fetch_prompts

pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * 3600)]
MODELS = ("SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct")
NUM_TOKENS = 64
SETS = {"mtbench": 20, "humaneval": 10, "gsm8k": 10}
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 4)  # requests at once, one after another
SHAPES = {"packaged": "8/4/16", "random": "3/3/8"}


@pytest.fixture(scope="module")
def conversations() -> list[list[dict]]:
    rows = [row for name, count in SETS.items() for row in fetch_prompts(name)[:: 80 // count][:count]]
    assert len(rows) == sum(BATCHES)
    order = np.random.default_rng(0).permutation(len(rows))
    return [rows[i]["messages"] for i in order]


class Case:
    """A model with its prompts, and what transformers and plain decoding say to them."""

    def __init__(self, name: str, path, conversations: list[list[dict]]):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.name, self.path = name, path
        tokenizer = AutoTokenizer.from_pretrained(path)
        self.prompts = [
            tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False)
            for c in conversations
        ]
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.plain: list[list[int]] = []

    @torch.inference_mode()
    def reference(self) -> list[list[int]]:
        answers = []
        for prompt in self.prompts:
            ids = torch.tensor([prompt])
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                repetition_penalty=1.0,
            )
            answers.append(out[0, len(prompt) :].tolist())
        return answers

    @torch.inference_mode()
    def gap(self, ids: list[int]) -> float:
        """Between the two largest logits after `ids`."""
        top = self.model(torch.tensor([ids])).logits[0, -1].topk(2).values
        return float(top[0] - top[1])

    def differences(self, expected: list[list[int]], got: list[list[int]]) -> list[dict]:
        """Of each answer that differs: where it first does, and how close the model's two best tokens are."""
        found = []
        for number, (prompt, a, b) in enumerate(zip(self.prompts, expected, got, strict=True)):
            if a != b:
                pairs = zip(a, b, strict=False)
                at = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
                found.append({"prompt": number, "token": at, "gap": self.gap(prompt + a[:at])})
        return found

    def answers(self, **options) -> list[Answer]:
        engine = InProcessEngine(self.path, max_model_len=2048, kv_cache_tokens=16384, **options)
        answers, start = [], 0
        for size in BATCHES:
            answers += engine.generate(self.prompts[start : start + size], greedy(NUM_TOKENS))
            start += size
        return answers


@pytest.fixture(scope="module", params=MODELS)
def case(request, demo_dir, conversations) -> Case:
    path = demo_dir if request.param == MODELS[0] else fetch_model("qwen2.5-coder-0.5b")
    return Case(request.param, path, conversations)


def report(
    case: Case, name: str, against: str, differences: list[dict], answers: list[Answer], **more
) -> None:
    tokens = sum(len(a.token_ids) for a in answers)
    entry = {
        "against": against,
        "prompts": len(answers),
        "tokens": tokens,
        "differences": differences,
        **more,
    }
    note("greedy answers", f"{case.name}, {name}", entry)
    assert not differences


def test_plain_decoding_equals_transformers(case):
    answers = case.answers()
    case.plain = [a.token_ids for a in answers]
    report(case, "plain", "transformers", case.differences(case.reference(), case.plain), answers)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "eagle4"])
def test_speculation_equals_plain_decoding(case, method, tmp_path, demo_draft_dir):
    if case.name == MODELS[0] and method == "eagle4":
        draft, kind = demo_draft_dir, "packaged"
    else:
        draft, kind = make_tiny_draft(tmp_path, case.path, method), "random"
    case.plain = case.plain or [a.token_ids for a in case.answers()]
    answers = case.answers(spec=method, draft=str(draft), spec_shape=SHAPES[kind])
    rounds = sum(a.finished.num_rounds for a in answers)
    length = 1 + sum(a.finished.num_accepted for a in answers) / rounds
    differences = case.differences(case.plain, [a.token_ids for a in answers])
    about = {"draft": kind, "shape": SHAPES[kind], "accept_length": round(length, 3)}
    report(case, method, "plain", differences, answers, **about)
