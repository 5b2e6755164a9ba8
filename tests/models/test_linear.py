"""Weights that a CPU repacks once they are loaded: the same bits, and no second copy."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from tokenspeed.layers.linear import ColumnParallel, RowParallel, can_pack
from tokenspeed.layers.parameter import Placement

needs_packing = pytest.mark.skipif(not can_pack(), reason="this CPU has no packed bfloat16 product")
PARTS = {"q": 40, "k": 24, "v": 24}


def bfloat16() -> Placement:
    return Placement(torch.device("cpu"), torch.bfloat16)


def fill(layer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in layer.params("").values():
        param.target.normal_(generator=generator)


@needs_packing
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 100])
def test_packed_weights_give_the_same_bits(rows, bias):
    place = bfloat16()
    column = ColumnParallel(56, PARTS, place, bias)
    last, row = column.last(2), RowParallel("o", 56, 30, place, bias)
    fill(column, 0), fill(row, 1)
    x = torch.randn(rows, 56, generator=torch.Generator().manual_seed(2)).bfloat16()
    plain = [layer.apply(x) for layer in (column, last, row)]
    place.finish()
    for layer, before in zip((column, last, row), plain, strict=True):
        after = layer.apply(x)
        assert after.is_contiguous() and torch.equal(after, before)
    assert torch.equal(plain[0][:, 40:], plain[1])


@needs_packing
def test_the_plain_weight_is_freed():
    place = bfloat16()
    layer = ColumnParallel(56, PARTS, place)
    part = layer.last(1)
    plain = weakref.ref(layer._linear.weight.untyped_storage())
    place.finish()
    gc.collect()
    assert plain() is None
    part.apply(torch.zeros(1, 56, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "place",
    [
        Placement(torch.device("cpu"), torch.float32),
        Placement(torch.device("cpu"), torch.bfloat16, batch_invariant=True),
        Placement(torch.device("meta"), torch.bfloat16),
    ],
    ids=["float32", "batch-invariant", "another device"],
)
def test_others_stay_plain(place):
    layer = ColumnParallel(56, PARTS, place)
    assert not place.on_loaded and layer._linear.weight.layout == torch.strided


@needs_packing
def test_finishing_twice_packs_once():
    place = bfloat16()
    layer = ColumnParallel(56, PARTS, place)
    fill(layer, 0)
    x = torch.ones(3, 56, dtype=torch.bfloat16)
    weight = torch.cat([param.target.clone() for param in layer.params("").values()])
    place.finish()
    place.finish()
    assert torch.equal(layer.apply(x), F.linear(x, weight))
