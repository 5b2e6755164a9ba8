"""The walk through a tree against a plain loop, and the two extremes of a drafter."""

import random

import pytest
import torch

from tokenspeed.spec.base import DraftTree
from tokenspeed.spec.verify import accept


def random_tree(rng: random.Random, batch: int, nodes: int, vocab: int) -> DraftTree:
    """Depth-first trees whose siblings may hold the same token."""
    parents = torch.zeros(batch, nodes, dtype=torch.long)
    depths, mask = torch.zeros_like(parents), torch.ones_like(parents)
    for b in range(batch):
        line = [0]
        for i in range(1, nodes):
            del line[rng.randint(1, len(line)) :]
            parents[b, i], depths[b, i] = line[-1], len(line)
            mask[b, i] = mask[b, line[-1]] | (1 << i if i < 63 else -(1 << 63))
            line.append(i)
    tokens = torch.tensor([[rng.randrange(vocab) for _ in range(nodes)] for _ in range(batch)])
    return DraftTree(tokens, parents, depths, mask)


def walk(tree: DraftTree, sampled: torch.Tensor, b: int) -> tuple[list[int], list[int]]:
    """Kept nodes and emitted tokens of one request."""
    node, path, emitted = 0, [0], [int(sampled[b, 0])]
    while True:
        drawn = int(sampled[b, node])
        children = [i for i in range(1, tree.tokens.shape[1]) if int(tree.parents[b, i]) == node]
        found = [i for i in children if drawn >= 0 and int(tree.tokens[b, i]) == drawn]
        if not found:
            return path, emitted
        node = found[0]
        path.append(node)
        emitted.append(int(sampled[b, node]))


@pytest.mark.parametrize("nodes", [1, 2, 3, 16, 63, 64])
@pytest.mark.parametrize("vocab", [1, 2, 5])
def test_accept_is_the_walk(nodes, vocab):
    rng = random.Random(nodes * 10 + vocab)
    tree = random_tree(rng, 20, nodes, vocab)
    sampled = torch.tensor([[rng.randrange(-1, vocab) for _ in range(nodes)] for _ in range(20)])
    steps = int(tree.depths.max())
    for kept in (accept(tree, sampled), accept(tree, sampled, steps)):
        for b in range(20):
            path, emitted = walk(tree, sampled, b)
            count = int(kept.count[b])
            assert count == len(path)
            assert kept.path[b, :count].tolist() == path
            assert (kept.path[b, count:] == path[-1]).all()
            assert kept.tokens[b, :count].tolist() == [max(token, 0) for token in emitted]
            assert bool(kept.failed[b]) == (emitted[-1] < 0)
    assert kept.path.shape == kept.tokens.shape == (20, steps + 1)


def chain(tokens: list[int]) -> DraftTree:
    n = len(tokens)
    numbers = torch.arange(n)[None]
    return DraftTree(torch.tensor([tokens]), (numbers - 1).clamp(min=0), numbers, (2 << numbers) - 1)


def test_a_drafter_that_is_always_right_and_one_that_is_always_wrong():
    truth = [5, 6, 7, 8, 9]  # what the target draws at nodes 0..4
    sampled = torch.tensor([truth])
    right = accept(chain([1, *truth[:-1]]), sampled, 4)
    assert right.count.tolist() == [5] and right.tokens.tolist() == [truth]
    wrong = accept(chain([1, 0, 0, 0, 0]), sampled, 4)
    assert wrong.count.tolist() == [1] and wrong.tokens[0, 0] == 5
    assert wrong.path.tolist() == [[0, 0, 0, 0, 0]]


def test_a_right_token_under_a_wrong_parent_is_not_kept():
    kept = accept(chain([1, 5, 0, 8]), torch.tensor([[5, 6, 8, 9]]))
    assert kept.count.tolist() == [2] and kept.tokens[:, -1].tolist() == [6]


def test_a_failed_row_matches_nothing():
    tree = chain([1, -1, -1])
    assert accept(tree, torch.tensor([[-1, -1, -1]])).count.tolist() == [1]
