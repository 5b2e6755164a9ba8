"""Small targets, texts and runs for the tests of this folder."""

from pathlib import Path

import numpy as np
import torch
from spec.draft_cases import make_target

from tokenspeed.models.config import load_model_config
from tokenspeed.spec.eagle4.formats import parse_draft
from tokenspeed.train.answers import Answer, AnswerWriter
from tokenspeed.train.model import TrainableDraft
from tokenspeed.train.options import TrainOptions, draft_config
from tokenspeed.train.packing import Packer, Position, Shape
from tokenspeed.train.target import Inputs, Target, load_target


def random_answers(count: int, vocab: int, longest: int, seed: int = 0) -> list[Answer]:
    rng = np.random.default_rng(seed)
    answers = []
    for _ in range(count):
        num_prompt = int(rng.integers(1, longest // 3))
        size = num_prompt + int(rng.integers(4, longest - num_prompt + 1))
        answers.append(Answer(rng.integers(0, vocab, size).astype(np.int32), num_prompt))
    return answers


@torch.no_grad()
def spread(draft: TrainableDraft, seed: int = 7) -> TrainableDraft:
    """Parameters far enough from their first values that every one of them shows."""
    generator = torch.Generator().manual_seed(seed)
    for p in draft.params.values():
        noise = torch.randn(p.shape, generator=generator)
        p.add_(noise * (0.2 if p.dim() == 1 else 0.15))
    return draft


def small(window: int = 9, unroll: int = 4, rows: int = 2, length: int = 64, **changes):
    """A random float32 target of tests/spec with an untrained draft: target, draft, raw config, options."""
    options = TrainOptions(
        model="m", data="d", steps=1, head_steps=0, window=window, unroll=unroll, ffn=40, rank=12,
        num_candidates=24, max_length=length, tokens_per_step=rows * length, **changes,
    )  # fmt: skip
    model = make_target()
    raw = draft_config(model.config, options)
    config = parse_draft(raw, "eagle4", "here")
    shape = Shape(rows, length, 16, unroll)
    target = Target(model, shape, config.aux_layers)
    draft = TrainableDraft(config, target.embedding, model.norm.weight, length, unroll, options.seed)
    return target, draft, raw, options


def load_inputs(answers: list[Answer], shape: Shape, seed: int = 0) -> Inputs:
    """The first batch of a packer."""
    inputs = Inputs(shape, torch.device("cpu"))
    inputs.load(next(Packer(answers, shape, seed).stream(Position(0, 0)))[1])
    return inputs


@torch.no_grad()
def write_answers(path: Path, model_dir: Path, count: int = 64, size: int = 48) -> Path:
    """Random prompts of four tokens, each with the greedy answer of the target."""
    config = load_model_config(model_dir)
    model = load_target(model_dir, config, torch.device("cpu"))
    shape = Shape(count, size, 1, 1)
    target, inputs = Target(model, shape, (0,)), Inputs(shape, torch.device("cpu"))
    inputs.cu_rows = torch.arange(0, shape.num_tokens + 1, size, dtype=torch.int32)
    inputs.chunks = [(0, size)] * count
    inputs.tokens[:, :4] = torch.randint(3, config.vocab_size, (count, 4), generator=torch.manual_seed(3))
    for last in range(3, size - 1):
        hidden, _ = target.read(inputs)
        inputs.tokens[:, last + 1] = model.logits(hidden[:, last]).argmax(-1)
    writer = AnswerWriter(path, "tiny", config.vocab_size)
    for row in inputs.tokens.numpy():
        writer.add(row.astype(np.int32), 4, 0.0, False, "random")
    writer.save()
    return path
