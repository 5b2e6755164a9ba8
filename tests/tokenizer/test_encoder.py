"""Loading a tokenizer, special tokens added once, saved truncation ignored; no heavy imports."""

import json
import shutil
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from tokenspeed.errors import ConfigError, RequestError
from tokenspeed.tokenizer.encoder import BYTE_OF_CHAR, Encoder, check_text, special_tokens


def save_llama_like(path, **tokenizer_config):
    """Byte-level tokens, a post-processor that begins prompts with <s>, truncation and padding saved."""
    vocab = dict(BYTE_OF_CHAR)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def test_bos_once_and_no_truncation(tmp_path):
    save_llama_like(
        tmp_path,
        bos_token={"content": "<s>", "special": True},
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    encoder = Encoder.load(tmp_path)
    assert encoder.encode(["abcdefg", "x"], True) == [[256, *b"abcdefg"], [256, *b"x"]]
    text = encoder.chat.render(b'[{"role": "user", "content": "abcdefg"}]')
    assert encoder.encode([text], False) == [[256, *b"abcdefg"]]


def test_missing_or_damaged_files(tmp_path, demo_dir):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Encoder.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ConfigError, match="can't be read"):
        Encoder.load(tmp_path)
    shutil.copy(demo_dir / "tokenizer.json", tmp_path)
    assert Encoder.load(tmp_path).chat is None
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        Encoder.load(tmp_path)


def test_special_tokens_and_text():
    config = {"bos_token": None, "eos_token": {"content": "</s>"}, "unk_token": "<unk>", "chat_template": "x"}
    assert special_tokens(config) == {"eos_token": "</s>", "unk_token": "<unk>"}
    check_text("fine \U0001f600", "prompt")
    with pytest.raises(RequestError) as caught:
        check_text("bad \ud800", "prompt")
    assert caught.value.param == "prompt"


def test_least_tokens_is_a_lower_bound(tmp_path, demo_dir):
    encoder = Encoder.load(demo_dir)
    for text in (" " * 5000, "a" * 5000, "hello world " * 400, "<|im_end|>" * 300):
        assert 0 < encoder.least_tokens(text) <= len(encoder.encode([text], False)[0])


def test_the_process_loads_neither_torch_nor_transformers():
    code = "import sys, tokenspeed.tokenizer.process, tokenspeed.hub.resolve; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "transformers", "triton", "gguf", "huggingface_hub"}
    assert "tokenizers" in loaded
