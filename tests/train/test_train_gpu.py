"""What only a GPU has: the loss kernel at full size, and the captured step against the eager one."""

from pathlib import Path

import pytest
import torch
from train.train_cases import random_answers

from tokenspeed.models.config import load_model_config
from tokenspeed.train.answers import AnswerWriter
from tokenspeed.train.loss import _row_loss, row_loss
from tokenspeed.train.options import TrainOptions
from tokenspeed.train.run import DRAFT, LOG, read_log, train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [49152, 151936])
def test_the_kernel_equals_plain_torch(size):
    g = torch.Generator("cuda").manual_seed(0)
    student, teacher = (torch.randn(40, size, generator=g, device="cuda") * 4 for _ in range(2))
    student[:8] = teacher[:8] * 0.8
    rows = torch.arange(40, device="cuda")
    weight = torch.rand(40, generator=g, device="cuda") * (rows % 5 > 0)
    tau = torch.rand(40, generator=g, device="cuda") + 0.4
    found = row_loss(student, teacher, rows, weight, tau, 1.0, torch.float32)
    expected = _row_loss(student, teacher, rows, weight, tau, 1.0, torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_captured_run_learns_what_an_eager_one_learns(tiny_model_dir, tmp_path):
    model_dir = tiny_model_dir()
    vocab = load_model_config(model_dir).vocab_size
    writer = AnswerWriter(tmp_path / "answers", "tiny", vocab)
    for answer in random_answers(200, vocab, 120):
        writer.add(answer.tokens, answer.num_prompt, 0.0, False, "random")
    writer.save()
    losses = [run(model_dir, tmp_path, capture) for capture in (True, False)]
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(losses[0], losses[1], atol=0.02, rtol=0.01)  # sums in another order


def run(model_dir: Path, folder: Path, capture: bool) -> list[float]:
    """Losses of a short run, both stages."""
    options = TrainOptions(
        str(model_dir), str(folder / "answers"), steps=40, head_steps=10, unroll=4, ffn=64, window=48,
        rank=32, num_candidates=16, max_length=128, tokens_per_step=1024,
    )  # fmt: skip
    output = folder / f"run-{capture}"
    assert train(options, output, lambda *a: None, device="cuda", capture=capture, log_every=10)
    assert (output / DRAFT).exists()
    return [record["loss"] for record in read_log(output / LOG)]
