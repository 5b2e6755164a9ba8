"""Changes to logits that a request asks for: penalties, logit_bias, allowed tokens, bad words, min_tokens.

Exact at every tree node.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.params import SamplingParams
from tokenspeed.sampling.bad_words import BadWords


@dataclass
class _Edit:
    """Of one request. All tensors on the device."""

    params: SamplingParams
    prompt_seen: Tensor | None  # bool [V] tokens of the prompt
    counts: Tensor | None  # float32 [V] how often each token was generated
    bias: Tensor | None  # float32 [V]; -inf for tokens that are not allowed
    bad_words: BadWords | None
    stop_ids: Tensor | None  # int64, masked while fewer than min_tokens are generated
    min_length: int  # absolute length from which on stop ids may come


class LogitEdits:
    """Edits by slot. A slot without any has no entry and costs nothing."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], device):
        self.vocab_size, self.eos_token_ids, self.device = vocab_size, eos_token_ids, device
        self._edits: dict[int, _Edit] = {}

    def admit(self, slot: int, tokens: list[int], num_prompt: int, params: SamplingParams) -> None:
        """`tokens`: prompt and, after a preemption, the output so far."""
        self._edits.pop(slot, None)
        stop_ids = (
            params.stop_token_ids if params.ignore_eos else (*self.eos_token_ids, *params.stop_token_ids)
        )
        waits = params.min_tokens > 0 and bool(stop_ids)
        allowed, banned = params.allowed_token_ids, params.bad_words_token_ids
        assert not params.bad_words, "words go through the tokenizer first"
        if not (params.penalised or params.logit_bias or waits or allowed is not None or banned):
            return
        seen = counts = bias = None
        if params.penalised:
            ids = torch.tensor(tokens, device=self.device)
            counts = torch.zeros(self.vocab_size, device=self.device)
            counts.index_add_(0, ids[num_prompt:], torch.ones(len(tokens) - num_prompt, device=self.device))
            seen = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
            seen[ids[:num_prompt]] = True
        if params.logit_bias or allowed is not None:
            bias = torch.zeros(self.vocab_size, device=self.device)
            ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=self.device)
            bias[ids] = torch.tensor(list(params.logit_bias.values()), device=self.device)
        if allowed is not None:
            others = torch.ones(self.vocab_size, dtype=torch.bool, device=self.device)
            others[torch.tensor(allowed, device=self.device)] = False
            bias[others] = float("-inf")
        stops = torch.tensor(sorted(set(stop_ids)), device=self.device) if waits else None
        bad_words = BadWords(banned, tokens[num_prompt:], self.device) if banned else None
        least = num_prompt + params.min_tokens
        self._edits[slot] = _Edit(params, seen, counts, bias, bad_words, stops, least)

    def release(self, slot: int) -> None:
        self._edits.pop(slot, None)

    def any(self, slots: list[int]) -> bool:
        return not self._edits.keys().isdisjoint(slots)

    def apply(
        self, logits: Tensor, slots: list[int], tokens: Tensor, mask: Tensor, positions: Tensor
    ) -> Tensor:
        """Edited copy where a request of the batch asks for it.

        Args:
            logits: float32 [B, N, V]. slots: of the B rows.
            tokens: int64 [B, N] of the nodes; node 0 is counted already.
            mask: int64 [B, N], bit j of node i: node j is i or an ancestor of it.
            positions: int64 [B, N] absolute position of the token that each node's logits are for.
        """
        if not self.any(slots):
            return logits
        logits = logits.clone()
        for row, slot in enumerate(slots):
            if (edit := self._edits.get(slot)) is not None:
                _edit(edit, logits[row], tokens[row], mask[row], positions[row])
        return logits

    def count(self, slots: list[int], tokens: Tensor, counts: Tensor) -> None:
        """Counts emitted tokens. tokens: int64 [B, n]; the first counts[b] of a row are valid (int64 [B])."""
        for row, slot in enumerate(slots):
            if (edit := self._edits.get(slot)) is None:
                continue
            if edit.counts is not None:
                valid = torch.arange(tokens.shape[1], device=self.device) < counts[row]
                edit.counts.index_add_(0, tokens[row].clamp(min=0), valid.float())
            if edit.bad_words is not None:
                edit.bad_words.extend(tokens[row], counts[row])


def _edit(edit: _Edit, logits: Tensor, tokens: Tensor, mask: Tensor, positions: Tensor) -> None:
    """In place on [N, V]. Repetition penalty as in CTRL (arXiv:1909.05858), the others as in OpenAI's API."""
    params = edit.params
    if edit.counts is not None:
        counts = edit.counts.expand_as(logits)
        if len(tokens) > 1:  # what the node's own path adds
            nodes = torch.arange(1, len(tokens), device=logits.device)
            on_path = ((mask[:, None] >> nodes) & 1).to(counts.dtype)  # [N, N - 1]
            counts = counts.clone().scatter_add_(1, tokens[1:].expand(len(tokens), -1), on_path)
        if params.repetition_penalty != 1.0:
            seen = edit.prompt_seen | (counts > 0)
            scaled = torch.where(
                logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
            )
            logits.copy_(torch.where(seen, scaled, logits))
        logits.sub_(params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
    if edit.bias is not None:
        logits.add_(edit.bias)
    if edit.bad_words is not None:
        edit.bad_words.ban(logits, tokens, mask)
    if edit.stop_ids is not None:
        early = (positions < edit.min_length)[:, None]
        logits[:, edit.stop_ids] = torch.where(early, float("-inf"), logits[:, edit.stop_ids])
