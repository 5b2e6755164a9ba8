"""Builds one worker's engine: device, dtype, weights, memory plan, KV pool, drafter, graphs."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.attention.select import Backend
from tokenspeed.config import Config, Resolved
from tokenspeed.errors import ConfigError
from tokenspeed.hub.checkpoint import num_elements
from tokenspeed.kernels.build import missing
from tokenspeed.layers.rotary import rope_table
from tokenspeed.models.weights import load_model
from tokenspeed.sampling.edits import LogitEdits
from tokenspeed.spec.calibration import encode, load
from tokenspeed.spec.eagle4.config import check_draft
from tokenspeed.spec.eagle4.load import load_drafter
from tokenspeed.structured.matchers import Matchers
from tokenspeed.worker.calibrate import CPU_BATCHES, Ladder, calibrate, key_of, ladder_for
from tokenspeed.worker.engine import Engine
from tokenspeed.worker.graph import BUCKETS, GraphSet
from tokenspeed.worker.memory import CPU_KV_BYTES, CPU_KV_SHARE, GIB, MemoryPlan, available_cpu_memory
from tokenspeed.worker.prefill import SIZES
from tokenspeed.worker.runner import Runner
from tokenspeed.worker.state import MAX_OVERHANG, SamplingState, SlotState

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CPU_SEQS, GPU_SEQS = 8, 256
CPU_PREFILL, GPU_PREFILL = 512, 4096
GRAPH_BYTES = 1 * GIB  # set aside for captured graphs
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Built:
    runner: Runner
    info: dict[str, int | float | str]  # for the other processes


def build(resolved: Resolved, progress: Progress) -> Built:
    """Loads and plans everything.

    Raises:
        ConfigError: no such device, no memory, a checkpoint that doesn't fit the configuration.
    """
    config = resolved.config
    device = choose_device(config.device)
    on_cpu = device.type == "cpu"
    tell_missing_kernels(device)
    if on_cpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    dtype = choose_dtype(config.dtype, device, resolved)
    total = _usable_memory(device, config.gpu_memory_utilization)
    max_num_seqs = config.max_num_seqs or (CPU_SEQS if on_cpu else GPU_SEQS)
    max_tokens = config.max_num_batched_tokens or (CPU_PREFILL if on_cpu else GPU_PREFILL)
    plan = MemoryPlan(total=total, page_size=config.page_size, max_num_seqs=max_num_seqs)
    context = resolved.max_model_len + MAX_OVERHANG + 2
    target = resolved.model
    before = _free(device)
    plan.reserve_weights(num_elements(Path(resolved.model_dir)) * dtype.itemsize)
    model = load_model(
        resolved.model_dir,
        target,
        device,
        dtype,
        config.batch_invariant,
        progress=lambda done, size: progress("loading the model", done, size),
    )
    plan.parts["target"] = model.num_bytes
    backend = Backend(
        device,
        config.batch_invariant,
        rope_table(target.rope, target.head_dim, context, device),
        target.windows,
        target.head_dim**-0.5,
    )
    draft_config = drafter = None
    if resolved.method != "none":
        draft_config = check_draft(
            resolved.draft_dir,
            resolved.method,
            target,
            resolved.model_dir,
            max(shape.steps for shape in resolved.shapes),
        )
        drafter = load_drafter(
            resolved.draft_dir,
            draft_config,
            model,
            backend.draft,
            context,
            full_head=config.draft_head == "full",
        )
        plan.parts["draft"] = drafter.num_bytes
    aux_size = 0 if drafter is None else drafter.aux_size
    element = dtype.itemsize
    plan.page_bytes = KvPool.page_bytes(
        target.num_layers, config.page_size, target.num_kv_heads, target.head_dim, dtype
    )
    if drafter is not None:
        plan.draft_page_bytes = aux_size * element + KvPool.page_bytes(
            1, config.page_size, draft_config.num_kv_heads, draft_config.head_dim, dtype
        )
        plan.page_bytes += plan.draft_page_bytes
    captured = not on_cpu and not config.enforce_eager
    adaptive = len(resolved.shapes) > 1
    known = load(key_of(resolved, _name(device), dtype)) if adaptive else None
    ladder = ladder_for(batches_for(config, on_cpu, max_num_seqs), resolved.shapes, known)
    plan.parts["workspace"] = _workspace(resolved, max_tokens, ladder, element, on_cpu)
    if captured:
        plan.parts["graphs"] = GRAPH_BYTES
    if not on_cpu:  # what the runtime itself has taken
        plan.parts["other"] = max(
            before - _free(device) - plan.parts["target"] - plan.parts.get("draft", 0), 0
        )
    cap = min(CPU_KV_BYTES, int(CPU_KV_SHARE * total)) if on_cpu else None
    plan.fill(config.kv_cache_tokens, resolved.max_model_len, cap)

    pool = KvPool(
        target.num_layers,
        plan.num_pages,
        config.page_size,
        target.num_kv_heads,
        target.head_dim,
        dtype,
        device,
    )
    if drafter is not None:
        drafter.bind(
            KvPool(
                1,
                plan.num_pages,
                config.page_size,
                draft_config.num_kv_heads,
                draft_config.head_dim,
                dtype,
                device,
            )
        )
    state = SlotState(max_num_seqs, resolved.max_model_len, config.page_size, aux_size, dtype, device)
    engine = Engine(
        model,
        drafter,
        pool,
        backend,
        state,
        SamplingState(max_num_seqs, device),
        LogitEdits(resolved.model.vocab_size, resolved.eos_token_ids, device),
        Matchers(resolved.model.vocab_size, device, lambda params: None),
    )
    prefills = [size for size in SIZES if size <= max_tokens]
    graphs = GraphSet(engine, ladder, prefills) if captured else None
    captured_graphs = graphs.capture(progress) if graphs else {}
    for line in plan.lines(resolved.max_model_len):
        progress(line, 0, 0)
    progress(f"running on {_name(device)} in {str(dtype).removeprefix('torch.')}", 0, 0)
    info = {
        "device": _name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "num_pages": plan.num_pages,
        "page_size": config.page_size,
        "kv_tokens": plan.num_tokens,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_tokens,
        "rounds_in_flight": config.rounds_in_flight or (1 if on_cpu else 2),
        **{f"memory_{name}": size for name, size in plan.parts.items()},
        "memory_kv": plan.num_pages * plan.page_bytes,
        **captured_graphs,
    }
    if adaptive:
        known = known or calibrate(engine, graphs, ladder, progress, dict(draft_config.acceptance))
        info["calibration"] = encode(known)
    return Built(Runner(engine, graphs, config.page_size), info)


def batches_for(config: Config, on_cpu: bool, max_num_seqs: int) -> set[int]:
    """Numbers of requests that rounds are captured (or, on a CPU, timed) for."""
    batches = CPU_BATCHES if on_cpu else config.cudagraph_capture_sizes or BUCKETS
    return {*(b for b in batches if b < max_num_seqs), max_num_seqs}


def choose_device(name: str) -> torch.device:
    """Raises ConfigError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch sees no GPU; install a CUDA or ROCm build of torch, or use --device cpu"
        )
    return torch.device(name)


def tell_missing_kernels(device: torch.device) -> None:
    """Logs one line on an NVIDIA GPU that csrc has kernels for and this installation has not."""
    if device.type == "cuda" and torch.version.cuda is not None:
        line = missing(*torch.cuda.get_device_capability(device))
        if line is not None:
            log.info(line)


def choose_dtype(name: str, device: torch.device, resolved: Resolved) -> torch.dtype:
    """'auto' is the checkpoint's dtype on a GPU, and on a CPU the faster of float32 and bfloat16, measured."""
    if name != "auto":
        return DTYPES[name]
    if device.type != "cpu":
        return DTYPES.get(resolved.model.dtype, torch.bfloat16)
    times = {dtype: _time_linear(dtype, resolved) for dtype in (torch.float32, torch.bfloat16)}
    return min(times, key=times.get)


def _time_linear(dtype: torch.dtype, resolved: Resolved) -> float:
    """Seconds of a few matrix products of the model's shape, one row and sixteen."""
    model = resolved.model
    weight = torch.randn(model.intermediate_size, model.hidden_size).to(dtype)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for rows in (1, 16):
            F.linear(torch.ones(rows, model.hidden_size, dtype=dtype), weight)
        best = min(best, time.perf_counter() - started)
    return best


def _workspace(resolved: Resolved, prefill_tokens: int, ladder: Ladder, element: int, on_cpu: bool) -> int:
    """Bytes of the largest activations: MLP rows of a prefill chunk, float32 logits of every tree node twice."""
    model = resolved.model
    rows = max(batch * (shape.nodes if shape else 1) for batch, shapes in ladder.items() for shape in shapes)
    mlp = prefill_tokens * (3 * model.intermediate_size + 8 * model.hidden_size) * element
    logits = (1 if on_cpu else 2) * rows * model.vocab_size * 4
    return mlp + logits


def _usable_memory(device: torch.device, share: float) -> int:
    if device.type == "cpu":
        return int(available_cpu_memory() * 0.9)
    free, total = torch.cuda.mem_get_info(device)
    return min(int(total * share), free)


def _free(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU ({torch.get_num_threads()} threads)"
    return torch.cuda.get_device_name(device)
