"""The candidate head's first factors: closest to the head, or closest in the scores of given outputs."""

import torch

from tokenspeed.train.head import low_rank_start


def narrow(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A head [60, 16] and outputs [200, 16] that lie, up to a little, in the 5 directions where it is weakest."""
    g = torch.Generator().manual_seed(seed)
    head = torch.randn(60, 16, generator=g) * torch.where(torch.arange(16) < 11, 1.0, 0.5)
    x = torch.randn(200, 16, generator=g) * torch.where(torch.arange(16) < 11, 1e-3, 30.0)
    return head, x


def test_without_outputs_it_is_the_best_approximation_of_the_head():
    head, _ = narrow()
    up, down = low_rank_start(head, 6)
    left, values, right = torch.linalg.svd(head.double(), full_matrices=False)
    best = (left[:, :6] * values[:6]) @ right[:6]
    torch.testing.assert_close((up @ down).double(), best, atol=1e-4, rtol=1e-4)


def test_with_outputs_it_is_the_best_approximation_of_their_scores():
    """By Eckart and Young no product of rank r comes closer to the scores than their own r first parts."""
    head, x = narrow()
    scores = (x @ head.t()).double()
    tail = torch.linalg.svdvals(scores)[4:].square().sum().sqrt()

    def miss(factors: tuple[torch.Tensor, torch.Tensor]) -> float:
        up, down = (factor.double() for factor in factors)
        return float((x.double() @ down.t() @ up.t() - scores).norm())

    assert tail <= miss(low_rank_start(head, 4, x)) < 1.02 * tail
    assert miss(low_rank_start(head, 4)) > 1.5 * tail


def test_no_outputs_are_no_reason_to_fail():
    head, x = narrow()
    for found, expected in zip(low_rank_start(head, 3, x[:0]), low_rank_start(head, 3), strict=True):
        assert torch.equal(found, expected)
