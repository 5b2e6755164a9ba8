"""The loss against float64 autograd, the kernel against plain torch, and the optimisers by their definition."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tokenspeed.train.loss import _row_loss, distil
from tokenspeed.train.muon import AdamW, Muon, clip, orthogonal


def reference(student: Tensor, teacher: Tensor, tau: Tensor, lk: float) -> Tensor:
    p = (teacher.double() / tau[..., None]).softmax(-1)
    q = student.softmax(-1)
    return -(p * q.log()).sum(-1) + lk * (1 - torch.minimum(p, q).sum(-1))


@pytest.mark.parametrize("lk", [0.0, 0.3, 1.0])
def test_loss_and_gradient(lk):
    g = torch.Generator().manual_seed(0)
    out, hidden = torch.randn(3, 10, 16, generator=g), torch.randn(3, 7, 16, generator=g)
    head = torch.randn(50, 16, generator=g)
    rows = torch.randint(0, 7, (3, 10), generator=g)
    weight = torch.rand(3, 10, generator=g) * (torch.rand(3, 10, generator=g) > 0.2)
    tau = torch.rand(3, 10, generator=g) * 1.5 + 0.5  # of each row its own
    ours = out.clone().requires_grad_()
    loss, hit = distil(ours, hidden, rows, weight, head, tau, lk)
    (3 * loss).backward()

    theirs = out.double().requires_grad_()
    student = theirs @ head.double().t()
    teacher = torch.stack([h[r] for h, r in zip(hidden, rows, strict=True)]).double() @ head.double().t()
    expected = (reference(student, teacher, tau, lk) * weight).sum()
    (3 * expected).backward()
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-6, rtol=1e-5)
    assert torch.equal(hit, (student.argmax(-1) == teacher.argmax(-1)) & (weight != 0))


def test_the_entropy_is_the_least_cross_entropy():
    g = torch.Generator().manual_seed(1)
    teacher = torch.randn(5, 30, generator=g) * 3
    found = _row_loss(teacher, teacher, torch.arange(5), torch.ones(5), torch.ones(5), 0.5, torch.float32)
    torch.testing.assert_close(found.loss, found.entropy)
    assert float(found.grad.abs().max()) < 1e-6 and bool(found.hit.all())


def test_the_kernel_equals_plain_torch():
    """In Triton's interpreter; a vocabulary that no block divides, unused rows, shared teacher rows."""
    pytest.importorskip("triton", reason="triton is not installed")
    code = """
import json, torch
from tokenspeed.train.loss import _row_loss
from tokenspeed.train.loss_kernel import row_loss_kernel
g = torch.Generator().manual_seed(0)
worst = []
tau = torch.tensor([1.0, 0.6, 2.0, 0.6, 1.0, 0.7])
for lk in (0.0, 1.0):
    s, t = torch.randn(6, 9001, generator=g) * 4, torch.randn(4, 9001, generator=g) * 4
    rows, weight = torch.tensor([3, 0, 0, 2, 1, 3]), torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.1])
    s[0] = t[3] * 0.9
    s[2] = torch.nan
    found = row_loss_kernel(s, t, rows, weight, tau, lk, torch.float32)
    expected = _row_loss(s.nan_to_num(), t, rows, weight, tau, lk, torch.float32)
    worst += [float(((a.float() - b.float()).abs() / (1 + b.float().abs())).max()) for a, b in zip(found, expected)]
    worst.append(float(not found[3][0]))
print(json.dumps(worst))
"""
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    assert max(json.loads(done.stdout)) < 5e-6, done.stdout


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_kernel_compiles_for_hopper(dtype):
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's interpreter is on")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tokenspeed.train.loss_kernel import row_loss_kernel_

    kinds = ["*fp32", "*fp32", "*i64", "*fp32", f"*{dtype}", "*fp32", "*fp32", "*i8", "*fp32", "fp32"]
    signature = dict(zip(row_loss_kernel_.arg_names, [*kinds, "constexpr", "constexpr"], strict=True))
    for size in (49152, 151936):
        source = ASTSource(row_loss_kernel_, signature, constexprs={"SIZE": size, "BLOCK": 4096})
        done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
        assert done.asm["cubin"] and done.metadata.shared < 16 * 1024
        assert ".local" not in done.asm["ptx"]  # no registers spilled into memory


def test_muon_moves_by_an_orthogonal_matrix():
    g = torch.Generator().manual_seed(2)
    for shape in ((24, 8), (8, 24)):
        p, grad = torch.zeros(shape), torch.randn(shape, generator=g)
        Muon([p], weight_decay=0.0).step([grad], torch.tensor(0.1))
        update = -p / (0.1 * 0.2 * 24**0.5)
        values = torch.linalg.svdvals(update)
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3
        u, _, v = torch.linalg.svd(grad, full_matrices=False)
        assert float((update * (u @ v)).sum()) / 8 > 0.8  # along the gradient
    x = torch.randn(6, 6, generator=g)
    torch.testing.assert_close(orthogonal(x), orthogonal(100 * x), atol=1e-4, rtol=1e-3)


def test_adamw_equals_torchs():
    g = torch.Generator().manual_seed(3)
    ours, theirs = torch.ones(5), torch.nn.Parameter(torch.ones(5))
    optimiser, other = (
        AdamW([ours], weight_decay=0.1),
        torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
    )
    for _ in range(7):
        grad = torch.randn(5, generator=g)
        optimiser.step([grad], torch.tensor(0.01))
        theirs.grad = grad
        other.step()
    torch.testing.assert_close(ours, theirs.detach(), atol=1e-6, rtol=1e-5)


def test_clip():
    grads = [torch.tensor([3.0]), torch.tensor([[4.0]])]
    assert clip(grads, 10.0)[0].tolist() == [3.0]
    torch.testing.assert_close(torch.cat([x.flatten() for x in clip(grads, 1.0)]), torch.tensor([0.6, 0.8]))
