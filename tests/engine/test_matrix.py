"""Speculation changes no token and no log-probability, however it meets what else an engine does.

Every pair of choices of `FACTORS` stands in a case: a set of parameters, a method, a tree, a batch, prompts whole or
in chunks, a prefix cache that is off, cold or warm, a pool that is roomy or preempts, one or two rounds in flight. The
right answer is that of an engine without speculation which has one request, room for it, and no prefix cache. Each
case also shows that what it names took place.
"""

import pytest
from harness import Answer, InProcessEngine, greedy
from pairwise import all_pairs, covering, cut, pairs

from tokenspeed.ipc.messages import Logprobs, unpack
from tokenspeed.params import SamplingParams

PAGE = 16
HEAD = 2 * PAGE  # tokens of a prompt that a warm cache knows
CHUNK = 7
LENGTHS = [45, 42, 40, 41, 47, 43, 46, 44]  # of the prompts; the first and its answer end with a page
OUTPUTS = [52, 34, 40, 36, 38, 32, 40, 35]  # of most answers; they differ, so that a batch shrinks
TOLERANCE = 1e-4  # of log-probabilities

SETS = {  # a negative min_tokens counts from the end
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.3},
    "warm": {"temperature": 1.0},
    "two choices": {"temperature": 1.5, "n": 2},
    "top_k": {"temperature": 1.5, "top_k": 6},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "presence, frequency": {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.8},
    "repetition": {"temperature": 0.3, "repetition_penalty": 1.6},
    "bias": {"temperature": 1.0, "logit_bias": {7: 6.0, 60: 5.0, 9: -100.0, 100: -100.0}},
    "bad words": {
        "temperature": 0.3,
        "bad_words_token_ids": (*((t,) for t in range(0, 320, 4)), *((t, t) for t in range(40)), (7, 60, 7)),
    },
    "min_tokens": {"temperature": 1.0, "min_tokens": -3, "stop_token_ids": tuple(range(0, 320, 2))},
    "logprobs": {"temperature": 1.0, "logprobs": 5},
}
MIXED = [  # a request each
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": -0.4},
    {"temperature": 0.0, "presence_penalty": 2.0},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0.0, "frequency_penalty": 1.2},
    {"temperature": 0.3, "min_tokens": -9, "stop_token_ids": tuple(range(4, 320, 5))},
    {"temperature": 1.5, "logprobs": 0, "prompt_logprobs": 2},
    {"temperature": 0.8, "repetition_penalty": 0.8, "logit_bias": {7: 4.0, 11: -3.0}},
]
FACTORS = {
    "params": [*SETS, "mixed"],
    "shape": ["4/1/5", "3/2/6", "5/4/16", "12/4/16", "crowd"],
    "batch": [1, 2, 5, 8],
    "method": ["eagle", "eagle3", "eagle4"],
    "prefix": ["off", "cold", "hit"],
    "prefill": ["whole", "chunks"],
    "pool": ["roomy", "tight"],
    "in_flight": [1, 2],
}
NUM_SHORT = 15


def allowed(case: dict) -> bool:
    """One request is no crowd: a round of it always has its tree."""
    return (case.get("shape"), case.get("batch")) != ("crowd", 1)


CASES = covering(FACTORS, allowed)
SHORT = cut(CASES, NUM_SHORT)


def text(row: int) -> list[int]:
    """The prompt of a row. No two begin alike."""
    return [(x * x * 7 + 31 * x + 37 * row + 11 * (x % 5)) % 300 + 3 for x in range(LENGTHS[row])]


def choices(name: str, row: int) -> list[SamplingParams]:
    """A row's parameters, for each choice that it asks for."""
    fields = MIXED[row] if name == "mixed" else SETS[name]
    if "min_tokens" in fields:
        fields = {**fields, "min_tokens": OUTPUTS[row] + fields["min_tokens"]}
    params = SamplingParams(seed=1000 + row, max_tokens=OUTPUTS[row], ignore_eos=True, **fields)
    return [params.resolved(index) for index in range(params.n)]


class Watched(InProcessEngine):
    """Counts prefill chunks and admissions."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.num_chunks = self.num_admitted = 0
        launch = self.runner.launch

        def counting(step):
            self.num_chunks += len(unpack(step.prefill_slots))
            self.num_admitted += len(step.admit)
            return launch(step)

        self.runner.launch = counting


@pytest.fixture(scope="module")
def target(tiny_model_dir):
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def plain(target):
    return InProcessEngine(target, enable_prefix_caching=False, max_num_seqs=1)


@pytest.fixture(scope="module")
def reference(plain):
    """reference(name, row) -> the answers to a row's choices."""
    known: dict[tuple[str, int], list[Answer]] = {}

    def ask(name: str, row: int) -> list[Answer]:
        if (name, row) not in known:
            known[name, row] = [plain.generate([text(row)], params)[0] for params in choices(name, row)]
        return known[name, row]

    return ask


@pytest.fixture(scope="module")
def make(target, tiny_draft_dir):
    """make(case, rows, pages) -> an engine for the case. pages: of a tight pool."""

    def engine(case: dict, rows: int, pages: int | None) -> Watched:
        options: dict = {"max_num_batched_tokens": CHUNK if case["prefill"] == "chunks" else 1024}
        if case["shape"] == "crowd":
            options["speculative_disable_by_batch_size"] = max(rows // 4, 1)  # a tight pool takes few at once
        if pages:
            options["kv_cache_tokens"] = pages * PAGE
        return Watched(
            target,
            spec=case["method"],
            draft=str(tiny_draft_dir(target, case["method"])),
            spec_shape="4/4/16" if case["shape"] == "crowd" else case["shape"],
            enable_prefix_caching=case["prefix"] != "off",
            max_num_seqs=16,
            rounds_in_flight=case["in_flight"],
            page_size=PAGE,
            **options,
        )

    return engine


def serve(engine: Watched, case: dict) -> tuple[list[Answer], dict[str, float]]:
    """The answers to the case's requests, all queued at once, and what was counted meanwhile."""
    if case["prefix"] == "hit":
        for row in range(case["batch"]):
            engine.generate([text(row)[: HEAD + 1]], greedy(2))

    def count() -> dict[str, float]:
        return engine.scheduler.counters.as_dict() | {
            "chunks": engine.num_chunks,
            "admitted": engine.num_admitted,
        }

    before = count()
    asked = [(text(row), p) for row in range(case["batch"]) for p in choices(case["params"], row)]
    answers = engine.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    return answers, {name: value - before[name] for name, value in count().items()}


def tight_sizes(case: dict, lengths: list[int]) -> list[int]:
    """Pools in pages, from the largest that can't hold all rows at their ends down to the smallest that takes any
    request. lengths: of prompts with their answers."""
    rows = range(case["batch"])
    least = max(-(-(LENGTHS[row] + OUTPUTS[row] - 1) // PAGE) for row in rows)
    most = max(least, sum(-(-n // PAGE) for n in lengths) - 1)
    return [*range(most, least, -max(1, len(lengths) // 2)), least]


def is_served_tight(rows: int, counted: dict[str, float]) -> bool:
    """Somebody had to give way; a request that is alone gives up its tree."""
    return counted["num_preemptions" if rows > 1 else "spec_decode_plain_rounds"] > 0


def check_took_place(case: dict, rows: int, counted: dict[str, float]) -> None:
    drafted, accepted = (counted[f"spec_decode_num_{what}"] for what in ("draft_tokens", "accepted_tokens"))
    assert 0 < accepted < drafted
    if case["shape"] == "crowd":
        assert counted["spec_decode_plain_rounds"] > 0
    elif case["pool"] == "roomy":
        assert counted["spec_decode_plain_rounds"] == 0
    if case["pool"] == "tight":
        assert is_served_tight(rows, counted)
    else:
        assert counted["num_preemptions"] == 0 and counted["admitted"] == rows
    if case["prefill"] == "chunks":
        assert counted["chunks"] > counted["admitted"]
    else:
        assert counted["chunks"] == counted["admitted"]
    if case["prefix"] == "hit":
        assert counted["prefix_cache_hits"] >= HEAD
        assert case["pool"] == "tight" or counted["prefix_cache_hits"] >= HEAD * (case["batch"] - 1)
    elif case["prefix"] == "off" or rows == case["batch"]:  # choices of a prompt find each other's pages
        assert counted["prefix_cache_hits"] == 0
    if case["prefix"] == "off":
        assert counted["prefix_cache_queries"] == 0


def gap(plain: InProcessEngine, ids: list[int]) -> float:
    """Between the two largest logits after these tokens."""
    (answer,) = plain.generate([ids], greedy(1, logprobs=2))
    first, second = answer.logprobs[0].top_logprobs
    return first - second


def check_equal(plain: InProcessEngine, who: str, prompt: list[int], got: Answer, expected: Answer) -> None:
    if got.token_ids != expected.token_ids:
        both = zip(got.token_ids, expected.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(both) if a != b), None)
        if at is None:
            pytest.fail(f"{who}: {len(got.token_ids)} tokens, expected {len(expected.token_ids)}")
        logits = gap(plain, prompt + expected.token_ids[:at])
        pytest.fail(
            f"{who}: token {at} is {got.token_ids[at]}, expected {expected.token_ids[at]}; "
            f"the two largest logits there are {logits:.2g} apart"
        )
    assert (got.finished.reason, got.finished.stop_token) == (
        expected.finished.reason,
        expected.finished.stop_token,
    ), who
    check_logprobs(f"{who}, logprobs", got.logprobs, expected.logprobs)
    check_logprobs(f"{who}, prompt_logprobs", got.prompt_logprobs, expected.prompt_logprobs)


def check_logprobs(who: str, got: list[Logprobs], expected: list[Logprobs]) -> None:
    assert len(got) == len(expected), who
    for at, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.top_ids == b.top_ids, f"{who}, {at}"
        numbers = [a.logprob, *a.top_logprobs], [b.logprob, *b.top_logprobs]
        assert numbers[0] == pytest.approx(numbers[1], abs=TOLERANCE), f"{who}, {at}"


def label(case: dict) -> str:
    return "-".join(str(level).replace(", ", "+").replace(" ", "_") for level in case.values())


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=label(c), marks=[] if c in SHORT else pytest.mark.long) for c in CASES],
)
def test_matrix(plain, reference, make, case):
    name = case["params"]
    who = [(row, i) for row in range(case["batch"]) for i in range(len(choices(name, row)))]
    expected = [reference(name, row)[i] for row, i in who]
    lengths = [LENGTHS[row] + len(e.token_ids) for (row, _), e in zip(who, expected, strict=True)]
    for pages in tight_sizes(case, lengths) if case["pool"] == "tight" else [None]:
        answers, counted = serve(make(case, len(who), pages), case)
        for (row, i), got, right in zip(who, answers, expected, strict=True):
            check_equal(plain, f"row {row} choice {i}", text(row), got, right)
        if is_served_tight(len(who), counted):
            break
    check_took_place(case, len(who), counted)


def test_every_pair_is_covered():
    held = set().union(*map(pairs, CASES))
    assert held == set(all_pairs(FACTORS, allowed))
    assert all(case.keys() == FACTORS.keys() and allowed(case) for case in CASES)
    assert 40 <= len(CASES) <= 70


def test_the_short_cut_has_every_level():
    assert len(SHORT) == NUM_SHORT and all(case in CASES for case in SHORT)
    assert {choice for case in SHORT for choice in case.items()} == {
        (name, level) for name, levels in FACTORS.items() for level in levels
    }


def test_every_set_has_an_effect(plain, reference):
    """The matrix would be equal too if a parameter were ignored on both sides."""
    for name, fields in SETS.items():
        without = SamplingParams(
            temperature=fields["temperature"], seed=1000, max_tokens=OUTPUTS[0], ignore_eos=True
        )
        (base,) = plain.generate([text(0)], without)
        answers = reference(name, 0)
        if name == "two choices":
            assert answers[0].token_ids == base.token_ids != answers[1].token_ids
        elif name == "logprobs":
            assert len(answers[0].logprobs) == len(base.token_ids)
        elif name == "min_tokens":
            stops = set(fields["stop_token_ids"])
            assert not stops.isdisjoint(base.token_ids[:9])
            assert answers[0].finished.reason == "stop" and answers[0].finished.stop_token in stops
            assert stops.isdisjoint(answers[0].token_ids[:-3])
        elif len(fields) > 1:
            assert answers[0].token_ids != base.token_ids, name
    assert len({tuple(reference(name, 0)[0].token_ids) for name in ("greedy", "cool", "warm")}) == 3
