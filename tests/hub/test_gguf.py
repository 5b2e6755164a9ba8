"""GGUF to a checkpoint: every block format against plain float64 loops, row order, names, refusals."""

import json
import sys

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import BLOCKS, DIM, HEADS, HIDDEN, KV, LAYERS, WIDE, random_blocks, tensors, write_gguf
from safetensors import safe_open

from tokenspeed.errors import ConfigError
from tokenspeed.hub.checkpoint import check_checkpoint
from tokenspeed.hub.gguf import convert_gguf, to_bfloat16
from tokenspeed.models.config import load_model_config
from tokenspeed.tokenizer.encoder import Encoder

VOCAB = 256 + 3 + 3


def quiet(text, done, total):
    pass


def convert(tmp_path, **options):
    source = tmp_path / "m.gguf"
    weights = write_gguf(source, **options)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(source, out, quiet)
    check_checkpoint(out, "")
    with safe_open(out / "model.safetensors", "pt") as file:
        return out, weights, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def bf16(values) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32)).to(torch.bfloat16)


@pytest.mark.parametrize("kind", [*BLOCKS, Type.F32, Type.F16, Type.BF16], ids=lambda k: k.name)
def test_every_type(tmp_path, kind):
    name = "blk.1.ffn_down.weight"
    if kind in BLOCKS:
        raw, expected = random_blocks(kind, HIDDEN, WIDE)
    else:
        exact = np.random.default_rng(1).standard_normal((HIDDEN, WIDE), dtype=np.float32)
        half = bf16(exact).view(torch.int16).numpy().view(np.uint8).reshape(HIDDEN, -1)
        raw = {Type.F32: exact, Type.F16: exact.astype(np.float16), Type.BF16: half}[kind]
        expected = exact.astype(np.float16) if kind == Type.F16 else exact
    _, _, found = convert(tmp_path, quantised={name: (kind, raw)})
    got = found["model.layers.1.mlp.down_proj.weight"].double().numpy()
    if kind in (Type.F32, Type.F16, Type.BF16):
        assert np.array_equal(got, bf16(expected).double().numpy())
    # float32 arithmetic of the dequantiser, then bfloat16's 8 bits: half a unit in the last place
    scale = np.abs(expected).max()
    assert np.all(np.abs(got - expected) <= np.abs(expected) * 2**-8 + scale * 1e-6)


def test_llama_rows_and_names(tmp_path):
    """q and k: file row 2i + j of a head (pair i, member j) is row j * d/2 + i of the checkpoint."""
    out, weights, found = convert(tmp_path)
    for letter, heads in (("q", HEADS), ("k", KV)):
        stored = weights[f"blk.1.attn_{letter}.weight"]
        rows = [h * DIM + 2 * (r % (DIM // 2)) + r // (DIM // 2) for h in range(heads) for r in range(DIM)]
        assert torch.equal(found[f"model.layers.1.self_attn.{letter}_proj.weight"], bf16(stored[rows]))
    assert torch.equal(found["model.layers.0.self_attn.v_proj.weight"], bf16(weights["blk.0.attn_v.weight"]))
    assert torch.equal(found["model.norm.weight"], bf16(weights["output_norm.weight"]))
    assert len(found) == 2 + 9 * LAYERS and "lm_head.weight" not in found
    config = load_model_config(out)
    assert (config.architecture, config.vocab_size, config.tie_word_embeddings) == (
        "LlamaForCausalLM",
        VOCAB,
        True,
    )
    assert (config.rms_norm_eps, config.head_dim, config.eos_token_ids) == (1e-5, DIM, (2,))


@pytest.mark.parametrize(("arch", "parts"), [("qwen2", 12), ("qwen3", 11)])
def test_qwen_rows_stay(tmp_path, arch, parts):
    out, weights, found = convert(tmp_path, arch=arch, pre="qwen2", weights=tensors(arch, VOCAB + 1))
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], bf16(weights["blk.0.attn_q.weight"]))
    assert len(found) == 2 + parts * LAYERS
    config = load_model_config(out)
    assert config.qkv_bias == (arch == "qwen2") and config.qk_norm == (arch == "qwen3")
    names = Encoder.load(out).tokenizer
    assert set(config.eos_token_ids) == {names.token_to_id("<|im_end|>"), names.token_to_id("<|endoftext|>")}
    assert names.token_to_id("<think>") not in Encoder.load(out).special_ids


@pytest.mark.parametrize(("noise", "tied"), [(0.05, True), (1.0, False)])
def test_output_that_is_the_embedding_but_for_noise(tmp_path, noise, tied):
    weights = tensors("llama", VOCAB)
    rng = np.random.default_rng(3)
    output = weights["token_embd.weight"] + noise * rng.standard_normal((VOCAB, HIDDEN), dtype=np.float32)
    out, _, found = convert(tmp_path, weights={**weights, "output.weight": output})
    kept = found["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(kept, bf16(output)) and load_model_config(out).tie_word_embeddings == tied


def test_bfloat16_rounding():
    values = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    edges = np.array(
        [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF800000, 0x00000001, 0x7F800001, 0xFFC12345], np.uint32
    )
    values = np.concatenate([values, edges.view(np.float32)])
    theirs = torch.from_numpy(values).to(torch.bfloat16)
    ours = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    nan = theirs.isnan()
    assert torch.equal(nan, ours.isnan()) and torch.equal(theirs[~nan], ours[~nan])


def scaling(kind, **more):
    from gguf import RopeScalingType

    return {
        "t": ("add_rope_scaling_type", RopeScalingType(kind)),
        "f": ("add_rope_scaling_factor", 4.0),
        **more,
    }


def test_rope_scaling_is_kept(tmp_path):
    for kind in ("linear", "yarn"):
        (tmp_path / kind).mkdir()
        more = {"o": ("add_rope_scaling_orig_ctx_len", 32)} if kind == "yarn" else {}
        out, _, _ = convert(tmp_path / kind, extra=scaling(kind, **more))
        rope = load_model_config(out).rope
        assert (rope.kind, rope.factor, rope.theta) == (kind, 4.0, 10000.0)
        assert kind == "linear" or rope.original_max_position == 32


def llama3_divisors(factor: float) -> np.ndarray:
    """As transformers computes the scaled frequencies: plain over scaled."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = dict(
        rope_type="llama3", rope_theta=10000.0, factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    config = LlamaConfig(head_dim=DIM, hidden_size=HIDDEN, num_attention_heads=HEADS, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 10000.0 ** (np.arange(0, DIM, 2) / DIM)
    return (plain / scaled.numpy()).astype(np.float32)


def test_llama3_rope(tmp_path):
    freqs = llama3_divisors(32.0)
    assert freqs.min() == pytest.approx(1.0) and freqs.max() == pytest.approx(32.0)
    weights = {**tensors("llama", VOCAB), "rope_freqs.weight": freqs}
    out, _, _ = convert(tmp_path, weights=weights, pre="llama-bpe")
    rope = load_model_config(out).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 32.0, 8192)
    (tmp_path / "other").mkdir()
    weights["rope_freqs.weight"] = np.linspace(1, 8, DIM // 2, dtype=np.float32)
    with pytest.raises(ConfigError, match="not Llama 3's"):
        convert(tmp_path / "other", weights=weights)


def test_tokenizers(tmp_path):
    out, _, _ = convert(tmp_path, pre="llama-bpe")
    encoder = Encoder.load(out)
    bos = encoder.tokenizer.token_to_id("<|begin_of_text|>")
    ids = encoder.encode(["the 1111<|eot_id|>"], True)[0]
    pieces = [
        "<|begin_of_text|>",
        "the",
        "\u0120",
        "11",
        "1",
        "1",
        "<|eot_id|>",
    ]  # numbers in groups of three
    assert [encoder.tokenizer.id_to_token(i) for i in ids] == pieces and ids[0] == bos
    assert encoder.encode(["the"], False)[0] != ids[:2] and encoder.decode(ids, True) == "the 1111"
    assert encoder.chat.render(b'[{"role": "user", "content": "x"}]') == "x"
    (tmp_path / "smol").mkdir()
    out, _, _ = convert(tmp_path / "smol")
    encoder = Encoder.load(out)
    ids = encoder.encode(["the 111"], True)[0]
    assert [encoder.tokenizer.id_to_token(i) for i in ids] == [
        "the",
        "\u0120",
        "1",
        "1",
        "1",
    ]  # single digits


def without(name):
    return {k: v for k, v in tensors("llama", VOCAB).items() if k != name}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(arch="gemma3"), "architecture gemma3 is not supported"),
        (dict(pre="tekken"), "pre-tokenizer tekken is not supported"),
        (dict(model="llama"), "tokenizer llama is not supported"),
        (dict(weights=without("blk.1.attn_v.weight")), r"tensor blk\.1\.attn_v\.weight is missing"),
        (
            dict(weights={**without(""), "blk.0.foo.weight": np.ones(4, np.float32)}),
            r"blk\.0\.foo\.weight is not one",
        ),
        (dict(weights=tensors("llama", VOCAB - 1)), r"token_embd\.weight has the shape"),
        (dict(extra={"x": ("add_expert_count", 8)}), "mixtures of experts"),
        (dict(extra={"x": ("add_sliding_window", 64)}), "sliding-window"),
        (dict(extra={"x": ("add_rope_dimension_count", 32)}), "rope.dimension_count"),
        (dict(extra=scaling("longrope")), "rotary scaling longrope"),
        (
            dict(quantised={"blk.0.ffn_down.weight": (Type.Q3_K, np.zeros((HIDDEN, 220), np.uint8))}),
            "of type Q3_K",
        ),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, options, says):
    if options.get("arch") == "gemma3":
        options["weights"] = tensors("llama", VOCAB)
    with pytest.raises(ConfigError, match=says) as caught:
        convert(tmp_path, **options)
    assert "\n" not in str(caught.value) and "m.gguf" in str(caught.value)


def test_damaged_files(tmp_path):
    source = tmp_path / "m.gguf"
    write_gguf(source)
    data = source.read_bytes()
    for size in (0, 3, 20, 1000, 8000, len(data) // 2, len(data) - 40):
        source.write_bytes(data[:size])
        with pytest.raises(ConfigError, match="cut short or damaged"):
            convert_gguf(source, tmp_path, quiet)
    source.write_bytes(b"\x00" * 5000)
    with pytest.raises(ConfigError, match="not a GGUF file"):
        convert_gguf(source, tmp_path, quiet)


def test_conversion_needs_no_torch(tmp_path):
    import subprocess

    write_gguf(tmp_path / "m.gguf")
    code = (
        "import sys, pathlib; from tokenspeed.hub.gguf import convert_gguf\n"
        "d = pathlib.Path(sys.argv[1]); convert_gguf(d / 'm.gguf', d, print); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "False"
    header = json.loads((tmp_path / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    total = max(t["data_offsets"][1] for n, t in header.items() if n != "__metadata__")
    assert lines[-2] == f"converting m.gguf {total} {total}"
