"""Checkpoints as they are published: names of tensors and configs of every layout lead to one and the same draft."""

import pytest
from spec.draft_cases import EAGLE, EAGLE3, make_drafter, make_weights, speculators
from spec.test_drafter import Requests, dense_tree

from tokenspeed.config import Shape


def midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def prefixed(name: str) -> str:
    return name if name == "lm_head.weight" else f"model.{name}"


def inside(key: str, **more) -> dict:
    """EAGLE3 with its layer ids in the sub-object `key`."""
    ids = "eagle_aux_hidden_state_layer_ids"
    return {k: v for k, v in EAGLE3.items() if k != ids} | {key: {ids: EAGLE3[ids], **more}}


NVIDIA = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
}
SPECULATORS = speculators(norm_before_residual=False)
LAYOUTS = {  # the plain config, what else it says, config.json as published (None: the plain one), names
    "eagle3 midlayer": (EAGLE3, {}, None, midlayer),
    "eagle3 midlayer that calls itself Llama": (
        EAGLE3, {}, {**EAGLE3, "architectures": ["LlamaForCausalLM"]}, midlayer,
    ),
    "eagle3 with a prefix": (EAGLE3, {}, None, prefixed),
    "eagle3 with both": (EAGLE3, {}, None, lambda name: prefixed(midlayer(name))),
    "eagle3 of the other name": (EAGLE3, {}, {**EAGLE3, "architectures": ["Eagle3LlamaForCausalLM"]}, None),
    "eagle3 eagle_config": (EAGLE3, {}, inside("eagle_config", **NVIDIA), midlayer),
    "eagle3 eagle_config with a norm": (
        EAGLE3, dict(norm_before_fc=True), inside("eagle_config", norm_before_fc=True), midlayer,
    ),
    "speculators": (EAGLE3, {}, SPECULATORS, None),
    "speculators norm_before_residual": (EAGLE3, dict(norm_before_residual=True), speculators(), None),
    "speculators norms": (
        EAGLE3,
        dict(fc_norm=True, norm_output=True),
        SPECULATORS | {"fc_norm": True, "norm_output": True},
        None,
    ),
    "speculators with the whole vocabulary": (
        EAGLE3, dict(draft_vocab_size=97), SPECULATORS | {"draft_vocab_size": 97}, None,
    ),
    "eagle with a prefix": (EAGLE, {}, None, prefixed),
    "eagle of the other name": (EAGLE, {}, {**EAGLE, "architectures": ["EagleLlamaForCausalLM"]}, None),
    "eagle for Qwen2": (
        EAGLE,
        dict(attention_bias=True),
        {**EAGLE, "architectures": ["Qwen2ForCausalLM"], "bias": True, "use_sliding_window": False},
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_layout_drafts_like_the_dense_draft(tmp_path, layout):
    base, changes, written, names = LAYOUTS[layout]
    if layout.startswith("speculators"):  # its ids name inputs of layers: these outputs
        changes = {**changes, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    drafter, dense = make_drafter(tmp_path, base, changes, written=written, names=names)
    raw = {**base, **changes}
    assert drafter.aux_layers == tuple(raw.get("eagle_aux_hidden_state_layer_ids", (8,)))
    requests = Requests(drafter, [2, 17], 97)
    requests.append_all()
    for shape in (Shape(4, 3, 12), Shape(5, 1, 6)):
        tree = drafter.propose(requests.frontier(), shape)
        for b in range(2):
            tokens, parents = dense_tree(dense, requests.tokens[b], requests.aux[b], shape)
            assert (tree.tokens[b].tolist(), tree.parents[b].tolist()) == (tokens, parents)


def test_a_reduced_vocabulary_reaches_only_its_tokens(tmp_path):
    drafter, _ = make_drafter(tmp_path, EAGLE3, {})
    known = {i + int(offset) for i, offset in enumerate(make_weights(EAGLE3)["d2t"])}
    assert len(known) == 50
    requests = Requests(drafter, [2, 13, 21], 97)
    requests.append_all()
    tree = drafter.propose(requests.frontier(), Shape(4, 8, 60))
    assert set(tree.tokens[:, 1:].flatten().tolist()) <= known
