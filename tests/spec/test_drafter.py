"""Drafters of every method against an independent dense forward: rows, trees, windows, pieces."""

import json

import pytest
import torch
from safetensors.torch import load_file
from spec.draft_cases import (
    CONTEXT,
    EAGLE,
    EAGLE3,
    EAGLE4,
    PACKAGED,
    PAGE,
    DenseDraft,
    make_drafter,
    make_target,
    python_tree,
    target_config,
)

from tokenspeed import kernels
from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.attention.sdpa import TreeAttention
from tokenspeed.attention.triton import TreeAttention as KernelTreeAttention
from tokenspeed.config import Shape
from tokenspeed.spec.base import Frontier
from tokenspeed.spec.eagle4 import model
from tokenspeed.spec.eagle4.config import check_draft
from tokenspeed.spec.eagle4.drafter import EagleDrafter
from tokenspeed.spec.eagle4.load import load_drafter

VARIANTS = {
    "eagle4": (EAGLE4, {}),
    "eagle4 full head, own tables": (EAGLE4, dict(candidate_head=None, tie_embed_to_target=False,
                                                  tie_lm_head_to_target=False)),
    "eagle4 bias, no window": (EAGLE4, dict(attention_bias=True, sliding_window=None)),
    "eagle4 window shorter than the tree": (EAGLE4, dict(sliding_window=2)),
    "eagle3": (EAGLE3, {}),
    "eagle3 full vocabulary": (EAGLE3, dict(draft_vocab_size=97)),
    "eagle3 fc_norm": (EAGLE3, dict(fc_norm=True)),
    "eagle3 norm_output": (EAGLE3, dict(norm_output=True)),
    "eagle3 norm_before_fc": (EAGLE3, dict(norm_before_fc=True)),
    "eagle3 norm_before_residual": (EAGLE3, dict(norm_before_residual=True)),
    "eagle3 biases, the target's embedding": (EAGLE3, dict(attention_bias=True, tie_embed_to_target=True)),
    "eagle3 narrower than the target": (EAGLE3, dict(hidden_size=16, target_hidden_size=32)),
    "eagle3 gpt-oss norms": (EAGLE3, dict(norm_before_fc=True, norm_before_residual=True, norm_output=True)),
    "eagle": (EAGLE, {}),
    "eagle biases": (EAGLE, dict(attention_bias=True)),
}  # fmt: skip


class Requests:
    """Requests whose committed rows lie in scattered pages of a drafter's pool."""

    def __init__(self, drafter: EagleDrafter, lengths: list[int], vocab: int, seed: int = 3):
        g = torch.Generator().manual_seed(seed)
        self.drafter, self.lengths = drafter, lengths
        self.tokens = [torch.randint(0, vocab, (n,), generator=g) for n in lengths]  # x_0 .. x_t
        self.aux = [torch.randn(n - 1, drafter.aux_size, generator=g) for n in lengths]  # a_0 .. a_{t-1}
        width = max(-(-n // PAGE) for n in lengths) + 1
        order = torch.randperm(39, generator=g)[: width * len(lengths)] + 1
        self.table = order.view(len(lengths), width).to(torch.int32)

    def slots(self, b: int, indices: torch.Tensor) -> torch.Tensor:
        return self.table[b].long()[indices // PAGE] * PAGE + indices % PAGE

    def append(self, b: int, start: int, end: int) -> None:
        """Rows of indices start..end-1; index 0 goes to the dummy page."""
        indices = torch.arange(start, end)
        aux = self.aux[b][(indices - 1).clamp(min=0)]
        slots = torch.where(indices > 0, self.slots(b, indices), 0)
        self.drafter.append(self.tokens[b][start:end], aux, indices, slots)

    def append_all(self) -> None:
        for b, n in enumerate(self.lengths):
            self.append(b, 0, n)

    def frontier(self, max_len: int | None = None) -> Frontier:
        last = torch.tensor([n - 1 for n in self.lengths])
        return Frontier(
            last_tokens=torch.stack([t[-1] for t in self.tokens]),
            aux=torch.stack([a[-1] for a in self.aux]),
            last_indices=last,
            block_table=self.table,
            max_len=max_len,
        )


def dense_tree(dense: DenseDraft, tokens: torch.Tensor, aux: torch.Tensor, shape: Shape) -> tuple[list, list]:
    rows = dense.committed(tokens, aux)
    t = len(tokens) - 1
    known = {}

    def run(path: tuple) -> tuple:
        """Output, state and visible rows after the root and a path of lanes."""
        if path not in known:
            if not path:
                out, state, _ = dense.row(int(tokens[-1]), dense.features(aux)[-1], t, rows[:-1])
                known[path] = out, state, rows
            else:
                _, state, seen = run(path[:-1])
                out, state, own = dense.row(path[-1], state, t + len(path), seen)
                known[path] = out, state, [*seen, own]
        return known[path]

    return python_tree(int(tokens[-1]), shape, lambda path: dense.best(run(path)[0], shape.topk))


@pytest.mark.parametrize("attention", [TreeAttention, KernelTreeAttention], ids=["sdpa", "ops"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_and_trees_equal_the_dense_draft(tmp_path, variant, attention):
    drafter, dense = make_drafter(tmp_path, *VARIANTS[variant], attention=attention)
    requests = Requests(drafter, [2, 13, 21], 97)
    requests.append_all()
    k_cache, v_cache = (x.flatten(0, 1) for x in drafter._pool.layer(0))
    for b in range(3):
        for index, k, v in dense.committed(requests.tokens[b], requests.aux[b]):
            slot = requests.slots(b, torch.tensor(index))
            torch.testing.assert_close(k_cache[slot], k, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(v_cache[slot], v, atol=2e-5, rtol=1e-4)
    for shape in (Shape(4, 3, 12), Shape(5, 1, 6), Shape(1, 2, 3)):
        tree = drafter.propose(requests.frontier(max_len=32), shape)
        for b in range(3):
            tokens, parents = dense_tree(dense, requests.tokens[b], requests.aux[b], shape)
            assert tree.tokens[b].tolist() == tokens
            assert tree.parents[b].tolist() == parents


@pytest.mark.parametrize("variant", ["eagle4", "eagle3", "eagle3 norm_before_residual", "eagle"])
def test_a_small_layer_drafts_alike(tmp_path, monkeypatch, variant):
    """The form for few rows, which reads and writes the residual stream (layers.few_rows)."""
    added, add = [], kernels.linear_add
    monkeypatch.setattr(model, "small_rows", lambda place, bias, width: 0 if bias else 6)
    monkeypatch.setattr(kernels, "linear_add", lambda x, *more: added.append(len(x)) or add(x, *more))
    test_rows_and_trees_equal_the_dense_draft(tmp_path, variant, KernelTreeAttention)
    # Roots of three requests, then one or two lanes each; the three lanes of the first shape are too many.
    assert set(added) == {3} and len(added) == 2 * (1 + 5 + 1)


def test_the_packaged_draft(tmp_path):
    """The real checkpoint beside a made-up target of the right sizes, on random states."""
    sizes = target_config(
        vocab_size=49152, hidden_size=576, num_layers=30, windows=(None,) * 30, num_heads=9, num_kv_heads=3,
        head_dim=64, intermediate_size=8, tie_word_embeddings=True,
    )  # fmt: skip
    target = make_target(5, sizes)
    config = check_draft(PACKAGED, "eagle4", sizes, tmp_path)
    raw = json.loads((PACKAGED / "config.json").read_text())
    assert list(config.aux_layers) == raw["eagle_aux_hidden_state_layer_ids"]
    assert (config.window, config.rank) == (raw["sliding_window"], raw["candidate_head"]["rank"])
    drafter = load_drafter(PACKAGED, config, target, TreeAttention, CONTEXT)
    drafter.bind(KvPool(1, 40, PAGE, 3, 64, torch.float32))
    dense = DenseDraft(raw, load_file(PACKAGED / "model.safetensors"), target)
    requests = Requests(drafter, [9, 17], 49152)
    requests.append_all()
    shape = Shape(3, 2, 6)
    tree = drafter.propose(requests.frontier(), shape)
    for b in range(2):
        tokens, parents = dense_tree(dense, requests.tokens[b], requests.aux[b], shape)
        assert (tree.tokens[b].tolist(), tree.parents[b].tolist()) == (tokens, parents)
    stored = (PACKAGED / "model.safetensors").stat().st_size  # bfloat16, and a header of less than 4 KiB
    assert 0 < stored - drafter.num_bytes // 2 < 4096


def test_appending_in_any_pieces_gives_the_cold_rows(tmp_path):
    """Append-only: chunks of a prompt, then whatever each round accepts, with trees drafted in between."""
    drafter, _ = make_drafter(tmp_path, EAGLE4, {})
    requests = Requests(drafter, [25], 97)
    pool = drafter._pool
    requests.append_all()
    cold = pool.data.clone()
    pool.data.zero_()
    generator = torch.Generator().manual_seed(0)
    done = 0
    while done < 25:
        count = min(int(torch.randint(1, 6, (1,), generator=generator)), 25 - done)
        requests.append(0, done, done + count)
        done += count
        if done > 1:
            before = pool.data.clone()
            frontier = Frontier(requests.tokens[0][done - 1 : done], requests.aux[0][done - 2 : done - 1],
                                torch.tensor([done - 1]), requests.table, None)  # fmt: skip
            drafter.propose(frontier, Shape(3, 2, 6))
            assert torch.equal(pool.data, before)
    rows = slice(PAGE, None)  # the dummy page may hold anything
    torch.testing.assert_close(
        pool.data.flatten(2, 3)[:, :, rows], cold.flatten(2, 3)[:, :, rows], atol=1e-5, rtol=1e-4
    )


def test_the_window_counts_by_index(tmp_path):
    """Rows outside the window, and index 0, may hold anything; the first row inside matters."""
    drafter, _ = make_drafter(tmp_path, EAGLE4, {})
    window, steps = 9, 3
    requests = Requests(drafter, [30], 97)
    requests.append_all()
    keys = drafter._pool.layer(0)[0].flatten(0, 1)
    frontier = requests.frontier()
    scores = []

    def record(out, k, draw, candidates=drafter.head.candidates):
        scores.append(out.clone())
        return candidates(out, k, draw)

    drafter.head.candidates = record

    def outputs() -> list[torch.Tensor]:
        scores.clear()
        drafter.propose(frontier, Shape(steps, 1, steps + 1))
        return list(scores)

    clean = outputs()
    # The row of step i has index 29 + i and sees indices > 29 + i - window. That steps 1 and 2 see less
    # shows in the comparison with the dense draft; here: what no step sees changes nothing.
    for index, seen in ((0, False), (29 - window, False), (30 - window, True), (29, True)):
        slot = requests.slots(0, torch.tensor(index))
        saved = keys[slot].clone()
        keys[slot] += 5.0
        assert any(not torch.equal(a, b) for a, b in zip(clean, outputs(), strict=True)) == seen, index
        keys[slot] = saved


def test_padding_rows_leave_the_others_alone(tmp_path):
    drafter, _ = make_drafter(tmp_path, EAGLE4, {})
    requests = Requests(drafter, [13, 21], 97)
    requests.append_all()
    alone = drafter.propose(requests.frontier(), Shape(4, 3, 12))
    f = requests.frontier()
    zeros = torch.zeros(1, dtype=torch.long)
    padded = Frontier(
        torch.cat([f.last_tokens, zeros]),
        torch.cat([f.aux, torch.full((1, drafter.aux_size), torch.nan)]),
        torch.cat([f.last_indices, zeros]),
        torch.cat([f.block_table, torch.zeros_like(f.block_table[:1])]),
        None,
    )
    tree = drafter.propose(padded, Shape(4, 3, 12))
    assert torch.equal(tree.tokens[:2], alone.tokens) and torch.equal(tree.parents[:2], alone.parents)
    assert int(tree.tokens.min()) >= 0 and int(tree.tokens.max()) < 97


def test_positions_beyond_the_drafts_own_limit(tmp_path):
    """The RoPE table follows the served context (128 here), not the draft's max_position_embeddings (64)."""
    drafter, dense = make_drafter(tmp_path, EAGLE4, {})
    requests = Requests(drafter, [125], 97)
    requests.append_all()
    shape = Shape(6, 1, 7)
    tree = drafter.propose(requests.frontier(), shape)
    assert tree.tokens[0].tolist() == dense_tree(dense, requests.tokens[0], requests.aux[0], shape)[0]
