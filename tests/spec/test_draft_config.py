"""Start-up checks of a draft: every layout that loads, every bad draft with its own message, and no torch."""

import json
import subprocess
import sys
import time

import pytest
import torch
from spec.draft_cases import (
    EAGLE,
    EAGLE3,
    EAGLE4,
    PACKAGED,
    make_weights,
    speculators,
    target_config,
    write_draft,
)

from tokenspeed.config import Shape
from tokenspeed.errors import ConfigError
from tokenspeed.spec.eagle4.config import (
    check_draft,
    check_keeps,
    detect_method,
    fitting_shapes,
    keep_acceptance,
    load_draft_config,
)

TARGET = target_config()


def check(path, method: str = "eagle4", target=TARGET, **kwargs):
    return check_draft(path, method, target, path / "target", **kwargs)


# ---- what loads


@pytest.mark.parametrize(("raw", "method"), [(EAGLE4, "eagle4"), (EAGLE3, "eagle3"), (EAGLE, "eagle")])
def test_method_is_detected(tmp_path, raw, method):
    write_draft(tmp_path, raw)
    assert detect_method(tmp_path) == method
    assert check(tmp_path, method).method == method
    for other in {"eagle", "eagle3", "eagle4"} - {method}:
        with pytest.raises(ConfigError, match=f"--spec {other} .* use --spec {method}"):
            check(tmp_path, other)


def test_an_old_eagle3_config_that_only_says_llama(tmp_path):
    write_draft(tmp_path, {**EAGLE3, "architectures": ["LlamaForCausalLM"]})
    assert detect_method(tmp_path) == "eagle3"


@pytest.mark.parametrize(
    "names",
    [
        lambda n: n.replace("layers.0.", "midlayer."),
        lambda n: "model." + n if n != "lm_head.weight" else n,
        lambda n: ("model." + n).replace("layers.0.", "midlayer."),
    ],
)
def test_spellings_of_tensor_names(tmp_path, names):
    write_draft(tmp_path, EAGLE3, names=names)
    assert check(tmp_path, "eagle3").draft_vocab_size == 50


def test_default_aux_layers(tmp_path):
    raw = {k: v for k, v in EAGLE3.items() if k != "eagle_aux_hidden_state_layer_ids"}
    write_draft(tmp_path / "a", raw, make_weights(EAGLE3))
    write_draft(tmp_path / "b", EAGLE)
    assert check(tmp_path / "a", "eagle3").aux_layers == (1, 3, 4)  # 1, n // 2 - 1, n - 4 of 8 layers
    assert check(tmp_path / "b", "eagle").aux_layers == (8,)  # the final norm's output


def test_keys_under_eagle_config(tmp_path):
    raw = {k: v for k, v in EAGLE3.items() if k != "eagle_aux_hidden_state_layer_ids"}
    inner = {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 5],
        "use_aux_hidden_state": True,
        "use_mtp_layernorm": False,
    }
    write_draft(tmp_path, {**raw, "eagle_config": inner}, make_weights(EAGLE3))
    assert check(tmp_path, "eagle3").aux_layers == (1, 2, 5)


def test_the_speculators_layout(tmp_path):
    write_draft(tmp_path, speculators(), make_weights(EAGLE3))
    config = check(tmp_path, "eagle3")
    assert config.norm_before_residual and config.target_hidden_size == 32
    assert config.aux_layers == (1, 3, 4)  # its ids name inputs of layers, ours outputs


def test_the_packaged_draft_is_checked_in_well_under_a_second():
    target = target_config(vocab_size=49152, hidden_size=576, num_layers=30)
    started = time.perf_counter()
    config = check_draft(PACKAGED, "eagle4", target, PACKAGED, steps=16)
    assert time.perf_counter() - started < 1.0
    raw = json.loads((PACKAGED / "config.json").read_text())
    assert config.num_candidates == raw["candidate_head"]["num_candidates"]
    names = ("head_dim", "norm_output", "fc_norm")
    assert [getattr(config, name) for name in names] == [raw[name] for name in names]


def test_checks_need_no_torch():
    code = "import sys; import tokenspeed.spec.eagle4.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_window_shorter_than_the_tree_warns(tmp_path, caplog):
    write_draft(tmp_path, {**EAGLE4, "sliding_window": 4})
    check(tmp_path, steps=4)
    assert not caplog.records
    check(tmp_path, steps=5)
    assert "sliding_window 4 of" in caplog.text


# ---- what does not

BAD_CONFIGS = {
    "draft expects hidden size 64, target gives 32": dict(target_hidden_size=64),
    "draft expects vocabulary 96, target gives 97": dict(vocab_size=96),
    "draft expects aux layer 9, target has layers 0 to 8": dict(eagle_aux_hidden_state_layer_ids=[0, 3, 9]),
    "draft expects aux layer -1, target has": dict(eagle_aux_hidden_state_layer_ids=[-1, 3, 6]),
    "num_aux_hidden_states is 3, eagle_aux_hidden_state_layer_ids names 2": dict(
        eagle_aux_hidden_state_layer_ids=[0, 3], num_aux_hidden_states=3
    ),
    "tensor fc.weight .* is \\[32, 96\\], its config.json calls for \\[32, 64\\]": dict(
        eagle_aux_hidden_state_layer_ids=[0, 3]
    ),
    "q_proj.weight .* is \\[64, 64\\], its config.json calls for \\[128, 64\\]": dict(head_dim=32),
    "head_dim 15 is not supported": dict(head_dim=15),
    "not a multiple of num_key_value_heads 3": dict(num_key_value_heads=3),
    "efficient_lm_head.weight .* calls for \\[97, 8\\]": dict(candidate_head={"rank": 8, "num_candidates":
        24}),
    "efficient_lm_head.weight .* is \\[97, 12\\], .* calls for \\[97, 16\\]": dict(
        candidate_head={"rank": 16, "num_candidates": 24}
    ),
    "num_candidates must be a positive integer, not 0": dict(candidate_head={"rank": 12, "num_candidates": 0}),
    "rank must be a positive integer, not 12.0": dict(candidate_head={"rank": 12.0, "num_candidates": 24}),
    "rank is missing": dict(candidate_head={"num_candidates": 24}),
    "candidate_head must be an object, not \\[12, 24\\]": dict(candidate_head=[12, 24]),
    "eagle_config must be an object, not \\[1\\]": dict(eagle_config=[1]),
    "layer_ids must be a list of layers, not 3": dict(eagle_aux_hidden_state_layer_ids=3),
    "expects aux layer 3.5": dict(eagle_aux_hidden_state_layer_ids=[0, 3.5, 6]),
    "expects aux layer True": dict(eagle_aux_hidden_state_layer_ids=[0, True, 6]),
    "sliding_window must be a positive integer": dict(sliding_window=0),
    "could not convert string to float: 'small'": dict(rms_norm_eps="small"),
    "architecture 'LlamaForCausalLMEagle4' .* must be a list": dict(architectures="LlamaForCausalLMEagle4"),
    "num_candidates 98 is more than the vocabulary 97": dict(candidate_head={"rank": 12, "num_candidates":
    98}), "unknown key candidate_head.ranks": dict(candidate_head={"ranks": 12, "num_candidates": 24}),
    "acceptance must be an object, not \\[0.5\\]": dict(acceptance=[0.5]),
    "acceptance: '8/4' is no tree STEPS/TOPK/NODES": dict(acceptance={"8/4": [0.5] * 8}),
    "acceptance: '2/1/9' is no tree STEPS/TOPK/NODES that can be built": dict(acceptance={"2/1/9": [0.5] * 2}),
    "acceptance of 2/1/3 must be a list of 2 numbers, one a step, not \\[0.5\\]": dict(acceptance={"2/1/3": [0.5]}),
    "acceptance of 2/1/3 must be a list of 2 numbers, one a step, not 0.5": dict(acceptance={"2/1/3": 0.5}),
    "acceptance of 2/1/3 must be between 0 and 1 at each depth, not 1.0": dict(acceptance={"2/1/3": [0.5, 1.0]}),
    "acceptance of 2/1/3 must be between 0 and 1 at each depth, not 0": dict(acceptance={"2/1/3": [0, 0.5]}),
    "acceptance of 2/1/3 must be between 0 and 1 at each depth, not 'x'": dict(acceptance={"2/1/3": ["x", 0.5]}),
    "acceptance of 2/1/3 must be between 0 and 1 at each depth, not True": dict(acceptance={"2/1/3": [True, 0.5]}),
    "lacks tensor embed_tokens.weight .* tie_embed_to_target": dict(tie_embed_to_target=False),
    "lacks tensor lm_head.weight .* tie_lm_head_to_target": dict(tie_lm_head_to_target=None),
    "tensor fc_norm.0.weight .* reaches no parameter": dict(fc_norm=False),
    "tensor efficient_lm_head.* reaches no parameter": dict(candidate_head=None),
    "fc_norm and norm_before_fc exclude each other": dict(norm_before_fc=True),
    "unknown key expert_count": dict(expert_count=4),
    "unknown key eagle_config.depth": dict(eagle_config={"depth": 1}),
    "eagle_config.use_last_layernorm = False is not supported": dict(eagle_config={"use_last_layernorm":
    False}), "num_hidden_layers is 2, a draft has 1": dict(num_hidden_layers=2),
    "hidden_act gelu is not supported": dict(hidden_act="gelu"),
    "draft architecture MysteryDraft .* is not supported": dict(architectures=["MysteryDraft"]),
    "hidden_size is missing": dict(hidden_size=None),
    "hidden_size must be a positive integer": dict(hidden_size=-1),
    "rope type .* is not supported": dict(rope_scaling={"rope_type": "wavy"}),
    "names code to run": dict(auto_map={"AutoModel": "evil.py"}),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_bad_configs(tmp_path, message):
    raw = {k: v for k, v in {**EAGLE4, **BAD_CONFIGS[message]}.items() if v is not None}
    write_draft(tmp_path, raw, make_weights(EAGLE4))
    with pytest.raises(ConfigError, match=message) as caught:
        check(tmp_path)
    assert "\n" not in str(caught.value)


def with_tensors(**changes):
    """Changes to the tensors of an EAGLE-3 draft; None drops one."""

    def write(path):
        weights = {**make_weights(EAGLE3), **{k.replace("__", "."): v for k, v in changes.items()}}
        write_draft(path, EAGLE3, {k: v for k, v in weights.items() if v is not None})

    return write


BAD_TENSORS = {
    "lacks tensor layers.0.mlp.up_proj.weight": with_tensors(layers__0__mlp__up_proj__weight=None),
    "lacks tensor d2t": with_tensors(d2t=None),
    "tensor rotary.scale .* reaches no parameter": with_tensors(rotary__scale=torch.ones(1)),
    "maps draft token 3 to 103, outside the target's vocabulary of 97": with_tensors(
        d2t=torch.zeros(50, dtype=torch.long).index_fill(0, torch.tensor([3]), 100)
    ),
    "maps draft token 0 to -1": with_tensors(d2t=torch.full((50,), -1)),
    "d2t .* is F32, not integers": with_tensors(d2t=torch.zeros(50)),
    "norm.weight .* is I32; supported: BF16": with_tensors(norm__weight=torch.ones(32, dtype=torch.int32)),
    "holds fc.weight twice": with_tensors(model__fc__weight=torch.ones(32, 96)),
}


@pytest.mark.parametrize("message", BAD_TENSORS)
def test_bad_tensors(tmp_path, message):
    BAD_TENSORS[message](tmp_path)
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, "eagle3")


def test_a_draft_too_narrow_for_the_targets_tables(tmp_path):
    raw = {
        **EAGLE4,
        "hidden_size": 16,
        "target_hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    write_draft(tmp_path, raw, make_weights(raw))
    with pytest.raises(ConfigError, match="hidden size 16 can't share the target's 32"):
        check(tmp_path)


def test_pickled_weights_name_the_command_that_converts_them(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(EAGLE))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=f"tokenspeed draft convert {tmp_path}"):
        check(tmp_path, "eagle")


@pytest.mark.parametrize("damage", ["empty", "cut", "header"])
def test_damaged_files(tmp_path, damage):
    write_draft(tmp_path, EAGLE4)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": data[:-10], "header": b"\xff" * 64}[damage])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        check(tmp_path)


def test_no_draft_at_all(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        check(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        check(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(EAGLE4))
    with pytest.raises(ConfigError, match=r"has no \*.safetensors"):
        check(tmp_path)


def test_a_whole_model_is_no_draft(tmp_path):
    weights = {k: v for k, v in make_weights(EAGLE).items() if not k.startswith("fc")}
    write_draft(tmp_path, {**EAGLE, "num_hidden_layers": 30}, weights)
    with pytest.raises(
        ConfigError, match=r"is no EAGLE draft: LlamaForCausalLM with 30 layers and no fc\.weight"
    ):
        check(tmp_path, "eagle")


def test_speculators_drafts_that_can_not_run(tmp_path):
    write_draft(tmp_path, speculators(speculators_model_type="mlp"), make_weights(EAGLE3))
    with pytest.raises(ConfigError, match="speculators draft of type mlp"):
        check(tmp_path, "eagle3")
    write_draft(
        tmp_path, speculators(speculators_model_type=None, speculators_config="x"), make_weights(EAGLE3)
    )
    with pytest.raises(ConfigError, match="speculators draft of type None"):
        check(tmp_path, "eagle3")
    write_draft(tmp_path, speculators(transformer_layer_config="x"), make_weights(EAGLE3))
    with pytest.raises(ConfigError, match="can't be used as eagle3 draft"):
        check(tmp_path, "eagle3")
    raw = speculators()
    del raw["norm_before_residual"]
    write_draft(tmp_path, raw, make_weights(EAGLE3))
    with pytest.raises(ConfigError, match="norm_before_residual is missing"):
        check(tmp_path, "eagle3")
    write_draft(tmp_path, speculators(eagle_aux_hidden_state_layer_ids=[0, 4, 5]), make_weights(EAGLE3))
    with pytest.raises(ConfigError, match="names 0, the embedding's output"):
        check(tmp_path, "eagle3")


def tokenizer(tokens: list[str], added: list[str] = ()) -> str:
    extra = [{"id": len(tokens) + i, "content": t} for i, t in enumerate(added)]
    return json.dumps({"model": {"vocab": {t: i for i, t in enumerate(tokens)}}, "added_tokens": extra})


def test_tokenizers_must_agree(tmp_path):
    write_draft(tmp_path, EAGLE4)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "tokenizer.json").write_text(tokenizer(["a", "b", "c"], ["<end>"]))
    (tmp_path / "tokenizer.json").write_text(tokenizer(["a", "b", "c", "<end>"]))
    check(tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer(["a", "x", "y"], ["<end>"]))
    with pytest.raises(ConfigError, match=r"token 1 is 'x' in .* and 'b' in"):
        check(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="can't be read as a tokenizer"):
        check(tmp_path)


def test_trees_wider_than_the_drafts_head(tmp_path):
    """One that was asked for is refused at start; of several that may be used, those that fit are left."""
    write_draft(tmp_path / "a", EAGLE4)  # 24 candidates of 97 tokens
    write_draft(tmp_path / "b", EAGLE3)  # 50 tokens
    wide, narrow, widest = Shape(2, 25, 30), Shape(2, 24, 30), Shape(1, 51, 52)
    config = check(tmp_path / "a")
    assert fitting_shapes(config, (narrow,), False) == (narrow,)
    assert fitting_shapes(config, (wide, narrow), False) == (narrow,)
    assert fitting_shapes(config, (wide, widest), True) == (wide, widest)
    with pytest.raises(
        ConfigError, match="tree 2/25/30 asks for 25 tokens a step, the draft has 24 candidates"
    ):
        fitting_shapes(config, (wide, widest), False)
    with pytest.raises(ConfigError, match="the draft has 50 tokens in its vocabulary"):
        fitting_shapes(check(tmp_path / "b", "eagle3"), (widest,), False)


def test_acceptance_is_kept_in_the_draft(tmp_path):
    write_draft(tmp_path, EAGLE4)
    assert check(tmp_path).acceptance == ()
    for priors in ({Shape(2, 1, 3): (0.75, 0.5)}, {Shape(8, 4, 16): (0.5,) * 8, Shape(1, 1, 2): (0.25,)}):
        check_keeps(tmp_path)
        file = keep_acceptance(tmp_path, priors)
        assert dict(check(tmp_path).acceptance) == priors  # the others are gone
        assert {k: v for k, v in json.loads(file.read_text()).items() if k != "acceptance"} == EAGLE4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_acceptance_that_can_not_be_kept(tmp_path, monkeypatch):
    write_draft(tmp_path / "a", EAGLE3)
    with pytest.raises(ConfigError, match="is an eagle3 draft; only an eagle4 draft's"):
        check_keeps(tmp_path / "a")
    write_draft(tmp_path / "b", {**EAGLE3, "acceptance": {"1/1/2": [0.5]}})
    with pytest.raises(ConfigError, match="unknown key acceptance"):
        check(tmp_path / "b", "eagle3")
    write_draft(tmp_path / "c", EAGLE4)
    before = (tmp_path / "c" / "config.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tokenspeed.spec.eagle4.config.os.replace", full)
    monkeypatch.setattr("tokenspeed.spec.eagle4.config.tempfile.TemporaryFile", lambda dir: full())
    for keep in (check_keeps, lambda path: keep_acceptance(path, {Shape(1, 1, 2): (0.5,)})):
        with pytest.raises(ConfigError, match=r"can't be written: No space left .* give --draft"):
            keep(tmp_path / "c")
    assert (tmp_path / "c" / "config.json").read_bytes() == before
    assert len(list((tmp_path / "c").iterdir())) == 2  # no half file is left


def test_config_without_checks_for_tools(tmp_path):
    write_draft(tmp_path, EAGLE4)
    assert load_draft_config(tmp_path, TARGET).aux_size == 96
