"""The torch references against float64 arithmetic, transformers' own layers, and published vectors."""

import math

import pytest
import torch
from transformers.models.llama import modeling_llama

from tokenspeed.kernels import philox, reference, reference_sample

INT64_MIN = -(2**63)


def make(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_like_transformers(dtype):
    norm = modeling_llama.LlamaRMSNorm(576, eps=1e-5).to(dtype)
    norm.weight.data = make(576, seed=1, dtype=dtype)
    x = make(7, 576, dtype=dtype)
    got = reference.rms_norm(x, norm.weight.data, 1e-5)
    if dtype == torch.bfloat16:
        assert torch.equal(got, norm(x))
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.data.double()
    torch.testing.assert_close(got.double(), want, atol=4e-6 if dtype == torch.float32 else 0.05, rtol=1e-2)


def test_add_rms_norm_updates_the_residual():
    x, residual, weight = (
        make(3, 32, dtype=torch.bfloat16),
        make(3, 32, seed=2, dtype=torch.bfloat16),
        make(32),
    )
    want = residual + x
    got = reference.add_rms_norm(x, residual, weight.bfloat16(), 1e-6)
    assert torch.equal(residual, want)
    assert torch.equal(got, reference.rms_norm(want, weight.bfloat16(), 1e-6))


def test_silu_and_mul_in_float64():
    x = make(4, 50).double()
    gate, up = x[:, :25], x[:, 25:]
    torch.testing.assert_close(reference.silu_and_mul(x), gate / (1 + (-gate).exp()) * up)


def test_rope_equals_transformers_and_stores():
    q, k, v = make(5, 4, 16), make(5, 2, 16, seed=1), make(5, 2, 16, seed=2)
    positions = torch.tensor([0, 3, 3, 9, 1])
    angles = torch.arange(10)[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    cos, sin = (torch.cat((t, t), -1)[positions][None] for t in (angles.cos(), angles.sin()))
    want_q, want_k = modeling_llama.apply_rotary_pos_emb(
        q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin
    )
    k_cache, v_cache = torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16)
    slots = torch.tensor([4, 11, 5, 0, 7])
    reference.rope_store_kv(q, k, v, cos_sin, positions, k_cache, v_cache, slots)
    torch.testing.assert_close(q, want_q[0].transpose(0, 1))
    torch.testing.assert_close(k, want_k[0].transpose(0, 1))
    assert torch.equal(k_cache.view(12, 2, 16)[slots], k) and torch.equal(v_cache.view(12, 2, 16)[slots], v)
    assert k_cache.view(12, -1)[[1, 2, 3, 6, 8, 9, 10]].eq(0).all()


def test_tree_attention_row_by_row_in_float64():
    table = torch.tensor([[2, 4, 0], [1, 0, 0]], dtype=torch.int32)
    k_cache, v_cache = make(5, 4, 2, 8), make(5, 4, 2, 8, seed=1)
    tail_k, tail_v, q = make(2, 3, 2, 8, seed=2), make(2, 3, 2, 8, seed=3), make(2, 3, 6, 8, seed=4)
    lens, mask = torch.tensor([7, 1], dtype=torch.int32), torch.tensor([[1, 3, 5], [INT64_MIN, 2, -1]])
    indices = torch.tensor([[7, 8, 8], [1, 2, 2]])
    for first, window in ((0, None), (1, None), (1, 3)):
        got = reference.tree_attention(
            q, k_cache, v_cache, tail_k, tail_v, table, lens, mask, indices, first, 0.3, window
        )
        for b in range(2):
            for n in range(3):
                low = first if window is None else max(first, int(indices[b, n]) - window + 1)
                pages = [(int(table[b, s // 4]), s % 4) for s in range(low, int(lens[b]))]
                tail = [j for j in range(3) if (int(mask[b, n]) >> j) & 1]
                keys = [k_cache[p] for p in pages] + [tail_k[b, j] for j in tail]
                values = [v_cache[p] for p in pages] + [tail_v[b, j] for j in tail]
                for head in range(6):
                    want = torch.zeros(8).double()
                    if keys:
                        k = torch.stack([x[head // 3] for x in keys]).double()
                        weights = (k @ q[b, n, head].double() * 0.3).softmax(0)
                        want = weights @ torch.stack([x[head // 3] for x in values]).double()
                    torch.testing.assert_close(got[b, n, head].double(), want, atol=1e-6, rtol=1e-6)


def test_move_kv_reads_before_it_writes():
    kv = make(4, 10, 3)
    want = kv.clone()
    want[:, [1, 2, 3]] = kv[:, [2, 3, 1]]
    reference.move_kv(kv, torch.tensor([2, 3, 1]), torch.tensor([1, 2, 3]))
    assert torch.equal(kv, want)


def test_philox_known_answers():
    """Vectors of Random123's kat_vectors for philox4x32-10."""
    ones = 0xFFFFFFFF
    vectors = [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, [ones] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, want in vectors:
        words = philox.philox4x32(*(tuple(torch.tensor([x]) for x in xs) for xs in (counter, key)))
        assert [int(w) for w in words] == want


def test_words_of_tokens_are_words_of_the_vocabulary():
    seeds, positions = torch.tensor([-5, 2**62 + 7]), torch.tensor([0, 2**33 + 1])
    ids = torch.tensor([[0, 5, 10, 3], [10, 9, 9, 1]])
    everything = philox.vocab_words(seeds, positions, 11)
    assert everything.shape == (2, 11)
    assert torch.equal(philox.token_words(seeds, positions, ids), everything.gather(1, ids))


def test_gumbel_noise_has_its_distribution():
    words = philox.vocab_words(torch.tensor([3]), torch.tensor([17]), 200_000)
    noise = philox.gumbel(words).double()
    assert abs(noise.mean() - 0.577216) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    extremes = philox.gumbel(torch.tensor([0, 2**32 - 1]))
    assert extremes.isfinite().all() and extremes[0] < reference_sample._MAX_NOISE


def draw(logits: torch.Tensor, count: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """Share of each token among `count` draws of one row of logits."""
    rows = logits.expand(count, -1)
    settings = [torch.full((count,), x) for x in (temperature, top_k, top_p, min_p)]
    tokens = reference.sample(
        rows,
        settings[0].float(),
        settings[1].int(),
        *settings[2:],
        torch.full((count,), 7),
        torch.arange(count),
    )
    return torch.bincount(tokens, minlength=logits.shape[-1]) / count


def kept(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """The distribution the settings ask for, by a plain float64 computation of the definition."""
    p = (logits.double() / temperature).softmax(-1)
    if top_k:
        p[p < p.sort(descending=True).values[top_k - 1]] = 0
        p /= p.sum()
    if top_p < 1:
        ranked = p.sort(descending=True).values
        p[p < ranked[int((ranked.cumsum(0) < top_p).sum())]] = 0
        p /= p.sum()
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(temperature=0.5),
        dict(top_k=3),
        dict(top_p=0.7),
        dict(min_p=0.3),
        dict(temperature=1.5, top_k=6, top_p=0.8, min_p=0.1),
    ],
)
def test_sampling_has_the_distribution_asked_for(settings):
    logits = torch.tensor([1.0, -0.5, 2.0, 0.3, 0.1, -3.0, 1.7, 0.0])
    want = kept(logits, **settings)
    got = draw(logits, 20_000, **settings)
    assert torch.equal(got > 0, want > 0) or not settings  # rare tokens may not come up without a cut
    assert (got - want).abs().max() < 0.015


@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_short_cuts_of_sampling_change_nothing(scale, monkeypatch):
    """The same tokens with 16 candidates as with the whole vocabulary sorted."""
    generator = torch.Generator().manual_seed(5)
    rows, vocab = 40, 700
    logits = torch.randn(rows, vocab, generator=generator) * scale
    logits[:, 100:160] = logits[:, :1]  # many ties
    pick = lambda *choices: torch.tensor([choices[i % len(choices)] for i in range(rows)])  # noqa: E731
    settings = (
        pick(0.0, 0.7, 1.0, 2.0, 1.0).float(),
        pick(0, 5, 0, 200, 16, 17, 1).int(),
        pick(1.0, 0.9, 0.99, 0.3, 1.0, 1.0).float(),
        pick(0.0, 0.0, 0.05, 0.0).float(),
        torch.arange(rows) // 3,
        torch.arange(rows) // 2,
    )
    found = []
    for count in (16, vocab):
        monkeypatch.setattr(reference_sample, "NUM_CANDIDATES", count)
        found.append(reference.sample(logits, *settings))
    assert torch.equal(*found)


def test_sampling_of_degenerate_rows():
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[nan, nan, nan], [-inf, -inf, -inf], [nan, 1.0, 1.0], [inf, 2.0, -1.0], [0.0, -inf, -inf]]
    )
    args = lambda heat: (  # noqa: E731
        torch.full((5,), heat),
        torch.zeros(5, dtype=torch.int32),
        torch.ones(5),
        torch.zeros(5),
        torch.arange(5),
        torch.arange(5),
    )
    assert reference.sample(logits, *args(0.0)).tolist() == [-1, -1, -1, 0, 0]
    assert reference.sample(logits, *args(1.0)).tolist() == [-1, -1, -1, 0, 0]


def test_noise_depends_on_seed_and_position_alone():
    logits = make(1, 3000).expand(6, -1)
    ones, zeros = torch.ones(6), torch.zeros(6)
    seeds, positions = torch.tensor([1, 1, 2, 1, 2, 1]), torch.tensor([4, 5, 4, 4, 4, 9])
    got = reference.sample(logits, ones, zeros.int(), ones, zeros, seeds, positions)
    assert got[0] == got[3] and got[2] == got[4]
    assert len({int(got[i]) for i in (0, 1, 2, 5)}) > 1
    alone = [
        int(reference.sample(logits[:1], ones[:1], zeros[:1].int(), ones[:1], zeros[:1], s[None], p[None]))
        for s, p in zip(seeds, positions, strict=True)
    ]
    assert got.tolist() == alone
