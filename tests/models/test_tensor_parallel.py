"""Two processes over gloo: collectives, and a split model that equals the whole one."""

import pytest
import torch
import torch.multiprocessing as mp
from dense_attention import NUM_TOKENS, DenseCausal, tokens

from tokenspeed.distributed.comm import all_gather, all_reduce, broadcast
from tokenspeed.distributed.groups import TensorParallel, join, leave
from tokenspeed.errors import ConfigError
from tokenspeed.models.config import load_model_config
from tokenspeed.models.weights import load_model


def forward(path, tp: TensorParallel):
    config = load_model_config(path)
    model = load_model(path, config, "cpu", torch.float32, tp=tp)
    hidden, aux = model.forward(tokens(), torch.arange(NUM_TOKENS), DenseCausal(config, NUM_TOKENS), (1, 4))
    return model.logits(hidden), aux


def rank_main(rank: int, address: str, paths: list, out) -> None:
    torch.set_num_threads(1)
    tp = join(rank, 2, address, "gloo")
    mine = torch.tensor([[1.0, 2.0]]) * 10**rank
    results = [all_reduce(mine.clone(), tp), all_gather(mine, tp), broadcast(mine.clone(), tp)]
    results += [tensor for path in paths for tensor in forward(path, tp)]
    torch.save(results, f"{out}/{rank}.pt")
    leave(tp)


@torch.no_grad()
def test_two_ranks_equal_one(tiny_model_dir, tmp_path):
    paths = [
        tiny_model_dir(
            "llama", attention_bias=True, mlp_bias=True, vocab_size=321
        ),  # 321: padded to 322 rows
        tiny_model_dir("qwen3", tie_word_embeddings=True),
    ]
    mp.spawn(rank_main, (f"file://{tmp_path}/meet", paths, tmp_path), nprocs=2)
    whole = [tensor for path in paths for tensor in forward(path, TensorParallel())]
    for rank in range(2):
        reduced, gathered, first, *outputs = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(reduced, torch.tensor([[11.0, 22.0]]))
        assert torch.equal(gathered, torch.tensor([[1.0, 2.0, 10.0, 20.0]]))
        assert torch.equal(first, torch.tensor([[1.0, 2.0]]))
        for ours, theirs in zip(outputs, whole, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_one_rank_needs_no_group():
    tp = join(0, 1, "", "gloo")
    x = torch.ones(2, 3)
    assert tp == TensorParallel()
    assert all_reduce(x, tp) is x and all_gather(x, tp) is x and broadcast(x, tp) is x
    leave(tp)


def test_heads_that_can_not_be_split_are_named(tiny_model_dir):
    path = tiny_model_dir("llama")
    with pytest.raises(
        ConfigError, match=r"--tensor-parallel-size .* num_attention_heads 4 can't be split over 3"
    ):
        load_model(path, load_model_config(path), "cpu", torch.float32, tp=TensorParallel(0, 3))
