"""Offline accept lengths: against rounds that really decode, and by hand."""

import torch
from spec.draft_cases import EAGLE3, EAGLE4, PAGE, make_drafter

from tokenspeed.config import Shape
from tokenspeed.spec.base import DraftTree, Frontier
from tokenspeed.spec.evaluate import (
    Recall,
    Round,
    accepted_everywhere,
    append_text,
    offline_rounds,
    simulate,
    watch_recall,
)


def test_simulated_rounds_are_those_of_decoding(tmp_path):
    """Rounds decoded one by one over a text that the draft half wrote, so that something is accepted."""
    drafter, _ = make_drafter(tmp_path, EAGLE4, {})
    g = torch.Generator().manual_seed(4)
    n, prompt_len, shape = 60, 7, Shape(4, 2, 8)
    tokens, aux = torch.randint(0, 97, (n,), generator=g), torch.randn(n, drafter.aux_size, generator=g)
    for i in range(prompt_len, n - 3, 5):  # the draft's own favourite, and its second child after that
        table = append_text(drafter, tokens, aux, PAGE)
        tree = drafter.propose(frontier(tokens, aux, table, i), shape)
        tokens[i + 1], tokens[i + 2] = tree.tokens[0, 1], tree.tokens[0, 2]
    found = offline_rounds(drafter, tokens, aux, prompt_len, shape, PAGE, batch=7)

    table = append_text(drafter, tokens, aux, PAGE)
    at, rounds = prompt_len, []
    while at < n - 1:
        tree = drafter.propose(frontier(tokens, aux, table, at), shape)
        accepted = covered(tree, tokens[at + 1 :].tolist())
        rounds.append(Round(at, accepted))
        at += accepted + 1
    assert list(found) == rounds
    assert max(r.accepted for r in rounds) >= 2 and min(r.accepted for r in rounds) == 0


def frontier(tokens, aux, table, at: int) -> Frontier:
    return Frontier(tokens[at : at + 1], aux[at - 1 : at], torch.tensor([at]), table, None)


def covered(tree: DraftTree, truth: list[int]) -> int:
    node, depth = 0, 0
    for token in truth:
        children = [i for i in range(1, 8) if tree.parents[0, i] == node and tree.tokens[0, i] == token]
        if not children:
            return depth
        node, depth = children[0], depth + 1
    return depth


def test_batches_do_not_matter(tmp_path):
    drafter, _ = make_drafter(tmp_path, EAGLE4, {})
    g = torch.Generator().manual_seed(4)
    tokens, aux = torch.randint(0, 97, (40,), generator=g), torch.randn(40, drafter.aux_size, generator=g)
    counts = [accepted_everywhere(drafter, tokens, aux, 5, Shape(3, 2, 6), PAGE, batch) for batch in (1, 35)]
    assert torch.equal(*counts) and len(counts[0]) == 35


def test_simulate_by_hand():
    # Roots at 10, 13, 14. The text ends with token 16, a drafted one: the last round's own is cut off.
    assert simulate(torch.tensor([2, 9, 9, 0, 2, 1, 0]), 10) == (Round(10, 2), Round(13, 0), Round(14, 2))
    assert simulate(torch.tensor([4]), 10) == () and simulate(torch.tensor([]), 10) == ()


def test_recall_by_a_direct_computation(tmp_path):
    """The dense draft follows the best lanes by hand; candidates and the full head's best are counted out."""
    head = {"rank": 12, "num_candidates": 30}  # random factors, so that many are missed
    drafter, dense = make_drafter(tmp_path, EAGLE4, {"candidate_head": head})
    g = torch.Generator().manual_seed(4)
    tokens, aux = torch.randint(0, 97, (30,), generator=g), torch.randn(30, drafter.aux_size, generator=g)
    shape, first = Shape(3, 2, 6), 6
    plain = accepted_everywhere(drafter, tokens, aux, first, shape, PAGE, 10)
    with watch_recall(drafter, shape) as recall:
        watched = accepted_everywhere(drafter, tokens, aux, first, shape, PAGE, 10)
    assert torch.equal(plain, watched) and drafter.head.num_candidates == 30

    up, down = dense.w["efficient_lm_head.weight"], dense.w["efficient_lm_head_down_proj.weight"]
    rows, found = dense.committed(tokens, aux), [0, 0, 0]

    def count(step: int, out) -> None:
        found[step] += int((dense.lm_head @ out).argmax()) in (up @ (down @ out)).topk(30).indices.tolist()

    for t in range(first, 30):
        out, state, _ = dense.row(int(tokens[t]), dense.features(aux[t - 1]), t, rows[: t - 1])
        count(0, out)
        lanes = [(score, (token,), state, rows[:t]) for token, score in dense.best(out, 2)]
        for step in (1, 2):
            grown = []
            for number, (score, path, before, seen) in enumerate(lanes):
                out, after, own = dense.row(path[-1], before, t + step, seen)
                if number == 0:
                    count(step, out)
                grown += [(score + s, (*path, x), after, [*seen, own]) for x, s in dense.best(out, 2)]
            lanes = sorted(grown, key=lambda lane: -lane[0])[:2]
    assert recall == Recall([24, 24, 24], found) and 10 < sum(found) < 60


def test_recall_of_a_whole_head_is_none(tmp_path):
    drafter, _ = make_drafter(tmp_path, EAGLE3, {})
    with watch_recall(drafter, Shape(3, 2, 6)) as recall:
        assert drafter.head.num_tokens == 50
    assert recall == Recall()
