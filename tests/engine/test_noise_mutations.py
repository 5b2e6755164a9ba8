"""Faults put into the noise that a draft ranks by: none changes a token, and the accept length drops.

As in test_mutations.py, for requests that sample: a draft that looks for what another noise would choose, or for
none, is refused more often by the target.
"""

import json
from dataclasses import replace

import pytest
from fault import Fault
from harness import Answer, InProcessEngine
from make_references import FILE, SHAPE, accept_length, sampled

from tokenspeed.spec.eagle4.drafter import EagleDrafter
from tokenspeed.worker.state import SamplingState

NUM_PROMPTS, NUM_TOKENS = 4, 32  # about 45 rounds
LEFT = 0.9  # of the accept length, at most; the guard's 2 % hears all the more


def noise_of_the_position_before(fault: Fault) -> None:
    fault.change(SamplingState, "draw", lambda draw, self, slots, last: draw(self, slots, last - 1))


def noise_of_the_roots_children_at_every_depth(fault: Fault) -> None:
    fault.change(EagleDrafter, "_grow", lambda grow, self, *args: grow(self, *args[:-1], 1))


def noise_of_another_slots_seed(fault: Fault) -> None:
    def changed(draw, self, slots, last):
        right = draw(self, slots, last)
        return replace(right, seeds=right.seeds.roll(1))

    fault.change(SamplingState, "draw", changed)


def no_noise(fault: Fault) -> None:
    fault.change(SamplingState, "draw", lambda draw, self, *args: None)


FAULTS = [
    noise_of_the_position_before,
    noise_of_the_roots_children_at_every_depth,
    noise_of_another_slots_seed,
    no_noise,
]


@pytest.fixture(scope="module")
def ask(demo_dir, demo_draft_dir):
    """ask() -> sampled answers to the first of the stored prompts."""
    options = {"spec": "eagle4", "draft": str(demo_draft_dir), "spec_shape": SHAPE, "max_model_len": 1024}
    engine = InProcessEngine(demo_dir, enable_prefix_caching=False, **options)
    prompts = [row["prompt_ids"] for row in json.loads(FILE.read_text())["answers"]][:NUM_PROMPTS]
    return lambda: engine.generate(prompts, sampled(NUM_PROMPTS, NUM_TOKENS))


@pytest.fixture(scope="module")
def sound(ask) -> list[Answer]:
    return ask()


@pytest.mark.parametrize("put_in", FAULTS, ids=lambda f: f.__name__)
def test_the_accept_length_hears_it(ask, sound, monkeypatch, put_in):
    fault = Fault(monkeypatch)
    put_in(fault)
    answers = ask()
    assert fault.calls
    assert [a.token_ids for a in answers] == [a.token_ids for a in sound]
    without, right = accept_length(answers), accept_length(sound)
    print(f"accept length {right:.3f} -> {without:.3f}, {without / right - 1:+.1%}")
    assert without < LEFT * right
