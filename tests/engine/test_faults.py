"""Faults inside the engine, injected: NaN logits, drafts that are nonsense."""

import pytest
import torch
from harness import InProcessEngine, greedy
from tiny import make_tiny_draft

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
