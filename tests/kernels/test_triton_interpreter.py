"""The logic of every Triton kernel against the torch reference, in Triton's interpreter on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.kernel_cases import CASES

from tokenspeed.kernels.registry import OPS

HERE = Path(__file__).parent
pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    """Error text of each op's cases, None where they pass."""
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join((str(HERE.parent.parent), str(HERE.parent))),
        "CUDA_VISIBLE_DEVICES": "",
    }
    run = subprocess.run(
        [sys.executable, str(HERE / "kernel_cases.py")], capture_output=True, text=True, env=env, timeout=240
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    return {line["op"]: line["error"] for line in lines}


def test_every_triton_kernel_has_a_case():
    assert {op for op, impls in OPS.items() if "triton" in impls} == set(CASES)


@pytest.mark.parametrize("op", CASES)
def test_kernel_equals_reference(op, results):
    assert results[op] is None, results[op]
