"""What the attention kernels share: one step of online softmax, and the tile sizes."""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_step(q, k, v, visible, scale, peak, total, acc, PRECISION: tl.constexpr):
    """Folds a block of keys into the running softmax (Milakov and Gimelshein 2018), base 2.

    q [R, D], k [D, S], v [S, D], visible bool [R, S]; scale includes log2(e).
    peak, total [R] and acc [R, D] are float32. peak is a whole number, not below any score: so changing it scales by
    a power of two, and a key's rounded weight does not depend on the keys that it meets in its block.
    """
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.ceil(tl.max(scores, 1)))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen yet: no inf - inf
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit
def page_offsets(
    table, keys, inside, head, PAGE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr
):
    """Element offset of each key's head in a cache [pages, page_size, Hkv, D]: int64."""
    page = tl.load(table + keys // PAGE, inside, 0).to(tl.int64)
    return ((page * PAGE + keys % PAGE) * NUM_KV_HEADS + head) * DIM


def key_block(dim: int, dtype: torch.dtype) -> int:
    """Keys a step: fewer for wide elements and heads, so that two stages of K and V fit into 64 KiB."""
    return max(16, min(64, 8192 // (triton.next_power_of_2(dim) * dtype.itemsize // 2)))


def head_block(dim: int) -> int:
    """A head's tile: a power of two that tl.dot takes."""
    return max(16, triton.next_power_of_2(dim))


def check_layout(cache: torch.Tensor, *rows: torch.Tensor) -> None:
    """Raises ValueError for a layout that the kernels' address arithmetic does not cover."""
    dim = cache.shape[-1]
    if not cache.is_contiguous():
        raise ValueError("the KV cache must be contiguous")
    if any(t.shape[-1] != dim or t.stride(-1) != 1 or t.stride(-2) != dim for t in rows if t.numel()):
        raise ValueError("attention needs the heads of a row next to one another")


def check_dense(*tensors: torch.Tensor) -> None:
    """Raises ValueError for a tensor that a kernel would misread: one that is not contiguous."""
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError("attention needs contiguous lengths, masks, indices and paths")


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU (8 for a CPU, where Triton's interpreter runs)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
