"""The attention kernels read lengths, masks and indices as dense arrays: what reaches them must be that.

A view of stride 0 went unnoticed on CPUs, where torch follows strides; on a GPU the kernel read past its end.
"""

import pytest
import torch
from harness import InProcessEngine, greedy


def test_every_row_tensor_is_dense(tiny_model_dir, tiny_draft_dir):
    target = tiny_model_dir("llama")
    engine = InProcessEngine(target, spec="eagle4", draft=str(tiny_draft_dir(target)), spec_shape="4/4/16")
    seen = []

    def watched(make):
        def wrapper(pool, rows, *args, **options):
            tensors = {
                "positions": rows.positions,
                "prefix_lens": rows.prefix_lens,
                "mask": rows.mask,
                "indices": rows.indices,
            }
            seen.extend(name for name, tensor in tensors.items() if not tensor.is_contiguous())
            return make(pool, rows, *args, **options)

        return wrapper

    drafter, backend = engine.runner.engine.drafter, engine.runner.engine.backend
    drafter._attention, backend._tree = watched(drafter._attention), watched(backend._tree)
    engine.generate([[5, 9, 17], [11] * 20], greedy(12))
    assert seen == []


def test_the_kernel_refuses_a_view():
    pytest.importorskip("triton", reason="triton is not installed")
    from tokenspeed.kernels.triton.tree_attention import tree_attention

    q, cache, tail = torch.zeros(2, 4, 2, 16), torch.zeros(3, 16, 1, 16), torch.zeros(2, 4, 1, 16)
    table, lens = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    mask = torch.zeros(2, 4, dtype=torch.int64)
    view = torch.zeros(2, 1, dtype=torch.int64).expand(2, 4)
    with pytest.raises(ValueError, match="contiguous"):
        tree_attention(q, cache, cache, tail, tail, table, lens, mask, view, 1, 0.25, 8)
