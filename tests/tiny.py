"""Tiny random checkpoints for tests: targets of each family with a byte-level tokenizer, and drafts that fit.

The nets are random, but not featureless. A token's embedding outweighs what a layer adds to it, so that
greedy text wanders and has clear winners (median gap of the top two logits over 0.5). A draft with skill is
often right.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = (
    "the quick brown fox jumps over the lazy dog and runs away from the other animals in the garden",
    "user assistant system What is the capital of France? Write a function that returns the answer.",
    "0 1 2 3 4 5 6 7 8 9 10 100 1000, a list of numbers; x = (y + z) * 2",
)
KINDS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
ARCHITECTURES = {
    "eagle4": "LlamaForCausalLMEagle4",
    "eagle3": "LlamaForCausalLMEagle3",
    "eagle": "LlamaForCausalLM",
}


def make_tokenizer(path: Path, vocab_size: int = 320) -> int:
    """Writes a byte-level BPE tokenizer with a ChatML template; returns its size (every byte has a token)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 1024,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def make_tiny_model(path: Path, kind: str = "llama", seed: int = 0, **overrides) -> Path:
    """Writes a whole checkpoint of a random model: config, weights (float32), tokenizer.

    Args:
        kind: a key of KINDS.
        overrides: fields of transformers' config. vocab_size is the tokenizer's unless given.
    """
    import transformers

    vocab = make_tokenizer(path)
    fields = dict(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
        sliding_window=None,
    )
    if kind == "llama":
        del fields["sliding_window"]
    config = getattr(transformers, f"{KINDS[kind]}Config")(**{**fields, **overrides})
    model = getattr(transformers, f"{KINDS[kind]}ForCausalLM")(config).eval()
    _randomize(model, seed, config.tie_word_embeddings)
    model.save_pretrained(path)
    return path


@torch.no_grad()
def _randomize(model: torch.nn.Module, seed: int, tied: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            weight.copy_(1 + 0.1 * noise)
            if tied and name == "model.norm.weight":  # a large embedding would repeat the last token for ever
                weight *= 3
        elif name.endswith("bias"):
            weight.copy_(0.1 * noise)
        elif "embed_tokens" in name or "lm_head" in name:
            weight.copy_(noise * (0.1 if tied else 1.0 if "embed_tokens" in name else 0.3))
        else:
            weight.copy_(noise * (2.0 if tied else 0.7) / weight.shape[1] ** 0.5)


def make_tiny_draft(
    path: Path, target_dir: Path, method: str = "eagle4", seed: int = 1, skill: float = 1.0, **overrides
) -> Path:
    """Writes a random draft for a target of `make_tiny_model` with an untied lm_head.

    Args:
        method: eagle4 (candidate head, fc_norm, the target's embedding and head), eagle3 (`midlayer.*`, half
            the vocabulary with d2t and t2d) or eagle (EAGLE-1/2).
        skill: how much of the token that the draft is given reaches its output. With 1, and the window of 1
            that eagle3 and eagle4 then have, it is often right; with 0 hardly ever.
        overrides: keys of its config.json; None leaves a key out.
    """
    target = json.loads((target_dir / "config.json").read_text())
    config = _draft_config(target, method, skill) | overrides
    config = {key: value for key, value in config.items() if value is not None}
    generator = torch.Generator().manual_seed(seed)
    tensors = _draft_tensors(config, method, skill, generator)
    weights = load_file(target_dir / "model.safetensors")
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    if "candidate_head" in config:
        rank = config["candidate_head"]["rank"]
        u, s, v = torch.linalg.svd(head.float(), full_matrices=False)
        tensors["efficient_lm_head.weight"] = (u[:, :rank] * s[:rank]).contiguous()
        tensors["efficient_lm_head_down_proj.weight"] = v[:rank].contiguous()
    if method == "eagle3":
        _reduce_vocabulary(tensors, config["draft_vocab_size"], head, generator)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _draft_config(target: dict, method: str, skill: float) -> dict:
    layers, hidden = target["num_hidden_layers"], target["hidden_size"]
    config = dict(
        architectures=[ARCHITECTURES[method]],
        model_type="llama",
        num_hidden_layers=1,
        vocab_size=target["vocab_size"],
        hidden_size=hidden,
        intermediate_size=80,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden // 4,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=128,
        torch_dtype="float32",
    )
    if method == "eagle":
        return config | {"bias": True}
    config |= dict(
        target_hidden_size=hidden,
        num_aux_hidden_states=3,
        eagle_aux_hidden_state_layer_ids=[0, layers // 2, layers - 1],
        sliding_window=1 if skill else 24,
    )
    if method == "eagle3":
        return config | {"draft_vocab_size": target["vocab_size"] // 2}
    return config | dict(
        fc_norm=True,
        norm_output=True,
        tie_embed_to_target=True,
        tie_lm_head_to_target=True,
        candidate_head={"rank": 32, "num_candidates": 16},
    )


def _draft_tensors(
    config: dict, method: str, skill: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """All but embedding, head and vocabulary map. With skill, self-attention gives a token's embedding."""
    h, ffn, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    wide = method != "eagle"
    width = 2 * h if wide else h
    layer = "midlayer." if method == "eagle3" else "layers.0."

    def weight(rows: int, columns: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale / columns**0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    tensors = {
        f"{layer}self_attn.q_proj.weight": weight(q, width),
        f"{layer}self_attn.k_proj.weight": weight(kv, width),
        f"{layer}self_attn.v_proj.weight": weight(kv, width),
        f"{layer}self_attn.o_proj.weight": weight(h, q),
        f"{layer}mlp.gate_proj.weight": weight(ffn, h),
        f"{layer}mlp.up_proj.weight": weight(ffn, h),
        f"{layer}mlp.down_proj.weight": weight(h, ffn),
        f"{layer}post_attention_layernorm.weight": norm(h),
    }
    if not wide:
        tensors["fc.weight"] = weight(h, 2 * h)
        tensors["fc.weight"][:, :h] += 2 * skill * torch.eye(h)  # [embedding | state]
        tensors["fc.bias"] = 0.01 * torch.randn(h, generator=generator)
        return tensors
    size, count = config["target_hidden_size"], config["num_aux_hidden_states"]
    tensors["fc.weight"] = weight(h, size * count)
    tensors |= {f"{layer}{name}.weight": norm(h) for name in ("input_layernorm", "hidden_norm")}
    tensors["norm.weight"] = norm(h)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(size) for i in range(count)}
    if skill:
        tensors[f"{layer}self_attn.v_proj.weight"][:, :h] += skill * torch.eye(kv, h)
        tensors[f"{layer}self_attn.o_proj.weight"] += 2 * skill * torch.eye(h, q)
    return tensors


def _reduce_vocabulary(
    tensors: dict[str, torch.Tensor], rows: int, head: torch.Tensor, generator: torch.Generator
) -> None:
    """The draft's own lm_head over a random part of the target's tokens, with the maps there and back."""
    kept = torch.randperm(head.shape[0], generator=generator)[:rows].sort().values
    tensors["lm_head.weight"] = head[kept].contiguous()
    tensors["d2t"] = kept - torch.arange(rows)
    tensors["t2d"] = torch.zeros(head.shape[0], dtype=torch.bool).index_fill_(0, kept, True)
