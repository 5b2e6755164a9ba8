"""The tiny checkpoints that end-to-end tests serve: whole, and lively enough to show a mistake."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokenspeed.spec.eagle4.checkpoint import check_d2t, check_tensors, read_headers
from tokenspeed.spec.eagle4.formats import method_of, parse_draft


@pytest.mark.parametrize(
    "kind, overrides",
    [("llama", {}), ("llama", dict(tie_word_embeddings=True)), ("qwen2", {}), ("qwen3", {}), ("mistral", {})],
)
@torch.no_grad()
def test_greedy_text_has_clear_winners_and_wanders(tiny_model_dir, kind, overrides):
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir(kind, **overrides), dtype=torch.float32
    ).eval()
    prompts = torch.randint(3, 300, (6, 6), generator=torch.Generator().manual_seed(0))
    texts = model.generate(prompts, max_new_tokens=48, do_sample=False, eos_token_id=-1)[:, 6:]
    top = model(texts).logits.topk(2).values
    assert (top[..., 0] - top[..., 1]).median() > 0.3
    assert sum(len(set(text.tolist())) for text in texts) / len(texts) > 12


def test_tokenizer_round_trip_and_template(tiny_model_dir):
    path = tiny_model_dir("llama")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    text = "the quick brown fox; naïve café, 日本語 🙂\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.get_vocab_size() == size and max(ids) < size and tokenizer.decode(ids) == text
    rendered = AutoTokenizer.from_pretrained(path).apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(rendered).ids[0] == 1 and tokenizer.token_to_id("<|im_end|>") == 2


@pytest.mark.parametrize("skill", [0.0, 1.0])
@pytest.mark.parametrize("method", ["eagle4", "eagle3", "eagle"])
def test_drafts_are_of_the_published_layouts(tiny_model_dir, tiny_draft_dir, method, skill):
    path = tiny_draft_dir(tiny_model_dir("llama"), method, skill=skill)
    tensors = read_headers(path)
    raw = json.loads((path / "config.json").read_text())
    assert method_of(raw, frozenset(tensors), path) == method
    config = parse_draft(raw, method, path)
    check_tensors(config, tensors, path)
    check_d2t(tensors, config, path)
