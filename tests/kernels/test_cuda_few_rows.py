"""Which products csrc's kernels get, and which stay with Triton's; the kernels themselves: test_gpu_cuda.py."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tokenspeed.kernels import cuda, cuda_few_rows
from tokenspeed.kernels.triton import few_rows, norm

OPS = ("linear_rows", "linear_sums", "gate_up_silu")


@pytest.fixture
def asked(monkeypatch):
    """asked(op, x, weight): who is asked for the product, 'cuda' or 'triton'."""
    monkeypatch.setattr(cuda_few_rows, "_launch", lambda *args: "cuda")
    for op in OPS:
        monkeypatch.setattr(few_rows, op, lambda x, weight, pdl=None: "triton")
    return lambda op, x, weight: getattr(cuda_few_rows, op)(x, weight)


@pytest.mark.parametrize("op", OPS)
def test_who_is_asked(op: str, asked):
    half = partial(torch.empty, dtype=torch.bfloat16)
    big = half(4096, 2048)
    assert asked(op, half(1, 2048), big) == asked(op, half(16, 2048), big) == "cuda"
    assert asked(op, half(3, 4096)[:, :2048], half(4096, 4096)[:, 2048:]) == "cuda"
    for x, weight in (
        (half(17, 2048), big),
        (half(0, 2048), big),
        (half(1, 2048).float(), big.float()),
        (half(1, 2056)[:, 1:2049], big),  # rows that start between 16 bytes
        (half(1, 2050)[:, :2048].expand(2, -1), half(4096, 2050)[:, :2048]),
        (half(1, 2080), half(4096, 2080)),  # no tile divides K
        (half(1, 2048), half(4104, 2048)),  # nor the outputs
        (half(1, 1024), half(2048, 1024)),  # 4 MiB
    ):
        assert asked(op, x, weight) == "triton"


def test_which_norms_stay_with_triton(monkeypatch):
    monkeypatch.setattr(norm, "add_partials_rms_norm", lambda *args: "triton")
    for rows, splits, size, dtype in (
        (17, 4, 4096, torch.float32),
        (0, 4, 4096, torch.float32),
        (1, 5, 4096, torch.float32),
        (1, 4, 576, torch.float32),  # one program a row is as fast
        (1, 4, 4112, torch.float32),  # no whole parts
        (1, 4, 4096, torch.bfloat16),
    ):
        residual, gain = torch.zeros(rows, size, dtype=dtype), torch.ones(size, dtype=torch.bfloat16)
        partials = torch.zeros(splits, rows, size)
        assert cuda_few_rows.add_partials_rms_norm(partials, residual, gain, 1e-5) == "triton"


def test_a_library_that_cannot_be_loaded_is_none(monkeypatch, tmp_path):
    (tmp_path / "lib.so").write_bytes(b"for another system")
    monkeypatch.setenv("TOKENSPEED_CUDA_LIBRARY", str(tmp_path / "lib.so"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda.library.cache_clear()
    assert not cuda.built()
