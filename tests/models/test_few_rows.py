"""When layers take the kernels for few rows, and that a model which does still computes the same."""

import pytest
import torch
from dense_attention import NUM_TOKENS, DenseCausal, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM

from tokenspeed import kernels
from tokenspeed.distributed.groups import TensorParallel
from tokenspeed.kernels import registry
from tokenspeed.layers import few_rows, linear, mlp
from tokenspeed.layers.parameter import Placement
from tokenspeed.models import decoder
from tokenspeed.models.config import load_model_config
from tokenspeed.models.weights import load_model

GPU = torch.device("cuda")
OPS = ("linear_rows", "linear_sums", "gate_up_silu")
WIDTH = 1536  # SmolLM2-135M's largest K


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of sm_90 with a table that has gate_up_silu win up to 8 rows."""
    monkeypatch.delenv(registry.ENV, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(few_rows, "WINS", {(9, 0): {"gate_up_silu": 8}})
    monkeypatch.setattr(few_rows, "SMALL_WINS", {(9, 0): (4, WIDTH)})


def place(dtype=torch.bfloat16, device=GPU, **more) -> Placement:
    return Placement(device, dtype, **more)


def test_nothing_is_on_that_was_not_measured(hopper, monkeypatch):
    assert [few_rows.most_rows(op, place(), False) for op in OPS] == [0, 0, 8]
    assert [few_rows.small_rows(place(), False, width) for width in (576, WIDTH, WIDTH + 1)] == [4, 4, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert {few_rows.most_rows(op, place(), False) for op in OPS} == {0}
    assert few_rows.small_rows(place(), False, 576) == 0


@pytest.mark.parametrize(
    ("where", "bias"),
    [
        (place(), True),
        (place(torch.float32), False),
        (place(device=torch.device("cpu")), False),
        (place(batch_invariant=True), False),
        (place(tp=TensorParallel(0, 2)), False),
    ],
)
def test_other_products_keep_their_path(hopper, monkeypatch, where, bias):
    forced = ",".join(f"{op}=triton" for op in ("gate_up_silu", *few_rows.SMALL_OPS))
    for value in ("", forced):
        monkeypatch.setenv(registry.ENV, value)
        assert few_rows.most_rows("gate_up_silu", where, bias) == 0
        assert few_rows.small_rows(where, bias, 576) == 0


def test_the_environment_overrules(hopper, monkeypatch):
    monkeypatch.setenv(registry.ENV, "gate_up_silu=torch,linear_sums=triton")
    assert [few_rows.most_rows(op, place(), False) for op in OPS] == [0, few_rows.MOST_ROWS, 0]


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ("linear_add=torch", 0),
        ("norm_linear=triton", 4),
        ("all=triton", few_rows.MOST_ROWS),
        ("all=torch", 0),
    ],
)
def test_the_ops_of_a_small_layer_are_forced_together(hopper, monkeypatch, value, rows):
    monkeypatch.setenv(registry.ENV, value)
    assert few_rows.small_rows(place(), False, 576) == rows
    assert few_rows.small_rows(place(), False, kernels.SMALL_K + 1) == 0


def in_parts(x: Tensor, weight: Tensor) -> Tensor:
    pieces = zip(x.tensor_split(3, 1), weight.tensor_split(3, 1), strict=True)
    return torch.stack([a @ b.T for a, b in pieces])


@pytest.mark.parametrize("most", [NUM_TOKENS, NUM_TOKENS - 1])
@torch.no_grad()
def test_logits_equal_transformers(tiny_model_dir, monkeypatch, most):
    called = []
    for module in (few_rows, linear, mlp):
        monkeypatch.setattr(module, "most_rows", lambda op, place, bias: most)
    for op in OPS:
        fn = in_parts if op == "linear_sums" else vars(kernels)[op]
        monkeypatch.setattr(kernels, op, lambda *args, op=op, fn=fn: called.append(op) or fn(*args))
    path, input_ids = tiny_model_dir("llama"), tokens()
    want = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(input_ids[None]).logits[0]
    config = load_model_config(path)
    model = load_model(path, config, "cpu", torch.float32)
    hidden, _ = model.forward(input_ids, torch.arange(NUM_TOKENS), DenseCausal(config, NUM_TOKENS))
    torch.testing.assert_close(model.logits(hidden), want, atol=1e-4, rtol=1e-4)
    layer = ["linear_rows", "linear_sums", "gate_up_silu", "linear_sums"]
    assert called == (layer * config.num_layers if most == NUM_TOKENS else [])


@pytest.mark.parametrize("most", [NUM_TOKENS, NUM_TOKENS - 1])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@torch.no_grad()
def test_small_layers_equal_transformers(tiny_model_dir, monkeypatch, kind, most):
    """Logits, and the states that a draft reads, of the form that reads and writes the residual stream."""
    called = []
    monkeypatch.setattr(decoder, "small_rows", lambda place, bias, width: most)
    for op in few_rows.SMALL_OPS:
        fn = vars(kernels)[op]
        monkeypatch.setattr(kernels, op, lambda *args, op=op, fn=fn: called.append(op) or fn(*args))
    path, input_ids = tiny_model_dir(kind), tokens()
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    want = hf(input_ids[None], output_hidden_states=True)
    config = load_model_config(path)
    model = load_model(path, config, "cpu", torch.float32)
    aux_layers = (*range(config.num_layers - 1), config.num_layers)
    attn = DenseCausal(config, NUM_TOKENS)
    hidden, aux = model.forward(input_ids, torch.arange(NUM_TOKENS), attn, aux_layers)
    torch.testing.assert_close(model.logits(hidden), want.logits[0], atol=1e-4, rtol=1e-4)
    states = torch.cat([state[0] for state in want.hidden_states[1:]], -1)
    torch.testing.assert_close(aux, states, atol=1e-4, rtol=1e-4)
    layer = ["norm_linear", "linear_add", "norm_gate_up_silu", "linear_add"]
    assert called == (layer * config.num_layers if most == NUM_TOKENS else [])
