"""The exact distribution of what a small model says: every prefix through transformers, the transforms in float64.

Written from what `SamplingParams` promises, and sharing no code with the engine.
"""

import numpy as np
import torch
from scipy.special import gammaincc

from tokenspeed.params import SamplingParams

MIN_EXPECTED = 5.0  # cells of the chi-square test that expect fewer draws are put together


class ExactModel:
    """Next-token logits of a checkpoint, in float64."""

    def __init__(self, path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
        self.vocab_size = self.model.config.vocab_size

    @torch.inference_mode()
    def logits(self, sequences: list[list[int]]) -> np.ndarray:
        """float64 [n, V] after each of n sequences of one length."""
        return self.model(torch.tensor(sequences)).logits[:, -1].numpy()

    def sequences(self, prompt: list[int], length: int, params: SamplingParams) -> np.ndarray:
        """Probabilities of every continuation of `length` tokens: float64 [V ** length], the last token fastest."""
        vocab = self.vocab_size
        outputs, weights = [[]], np.ones(1)
        for _ in range(length):
            logits = self.logits([prompt + out for out in outputs])
            rows = [next_token(row, prompt, out, params) for row, out in zip(logits, outputs, strict=True)]
            weights = (weights[:, None] * np.array(rows)).ravel()
            outputs = [[*out, token] for out in outputs for token in range(vocab)]
        return weights


def next_token(
    logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams
) -> np.ndarray:
    """Probabilities float64 [V] of the next token, one transform after another, token by token."""
    scores = [float(x) for x in logits]
    for token in range(len(scores)):
        times = output.count(token)
        if token in prompt or times:
            scores[token] *= (
                params.repetition_penalty if scores[token] <= 0 else 1 / params.repetition_penalty
            )
        scores[token] -= params.frequency_penalty * times
        scores[token] -= params.presence_penalty if times else 0.0
        scores[token] += params.logit_bias.get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            scores[token] = float("-inf")
        if any([*output, token][-len(bad) :] == list(bad) for bad in params.bad_words_token_ids):
            scores[token] = float("-inf")
    probs = softmax(np.array(scores) / params.temperature)
    if params.top_k > 0:
        least = sorted(probs, reverse=True)[min(params.top_k, len(probs)) - 1]
        probs = renormalised(probs, probs >= least)
    if params.top_p < 1:
        mass, least = 0.0, 1.0
        for prob in sorted(probs, reverse=True):
            if mass >= params.top_p:
                break
            mass, least = mass + prob, prob
        probs = renormalised(probs, probs >= least)
    return renormalised(probs, probs >= params.min_p * probs.max())


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def renormalised(probs: np.ndarray, kept: np.ndarray) -> np.ndarray:
    return np.where(kept, probs, 0) / probs[kept].sum()


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value that `counts` are drawn from `probs`; 0 where something impossible was drawn.

    Cells that expect fewer than MIN_EXPECTED draws are put together, the rarest first, until each group expects
    that many.
    """
    if counts[probs == 0].any():
        return 0.0
    cells = np.nonzero(probs)[0]
    cells = cells[np.argsort(probs[cells], kind="stable")]
    observed, expected = [0.0], [0.0]
    for count, wanted in zip(counts[cells], counts.sum() * probs[cells], strict=True):
        if expected[-1] >= MIN_EXPECTED:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += count
        expected[-1] += wanted
    distance = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(expected) - 1
    return float(gammaincc(freedom / 2, distance / 2)) if freedom else 1.0
