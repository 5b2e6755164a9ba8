"""Which implementation of an op runs on which kind of device: decided on the op's first call."""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.errors import ConfigError

ENV = "TOKENSPEED_KERNELS"


@dataclass(frozen=True)
class Impl:
    """One way to run an op.

    Args:
        target: "module:function"; imported when first needed, so that a CPU process never loads Triton.
        device: torch device type it runs on, or "any".
        ready: "module:function" that says whether it can run here (a library that is built); None: always.
    """

    target: str
    device: str
    ready: str | None = None

    def fits(self, device: str) -> bool:
        return self.device in ("any", device)

    def load(self) -> Callable:
        return _import(self.target)

    def can_run(self) -> bool:
        return self.ready is None or bool(_import(self.ready)())


def _torch(op: str, module: str = "reference") -> Impl:
    return Impl(f"tokenspeed.kernels.{module}:{op}", "any")


def _triton(module: str, op: str) -> Impl:
    return Impl(f"tokenspeed.kernels.triton.{module}:{op}", "cuda")


# Implementations of each op by name, the preferred one first. ROCm's device type is "cuda" too.
OPS: dict[str, dict[str, Impl]] = {
    op: {"triton": _triton(module, op), "torch": _torch(op)}
    for op, module in (
        ("rms_norm", "norm"),
        ("add_rms_norm", "norm"),
        ("embed_rms_norm", "norm"),
        ("silu_and_mul", "activation"),
        ("rope_store_kv", "rope"),
        ("prefill_attention", "prefill_attention"),
        ("tree_attention", "tree_attention"),
        ("rope_tree_attention", "tree_attention"),
        ("tree_attention_invariant", "invariant_attention"),
        ("sample", "sample"),
        ("move_kv", "move_kv"),
        ("linear_invariant", "linear"),
    )
}
OPS |= {
    op: {"triton": _triton(module, op), "torch": _torch(op, "reference_draft")}
    for op, module in (
        ("draft_rows", "draft_rows"),
        ("draft_input", "draft_rows"),
        ("top_candidates", "candidates"),
        ("linear_candidates", "linear_candidates"),
        ("row_dots", "candidates"),
        ("grow_tree", "draft_tree"),
        ("build_tree", "draft_tree"),
    )
}
# `layers.few_rows` says where these are used.
OPS |= {
    op: {"triton": _triton(module, op), "torch": _torch(op, "reference_few_rows")}
    for op, module in (
        ("linear_rows", "few_rows"),
        ("linear_sums", "few_rows"),
        ("gate_up_silu", "few_rows"),
        ("add_partials_rms_norm", "norm"),
        ("norm_linear", "small_layer"),
        ("norm_gate_up_silu", "small_layer"),
        ("linear_add", "small_layer"),
    )
}
OPS |= {
    op: {"triton": _triton("round", op), "torch": _torch(op, "reference_round")}
    for op in ("read_slots", "place_nodes", "accept", "commit", "keep_aux")
}
# The same by the two ops that it joins, each as the registry has it: TOKENSPEED_KERNELS=rope_tree_attention=parts.
OPS["rope_tree_attention"]["parts"] = Impl("tokenspeed.kernels.parts:rope_tree_attention", "any")
# CUDA C++ kernels come before Triton where they were measured to be faster; otherwise TOKENSPEED_KERNELS asks for them.
for _op in ("linear_rows", "linear_sums", "gate_up_silu", "add_partials_rms_norm"):
    _impl = Impl(f"tokenspeed.kernels.cuda_few_rows:{_op}", "cuda", "tokenspeed.kernels.cuda_few_rows:ready")
    OPS[_op] = {"cuda": _impl, **OPS[_op]}
OPS["add_rms_norm"]["cuda"] = Impl(
    "tokenspeed.kernels.cuda:add_rms_norm", "cuda", "tokenspeed.kernels.cuda:ready"
)


def forced_names() -> dict[str, str]:
    """The choices of TOKENSPEED_KERNELS ("op=name,op=name"); "all=name" speaks for every op that has it.

    Raises:
        ConfigError: the variable does not parse, or names an op or an implementation that does not exist.
    """
    forced: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in os.environ.get(ENV, "").split(","))):
        op, _, name = item.partition("=")
        if op == "all" and any(name in impls for impls in OPS.values()):
            forced.update({known: name for known, impls in OPS.items() if name in impls})
        elif name in OPS.get(op, {}):
            forced[op] = name
        else:
            known = f"{op} has {', '.join(OPS[op])}" if op in OPS else f"ops are {', '.join(OPS)}"
            raise ConfigError(f"{ENV}: no kernel {item!r}; {known}")
    return forced


def choose(op: str, device: str) -> str:
    """Name of the implementation of `op` for a device type ("cpu", "cuda", ...).

    Raises:
        ConfigError: TOKENSPEED_KERNELS asks for one that cannot run there.
    """
    name = forced_names().get(op)
    if name is not None:
        impl = OPS[op][name]
        if not impl.fits(device) or not impl.can_run():
            raise ConfigError(f"{ENV}: {op}={name} can't run on {device}; leave it out or build it first")
        return name
    return next(name for name, impl in OPS[op].items() if impl.fits(device) and impl.can_run())


class Op(dict):
    """Device type -> function of one op, filled on first use: `op[x.device.type](x, ...)`."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def __missing__(self, device: str) -> Callable:
        fn = OPS[self.name][choose(self.name, device)].load()
        self[device] = fn
        return fn


def _import(target: str) -> Callable:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
