"""RMSNorm against its formula in float64, before and after a CPU has widened its weight."""

import pytest
import torch

from tokenspeed.layers.norm import RMSNorm
from tokenspeed.layers.parameter import Placement

HALF_STEP = 2.0**-8  # of bfloat16, relative to the value at most
EPS = 1e-5


def make(size: int, finish: bool) -> tuple[RMSNorm, torch.Tensor]:
    """A norm on the CPU in bfloat16 and its weight in float64."""
    place = Placement(torch.device("cpu"), torch.bfloat16)
    norm = RMSNorm(size, EPS, place)
    (param,) = norm.params("").values()
    param.target.normal_(generator=torch.Generator().manual_seed(0))
    weight = param.target.double()
    if finish:
        place.finish()
    return norm, weight


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("finish", [False, True])
def test_add_apply(dtype, rows, finish):
    norm, weight = make(576, finish)
    x, residual = normal(rows, 576).bfloat16(), normal(rows, 576, seed=2).to(dtype)
    want = residual + x
    got = norm.add_apply(x, residual)
    assert torch.equal(residual, want.to(dtype))
    # A float32 row is rounded once, at the end; a bfloat16 row before the weight as well, unless widened.
    roundings = 1 if finish or dtype == torch.float32 else 2
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(
        got.double(), exact(residual, weight), rtol=roundings * HALF_STEP * 1.01, atol=1e-6
    )


@pytest.mark.parametrize("finish", [False, True])
def test_heads_inside_a_wider_row(finish):
    norm, weight = make(24, finish)
    heads = normal(4, 8, 24).bfloat16()[:, 1:6]
    got = norm.apply(heads)
    assert got.is_contiguous() and got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), exact(heads, weight), rtol=2 * HALF_STEP * 1.01, atol=1e-6)


def test_a_row_of_zeros_stays_zero():
    norm, _ = make(16, True)
    assert not norm.apply(torch.zeros(2, 16)).any()
