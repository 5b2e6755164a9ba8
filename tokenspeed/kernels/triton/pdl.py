"""Programmatic dependent launch (PDL): a kernel that starts while the one before it in the stream still runs.

NVIDIA's sm_90 and later have it. The rule for a kernel that is launched so: until gdc_wait it touches nothing but
weights, since an earlier kernel may still write what it reads, or read what it writes; every program waits; and only
after that it lets the next kernel start (gdc_launch_dependents), so that no more than two neighbours overlap. With
three, L1 can give a kernel what an earlier one had read at an address written since, and Triton's products slow down
(docs/performance.md). A kernel that is launched plainly waits for all before it, whatever they were, and needs no care.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_early(PDL: tl.constexpr):
    """What a kernel that reads no weights ahead begins with."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def has_pdl() -> bool:
    """Whether this process's GPU has it."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def launch_options(pdl: bool) -> dict[str, bool]:
    """What a launch is given beside its constants; only NVIDIA's backend knows the option."""
    return {"launch_pdl": True} if pdl else {}


def early_options() -> dict[str, bool]:
    """What a launch of a kernel with PDL is given, where the GPU decides."""
    return {"PDL": has_pdl(), **launch_options(has_pdl())}
