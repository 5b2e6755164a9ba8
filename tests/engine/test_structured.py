"""The seam for structured output: a toy matcher holds every answer to its rule, and speculation changes no token."""

import copy

import pytest
import torch
from harness import InProcessEngine, greedy

from tokenspeed.params import SamplingParams
from tokenspeed.structured.matchers import WORD, fill_tree

VOCAB, END = 40, 2  # more than one element of a mask, the last of them not full
OPEN, CLOSE, DIGITS = (5, 9), (6, 10), tuple(range(20, 30))
PROMPTS = [[5, 9, 3, 12, 9, 0, 7], [11], [1, 2, 3], [7, 7, 7, 8], list(range(30)), [4] * 20, [12, 13], [0, 6]]


class Toy:
    """A matcher by what may follow the accepted tokens."""

    def __init__(self, rule):
        self.rule, self.tokens = rule, []

    def allowed(self) -> set[int]:
        return set(range(VOCAB)) if END in self.tokens else self.rule(self.tokens)

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        self.tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert 0 < count <= len(self.tokens)
        del self.tokens[-count:]

    def fill_mask(self, mask: torch.Tensor) -> None:
        bits = torch.zeros(len(mask) * WORD, dtype=torch.int64)
        bits[list(self.allowed())] = 1
        mask.copy_((bits.view(-1, WORD) << torch.arange(WORD)).sum(1).to(torch.int32))


def digits(tokens: list[int]) -> set[int]:
    return {*DIGITS, END} if tokens else {*DIGITS}


def brackets(tokens: list[int]) -> set[int]:
    """Two kinds, up to five deep; the end where all are closed."""
    stack = []
    for token in tokens:
        if token in OPEN:
            stack.append(CLOSE[OPEN.index(token)])
        else:
            stack.pop()
    closing = {stack[-1]} if stack else {END} if tokens else set()
    return closing | (set(OPEN) if len(stack) < 5 else set())


def no_neighbours(tokens: list[int]) -> set[int]:
    """Nearly everything, so that drafts are often right: no token whose number is near the last one's."""
    return {t for t in range(VOCAB) if not tokens or abs(t - tokens[-1]) > 2}


RULES = {"digits": digits, "brackets": brackets, "no neighbours": no_neighbours}


@pytest.fixture(scope="module")
def target(tiny_model_dir):
    return tiny_model_dir("llama", vocab_size=VOCAB, eos_token_id=END)


@pytest.fixture(scope="module")
def plain(target):
    return constrained(InProcessEngine(target, max_num_seqs=1, enable_prefix_caching=False))


@pytest.fixture(scope="module", params=["roomy", "tight"])
def speculative(request, target, tiny_draft_dir):
    """tight: chunks of prompts, preemptions and two rounds in flight."""
    draft = str(tiny_draft_dir(target, candidate_head=None))
    more = {"max_num_batched_tokens": 16, "kv_cache_tokens": 16 * 7, "rounds_in_flight": 2}
    options = {"spec": "eagle4", "draft": draft, "spec_shape": "4/4/16"}
    return constrained(InProcessEngine(target, **options, **(more if request.param == "tight" else {})))


def constrained(engine: InProcessEngine) -> InProcessEngine:
    """A request's rule is named by its stop string, which no process looks at here."""
    engine.runner.engine.matchers.make = lambda params: Toy(RULES[params.stop[0]]) if params.stop else None
    return engine


def follows(rule, tokens: list[int]) -> bool:
    return all(token in rule(tokens[:i]) for i, token in enumerate(tokens))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1.2},
        {
            "temperature": 1.0,
            "top_k": 9,
            "frequency_penalty": 0.8,
            "bad_words_token_ids": ((20, 21), (5, 5), (9, 9)),
        },
    ],
)
def test_speculation_changes_no_token(plain, speculative, fields):
    """All rules and none in one batch."""
    rules = [*RULES, None] * 2
    params = [
        SamplingParams(seed=i, max_tokens=30, stop=(rule,) if rule else (), **fields)
        for i, rule in enumerate(rules)
    ]
    expected = [plain.generate([p], q)[0] for p, q in zip(PROMPTS, params, strict=True)]
    before = speculative.scheduler.counters.as_dict()["num_preemptions"]
    answers = speculative.generate(PROMPTS, params)
    if speculative.info["rounds_in_flight"] == 2:
        assert speculative.scheduler.counters.as_dict()["num_preemptions"] > before
    for rule, answer, right in zip(rules, answers, expected, strict=True):
        assert answer.token_ids == right.token_ids
        assert answer.finished.reason == right.finished.reason != "error"
        assert rule is None or follows(RULES[rule], answer.token_ids)
    speculative.generate([[1]], greedy(2))  # its first step releases the slots
    assert not speculative.runner.engine.matchers.any(range(8))
    near = [
        a.finished.num_accepted for rule, a in zip(rules, answers, strict=True) if rule == "no neighbours"
    ]
    assert sum(near) > 0
    assert {len(a.token_ids) for a in answers} != {30}, "none came to its end"


def test_the_rules_have_an_effect(plain):
    for name, rule in RULES.items():
        (free,) = plain.generate(
            [PROMPTS[0]], SamplingParams(temperature=1.2, seed=1, max_tokens=30, ignore_eos=True)
        )
        assert not follows(rule, free.token_ids), name


def test_a_rule_that_allows_nothing_ends_its_request(plain, monkeypatch):
    monkeypatch.setitem(RULES, "nothing", lambda tokens: {7} if len(tokens) < 3 else set())
    (answer,) = plain.generate([[5]], greedy(10, stop=("nothing",)))
    assert answer.token_ids[:3] == [7, 7, 7] and answer.finished.reason == "error"
    assert "no token" in answer.finished.message


@pytest.mark.parametrize("name", RULES)
def test_masks_of_a_tree(name):
    """Against a matcher of its own for every node; the walk leaves the matcher as it was."""
    generator = torch.Generator().manual_seed(1)
    pool = torch.tensor([*OPEN, *CLOSE, 20, 24, 29, END, 39])
    rule, reached = RULES[name], 0
    for _ in range(40):
        start = Toy(rule)
        for token in pool[torch.randint(len(pool), (4,), generator=generator)].tolist():
            start.accept(token)
        if not start.tokens:
            continue
        parents = [0] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, 12)]
        tokens = pool[torch.randint(len(pool), (12,), generator=generator)].tolist()
        masks = torch.zeros(12, 2, dtype=torch.int32)
        walker = copy.deepcopy(start)
        fill_tree(walker, tokens, parents, masks)
        assert walker.tokens == start.tokens
        for node in range(12):
            path, at = [], node
            while at:
                path, at = [tokens[at], *path], parents[at]
            own = copy.deepcopy(start)
            right = torch.zeros(2, dtype=torch.int32)
            if all(own.accept(token) for token in path):
                own.fill_mask(right)
                reached += node > 0
            assert masks[node].tolist() == right.tolist()
    assert reached > 20
