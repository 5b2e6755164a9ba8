"""csrc's kernels on a GPU: built here, against the references, and beside Triton's."""

from functools import partial

import pytest
import torch
from kernels.few_rows_cases import close
from kernels.kernel_cases import CASES, Maker
from kernels.test_gpu_kernels import check_early_starts

from tokenspeed.errors import ConfigError
from tokenspeed.kernels import build, cuda, cuda_few_rows
from tokenspeed.kernels.registry import OPS
from tokenspeed.kernels.triton.pdl import has_pdl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
PRODUCTS = ("linear_rows", "linear_sums", "gate_up_silu")
FEW_ROWS = (*PRODUCTS, "add_partials_rms_norm")


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(build.LIBRARY_ENV, str(tmp_path_factory.mktemp("csrc") / "lib.so"))
        major, minor = torch.cuda.get_device_capability()
        if torch.version.cuda is None or f"{major}{minor}a" not in build.ARCHITECTURES:
            pytest.skip("csrc has no code for this GPU")
        try:
            build.build(build.library_path(), (f"{major}{minor}a",))
        except ConfigError as error:
            pytest.skip(f"csrc can't be built here: {error}")
        caches = (cuda.library, cuda.ready, cuda_few_rows.ready)
        for cached in caches:
            cached.cache_clear()
        yield
        for cached in caches:
            cached.cache_clear()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_add_rms_norm(dtype: torch.dtype):
    assert cuda.ready()
    CASES["add_rms_norm"](cuda.add_rms_norm, Maker("cuda", dtype))
    with pytest.raises(ValueError, match="16 bytes"):
        x = torch.zeros(2, 65, dtype=dtype, device="cuda")[:, 1:]
        cuda.add_rms_norm(x, x.contiguous(), torch.ones(64, dtype=dtype, device="cuda"), 1e-5)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("op", FEW_ROWS)
def test_products_of_any_shape(op: str, dtype: torch.dtype):
    CASES[op](getattr(cuda_few_rows, op), Maker("cuda", dtype))


@pytest.mark.parametrize("rows", (1, 3, 8, 13, 16))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("op", "outputs", "size"),
    [
        ("linear_rows", 6144, 4096),
        ("linear_rows", 4128, 1024),  # one tile beside 128
        ("linear_rows", 16384, 256),  # one step
        ("linear_sums", 4096, 4096),
        ("linear_sums", 2112, 14336),
        ("linear_sums", 2048, 2176),  # a last span that is shorter
        ("gate_up_silu", 14336, 4096),
        ("gate_up_silu", 2112, 1088),
    ],
)
def test_products(op: str, outputs: int, size: int, dtype: torch.dtype, rows: int, monkeypatch):
    """Right, by CUDA, and a row's bits are its own."""
    assert cuda_few_rows.ready()
    launches = []
    monkeypatch.setattr(
        cuda_few_rows,
        "_launch",
        lambda *args, launch=cuda_few_rows._launch: launches.append(1) or launch(*args),
    )
    m, fn = Maker("cuda", dtype), getattr(cuda_few_rows, op)
    x = m.normal(rows, size + 8)[:, :size]  # rows of something wider
    weight = m.normal(outputs * (2 if op == "gate_up_silu" else 1), size) / size**0.5
    got, want = fn(x, weight), x.double() @ weight.double().T
    if op == "gate_up_silu":
        gate, up = want.chunk(2, -1)
        want = gate / (1 + (-gate).exp()) * up
    if op == "linear_sums":
        assert got.shape == OPS[op]["triton"].load()(x, weight).shape
        torch.testing.assert_close(got.double().sum(0), want, atol=1e-3, rtol=1e-3)
    else:
        close(got, want)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(fn(x[row : row + 1], weight)[..., 0, :], got[..., row, :])
    assert len(launches) == 1 + len({0, rows // 2, rows - 1})


@pytest.mark.parametrize("rows", (1, 5, 16))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize(("splits", "size"), [(4, 4096), (1, 2048), (3, 2080), (2, 14336)])
def test_norm_of_sums(dtype: torch.dtype, rows: int, splits: int, size: int, monkeypatch):
    """Right, by CUDA, and the same bits time and again: blocks of a cluster wait for each other."""
    monkeypatch.setattr(cuda_few_rows.norm, "add_partials_rms_norm", None)
    m = Maker("cuda", torch.float32)
    partials, start, gain = (
        m.normal(splits, rows, size),
        m.normal(rows, size + 4)[:, :size],
        m.normal(size).to(dtype),
    )
    total = partials.double().sum(0) + start.double()
    want = total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt() * gain.double()
    results = []
    for _ in range(20):
        residual = start.clone(memory_format=torch.preserve_format)
        results.append(cuda_few_rows.add_partials_rms_norm(partials, residual, gain, 1e-5))
        torch.testing.assert_close(residual.double(), total, atol=1e-5, rtol=1e-5)
    close(results[0], want)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.skipif(not has_pdl(), reason="this GPU has no programmatic dependent launch")
@pytest.mark.parametrize("rows", (1, 8, 16, 17))
def test_early_starts_change_no_bits(rows: int):
    """Layers in one graph, their buffers used again and again, as in test_gpu_kernels.py: three kernels may overlap."""
    m = Maker("cuda", torch.bfloat16)
    weights = [
        [m.normal(n, k) / k**0.5 for n, k in ((4096, 2048), (2048, 4096), (16384, 2048), (2048, 8192))]
        for _ in range(3)
    ]
    gain, start, stream = m.normal(2048), m.normal(rows, 2048).float(), m.normal(rows, 2048).float()

    def layers(pdl: bool) -> torch.Tensor:
        fn = {op: partial(getattr(cuda_few_rows, op), pdl=pdl) for op in PRODUCTS}
        norm = partial(cuda_few_rows.add_partials_rms_norm, pdl=pdl)
        stream.copy_(start)
        x = gain.expand(rows, -1).contiguous()
        for wide, narrow, gate_up, down in weights * 4:
            x = norm(fn["linear_sums"](fn["linear_rows"](x, wide), narrow), stream, gain, 1e-5)
            x = norm(fn["linear_sums"](fn["gate_up_silu"](x, gate_up), down), stream, gain, 1e-5)
        return x

    check_early_starts(layers)
