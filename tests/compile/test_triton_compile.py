"""Every Triton kernel compiles for every GPU we name and fits its shared memory; no GPU is needed.

What has compiled is remembered under .cache/compile (or $TOKENSPEED_CACHE/compile) by sources, signature and
versions.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton
from compile.kernel_signatures import BUILDS, Build, kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenspeed.kernels import triton as package

pytestmark = [
    pytest.mark.compile,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton's interpreter is on"),
]

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("TOKENSPEED_CACHE") or ROOT / ".cache") / "compile"
TARGETS = {
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "sm_103": (GPUTarget("cuda", 103, 32), 227 * 1024),
    "gfx950": (GPUTarget("hip", "gfx950", 64), 160 * 1024),
}


def fingerprint() -> str:
    """Of everything that a compiled kernel depends on beside its own signature."""
    digest = hashlib.sha256(triton.__version__.encode())
    digest.update(os.environ.get("TRITON_DEFAULT_FP_FUSION", "").encode())
    for path in sorted(Path(package.__path__[0]).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def shared_bytes(kernel: triton.JITFunction, build: Build, dtype: str, target: str) -> int:
    """Compiles, or looks up, one build: bytes of shared memory that a program takes."""
    signature = build.signature(kernel, dtype)
    about = [
        fingerprint(),
        kernel.__name__,
        target,
        signature,
        build.constants,
        build.num_warps,
        build.num_stages,
    ]
    entry = CACHE / (hashlib.sha256(json.dumps(about).encode()).hexdigest() + ".json")
    if entry.exists():
        return json.loads(entry.read_text())["shared"]
    source = ASTSource(kernel, signature, constexprs=build.constants)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    if build.pdl:
        options["launch_pdl"] = True
    compiled = triton.compile(source, target=TARGETS[target][0], options=options)
    assert compiled.asm["hsaco" if target.startswith("gfx") else "cubin"]
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = entry.with_suffix(f".{os.getpid()}")
    scratch.write_text(
        json.dumps({"kernel": kernel.__name__, "target": target, "shared": compiled.metadata.shared})
    )
    scratch.replace(entry)
    return compiled.metadata.shared


def test_every_kernel_has_an_entry():
    assert set(kernels()) == set(BUILDS)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BUILDS)
def test_kernel_compiles(name: str, target: str):
    for build in BUILDS[name]:
        if build.pdl and target.startswith("gfx"):
            continue
        for dtype in build.dtypes:
            shared = shared_bytes(kernels()[name], build, dtype, target)
            assert shared <= TARGETS[target][1], f"{name} {dtype} {build}: {shared} bytes of shared memory"
