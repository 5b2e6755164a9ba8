"""Near the context limit trees have nodes past it: the answer is plain decoding's, and nobody's K/V is harmed."""

import pytest
from harness import InProcessEngine
from tiny import make_tiny_draft

from tokenspeed.params import SamplingParams

LEFT = [1, 2, 3, 5, 9, 12, 16, 17]  # tokens between the prompt and the limit


@pytest.fixture(scope="module")
def target(tiny_model_dir):
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory):
    return str(make_tiny_draft(tmp_path_factory.mktemp("draft"), target))


def requests(max_len: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and sampled ones, each to the limit."""
    prompts, params = [], []
    for i, left in enumerate(LEFT):
        prompts.append([(7 * i + 13 * j + j * j) % 297 + 3 for j in range(max_len - left)])
        temperature = 0.8 * (i % 2)
        params.append(SamplingParams(max_tokens=left, temperature=temperature, seed=i, ignore_eos=True))
    return prompts, params


@pytest.mark.parametrize(
    ("max_len", "shape"),
    [
        (64, "8/4/16"),
        (65, "8/4/16"),
        (71, "8/4/16"),
        (79, "8/4/16"),
        (80, "8/4/16"),
        (64, "16/1/17"),
        (79, "5/8/64"),
    ],
)
def test_answers_to_the_limit(target, draft, max_len, shape):
    prompts, params = requests(max_len)
    options = {"max_model_len": max_len, "max_num_seqs": 4, "page_size": 16}
    plain = InProcessEngine(target, **options, enable_prefix_caching=False)
    expected = [a.token_ids for a in plain.generate(prompts, params)]
    for rounds_in_flight in (1, 2):
        engine = InProcessEngine(
            target,
            spec="eagle4",
            draft=draft,
            spec_shape=shape,
            rounds_in_flight=rounds_in_flight,
            kv_cache_tokens=30 * 16,  # full with four of them, so a write out of bounds hits a neighbour
            **options,
        )
        for _ in range(2):  # then from the pages that the first ones have left
            answers = engine.generate(prompts, params)
            assert [a.token_ids for a in answers] == expected
            assert {a.finished.reason for a in answers} == {"length"}
            assert [a.finished.num_output for a in answers] == LEFT
        assert [
            engine.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)
        ] == expected


@pytest.mark.parametrize("method", ["eagle", "eagle4"])  # without and with a window
def test_a_long_context_leaves_the_next_ones_alone(target, tiny_draft_dir, method):
    """B22: 900 positions, where the draft's config has 128; what came before and after it is drafted alike."""
    draft = str(tiny_draft_dir(target, method))
    engine = InProcessEngine(
        target, spec=method, draft=draft, spec_shape="6/4/16", enable_prefix_caching=False
    )
    short = [[(11 * i + 5 * j + j * j) % 297 + 3 for j in range(20)] for i in range(4)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

    def accounts() -> list[tuple]:
        answers = engine.generate(short, params)
        return [(a.token_ids, a.finished.num_rounds, a.finished.accepted_per_depth) for a in answers]

    before = accounts()
    (long,) = engine.generate([[(7 * j + j * j) % 297 + 3 for j in range(900)]], params)
    assert long.finished.num_accepted > 10 and sum(sum(depths) for _, _, depths in before) > 40
    assert accounts() == before
