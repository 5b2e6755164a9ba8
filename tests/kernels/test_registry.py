"""Which kernel runs where, and what a forced choice may be."""

import subprocess
import sys

import pytest
import torch

from tokenspeed import kernels
from tokenspeed.errors import ConfigError
from tokenspeed.kernels import reference, reference_draft, reference_few_rows, reference_round, registry


def test_defaults(monkeypatch):
    monkeypatch.delenv(registry.ENV, raising=False)
    assert {registry.choose(op, "cpu") for op in registry.OPS} == {"torch"}
    assert registry.choose("sample", "cuda") == "triton"
    assert registry.choose("sample", "mps") == "torch"


@pytest.mark.parametrize(("device", "kernel"), [("cuda", "triton"), ("cpu", "torch"), ("xpu", "torch")])
def test_no_device_samples_greedily(monkeypatch, device, kernel):
    """B16: on AMD, where torch says cuda too, runs the kernel of NVIDIA; all others take the reference. The two
    draw alike (test_triton_interpreter.py), and there is no third."""
    monkeypatch.delenv(registry.ENV, raising=False)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert registry.choose("sample", device) == kernel
    assert set(registry.OPS["sample"]) == {"triton", "torch"}


def test_every_op_has_a_function_and_a_reference():
    every = vars(reference) | vars(reference_draft) | vars(reference_round) | vars(reference_few_rows)
    for op, impls in registry.OPS.items():
        assert callable(vars(kernels)[op])
        assert impls["torch"].load() is every[op]


def test_forced(monkeypatch):
    monkeypatch.setenv(registry.ENV, "sample=torch, move_kv=triton")
    assert registry.choose("sample", "cuda") == "torch"
    with pytest.raises(ConfigError, match="move_kv=triton can't run on cpu"):
        registry.choose("move_kv", "cpu")
    monkeypatch.setenv(registry.ENV, "all=torch")
    assert {registry.choose(op, "cuda") for op in registry.OPS} == {"torch"}


@pytest.mark.parametrize("value", ["nothing=torch", "sample=fast", "sample", "all=fast"])
def test_unknown_choice(monkeypatch, value):
    monkeypatch.setenv(registry.ENV, value)
    with pytest.raises(ConfigError, match="no kernel"):
        registry.choose("sample", "cpu")


def test_choice_is_made_once(monkeypatch):
    op = registry.Op("silu_and_mul")
    fn = op["cpu"]
    monkeypatch.setenv(registry.ENV, "nonsense")
    assert op["cpu"] is fn
    torch.testing.assert_close(fn(torch.zeros(1, 4)), torch.zeros(1, 2))


def test_a_cpu_process_loads_no_triton():
    code = """
import sys, torch
from tokenspeed import kernels
kernels.silu_and_mul(torch.zeros(1, 4))
print("tokenspeed.kernels.triton" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
