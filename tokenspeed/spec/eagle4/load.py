"""Builds a drafter from a checkpoint directory and the target that it drafts for."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tokenspeed.errors import ConfigError
from tokenspeed.layers.embedding import Head, VocabTable
from tokenspeed.layers.rotary import rope_table
from tokenspeed.models.decoder import Decoder
from tokenspeed.models.weights import Progress, load_params
from tokenspeed.spec.eagle4.checkpoint import (
    CANDIDATE_TENSORS,
    TensorInfo,
    canonical,
    check_tensors,
    read_headers,
)
from tokenspeed.spec.eagle4.config import DraftConfig
from tokenspeed.spec.eagle4.drafter import EagleDrafter, TreeAttentionMaker
from tokenspeed.spec.eagle4.head import CandidateHead, FullHead
from tokenspeed.spec.eagle4.model import DraftModel
from tokenspeed.spec.options import MAX_STEPS


def load_drafter(
    draft_dir: str | Path,
    config: DraftConfig,
    target: Decoder,
    attention: TreeAttentionMaker,
    context: int,
    progress: Progress | None = None,
    full_head: bool = False,
) -> EagleDrafter:
    """Loads a draft beside its target, on the target's device and in its dtype. Call `bind` before using it.

    Args:
        config: what `check_draft` returned. target: lends its embedding and lm_head where the draft has none.
        attention: makes the attention of a draft step (drafter.TreeAttentionMaker).
        context: tokens that a request may reach; the RoPE table is sized from it, not from the draft's
            config.
        full_head: score every token exactly though the checkpoint has a candidate head.

    Raises:
        ConfigError: a tensor is missing, misshapen or reaches no parameter.
    """
    path, place = Path(draft_dir), target.place
    tensors = read_headers(path)
    check_tensors(config, tensors, path)
    own_embedding = "embed_tokens.weight" in tensors
    if not own_embedding:
        _same_width(config, target, path, "embedding")
    model = DraftModel(
        config,
        place,
        None if own_embedding else target.embedding.table,
        qkv_bias="layers.0.self_attn.q_proj.bias" in tensors,
        o_bias="layers.0.self_attn.o_proj.bias" in tensors,
        fc_bias="fc.bias" in tensors,
    )
    params = model.params()
    if "lm_head.weight" in tensors:
        table = VocabTable(config.draft_vocab_size, config.hidden_size, place)
        params |= table.params("lm_head.")
    elif config.tie_word_embeddings and own_embedding:
        table = model.embedding.table
    else:
        _same_width(config, target, path, "lm_head")
        table = target.head.table
    token_ids = _token_ids(tensors, place.device)
    ignored: tuple[str, ...] = ("d2t", "t2d")
    own_head = None
    if config.rank is None or full_head:
        if table is not target.head.table:
            own_head = Head(table, place)
        head = FullHead(own_head or target.head, token_ids)
        ignored += CANDIDATE_TENSORS
    else:
        head = CandidateHead(table, token_ids, config.rank, config.num_candidates, place)
        params |= head.params()
    load_params(path, params, ignored, progress, canonical)
    cos_sin = rope_table(config.rope, config.head_dim, context + MAX_STEPS + 1, place.device)
    num_bytes = sum(param.num_bytes for param in params.values())
    place.finish()
    if own_head is not None:
        num_bytes += own_head.packed_bytes
    return EagleDrafter(model, head, cos_sin, attention, num_bytes)


def _same_width(config: DraftConfig, target: Decoder, path: Path, what: str) -> None:
    if config.hidden_size != target.config.hidden_size:
        raise ConfigError(
            f"{path} has no {what} of its own and its hidden size {config.hidden_size} does not fit the "
            f"target's {what}, {target.config.hidden_size} wide"
        )


def _token_ids(tensors: dict[str, TensorInfo], device: torch.device) -> Tensor | None:
    """Target id of each draft id: int64 [V_draft], from the offsets in d2t."""
    if "d2t" not in tensors:
        return None
    with safe_open(tensors["d2t"].file, framework="pt") as file:
        offsets = file.get_tensor(tensors["d2t"].name).long()
    return (offsets + torch.arange(len(offsets))).to(device)
