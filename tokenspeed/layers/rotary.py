"""Rotary position embedding (RoFormer, Su et al. 2021) as a table of cosines and sines, with its scalings."""

import math

import torch
from torch import Tensor

from tokenspeed.models.config import RopeConfig


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """Cosines and sines of positions 0..num_positions-1, in float32 arithmetic, as models are trained with.

    Args:
        num_positions: P, from the context that is served, with room for a tree beyond it, whatever limit
            the checkpoint names.

    Returns:
        float32 [P, head_dim]: the head_dim / 2 cosines, then the sines, both times YaRN's attention factor.
    """
    inv_freq, scale = inverse_frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(device)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians a position of each pair of dimensions, float32 [head_dim / 2]; the factor on the table."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, head_dim), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Llama 3.1: long waves are slowed down by `factor`, short ones kept, those in between blended."""
    turns = rope.original_max_position * inv_freq / (2 * math.pi)  # within the context of training
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * (inv_freq / rope.factor) + kept * inv_freq


def _yarn(rope: RopeConfig, inv_freq: Tensor, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023), section 3.2, with the ramp over dimensions that its authors' code has."""

    def pair_with(turns: float) -> float:
        """The index, a real number, of the pair that turns so often within the context of training."""
        wave = rope.original_max_position / (2 * math.pi * turns)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return (inv_freq / rope.factor) * slowed + inv_freq * (1 - slowed)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
