"""A kernel that starts early touches nothing but weights until the kernels before it have ended."""

import os
import re

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton
from compile.kernel_signatures import BUILDS, Build, kernels
from compile.test_triton_compile import TARGETS
from triton.compiler import ASTSource

pytestmark = [
    pytest.mark.compile,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton's interpreter is on"),
]
EARLY = [(name, build) for name, builds in BUILDS.items() for build in builds if build.pdl]
# What a kernel reads before it waits, where that is anything: nobody writes it.
WEIGHTS = {
    "rms_norm_kernel": {"weight"},
    "add_partials_rms_norm_kernel": {"weight"},
    "norm_linear_kernel": {"weight", "norm_weight"},
    "linear_add_kernel": {"weight"},
    "linear_scan_kernel": {"weight"},
}
MEMORY = re.compile(r"\b(?:ld\.global|st\.global|cp\.async\.c[ag]|red\.|atom\.|cp\.async\.bulk\.tensor)")


def ptx(name: str, build: Build, **more) -> str:
    """PTX for sm_90. more: constants that differ."""
    constants = build.constants | more
    source = ASTSource(kernels()[name], build.signature(kernels()[name], "bf16"), constexprs=constants)
    options = {
        "num_warps": build.num_warps,
        "num_stages": build.num_stages,
        "launch_pdl": constants["PDL"],
    }
    return triton.compile(source, target=TARGETS["sm_90"][0], options=options).asm["ptx"]


@pytest.mark.parametrize(("name", "build"), EARLY, ids=[f"{name}{i}" for i, (name, _) in enumerate(EARLY)])
def test_every_program_waits_first(name: str, build: Build):
    code = ptx(name, build)
    before, wait, after = code.partition("griddepcontrol.wait")
    assert wait and MEMORY.search(after)
    if name == "few_rows_kernel":  # weights come into L2, into no register
        assert not MEMORY.search(before)
        assert ("cp.async.bulk.prefetch.L2" in before) == (build.constants["AHEAD"] > 0)
    elif name not in WEIGHTS:
        assert not MEMORY.search(before)
    else:
        bases = dict(re.findall(r"ld\.param\.b64\s+(%rd\d+), \[\w+_param_(\d+)\]", before))
        read = set(re.findall(r"(?:add|mad\.wide)\.s\d+\s+%rd\d+, (%rd\d+),", before))
        weights = {str(kernels()[name].arg_names.index(weight)) for weight in WEIGHTS[name]}
        assert {bases[base] for base in read & bases.keys()} == weights and "st.global" not in before
    assert "bra" not in before and "ret;" not in before.partition(".entry")[2]
    assert "griddepcontrol.launch_dependents" in after  # so that no more than two kernels overlap


def test_a_plain_kernel_has_no_trace_of_it():
    for name, build in EARLY[:1] + EARLY[-1:]:
        more = {"PDL": False} | ({"AHEAD": 0} if "AHEAD" in build.constants else {})
        assert not re.search("griddepcontrol|prefetch", ptx(name, build, **more))
