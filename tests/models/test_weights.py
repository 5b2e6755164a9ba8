"""Loading: every tensor finds its place or is named, every parameter is filled, damage is told apart."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tokenspeed.errors import ConfigError
from tokenspeed.layers.parameter import Placement
from tokenspeed.models.config import load_model_config
from tokenspeed.models.weights import load_model, weight_files


@pytest.fixture
def copy(tiny_model_dir, tmp_path):
    """A checkpoint of one's own to break."""
    return shutil.copytree(tiny_model_dir("llama"), tmp_path / "model")


def load(path, dtype=torch.float32, **options):
    return load_model(path, load_model_config(path), "cpu", dtype, **options)


def rewrite(path, change):
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def weights(model):
    return {name: p.target.clone() for name, p in model.params().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_arrive_in_the_dtype_asked_for(copy, dtype, monkeypatch):
    monkeypatch.setattr(Placement, "finish", lambda place: None)  # weights stay as they were loaded
    found = weights(load(copy, dtype))
    for name, value in AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).state_dict().items():
        assert found[name].dtype == dtype and torch.equal(found[name], value.to(dtype)), name


def test_shards_load_like_one_file(copy, tmp_path):
    whole = weights(load(copy))
    model = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="150KB")
    assert len(weight_files(tmp_path / "sharded")) > 2
    sharded = weights(load(tmp_path / "sharded"))
    assert whole.keys() == sharded.keys() and all(torch.equal(whole[k], sharded[k]) for k in whole)


def test_progress_counts_bytes_to_the_end(copy):
    calls = []
    load(copy, progress=lambda done, total: calls.append((done, total)))
    size = (copy / "model.safetensors").stat().st_size
    assert calls[-1] == (size, size) and {total for _, total in calls} == {size}
    assert [done for done, _ in calls] == sorted(done for done, _ in calls) and len(calls) > 30


def test_a_tensor_is_missing(copy):
    rewrite(copy, lambda t: t.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"has no tensor model\.layers\.2\.mlp\.up_proj\.weight;"):
        load(copy)


def test_several_tensors_are_missing(copy):
    rewrite(copy, lambda t: [t.pop(f"model.layers.3.self_attn.{n}_proj.weight") for n in "qkvo"])
    with pytest.raises(ConfigError, match=r"layers\.3\.self_attn\.q_proj\.weight and 3 more"):
        load(copy)


def test_an_untied_head_is_missing(copy):
    rewrite(copy, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"has no tensor lm_head\.weight"):
        load(copy)


def test_a_tensor_reaches_nothing(copy):
    rewrite(copy, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(ConfigError, match=r"q_proj\.bias belongs to no parameter"):
        load(copy)


def test_a_layer_too_many(copy):
    extra = {"model.layers.4.input_layernorm.weight": torch.zeros(64)}
    rewrite(copy, lambda t: t.update(extra))
    with pytest.raises(ConfigError, match=r"layers\.4\.input_layernorm\.weight belongs to no parameter"):
        load(copy)


def test_harmless_tensors_are_passed_over(copy, tiny_model_dir, tmp_path):
    rewrite(copy, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(copy)
    tied = shutil.copytree(tiny_model_dir("llama", tie_word_embeddings=True), tmp_path / "tied")
    rewrite(tied, lambda t: t.update({"lm_head.weight": torch.zeros(320, 64)}))
    model = load(tied)
    assert torch.equal(
        model.head.table.weight, load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    )


@pytest.mark.parametrize(
    "value, message",
    [
        (torch.zeros(32, 65), r"k_proj\.weight has shape \[32, 65\], but the config asks for \[32, 64\]"),
        (torch.zeros(32 * 64), r"has shape \[2048\]"),
        (torch.zeros(32, 64, dtype=torch.int8), r"has dtype torch\.int8"),
    ],
)
def test_a_tensor_does_not_fit(copy, value, message):
    rewrite(copy, lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": value}))
    with pytest.raises(ConfigError, match=message) as caught:
        load(copy)
    assert "model.layers.1.self_attn.k_proj.weight" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_a_file_is_cut_short(copy, keep):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged or cut short .*download it again"):
        load(copy)


def test_no_weights(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no \.safetensors file$"):
        load(copy)
    (copy / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match="convert them to safetensors"):
        load(copy)


@pytest.mark.parametrize(
    "index, message",
    [
        ("{", "can't be read"),
        ("{}", "can't be read"),
        (json.dumps({"weight_map": {"a": "gone.safetensors"}}), "gone.safetensors, which is not there"),
        (json.dumps({"weight_map": {"a": "../model/model.safetensors"}}), "which is not there"),
        (json.dumps({"weight_map": {"a": 3}}), "names 3, which is not there"),
    ],
)
def test_a_bad_index(copy, index, message):
    (copy / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=message):
        load(copy)


def test_a_tensor_twice_over_shards(copy):
    shutil.copy(copy / "model.safetensors", copy / "more.safetensors")
    names = {"a": "model.safetensors", "b": "more.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError, match="comes twice"):
        load(copy)
