"""Every option of the engine, once: name, default, bounds, help and aliases.

The CLI, `LLM(...)` and docs/options.md are made from `Config`; `resolve` in launch.py turns it into a
`Resolved` that no one changes afterwards.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from tokenspeed.errors import ConfigError
from tokenspeed.models.config import ModelConfig

METHODS = ("none", "eagle", "eagle3", "eagle4")


def option(
    default: Any,
    help: str,
    group: str,
    *names: str,
    choices: tuple = (),
    metavar: str | None = None,
    bounds: tuple[float | None, float | None] | None = None,
) -> Any:
    """A field of Config: `names` are further spellings of its flag (the first is always --field-name)."""
    data = dict(help=help, group=group, names=names, choices=choices, metavar=metavar, bounds=bounds)
    return field(default=default, metadata=data)


def check_option(
    name: str, value: Any, choices: tuple, bounds: tuple[float | None, float | None] | None
) -> None:
    """Raises ConfigError for a value outside `choices` or `bounds` (inclusive; of a tuple, each element)."""
    flag = "--" + name.replace("_", "-")
    if choices and value not in choices:
        raise ConfigError(f"{flag} must be one of {', '.join(map(str, choices))}, not {value}")
    if bounds is None or value is None:
        return
    low, high = bounds
    for number in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ConfigError(f"{flag} must be a number, not {number!r}")
        if not (low is None or number >= low) or not (high is None or number <= high):
            wanted = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ConfigError(f"{flag} must be {wanted}, not {number}")


@dataclass(frozen=True)
class Config:
    """What the user asked for. None means: chosen at start, and logged."""

    model: str = option("demo", "directory, GGUF file, hub name, or 'demo'", "model", "--model-path")
    served_model_name: tuple[str, ...] = option(
        (), "name(s) in the API (default: the model as given)", "model"
    )
    revision: str | None = option(None, "hub revision", "model")
    dtype: str = option(
        "auto", "weights and activations", "model", choices=("auto", "float32", "bfloat16", "float16")
    )
    max_model_len: int | None = option(
        None, "context limit in tokens (default: the model's)", "model", "--context-length", bounds=(1, None)
    )
    device: str = option("auto", "where the model runs", "model", choices=("auto", "cpu", "cuda"))
    seed: int | None = option(
        None,
        "seeds the requests that name no seed, in their order of arrival (default: random)",
        "model",
        "--random-seed",
        bounds=(-(2**63), 2**63 - 1),
    )

    spec: str = option("none", "speculative decoding", "speculation", choices=METHODS)
    draft: str | None = option(
        None,
        "draft directory or hub name (default: a known pair, then MODEL/draft)",
        "speculation",
        "--speculative-draft-model-path",
        "--spec-model",
    )
    spec_shape: str | None = option(
        None, "tree as STEPS/TOPK/NODES, e.g. 8/4/16; nodes count the root", "speculation", metavar="S/K/N"
    )
    speculative_config: str | None = option(
        None,
        "vLLM's JSON: method, model, num_speculative_tokens, draft_tensor_parallel_size, disable_by_batch_size",
        "speculation",
        "-sc",
        metavar="JSON",
    )
    speculative_algorithm: str | None = option(
        None, "SGLang's name of --spec: EAGLE, EAGLE3, EAGLE4", "speculation", metavar="NAME"
    )
    speculative_num_steps: int | None = option(None, "S of --spec-shape", "speculation")
    speculative_eagle_topk: int | None = option(None, "K of --spec-shape", "speculation")
    speculative_num_draft_tokens: int | None = option(
        None, "N of --spec-shape (counts the root)", "speculation"
    )
    speculative_disable_by_batch_size: int | None = option(
        None, "requests in a round above which it does not speculate", "speculation", bounds=(1, None)
    )
    draft_head: str = option(
        "candidate",
        "the draft's output head: its low-rank candidate head where it has one, or exact scores of every token",
        "speculation",
        choices=("candidate", "full"),
    )
    batch_invariant: bool = option(
        False, "same bits for a request whatever shares its batch (slower)", "speculation"
    )

    page_size: int = option(16, "tokens a KV page", "memory", choices=(16, 32, 64))
    kv_cache_tokens: int | None = option(
        None, "size of the KV pool in tokens", "memory", "--max-total-tokens", bounds=(1, None)
    )
    gpu_memory_utilization: float = option(
        0.9, "share of the GPU's memory the engine may take", "memory", bounds=(0.05, 1.0)
    )
    enable_prefix_caching: bool = option(True, "share KV of equal prefixes", "memory")
    max_num_seqs: int | None = option(
        None, "requests decoded at once", "memory", "--max-running-requests", bounds=(1, None)
    )
    max_num_batched_tokens: int | None = option(
        None, "prefill tokens a step", "memory", "--chunked-prefill-size", bounds=(1, None)
    )
    max_queued_requests: int = option(
        2048, "waiting requests before 503", "memory", "--max-num-queued-reqs", bounds=(0, None)
    )

    enforce_eager: bool = option(False, "no CUDA graphs", "execution")
    cudagraph_capture_sizes: tuple[int, ...] = option(
        (), "batch sizes to capture", "execution", bounds=(1, None)
    )
    rounds_in_flight: int | None = option(
        None, "steps sent before the first has answered (CPU 1, GPU 2)", "execution", bounds=(1, None)
    )
    watchdog_timeout: float = option(
        300.0, "seconds without an answer from a worker before giving up", "execution", bounds=(1.0, 86400.0)
    )
    tensor_parallel_size: int = option(
        1, "GPUs a layer is split over (1 for now)", "execution", "-tp", "--tp", "--tp-size", bounds=(1, None)
    )
    pipeline_parallel_size: int = option(
        1, "GPUs the layers are spread over (1 for now)", "execution", "-pp", "--pp-size", bounds=(1, None)
    )
    data_parallel_size: int = option(
        1, "copies of the model (1 for now)", "execution", "-dp", "--dp-size", bounds=(1, None)
    )

    host: str = option("127.0.0.1", "address to listen on", "server")
    port: int = option(8000, "port to listen on", "server", bounds=(0, 65535))
    api_key: str | None = option(None, "key that /v1 requires (or TOKENSPEED_API_KEY)", "server")
    shutdown_timeout: float = option(
        30.0, "seconds that open requests get after Ctrl-C or SIGTERM", "server", bounds=(0.0, 86400.0)
    )
    max_body_mib: int = option(32, "largest request body", "server", bounds=(1, None))
    log_level: str = option(
        "info", "how much to log", "server", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for a choice or a number that an option does not allow."""
        for f in fields(self):
            check_option(f.name, getattr(self, f.name), f.metadata["choices"], f.metadata["bounds"])

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "Config":
        """For LLM(...). Raises TypeError for an unknown name."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(kwargs) - known):
            raise TypeError(f"unknown option {unknown[0]!r}")
        return cls(**kwargs)


@dataclass(frozen=True)
class Shape:
    """A draft tree: S steps, K lanes a step, N nodes with the root. A chain of k tokens is (k, 1, k + 1)."""

    steps: int
    topk: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.steps}/{self.topk}/{self.nodes}"


@dataclass(frozen=True)
class Resolved:
    """What every process of the ring is started with. Paths exist, each 'auto' that needs no torch is filled.

    `dtype`, `device` and the KV pool's size are settled by the worker, which reports them in its Ready.
    """

    config: Config
    model_dir: str  # a HF checkpoint directory: config.json, *.safetensors, tokenizer.json
    model: ModelConfig
    names: tuple[str, ...]  # names the API answers to
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    method: str = "none"
    draft_dir: str | None = None
    shapes: tuple[Shape, ...] = ()  # tree shapes in use; the first is the default
    plain_above: int | None = None  # requests in a round above which it is a plain one
    run_dir: str = ""  # private 0700 directory of the sockets
