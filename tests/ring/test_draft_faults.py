"""A server whose draft is broken answers as one without a draft, and its metrics say what is wrong."""

import httpx
import torch
from harness import InProcessEngine, greedy
from safetensors.torch import load_file, save_file
from servers import Running
from tiny import make_tiny_draft

from tokenspeed.tokenizer.encoder import Encoder

PROMPT = list(range(40, 75))


def test_a_draft_with_nan_in_its_weights(tiny_model_dir, tmp_path):
    """B17."""
    target = tiny_model_dir("llama")
    file = make_tiny_draft(tmp_path / "draft", target) / "model.safetensors"
    weights = load_file(file)
    weights["efficient_lm_head.weight"][40] = torch.nan
    save_file(weights, file)
    (expected,) = InProcessEngine(target).generate([PROMPT], greedy(30, ignore_eos=True))
    text = Encoder.load(target).decode(expected.token_ids, skip_special_tokens=True)
    options = [
        "--spec",
        "eagle4",
        "--draft",
        tmp_path / "draft",
        "--dtype",
        "float32",
        "--spec-shape",
        "6/4/16",
    ]
    with Running(target, *options, "--kv-cache-tokens", 4096) as server:
        for _ in range(2):
            answer = server.complete(prompt=PROMPT, max_tokens=30, ignore_eos=True)
            assert answer["choices"][0]["text"] == text and answer["usage"]["completion_tokens"] == 30
        assert server.metric("tokenspeed:spec_decode_num_nan_drafts_total") > 0
        assert server.metric("tokenspeed:num_nan_aborted_requests_total") == 0
        assert httpx.get(server.url + "/health").status_code == 200
