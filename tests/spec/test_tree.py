"""Draft trees against a reference made of lists and recursion; the shapes' limits."""

import random

import pytest
import torch
from spec.draft_cases import python_tree

from tokenspeed.config import Shape
from tokenspeed.errors import ConfigError
from tokenspeed.kernels.reference_draft import best_candidates
from tokenspeed.spec.eagle4.head import Candidates
from tokenspeed.spec.eagle4.tree import Expansion, build_tree, check_shape, num_candidates

SHAPES = [(1, 1, 2), (5, 1, 6), (1, 4, 5), (2, 64, 64), (3, 2, 4), (8, 4, 16), (12, 4, 16), (16, 4, 64), (16,
          1, 17), (7, 10, 60), (5, 16, 64), (4, 3, 30)]  # fmt: skip


def drawn_children(kind: str, k: int, seed: int):
    """A draft that answers any path with K tokens, remembered, so that both sides ask the same one."""
    rng, known = random.Random(seed), {}

    def logprob() -> float:
        if kind == "ties":
            return -0.5 * rng.randrange(3)
        if kind == "nan" and rng.random() < 0.2:
            return rng.choice([float("nan"), float("-inf"), 0.5, float("inf")])
        return -rng.expovariate(1.0)

    def children(path):
        if path not in known:
            scores = sorted((logprob() for _ in range(k)), key=lambda x: -x if x == x else 99.0)
            known[path] = list(zip(rng.sample(range(1000), k), scores, strict=True))
        return known[path]

    return children


def candidates_of(answers: list[list[tuple[int, float]]]) -> Candidates:
    """Rows of (token, score) as a head gives them."""
    scores = torch.tensor([[s for _, s in row] for row in answers], dtype=torch.float32)
    return Candidates(
        scores, torch.tensor([[t for t, _ in row] for row in answers]), torch.zeros(len(answers))
    )


def grow(shape: Shape, drafts: list, root: torch.Tensor):
    """Runs the tensor version over a batch of Python drafts; scores are exact in float32 for what ties."""
    growth, paths = Expansion(shape), [[()] for _ in drafts]
    lanes, rows = None, 1
    for _ in range(shape.steps):
        answers = [[children(p) for p in paths[b]] for b, children in enumerate(drafts)]
        assert all(len(a) == rows for a in answers)
        lanes = growth.grow(candidates_of([row for a in answers for row in a]))
        if lanes is not None:
            rows = shape.topk
            paths = [
                [(*paths[b][int(p)], int(t)) for t, p in zip(lanes.tokens[b], lanes.parents[b], strict=True)]
                for b in range(len(drafts))
            ]
            depth = len(paths[0][0])
            for b in range(len(drafts)):
                for lane, path in enumerate(
                    paths[b]
                ):  # as many rows of the side buffer as the path is long, own last
                    bits = [j for j in range(64) if int(lanes.mask[b, lane]) >> j & 1]
                    assert [j // shape.topk for j in bits] == list(range(depth)) and len(path) == depth
                    assert bits[-1] == (depth - 1) * shape.topk + lane
    assert lanes is None
    return build_tree(root, *growth.finish(), shape.nodes)


@pytest.mark.parametrize("kind", ["random", "ties", "nan"])
@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_tree_is_the_reference_tree(kind, size):
    shape = Shape(*size)
    check_shape(shape, 1000)
    root = torch.tensor([7, 8])
    drafts = [drawn_children(kind, shape.topk, seed) for seed in (1, 2)]
    tree = grow(shape, drafts, root)
    for b, children in enumerate(drafts):
        tokens, parents = python_tree(int(root[b]), shape, ranked(children, shape.topk))
        assert tree.tokens[b].tolist() == tokens
        assert tree.parents[b].tolist() == parents
        check_numbers(tree, b)


def ranked(children, k: int):
    """The children of a path as a tree takes them: the best first, with their log-probabilities."""

    def best(path):
        tokens, logprobs = best_candidates(*candidates_of([children(path)]), k)
        return list(zip(tokens[0].tolist(), logprobs[0].tolist(), strict=True))

    return best


def check_numbers(tree, b: int) -> None:
    parents = tree.parents[b].tolist()
    for i, parent in enumerate(parents):
        line = {i}
        while i:
            i = parents[i]
            line.add(i)
        node = max(line)
        assert int(tree.depths[b, node]) == len(line) - 1
        assert {j for j in range(64) if int(tree.mask[b, node]) >> j & 1} == line
        assert parent < node or node == 0


def test_the_principal_chain_has_the_first_numbers():
    shape = Shape(6, 3, 12)
    children = drawn_children("random", 3, 5)
    tree = grow(shape, [children], torch.tensor([1]))
    node, path = 0, ()
    while True:
        best = children(path)[0][0]
        if node + 1 >= shape.nodes or int(tree.parents[0, node + 1]) != node:
            break
        assert int(tree.tokens[0, node + 1]) == best
        path, node = (*path, best), node + 1
    assert node >= 2


def test_all_scores_lost_still_gives_a_whole_tree():
    shape, growth = Shape(4, 2, 9), Expansion(Shape(4, 2, 9))
    for rows in (1, 2, 2, 2):
        growth.grow(candidates_of([[(0, torch.nan), (0, torch.nan)]] * rows))
    tree = build_tree(torch.tensor([3]), *growth.finish(), shape.nodes)
    check_numbers(tree, 0)


@pytest.mark.parametrize(
    "size",
    [(0, 1, 2), (17, 1, 18), (2, 65, 8), (9, 9, 16), (3, 0, 2), (3, 2, 65), (3, 2, 1), (2, 2, 8), (2, 50, 8)],
)
def test_shapes_out_of_bounds_are_refused(size):
    with pytest.raises(ConfigError, match="tree"):
        check_shape(Shape(*size), 40)


def test_number_of_candidates():
    assert num_candidates(Shape(12, 4, 16)) == 180
