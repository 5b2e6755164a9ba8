"""Bad words: never in an answer, the same tokens with and without speculation."""

import pytest
import torch
from harness import InProcessEngine, greedy

from tokenspeed.params import SamplingParams
from tokenspeed.sampling.bad_words import BadWords

VOCAB = 16  # so that the tree's tokens are often the right ones
PROMPTS = [[5, 9, 3, 12, 9, 0, 7], [11], [1, 2, 3], [7, 7, 7, 8], list(range(16)), [4] * 20, [12, 13], [0, 6]]
BAD = {
    "short": ((5,), (9, 4), (4, 4), (7, 9), (12, 3), (0, 0)),
    "long": ((9, 9, 9, 9), (7, 9, 7), (4, 11, 4), (3,) * 9, (0, 1, 2), (8, 8, 8)),
    "all pairs of some": tuple((a, b) for a in range(0, 16, 2) for b in range(0, 16, 3)),
}


@pytest.fixture(scope="module")
def target(tiny_model_dir):
    return tiny_model_dir("llama", vocab_size=VOCAB, eos_token_id=None)


@pytest.fixture(scope="module")
def plain(target):
    return InProcessEngine(target)


@pytest.fixture(scope="module")
def speculative(target, tiny_draft_dir):
    """Chunks of prompts and preemptions too: both lie between the tokens of a sequence."""
    draft = str(tiny_draft_dir(target, candidate_head=None))
    options = {"spec": "eagle4", "draft": draft, "spec_shape": "4/4/16", "max_num_batched_tokens": 16}
    return InProcessEngine(target, kv_cache_tokens=16 * 12, **options)


def asked(temperature: float, **fields) -> list[SamplingParams]:
    common = {"max_tokens": 40, "temperature": temperature, "ignore_eos": True}
    return [SamplingParams(seed=i, **common, **fields) for i in range(len(PROMPTS))]


def holds(tokens: list[int], sequence: tuple[int, ...]) -> bool:
    n = len(sequence)
    return any(tuple(tokens[i : i + n]) == sequence for i in range(len(tokens) - n + 1))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("name", BAD)
def test_they_never_come(plain, speculative, name, temperature):
    params = asked(temperature, bad_words_token_ids=BAD[name])
    before = speculative.scheduler.counters.as_dict()["num_preemptions"]
    answers = speculative.generate(PROMPTS, params)
    assert speculative.scheduler.counters.as_dict()["num_preemptions"] > before
    assert sum(a.finished.num_accepted for a in answers) > 20
    expected = [plain.generate([p], q)[0].token_ids for p, q in zip(PROMPTS, params, strict=True)]
    assert [a.token_ids for a in answers] == expected
    assert not any(holds(a.token_ids, words) for a in answers for words in BAD[name])


@pytest.mark.parametrize("name", BAD)
def test_without_the_ban_they_come(plain, name):
    free = plain.generate(PROMPTS * 2, asked(0.0) + asked(1.5))
    assert any(holds(a.token_ids, words) for a in free for words in BAD[name])


def test_the_prompt_is_no_part_of_them(plain):
    params = greedy(1, ignore_eos=True, allowed_token_ids=(8,), bad_words_token_ids=((7, 8),))
    assert plain.generate([[7, 7, 7]], params)[0].token_ids == [8]


def test_every_token_banned(plain):
    """The request ends, with the reason; the one beside it goes on."""
    params = greedy(3, ignore_eos=True, allowed_token_ids=(8,), bad_words_token_ids=((8, 8),))
    ended, other = plain.generate([[7], [7]], [params, greedy(3, ignore_eos=True)])
    assert ended.finished.reason == "error" and "no token" in ended.finished.message
    assert len(other.token_ids) == 3


def test_each_node_by_its_own_path():
    """A tree with everything in it, against the rule written out for each node."""
    generator = torch.Generator().manual_seed(0)
    parents = [0, 0, 1, 2, 0, 4, 2, 6, 7, 8]
    num_nodes = len(parents)
    for _ in range(50):
        tokens = torch.randint(0, 3, (num_nodes,), generator=generator)
        output = torch.randint(
            0, 3, (int(torch.randint(1, 6, (), generator=generator)),), generator=generator
        ).tolist()
        output[-1] = int(tokens[0])
        sequences = [torch.randint(0, 3, (n,), generator=generator).tolist() for n in (1, 2, 2, 3, 4, 6)]
        paths = [[0]]
        for node in range(1, num_nodes):
            paths.append([*paths[parents[node]], node])
        mask = torch.tensor([sum(1 << node for node in path) for path in paths])
        logits = torch.zeros(num_nodes, 3)
        BadWords(sequences, output, "cpu").ban(logits, tokens, mask)
        for path, row in zip(paths, logits, strict=True):
            text = output + [int(tokens[node]) for node in path[1:]]
            for token in range(3):
                banned = any([*text, token][-len(s) :] == s for s in sequences)
                assert row[token] == (float("-inf") if banned else 0.0)
