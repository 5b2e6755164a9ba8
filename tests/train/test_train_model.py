"""The unrolled forward against the engine's drafter, and the target's packed reading against one text alone."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from spec.draft_cases import CONTEXT, PAGE
from train.train_cases import load_inputs, random_answers, small, spread

from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.attention.sdpa import TreeAttention
from tokenspeed.config import Shape as TreeShape
from tokenspeed.spec.base import Frontier
from tokenspeed.spec.eagle4.config import check_draft
from tokenspeed.spec.eagle4.load import load_drafter
from tokenspeed.spec.evaluate import append_text
from tokenspeed.train.answers import Answer
from tokenspeed.train.model import TrainableDraft
from tokenspeed.train.packing import Batch, Shape
from tokenspeed.train.target import Inputs, Target


def engine_outputs(drafter, tokens, aux, start: int, steps: int):
    """What the head is given at each step of a chain, and the chain, drafted after token start + 1."""
    table = append_text(drafter, tokens[: start + 2], aux[: start + 2], PAGE)
    seen, plain = [], drafter.head.candidates
    drafter.head.candidates = lambda out, k, draw: seen.append(out.clone()) or plain(out, k, draw)
    frontier = Frontier(
        tokens[start + 1 : start + 2], aux[start : start + 1], torch.tensor([start + 1]), table, None
    )
    tree = drafter.propose(frontier, TreeShape(steps, 1, steps + 1))
    return torch.cat(seen), tree.tokens[0, 1:]


@pytest.mark.parametrize("window", [9, 2, 100])
def test_the_unroll_is_the_engines_chain(tmp_path, window):
    """Two texts in a row, so that positions, window and texts all count; the texts go on as the draft says."""
    steps = 4
    target, draft, raw, _ = small(window=window, unroll=steps, rows=1)
    spread(draft)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file({n: p.detach() for n, p in draft.params.items()}, tmp_path / "model.safetensors")
    config = check_draft(tmp_path, "eagle4", target.model.config, tmp_path)
    drafter = load_drafter(tmp_path, config, target.model, TreeAttention, CONTEXT)
    drafter.bind(KvPool(1, 40, PAGE, config.num_kv_heads, config.head_dim, torch.float32))

    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 97, size).astype(np.int64) for size in (27, 24)]
    starts = [15, 12]
    begins = [0, 32]
    alone = [torch.from_numpy(text) for text in texts]
    expected = []
    for i, tokens in enumerate(alone):
        aux = read_alone(target, tokens)
        out, chain = engine_outputs(drafter, tokens, aux, starts[i], steps)
        texts[i][starts[i] + 2 : starts[i] + 2 + steps] = chain.numpy()
        expected.append(out)
    shape = Shape(1, 64, 2, steps)
    inputs = Inputs(shape, torch.device("cpu"))
    row = np.zeros((1, 64), np.int64)
    for text, begin in zip(texts, begins, strict=True):
        row[0, begin : begin + len(text)] = text
    cu_rows = np.full(shape.num_texts + 1, 64, np.int32)
    cu_rows[:2] = begins
    inputs.load(
        Batch(
            tokens=row,
            begins=np.repeat([begins], 32, 1).reshape(1, 64),
            cu_rows=cu_rows,
            starts=np.asarray([[s + b for s, b in zip(starts, begins, strict=True)]]),
            counts=np.full((1, 2), steps),
            temperatures=np.zeros((1, 2), np.float32),
        )
    )
    with torch.no_grad():
        out = draft.unroll(inputs, target.read(inputs)[1])
    for i in range(2):
        torch.testing.assert_close(out[0, :, i], expected[i], atol=1e-5, rtol=1e-5)


def read_alone(target: Target, tokens: torch.Tensor) -> torch.Tensor:
    """Aux states of one text in a batch of its own."""
    length = -(-len(tokens) // 8) * 8
    shape = Shape(1, length, 1, 1)
    inputs = Inputs(shape, torch.device("cpu"))
    inputs.tokens[0, : len(tokens)] = tokens
    inputs.cu_rows[1:] = length
    inputs.chunks = [(0, length)]
    return Target(target.model, shape, target.aux_layers).read(inputs)[1][0, : len(tokens)]


def test_packed_texts_are_read_as_if_alone():
    target, _, _, _ = small()
    answers = random_answers(12, 97, 40)
    inputs = load_inputs(answers, Shape(2, 64, 16, 4))
    hidden, aux = target.read(inputs)
    again, _ = target.read(inputs)
    assert torch.equal(hidden, again)
    for r in range(2):
        begins = sorted(set(inputs.begins[r].tolist()))
        assert len(begins) > 1
        for begin in begins:
            size = int((inputs.begins[r] == begin).sum())
            alone = read_alone(target, inputs.tokens[r, begin : begin + size])
            torch.testing.assert_close(aux[r, begin : begin + size], alone, atol=1e-5, rtol=1e-5)


def test_every_parameter_gets_a_gradient_that_finite_differences_confirm():
    target, draft, _, _ = small(unroll=3)
    spread(draft)
    inputs = load_inputs(random_answers(8, 97, 40), Shape(2, 64, 16, 3))
    aux = target.read(inputs)[1]
    used = (torch.arange(3)[:, None] < inputs.counts[:, None])[..., None]
    direction = torch.randn(2, 3, 16, 32, generator=torch.Generator().manual_seed(2)) * used

    def value() -> torch.Tensor:
        return (draft.unroll(inputs, aux).double() * direction).sum()

    grads = torch.autograd.grad(value(), list(draft.params.values()))
    generator = torch.Generator().manual_seed(3)
    for (name, p), grad in zip(draft.params.items(), grads, strict=True):
        step = torch.randn(p.shape, generator=generator) * 1e-2 / p.numel() ** 0.5
        with torch.no_grad():
            p.add_(step)
            high = value()
            p.sub_(2 * step)
            low = value()
            p.add_(step)
        assert float(grad.norm()) > 0, name
        torch.testing.assert_close(
            float(high - low) / 2, float((grad * step).sum()), atol=1e-4, rtol=2e-2, msg=name
        )


def test_first_weights_let_the_last_aux_layer_through():
    target, draft, _, options = small()
    again = TrainableDraft(draft.config, target.embedding, target.model.norm.weight, 64, 4, options.seed)
    assert all(torch.equal(p, again.params[name]) for name, p in draft.params.items())
    fc = draft.params["fc.weight"].detach()
    assert float((fc[:, -32:] - torch.eye(32)).abs().max()) < 0.06 and float(fc[:, :-32].abs().max()) < 0.06
    assert torch.equal(draft.params["norm.weight"], target.model.norm.weight)


def test_a_text_of_one_prompt_token_has_its_first_start_at_it():
    inputs = load_inputs([Answer(np.arange(20, dtype=np.int32), 1)], Shape(1, 32, 32, 4))
    used = {int(s): int(c) for s, c in zip(inputs.starts[0], inputs.counts[0], strict=True) if c}
    assert used == {start: min(18 - start, 4) for start in range(18)}
