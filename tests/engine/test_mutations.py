"""Faults put into the drafter on purpose: none changes a token, and each is noticed by something all the same.

What a wrong draft says is refused by the target, so comparing tokens can't find it. Two things can: the guard of
test_demo_references.py, an accept length that may not move by more than 2 %; and where a fault is too small for
that, the tests that compare the drafter with an independent one. LOUD faults must be heard by a guard of that kind
(three of its prompts, against the same engine without the fault), QUIET ones by the test that is named with them,
or by one here. Faults of the noise that a draft ranks by are in test_noise_mutations.py.
"""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from fault import Fault
from harness import Answer, InProcessEngine, greedy
from make_references import FILE, SHAPE, accept_length
from models import test_decoder
from spec import test_drafter

from tokenspeed.attention import sdpa
from tokenspeed.models import decoder
from tokenspeed.spec.base import DraftTree
from tokenspeed.spec.eagle4 import drafter
from tokenspeed.spec.eagle4.drafter import EagleDrafter
from tokenspeed.spec.eagle4.model import DraftModel
from tokenspeed.spec.eagle4.tree import Expansion
from tokenspeed.worker import engine as worker_engine
from tokenspeed.worker.engine import Engine

NUM_PROMPTS, NUM_TOKENS = 3, 32  # about 27 rounds, and no fewer: some faults need an answer of this length
TOLERANCE = 0.02  # the guard's


def change_rows(fault: Fault, change: Callable) -> None:
    """change(rows, frontier) -> the rows of every draft step with the fault."""
    fault.change(EagleDrafter, "_rows", lambda rows, self, at, *rest: change(rows(self, at, *rest), at))


# ---- loud: where rows stand


def append_off(fault: Fault, index: int, slot: int) -> None:
    def changed(append, self, tokens, aux, indices, slots):
        append(self, tokens, aux, indices + index, slots + slot)

    fault.change(EagleDrafter, "append", changed)


def rows_appended_one_slot_late(fault: Fault) -> None:
    append_off(fault, 0, 1)


def the_roots_own_row_not_seen(fault: Fault) -> None:
    change_rows(fault, lambda rows, _: replace(rows, prefix_lens=rows.prefix_lens - 1))


# ---- loud: what rows are made of


def aux_layers_swapped(fault: Fault) -> None:
    fault.change(decoder, "_places", lambda places, i, aux: places(i, (*aux[1::-1], *aux[2:])))


def aux_of_the_next_layers(fault: Fault) -> None:
    fault.change(decoder, "_places", lambda places, i, aux: places(i - 1, aux))


def aux_of_the_node_before_the_last(fault: Fault) -> None:
    """The next round's root gets a_{t-2} in place of a_{t-1}."""

    def changed(append_kept, self, slots, kept, target, indices, places, aux):
        append_kept(self, slots, kept, target, indices, places, aux)
        node = kept.path.gather(1, (kept.count - 2).clamp(min=0)[:, None])[:, 0]
        self.state.aux[slots] = aux[torch.arange(len(slots)), node]

    fault.change(Engine, "_append_kept", changed)


def change_kept(fault: Fault, change: Callable) -> None:
    """change(kept) -> what the rows of a round's kept tokens are made of."""

    def changed(append_kept, self, slots, kept, *rest):
        append_kept(self, slots, change(kept), *rest)

    fault.change(Engine, "_append_kept", changed)


def aux_of_kept_nodes_one_late(fault: Fault) -> None:
    """Committed rows, and the next root, are made of the states of their token's grandparent."""

    def before(path):
        return torch.cat([path[:, :1], path[:, :-1]], 1)

    change_kept(fault, lambda kept: replace(kept, path=before(kept.path)))


def prompt_rows_made_of_their_own_states(fault: Fault) -> None:
    """a_t stands beside x_t, where a_{t-1} belongs: the shift by one forgotten."""

    def changed(append_prompt, self, chunks, rows, aux):
        append_prompt(self, chunks, rows, aux)
        self.drafter.append(chunks.tokens, aux, rows.positions, rows.slots * (rows.positions > 0))

    fault.change(Engine, "_append_prompt", changed)


def previous_token_appended(fault: Fault) -> None:
    """Rows of a round's kept tokens are made of x_{t-1} in place of x_t."""

    roots = []
    fault.change(worker_engine, "Frontier", lambda make, x, *rest: roots.append(x[:, None]) or make(x, *rest))
    change_kept(fault, lambda kept: replace(kept, tokens=torch.cat([roots.pop(), kept.tokens[:, :-1]], 1)))


def previous_token_fed_to_lanes(fault: Fault) -> None:
    """From the second step of lanes on, each is fed its parent's token."""

    def changed(pick, self, step, *args):
        lanes = pick(self, step, *args)
        fed = self.before.gather(1, lanes.parents) if step else lanes.tokens
        self.before = lanes.tokens
        return replace(lanes, tokens=fed)

    fault.change(Expansion, "_next", changed)


# ---- loud: how the tree hangs together


def change_tree(fault: Fault, change: Callable[[DraftTree], DraftTree]) -> None:
    fault.change(drafter, "build_tree", lambda build, *args: change(build(*args)))


def children_hung_on_the_lane_before(fault: Fault) -> None:
    """Numbers of the candidates that lanes continue, one too low: the tree is sound, but not what was drafted."""

    def changed(pick, self, *args):
        lanes = pick(self, *args)
        self._lanes = self._lanes - 1
        return lanes

    fault.change(Expansion, "_next", changed)


def parents_one_number_too_low(fault: Fault) -> None:
    change_tree(fault, lambda tree: replace(tree, parents=(tree.parents - 1).clamp(min=0)))


LOUD = [
    rows_appended_one_slot_late,
    the_roots_own_row_not_seen,
    aux_layers_swapped,
    aux_of_the_next_layers,
    aux_of_the_node_before_the_last,
    aux_of_kept_nodes_one_late,
    prompt_rows_made_of_their_own_states,
    previous_token_appended,
    previous_token_fed_to_lanes,
    children_hung_on_the_lane_before,
    parents_one_number_too_low,
]


# ---- quiet: the guard hears less than 2 % of these, or nothing


def window_off(by: int) -> Callable[[Fault], None]:
    """The guard's texts are shorter than the draft's window of 512, so it never cuts anything there."""

    def changed(visible, lens, indices, first, length, window):
        return visible(lens, indices, first, length, window and window + by)

    return lambda fault: fault.change(sdpa, "visible_prefix", changed)


def window_among_lanes_off(by: int) -> Callable[[Fault], None]:
    def changed(near, self, mask, step, k):
        return near(self, mask, step - by, k)

    return lambda fault: fault.change(EagleDrafter, "_near", changed)


def lanes_written_one_place_early(fault: Fault) -> None:
    """A step's first lane takes the place of the last one before: 2.3 %, too near the limit to build on."""

    def changed(attend, self, rows, buffer, start):
        return attend(self, rows, buffer, max(start - 1, 0))

    fault.change(EagleDrafter, "_attend", changed)


def rope_of_everything_off(fault: Fault) -> None:
    """RoPE knows distances only: with all rows moved alike nothing changes but rounding."""
    fault.change(EagleDrafter, "_rope", lambda rope, self, indices: rope(self, indices + 1))
    rope_of_drafted_rows_off(fault)


def rope_of_drafted_rows_off(fault: Fault) -> None:
    change_rows(fault, lambda rows, _: replace(rows, positions=rows.positions + 1))


def rope_of_lanes_stays_the_roots(fault: Fault) -> None:
    def change(rows, frontier):
        root = (frontier.last_indices - 1).clamp(min=0)[:, None]
        return replace(rows, positions=root.expand_as(rows.mask).flatten())

    change_rows(fault, change)


def aux_of_the_layers_before(fault: Fault) -> None:
    """What goes into a layer in place of what comes out: transformers' hidden_states[i]."""
    fault.change(decoder, "_places", lambda places, i, aux: places(i + 1, aux))


def the_row_after_the_root_seen(fault: Fault) -> None:
    """It has not been written yet."""
    change_rows(fault, lambda rows, _: replace(rows, prefix_lens=rows.prefix_lens + 1))


def state_of_the_lane_before(fault: Fault) -> None:
    def changed(layer, self, tokens, state, attn, parents=None):
        return layer(self, tokens, state, attn, None if parents is None else (parents - 1).clamp(min=0))

    fault.change(DraftModel, "layer", changed)


def ancestors_of_the_lane_before(fault: Fault) -> None:
    def changed(pick, self, step, *args):
        self._mask = self._mask.roll(1, 1) if step else None
        return pick(self, step, *args)

    fault.change(Expansion, "_next", changed)


def nodes_numbered_breadth_first(fault: Fault) -> None:
    """A sound tree, of which as much is accepted; only more K/V has to move."""

    def change(tree):
        order = tree.depths.sort(dim=1, stable=True).indices
        place = order.argsort(1)
        bits = (tree.mask[..., None] >> torch.arange(order.shape[1])) & 1
        mask = (bits << place[:, None]).sum(2)
        parents = place.gather(1, tree.parents)
        return DraftTree(*(x.gather(1, order) for x in (tree.tokens, parents, tree.depths, mask)))

    change_tree(fault, change)


def rows_differ(variant: str = "eagle4") -> Callable:
    return lambda path, _: test_drafter.test_rows_and_trees_equal_the_dense_draft(
        path, variant, sdpa.TreeAttention
    )


def window_differs(path, _) -> None:
    test_drafter.test_the_window_counts_by_index(path)


def layers_differ(_, models) -> None:
    test_decoder.test_logits_and_layer_outputs_equal_transformers(models, "llama", {})


SHORT = "eagle4 window shorter than the tree"
QUIET = {  # with the test that fails with it, as a function of a folder and of tiny_model_dir
    "window one longer": (window_off(1), window_differs),
    "window one shorter": (window_off(-1), window_differs),
    "window among lanes one longer": (window_among_lanes_off(1), rows_differ(SHORT)),
    "window among lanes one shorter": (window_among_lanes_off(-1), rows_differ(SHORT)),
    "RoPE of everything": (rope_of_everything_off, rows_differ()),
    "RoPE of drafted rows": (rope_of_drafted_rows_off, rows_differ()),
    "RoPE of appended rows": (lambda fault: append_off(fault, 1, 0), rows_differ()),
    "RoPE of lanes": (rope_of_lanes_stays_the_roots, rows_differ()),
    "aux of the layers before": (aux_of_the_layers_before, layers_differ),
    "a row too many": (the_row_after_the_root_seen, rows_differ()),
    "lanes one place early": (lanes_written_one_place_early, rows_differ()),
    "state of the lane before": (state_of_the_lane_before, rows_differ("eagle4 full head, own tables")),
    "ancestors of the lane before": (ancestors_of_the_lane_before, rows_differ()),
    "nodes numbered breadth-first": (nodes_numbered_breadth_first, rows_differ()),
}


# ---- the measurement


@pytest.fixture(scope="module")
def stored() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what transformers says to them."""
    rows = json.loads(FILE.read_text())["answers"]
    return [row["prompt_ids"] for row in rows], [row["token_ids"] for row in rows]


@pytest.fixture(scope="module")
def engine(demo_dir, demo_draft_dir):
    # Without a prefix cache: it would keep rows that were made without the fault.
    return InProcessEngine(
        demo_dir,
        spec="eagle4",
        draft=str(demo_draft_dir),
        spec_shape=SHAPE,
        max_model_len=1024,
        enable_prefix_caching=False,
    )


def ask(engine: InProcessEngine, stored: tuple, num_prompts: int, num_tokens: int) -> list[Answer]:
    """Answers to the first prompts, which must be the stored ones."""
    prompts, expected = (x[:num_prompts] for x in stored)
    engine.runner.engine.drafter._pool.data.zero_()  # or a row written nowhere is found from the last run
    answers = engine.generate(prompts, greedy(num_tokens))
    assert [a.token_ids for a in answers] == [tokens[:num_tokens] for tokens in expected]
    return answers


@pytest.fixture(scope="module")
def sound(engine, stored) -> float:
    """The accept length without a fault."""
    return accept_length(ask(engine, stored, NUM_PROMPTS, NUM_TOKENS))


def test_the_measurement_repeats_itself(engine, stored, sound):
    """What a fault changes is the fault's doing alone; no fault has stayed either, whatever ran before."""
    assert sound > 2  # a draft that is of use at all
    assert accept_length(ask(engine, stored, NUM_PROMPTS, NUM_TOKENS)) == sound


@pytest.mark.parametrize("put_in", LOUD, ids=lambda f: f.__name__)
def test_the_guard_hears_it(engine, stored, sound, monkeypatch, put_in):
    fault = Fault(monkeypatch)
    put_in(fault)
    got = accept_length(ask(engine, stored, NUM_PROMPTS, NUM_TOKENS))
    print(f"accept length {sound:.3f} -> {got:.3f}, {got / sound - 1:+.1%}")
    assert fault.calls
    assert got < (1 - TOLERANCE) * sound


@pytest.mark.parametrize("put_in, differs", QUIET.values(), ids=QUIET.keys())
def test_another_test_hears_it(engine, stored, tiny_model_dir, tmp_path, monkeypatch, put_in, differs):
    fault = Fault(monkeypatch)
    put_in(fault)
    ask(engine, stored, 1, 8)
    assert fault.calls
    fault.calls = 0
    with pytest.raises(AssertionError):
        differs(tmp_path, tiny_model_dir)
    assert fault.calls


def misplaced(engine, stored, monkeypatch) -> list[tuple[int, int]]:
    """(index, token) of rows appended and of roots of trees, as the engine says, where the text has another."""
    propose, append, said = EagleDrafter.propose, EagleDrafter.append, []

    def watched_propose(self, frontier, shape):
        said.extend(zip(frontier.last_indices.tolist(), frontier.last_tokens.tolist(), strict=True))
        return propose(self, frontier, shape)

    def watched_append(self, tokens, aux, indices, slots):
        real = slots >= engine.runner.page_size  # others go to the dummy page
        said.extend(zip(indices[real].tolist(), tokens[real].tolist(), strict=True))
        append(self, tokens, aux, indices, slots)

    monkeypatch.setattr(EagleDrafter, "propose", watched_propose)
    monkeypatch.setattr(EagleDrafter, "append", watched_append)
    ask(engine, stored, 1, 16)  # the last round may go further
    text = stored[0][0] + stored[1][0]
    assert len(said) > len(stored[0][0]) + 16
    return [(index, token) for index, token in said if text[index] != token]


def test_the_engine_says_where_a_request_stands(engine, stored, monkeypatch):
    assert misplaced(engine, stored, monkeypatch) == []


def test_a_frontier_one_too_far_is_heard(engine, stored, monkeypatch):
    """The guard loses 1.6 % by it, and tests of the drafter take the engine's word for the index."""

    def changed(make, tokens, aux, last, *rest):
        return make(tokens, aux, last + 1, *rest)

    fault = Fault(monkeypatch)
    fault.change(worker_engine, "Frontier", changed)
    ask(engine, stored, 1, 8)
    assert fault.calls
    assert misplaced(engine, stored, monkeypatch)
