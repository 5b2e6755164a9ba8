"""Tiny GGUF files for the tests, and the block formats decoded once more: plain loops in float64."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

HEADS, KV, DIM, HIDDEN, WIDE, LAYERS = 4, 2, 64, 256, 512, 2
WORDS = {
    "smollm": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"],
    "llama-bpe": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
}


def alphabet() -> list[str]:
    from tokenspeed.tokenizer.encoder import BYTE_OF_CHAR

    return sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__)


def tensors(arch: str, vocab: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under their GGUF names, rows of q and k in the file's order."""
    rng = np.random.default_rng(seed)

    def w(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    out = {"token_embd.weight": w(vocab, HIDDEN), "output_norm.weight": w(HIDDEN)}
    for i in range(LAYERS):
        b = f"blk.{i}."
        out |= {b + "attn_norm.weight": w(HIDDEN), b + "ffn_norm.weight": w(HIDDEN)}
        for letter, n in (("q", HEADS), ("k", KV), ("v", KV)):
            out[f"{b}attn_{letter}.weight"] = w(n * DIM, HIDDEN)
            if arch == "qwen2":
                out[f"{b}attn_{letter}.bias"] = w(n * DIM)
            if arch == "qwen3" and letter != "v":
                out[f"{b}attn_{letter}_norm.weight"] = w(DIM)
        out[b + "attn_output.weight"] = w(HIDDEN, HEADS * DIM)
        out |= {b + "ffn_gate.weight": w(WIDE, HIDDEN), b + "ffn_up.weight": w(WIDE, HIDDEN)}
        out[b + "ffn_down.weight"] = w(HIDDEN, WIDE)
    return out


def write_gguf(
    path: Path,
    arch: str = "llama",
    pre: str = "smollm",
    weights: dict[str, Any] | None = None,
    extra: dict[str, tuple[str, Any]] | None = None,
    model: str = "gpt2",
    quantised: dict[str, tuple[Type, np.ndarray]] | None = None,
) -> dict[str, np.ndarray]:
    """Writes a file, returns its float32 weights. `quantised`: name -> type and raw blocks [rows, bytes]."""
    chars, special = alphabet(), WORDS.get(pre, WORDS["smollm"])
    merged = ["th", "the", "11"]
    tokens = special + chars + merged if pre == "smollm" else chars + merged + special
    types = [3 if t in special else 1 for t in tokens]
    writer = GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["t h", "th e", "1 1"])
    writer.add_bos_token_id(tokens.index(special[1 if pre == "smollm" else 0]))
    writer.add_eos_token_id(tokens.index(special[2]))
    writer.add_chat_template("{{ messages[0].content }}")
    for method, value in (extra or {}).values():
        getattr(writer, method)(*value if isinstance(value, tuple) else (value,))
    weights = tensors(arch, len(tokens)) if weights is None else weights
    for name, value in weights.items():
        if quantised and name in quantised:
            kind, raw = quantised[name]
            writer.add_tensor(name, raw, raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


# ---- the block formats, each as (bytes a block, elements a block, decoder)


def _half(data: bytes) -> float:
    return float(np.frombuffer(data, "<f2")[0])


def _bit(data: bytes, i: int) -> int:
    return data[i // 8] >> (i % 8) & 1


def _nibble(data: bytes, i: int, half: int = 16) -> int:
    """Element i of `2 * half`: the low nibbles come first, then the high ones."""
    return data[i % half] >> (4 * (i // half)) & 15


def _q4_0(b: bytes) -> list[float]:
    return [_half(b[:2]) * (_nibble(b[2:], i) - 8) for i in range(32)]


def _q4_1(b: bytes) -> list[float]:
    return [_half(b[:2]) * _nibble(b[4:], i) + _half(b[2:4]) for i in range(32)]


def _q5_0(b: bytes) -> list[float]:
    return [_half(b[:2]) * ((_nibble(b[6:], i) | _bit(b[2:6], i) << 4) - 16) for i in range(32)]


def _q5_1(b: bytes) -> list[float]:
    return [_half(b[:2]) * (_nibble(b[8:], i) | _bit(b[4:8], i) << 4) + _half(b[2:4]) for i in range(32)]


def _q8_0(b: bytes) -> list[float]:
    return [_half(b[:2]) * int(np.int8(np.uint8(v))) for v in b[2:]]


def _scale_min(s: bytes, j: int) -> tuple[int, int]:
    """6-bit scale and minimum of sub-block j of 8, packed in 12 bytes."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return s[j + 4] & 15 | s[j - 4] >> 6 << 4, s[j + 4] >> 4 | s[j] >> 6 << 4


def _q4_k(b: bytes) -> list[float]:
    d, m, out = _half(b[:2]), _half(b[2:4]), []
    for j in range(8):
        scale, low = _scale_min(b[4:16], j)
        quants = b[16 + 32 * (j // 2) :]
        out += [d * scale * (quants[i] >> 4 * (j % 2) & 15) - m * low for i in range(32)]
    return out


def _q5_k(b: bytes) -> list[float]:
    d, m, high, out = _half(b[:2]), _half(b[2:4]), b[16:48], []
    for j in range(8):
        scale, low = _scale_min(b[4:16], j)
        quants = b[48 + 32 * (j // 2) :]
        out += [
            d * scale * ((quants[i] >> 4 * (j % 2) & 15) | (high[i] >> j & 1) << 4) - m * low
            for i in range(32)
        ]
    return out


def _q6_k(b: bytes) -> list[float]:
    low, high, scales, d, out = b[:128], b[128:192], np.frombuffer(b[192:208], np.int8), _half(b[208:]), []
    for i in range(256):
        part, within = divmod(i, 128)
        row, column = divmod(within, 32)
        bits = low[64 * part + 32 * (row % 2) + column] >> 4 * (row // 2) & 15
        bits |= (high[32 * part + column] >> 2 * row & 3) << 4
        out.append(d * int(scales[i // 16]) * (bits - 32))
    return out


BLOCKS = {
    Type.Q4_0: (18, 32, _q4_0, (0,)),
    Type.Q4_1: (20, 32, _q4_1, (0, 2)),
    Type.Q5_0: (22, 32, _q5_0, (0,)),
    Type.Q5_1: (24, 32, _q5_1, (0, 2)),
    Type.Q8_0: (34, 32, _q8_0, (0,)),
    Type.Q4_K: (144, 256, _q4_k, (0, 2)),
    Type.Q5_K: (176, 256, _q5_k, (0, 2)),
    Type.Q6_K: (210, 256, _q6_k, (208,)),
}  # last: where the half-precision scales lie


def random_blocks(kind: Type, rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Raw blocks uint8 [rows, bytes] of random bits with sane scales, and what they stand for, float64."""
    width, size, decode, scales = BLOCKS[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // size, width), dtype=np.uint8)
    for at in scales:
        raw[..., at : at + 2] = rng.normal(0, 0.02, raw.shape[:2]).astype("<f2")[..., None].view(np.uint8)
    values = [[v for block in row for v in decode(block.tobytes())] for row in raw]
    return raw.reshape(rows, -1), np.array(values, dtype=np.float64)
