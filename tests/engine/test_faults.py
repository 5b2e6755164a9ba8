"""Faults inside the engine, injected: NaN logits, drafts that are nonsense."""

import pytest
import torch
from harness import InProcessEngine, greedy
from safetensors.torch import load_file, save_file
from tiny import make_tiny_draft

from tokenspeed.params import SamplingParams

PROMPTS = [[5, 9, 17, 33, 2, 71], [11], list(range(40, 75)), [7, 7, 7, 8]]


@pytest.fixture(scope="module")
def target(tiny_model_dir):
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    return make_tiny_draft(tmp_path_factory.mktemp("draft"), target)


def engine(target, draft, **options) -> InProcessEngine:
    if draft is None:
        return InProcessEngine(target, **options)
    return InProcessEngine(target, spec="eagle4", draft=str(draft), spec_shape="4/4/16", **options)


class Spoiler:
    """Stands before `model.logits`: after `first` calls with rows of all requests, those of request number
    `victim` are NaN, every entry (whole) or one of each."""

    def __init__(self, plain, victim: int, nodes: int, first: int, whole: bool):
        self.plain, self.victim, self.first, self.whole = plain, victim, first, whole
        self.sizes = (len(PROMPTS), len(PROMPTS) * nodes)  # fewer rows: the victim has gone

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.plain(hidden)
        if len(hidden) in self.sizes:
            self.first -= 1
            if self.first < 0:
                rows = logits.view(len(PROMPTS), len(hidden) // len(PROMPTS), -1)[self.victim]
                rows[:, slice(None) if self.whole else slice(3, 4)] = float("nan")
        return logits


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("whole", [True, False])
def test_nan_logits_end_one_request(target, draft, monkeypatch, speculative, first, whole):
    """B17: an error for that request, nothing for its neighbours. first = 0 is the end of the prompt."""
    expected = engine(target, None).generate(PROMPTS, greedy(20, ignore_eos=True))
    spoiled = engine(target, draft if speculative else None)
    model = spoiled.runner.engine.model
    nodes = 16 if speculative else 1
    monkeypatch.setattr(model, "logits", Spoiler(model.logits, 2, nodes, first, whole))
    answers = spoiled.generate(PROMPTS, greedy(20, ignore_eos=True))
    bad = answers.pop(2)
    assert bad.finished.reason == "error" and "NaN" in bad.finished.message and bad.finished.status == 500
    good = expected.pop(2)
    assert bad.token_ids == good.token_ids[: len(bad.token_ids)] and len(bad.token_ids) < 20
    for answer, plain in zip(answers, expected, strict=True):
        assert answer.finished.reason == "length" and answer.token_ids == plain.token_ids
    assert spoiled.scheduler.counters.num_nan_aborted_requests == 1
    # Nothing of it stays: the same prompt is computed anew, and well.
    monkeypatch.undo()
    again = spoiled.generate([PROMPTS[2]], greedy(20, ignore_eos=True))[0]
    assert again.token_ids == good.token_ids


def test_drafts_that_are_nonsense_cost_only_time(target, tmp_path):
    """B15, B17: a draft of random weights is wrong nearly always; the text stays the target's."""
    draft = make_tiny_draft(tmp_path / "draft", target, seed=5, skill=0.0)
    expected = engine(target, None).generate(PROMPTS, greedy(20, ignore_eos=True))
    answers = engine(target, draft).generate(PROMPTS, greedy(20, ignore_eos=True))
    assert [a.token_ids for a in answers] == [e.token_ids for e in expected]


SPOILED = {  # method, tensor, where in it
    "a candidate": ("eagle4", "efficient_lm_head.weight", (40,)),
    "a head's row": ("eagle3", "lm_head.weight", (20,)),
    "a key": ("eagle4", "layers.0.self_attn.k_proj.weight", (3, 5)),
    "a value": ("eagle3", "midlayer.self_attn.v_proj.weight", (0, 0)),
    "everything": ("eagle", "fc.weight", ()),
}


def spoiled_draft(path, target, name: str) -> tuple[str, str]:
    """A draft with NaN in its weights: its method and its directory."""
    method, tensor, where = SPOILED[name]
    file = make_tiny_draft(path, target, method) / "model.safetensors"
    weights = load_file(file)
    weights[tensor][where] = torch.nan
    save_file(weights, file)
    return method, str(path)


@pytest.mark.parametrize("name", SPOILED)
def test_nan_in_a_drafts_logits_costs_only_acceptance(target, tmp_path, name):
    """B17: such candidates rank last, whatever else the round does; each tree is counted, no request ends."""
    method, path = spoiled_draft(tmp_path / "draft", target, name)
    drafting = InProcessEngine(target, spec=method, draft=path, spec_shape="4/4/16")
    plain = engine(target, None)
    for params in (greedy(20, ignore_eos=True), SamplingParams(max_tokens=20, seed=3, ignore_eos=True)):
        answers, expected = (one.generate(PROMPTS, params) for one in (drafting, plain))
        assert [a.token_ids for a in answers] == [e.token_ids for e in expected]
        assert {a.finished.reason for a in answers} == {"length"}
    counters = drafting.scheduler.counters.as_dict()
    assert counters["spec_decode_num_nan_drafts"] == counters["spec_decode_num_drafts"] > 0
    assert counters["num_nan_aborted_requests"] == 0
    assert plain.scheduler.counters.spec_decode_num_nan_drafts == 0


def test_a_head_with_a_nan_still_ranks_the_others(target, tmp_path):
    """One row of a whole head is NaN: the other tokens keep their order, so drafts are still accepted."""
    method, path = spoiled_draft(tmp_path / "draft", target, "a head's row")
    drafting = InProcessEngine(target, spec=method, draft=path, spec_shape="4/4/16")
    drafting.generate(PROMPTS, greedy(20, ignore_eos=True))
    assert drafting.scheduler.counters.as_dict()["spec_decode_num_accepted_tokens"] > 10


def test_nan_is_counted_by_tree_not_by_batch(target, draft, monkeypatch):
    """Two rounds of one request are spoiled among four requests; sound drafts count nothing."""
    sound = engine(target, draft)
    head, calls = sound.runner.engine.drafter.head, []

    def candidates(out, k, draw, plain=head.candidates):
        calls.append(len(out))
        if len(out) == len(PROMPTS) and calls.count(len(PROMPTS)) in (2, 3):  # the roots of rounds 2 and 3
            out = out.index_fill(0, torch.tensor([1]), torch.nan)
        return plain(out, k, draw)

    sound.generate(PROMPTS, greedy(12, ignore_eos=True))
    assert sound.scheduler.counters.spec_decode_num_nan_drafts == 0
    monkeypatch.setattr(head, "candidates", candidates)
    sound.generate(PROMPTS, greedy(12, ignore_eos=True))
    assert sound.scheduler.counters.spec_decode_num_nan_drafts == 2
