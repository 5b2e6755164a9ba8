"""The engine on a GPU: captured graphs against eager, speculation against plain decoding, batch invariance."""

import pytest
import torch
from harness import InProcessEngine, greedy
from make_references import accept_length

from tokenspeed.params import SamplingParams
from tokenspeed.worker.state import SamplingState

pytestmark = pytest.mark.gpu
TEXTS = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain what a hash table is and when to use one.",
    "def fibonacci(n):",
    "What is 17 times 23? Show the steps.",
    "List five uses of a paper clip.",
    "Translate 'good morning' into French, Spanish and German.",
    "Why is the sky blue?",
    "Summarise the water cycle in three sentences.",
)


@pytest.fixture(scope="module")
def prompts(demo_dir):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_dir / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.fixture(scope="module")
def make(demo_dir, demo_draft_dir):
    def engine(spec: str | None = None, **options) -> InProcessEngine:
        draft = {"spec": "eagle4", "draft": str(demo_draft_dir), "spec_shape": spec} if spec else {}
        sizes = {"device": "cuda", "kv_cache_tokens": 65536, "max_num_seqs": 64}
        return InProcessEngine(demo_dir, **{**sizes, **draft, **options})

    yield engine
    torch.cuda.empty_cache()


def sampled(count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=1.0, seed=i, max_tokens=48) for i in range(count)]


def mixed(count: int) -> list[SamplingParams]:
    """Greedy and sampled in turns, of different lengths, so that a batch shrinks."""
    return [
        SamplingParams(temperature=(0.0, 1.0, 0.6)[i % 3], top_p=0.9, seed=50 + i, max_tokens=40 - 3 * i)
        for i in range(count)
    ]


@pytest.mark.parametrize("spec", [None, "8/4/16", "5/1/6"])
def test_graph_equals_eager(make, prompts, spec):
    """Buckets pad a batch of 3 to 4 and of 5 to 8; the replay after a larger batch sees no stale rows."""
    eager, graph = make(spec, dtype="float32", enforce_eager=True), make(spec, dtype="float32")
    for count in (8, 3, 5, 1):
        assert tokens(graph, prompts[:count], greedy(48)) == tokens(eager, prompts[:count], greedy(48))
        assert tokens(graph, prompts[:count], sampled(count)) == tokens(
            eager, prompts[:count], sampled(count)
        )


def test_graphs_rank_by_the_noise_of_their_requests(make, prompts):
    """Wrong noise (of the settings at capture, of another slot) changes no token; the accept length tells."""
    eager, graph = (make("8/4/16", dtype="float32", enforce_eager=how) for how in (True, False))
    for params in (sampled(8), mixed(8)):
        expected, got = (accept_length(engine.generate(prompts, params)) for engine in (eager, graph))
        assert got == pytest.approx(expected, rel=0.02)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SamplingState, "draw", lambda self, slots, last: None)
        without = accept_length(eager.generate(prompts, sampled(8)))
    assert without < 0.9 * accept_length(graph.generate(prompts, sampled(8)))


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"dtype": "bfloat16", "batch_invariant": True}], ids=str
)
@pytest.mark.parametrize("spec", [None, "8/4/16"])
def test_captured_prefill_equals_eager(make, prompts, spec, options):
    """Single prompts of all sizes, a pass that is full, one of too many chunks, prompts in pieces, cached prefixes."""
    eager = make(spec, max_num_batched_tokens=1024, enforce_eager=True, **options)
    graph = make(spec, max_num_batched_tokens=1024, **options)
    sizes = replayed(graph)

    def check(lengths: list[int], *expected: int) -> None:
        wave = [text(length, i) for i, length in enumerate(lengths)]
        params = [greedy(8), *sampled(len(wave))][: len(wave)]
        assert tokens(graph, wave, params) == tokens(eager, wave, params)
        assert sizes == list(expected)
        sizes.clear()

    for length, size in ((1, 128), (100, 128), (128, 128), (129, 256), (384, 384), (700, 768), (1024, 1024)):
        check([length], size)
    check([1025], 1024, 128)
    check([64] * 16, 1024)
    check([20] * 17)
    for expected in ((1024, 1024, 768), (128,)):
        check([40 * i + 1 for i in range(12)], *expected)


def text(length: int, seed: int) -> list[int]:
    """The same of no other length or seed begins likewise."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(100, 40000, (length,), generator=generator).tolist()


def replayed(engine: InProcessEngine) -> list[int]:
    """Fills with the size of each prefill graph that is replayed."""
    graphs, sizes = engine.runner.graphs, []
    replay = graphs.replay_prefill

    def watched(chunks):
        sizes.append(next(n for n in graphs.prefills if n >= len(chunks.tokens)))
        return replay(chunks)

    graphs.replay_prefill = watched
    return sizes


def test_speculation_changes_nothing_in_float32(make, prompts):
    plain, spec = make(dtype="float32"), make("8/4/16", dtype="float32")
    for count in (1, 8):
        assert tokens(spec, prompts[:count], greedy(64)) == tokens(plain, prompts[:count], greedy(64))
        for params in (sampled(count), mixed(count)):
            assert tokens(spec, prompts[:count], params) == tokens(plain, prompts[:count], params)


def test_a_step_ahead_changes_nothing(make, prompts):
    one = make("8/4/16", dtype="float32", rounds_in_flight=1)
    two = make("8/4/16", dtype="float32", rounds_in_flight=2)
    assert tokens(two, prompts, greedy(64)) == tokens(one, prompts, greedy(64))


@pytest.mark.parametrize("spec", [None, "8/4/16"])
def test_no_launch_waits_for_the_device(make, prompts, spec):
    """Admissions, prefills (captured or too large), new pages, rounds and releases: PyTorch raises where one waits."""
    engine = make(spec, rounds_in_flight=2)
    prompts = [*prompts, prompts[0] * 100]
    assert len(prompts[-1]) > engine.runner.graphs.prefills[-1]
    engine.generate(prompts[:-1], greedy(40))  # compiles kernels
    engine.generate(prompts[-1:], greedy(40))
    launch = engine.runner.launch

    def watched(step):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.runner.launch = watched
    sizes = replayed(engine)
    engine.generate(prompts[:-1], greedy(40))  # all but the last page of each prompt is cached
    engine.generate([prompt[::-1] for prompt in prompts[:-1]], sampled(len(prompts) - 1))
    assert len(sizes) > 1
    count = len(sizes)
    engine.generate([prompts[-1][::-1]], greedy(40))
    assert len(sizes) == count


def test_batch_invariant_bits(make, prompts):
    """bfloat16, where batches and trees round differently unless told not to."""
    plain = make(dtype="bfloat16", batch_invariant=True, enable_prefix_caching=False)
    expected = [tokens(plain, [p], greedy(64))[0] for p in prompts]
    drawn = [tokens(plain, [p], [q])[0] for p, q in zip(prompts, sampled(8), strict=True)]
    assert tokens(plain, prompts * 8, greedy(64)) == expected * 8
    for shape in ("8/4/16", "3/2/6"):
        spec = make(shape, dtype="bfloat16", batch_invariant=True, enable_prefix_caching=False)
        assert tokens(spec, prompts, greedy(64)) == expected
        assert tokens(spec, prompts[:1], greedy(64)) == expected[:1]
        assert tokens(spec, prompts * 8, greedy(64)) == expected * 8
        assert tokens(spec, prompts, sampled(8)) == drawn


def test_edits_and_logprobs_take_the_eager_way(make, prompts):
    plain, spec = make(dtype="float32"), make("8/4/16", dtype="float32")
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, logprobs=3, max_tokens=32)
    a, b = (engine.generate(prompts[:4], params) for engine in (plain, spec))
    assert [x.token_ids for x in a] == [x.token_ids for x in b]
    for x, y in zip(a, b, strict=True):
        assert len(x.logprobs) == len(y.logprobs) == len(x.token_ids)
        assert all(abs(p.logprob - q.logprob) < 1e-3 for p, q in zip(x.logprobs, y.logprobs, strict=True))


class OddAfterEven:
    """A matcher: an even token after an odd one and the other way round, an even one first."""

    def __init__(self):
        self.tokens = [1]

    def accept(self, token: int) -> bool:
        fits = (token + self.tokens[-1]) % 2 == 1
        self.tokens += [token] * fits
        return fits

    def rollback(self, count: int) -> None:
        del self.tokens[-count:]

    def fill_mask(self, mask: torch.Tensor) -> None:
        mask.fill_(0x55555555 if self.tokens[-1] % 2 else -0x55555556)  # the even bits, or the odd ones


def test_bad_words_and_masks_take_the_eager_way(make, prompts):
    """With two rounds in flight: what the host knows of a request is a step old."""
    common = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    (free,) = tokens(make(dtype="float32"), prompts[:1], SamplingParams(**common))
    bad = (*(tuple(free[i : i + 2]) for i in range(0, 30, 3)), tuple(free[31:34]))
    params = [
        SamplingParams(**common, seed=seed, bad_words_token_ids=bad if seed < 3 else ()) for seed in range(5)
    ]
    plain, spec = make(dtype="float32"), make("8/4/16", dtype="float32", rounds_in_flight=2)
    for engine in (plain, spec):
        engine.runner.engine.matchers.make = lambda p: OddAfterEven() if p.seed in (2, 3) else None
    expected = tokens(plain, [prompts[0]] * 5, params)
    assert tokens(spec, [prompts[0]] * 5, params) == expected
    assert expected[0] == expected[1] != free == expected[4]
    for answer in expected[2:4]:
        assert all((a + b) % 2 for a, b in zip([1, *answer], answer, strict=False))


def tokens(engine: InProcessEngine, prompts, params) -> list[list[int]]:
    return [answer.token_ids for answer in engine.generate(prompts, params)]
