"""Cases of the products of few rows; see kernel_cases.py."""

from collections.abc import Callable

import torch

from tokenspeed.kernels import reference_few_rows as reference

# T, N, K: rows beyond a tile, outputs and inputs beyond the last full tile, K split and not.
SHAPES = [(1, 24, 64), (3, 70, 200), (9, 16, 1024), (17, 48, 1100), (70, 20, 520)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def case_linear_rows(fn: Callable, m) -> None:
    for rows, num_out, size in SHAPES:
        x = m.normal(rows, size + 8)[:, :size]  # rows of something wider
        weight = m.normal(num_out, size) / size**0.5
        got = fn(x, weight)
        assert got.dtype == m.dtype and got.is_contiguous()
        close(got, x.double() @ weight.double().T)
    assert fn(m.normal(0, 32), m.normal(16, 32)).shape == (0, 16)


def case_linear_sums(fn: Callable, m) -> None:
    for rows, num_out, size in SHAPES:
        x, weight = m.normal(rows, size), m.normal(num_out, size) / size**0.5
        got = fn(x, weight)
        assert got.dtype == torch.float32 and got.shape[1:] == (rows, num_out) and got.is_contiguous()
        tolerance = 2e-5 if m.dtype == torch.float32 else 1e-3  # tensor cores cut off what they add
        torch.testing.assert_close(
            got.double().sum(0), x.double() @ weight.double().T, atol=tolerance, rtol=tolerance
        )
        alone = fn(x[:1], weight)
        assert len(alone) == len(got)
        assert torch.equal(fn(x, weight), got)  # no order of addition that changes
    assert fn(m.normal(0, 32), m.normal(16, 32)).shape[1:] == (0, 16)


def case_gate_up_silu(fn: Callable, m) -> None:
    for rows, num_out, size in SHAPES:
        x, weight = m.normal(rows, size), m.normal(2 * num_out, size) * (2 / size**0.5)
        got = fn(x, weight)
        assert got.dtype == m.dtype and got.shape == (rows, num_out)
        gate, up = (x.double() @ weight.double().T).chunk(2, -1)
        close(got, gate / (1 + (-gate).exp()) * up)
    assert fn(m.normal(0, 32), m.normal(16, 32)).shape == (0, 8)


def case_add_partials_rms_norm(fn: Callable, m) -> None:
    for splits, rows, size in ((1, 1, 576), (4, 3, 100), (3, 2, 16), (2, 0, 32)):
        for dtype in (torch.float32, m.dtype):
            partials, weight = m.normal(splits, rows, size, dtype=torch.float32), m.normal(size)
            residual = m.normal(rows, size, dtype=dtype)
            other, wide = residual.clone(), residual.double() + partials.double().sum(0)
            got = fn(partials, residual, weight, 1e-5)
            reference.add_partials_rms_norm(partials, other, weight, 1e-5)
            assert got.dtype == m.dtype and torch.equal(residual, other)
            close(got, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())


# T, N, K: one row and rows beyond a tile, outputs beyond the last full tile, K of no, one and many parts.
SMALL_SHAPES = [(1, 24, 64), (1, 70, 576), (3, 17, 200), (9, 40, 1100), (17, 16, 1536), (8, 33, 2048)]


def normed(residual: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = residual.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()


def check_norm_product(fn: Callable, m, factor: int, finish: Callable) -> None:
    """fn's product with `factor` N weight rows, a row's bits its own; `finish`: float64 result, what errors go with."""
    for rows, num_out, size in SMALL_SHAPES:
        weight, gain = m.normal(factor * num_out, size) * (factor / size**0.5), m.normal(size)
        for dtype in {torch.float32, m.dtype}:
            # Rows of something wider, each aligned to 16 bytes, as the whole is: what is not is read by other threads.
            residual = m.normal(rows, size // 16 * 16 + 32, dtype=dtype).mul_(3)[:, :size]
            before = residual.clone()
            got = fn(residual, gain, 1e-5, weight)
            assert got.dtype == m.dtype and got.shape == (rows, num_out) and got.is_contiguous()
            want, most = finish(normed(residual, gain) @ weight.double().T)
            # The rounded norm's error goes with the product's two factors, not with the product.
            bound = TOLERANCE[m.dtype] * (1 + most)
            assert ((got.double() - want).abs() <= bound).all()
            assert torch.equal(residual, before)
            for row in {0, rows // 2, rows - 1}:
                assert torch.equal(fn(residual[row : row + 1], gain, 1e-5, weight)[0], got[row])
    assert fn(m.normal(0, 32), m.normal(32), 1e-5, m.normal(16, 32)).shape == (0, 16 // factor)


def case_norm_linear(fn: Callable, m) -> None:
    check_norm_product(fn, m, 1, lambda y: (y, y.abs()))


def case_norm_gate_up_silu(fn: Callable, m) -> None:
    def silu_and_mul(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = y.chunk(2, -1)
        silu = gate / (1 + (-gate).exp())
        return silu * up, silu.abs() + up.abs()

    check_norm_product(fn, m, 2, silu_and_mul)


def case_linear_add(fn: Callable, m) -> None:
    for rows, num_out, size in SMALL_SHAPES:
        x, weight = m.normal(rows, size + 8)[:, :size], m.normal(num_out, size) / size**0.5
        for dtype in {torch.float32, m.dtype}:
            before = m.normal(rows, num_out + 3, dtype=dtype)  # its last columns are nobody's
            got = before.clone()
            fn(x, weight, got[:, :num_out])
            want = before[:, :num_out].double() + x.double() @ weight.double().T
            tolerance = TOLERANCE[dtype] if dtype != torch.float32 or m.dtype == dtype else 1e-3
            torch.testing.assert_close(got[:, :num_out].double(), want, atol=tolerance, rtol=tolerance)
            assert torch.equal(got[:, num_out:], before[:, num_out:])
            for row in {0, rows // 2, rows - 1}:
                alone = before[row : row + 1].clone()
                fn(x[row : row + 1], weight, alone[:, :num_out])
                assert torch.equal(alone[0], got[row])
    fn(m.normal(0, 32), m.normal(16, 32), m.normal(0, 16))
