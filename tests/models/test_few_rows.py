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
from tokenspeed.models.config import load_model_config
from tokenspeed.models.weights import load_model

GPU = torch.device("cuda")
OPS = ("linear_rows", "linear_sums", "gate_up_silu")


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of sm_90 with a table that has gate_up_silu win up to 8 rows."""
    monkeypatch.delenv(registry.ENV, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(few_rows, "WINS", {(9, 0): {"gate_up_silu": 8}})


def place(dtype=torch.bfloat16, device=GPU, **more) -> Placement:
    return Placement(device, dtype, **more)


def test_nothing_is_on_that_was_not_measured(hopper, monkeypatch):
    assert [few_rows.most_rows(op, place(), False) for op in OPS] == [0, 0, 8]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert {few_rows.most_rows(op, place(), False) for op in OPS} == {0}


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
    assert few_rows.most_rows("gate_up_silu", where, bias) == 0
    monkeypatch.setenv(registry.ENV, "gate_up_silu=triton")
    assert few_rows.most_rows("gate_up_silu", where, bias) == 0


def test_the_environment_overrules(hopper, monkeypatch):
    monkeypatch.setenv(registry.ENV, "gate_up_silu=torch,linear_sums=triton")
    assert [few_rows.most_rows(op, place(), False) for op in OPS] == [0, few_rows.MOST_ROWS, 0]


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
