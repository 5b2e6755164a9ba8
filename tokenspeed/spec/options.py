"""What the spellings of speculation mean, and the trees that are used where none is given. No torch."""

import json
import os
from typing import Any

from tokenspeed.config import METHODS, Config, Shape
from tokenspeed.errors import ConfigError

MAX_STEPS, MAX_NODES, MAX_LANES = 16, 64, 64
# Trees of a GPU that was not calibrated, with the least and the most requests of a round that may use them: few
# requests leave room for many nodes beside the weights that are read anyway.
GPU_SHAPES = {
    Shape(8, 4, 16): (1, 32),
    Shape(5, 4, 16): (1, 8),
    Shape(4, 2, 8): (1, 16),
    Shape(5, 4, 8): (12, 96),
    Shape(3, 2, 4): (24, 256),
    Shape(2, 1, 3): (48, 256),
}
# A draft step costs more on a CPU, beside a target pass. To compare: benchmarks/cpu_transformers.py --shape S/K/N.
CPU_SHAPES = (Shape(6, 4, 16), Shape(3, 2, 6))
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA, AMD, WSL

# SGLang's names. Its others (NEXTN, NGRAM, STANDALONE, ...) are methods that this engine does not have.
_ALGORITHMS = {"EAGLE": "eagle", "EAGLE3": "eagle3", "EAGLE4": "eagle4"}
_CONFIG_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "disable_by_batch_size",
)
_EXACT = "what is accepted has the target's own distribution; nothing can be relaxed"
# vLLM's others -> (values that ask for nothing, why not).
_REFUSED_KEYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "acceptance_method": (("rejection_sampler",), _EXACT),
    "rejection_sample_method": (("strict",), _EXACT),
    "posterior_threshold": ((), _EXACT),
    "posterior_alpha": ((), _EXACT),
    "disable_logprobs": ((False,), "log-probabilities are those of plain decoding, with every tree"),
    "speculative_token_tree": ((), "trees follow the draft's scores; give --spec-shape S/K/N"),
    "parallel_drafting": ((False,), "drafts are made step by step"),
    "prompt_lookup_max": ((), "it belongs to the method ngram, which is not offered"),
    "prompt_lookup_min": ((), "it belongs to the method ngram, which is not offered"),
    "quantization": ((), "a draft is run as it is stored"),
    "max_model_len": ((), "a draft reaches as far as its target"),
    "revision": ((), "give the directory of that revision as model"),
    "code_revision": ((), "no code of a checkpoint is run"),
    "enforce_eager": ((False,), "draft and target are captured together; give --enforce-eager for both"),
    "disable_padded_drafter_batch": ((False,), "captured rounds are padded, draft and target alike"),
}


def default_shapes(device: str) -> tuple[Shape, ...]:
    """The trees for --device `device`, the one for a single request first; "auto" is a GPU if there is one."""
    on_cpu = device == "cpu" or (device == "auto" and not any(map(os.path.exists, GPU_DEVICES)))
    return CPU_SHAPES if on_cpu else tuple(GPU_SHAPES)


def trees_for(batch: int, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Those of `shapes` that rounds of `batch` requests may use."""
    everywhere = (1, batch)
    ranges = {shape: GPU_SHAPES.get(shape, everywhere) if len(shapes) > 1 else everywhere for shape in shapes}
    return tuple(shape for shape, (least, most) in ranges.items() if least <= batch <= most)


def parse_shape(text: str) -> Shape:
    """A shape from STEPS/TOPK/NODES, for example 8/4/16. Raises ConfigError."""
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--spec-shape must be STEPS/TOPK/NODES such as 8/4/16, not {text!r}")
    steps, topk, nodes = map(int, parts)
    return check_shape(Shape(steps, topk, nodes), "--spec-shape")


def check_shape(shape: Shape, source: str) -> Shape:
    """Returns `shape`. Raises ConfigError, naming `source` and the bound, for one that can't be built."""
    steps, topk, nodes = shape.steps, shape.topk, shape.nodes
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"{source}: steps must be from 1 to {MAX_STEPS}, not {steps}")
    if topk < 1:
        raise ConfigError(f"{source}: top-k must be at least 1, not {topk}")
    lanes = (steps - 1) * topk
    if lanes > MAX_LANES:
        raise ConfigError(f"{source}: (steps - 1) * top-k must be at most {MAX_LANES}, not {lanes}")
    if not 2 <= nodes <= MAX_NODES:
        raise ConfigError(f"{source}: nodes (with the root) must be from 2 to {MAX_NODES}, not {nodes}")
    if nodes > (most := _largest(steps, topk)):
        raise ConfigError(f"{source}: {steps} steps of top-k {topk} give at most {most} nodes, not {nodes}")
    return shape


def speculation(config: Config) -> tuple[str, str | None, tuple[Shape, ...]]:
    """What the options say together: ours, vLLM's JSON and SGLang's.

    Returns:
        method: one of METHODS.
        draft: the draft as the user named it, or None.
        shapes: the tree that was asked for, else `default_shapes`; empty for method "none".

    Raises:
        ConfigError: an option is wrong, or two contradict each other (both are named).
    """
    methods: list[tuple[str, Any]] = []  # (option, value) pairs that must agree
    drafts: list[tuple[str, Any]] = []
    shapes: list[tuple[str, Any]] = []
    if config.spec != "none":
        methods.append(("--spec", config.spec))
    if config.draft is not None:
        drafts.append(("--draft", config.draft))
    if config.spec_shape is not None:
        shapes.append(("--spec-shape", parse_shape(config.spec_shape)))
    if config.speculative_config is not None:
        _add_vllm(config.speculative_config, methods, drafts, shapes)
    if config.speculative_algorithm is not None:
        methods.append(("--speculative-algorithm", _algorithm(config.speculative_algorithm)))
    if (shape := _sglang_shape(config)) is not None:
        shapes.append(shape)
    method = _agreed(methods)
    if method is None:
        for name, value in drafts + shapes:
            raise ConfigError(f"{name} {value} needs a method; add --spec eagle4 (or eagle3, eagle)")
        return "none", None, ()
    pinned = _agreed(shapes)
    return method, _agreed(drafts), (pinned,) if pinned else default_shapes(config.device)


def plain_above(config: Config) -> int | None:
    """Requests in a round above which it does not speculate: our option or vLLM's key. Raises ConfigError."""
    claims: list[tuple[str, Any]] = []
    if config.speculative_disable_by_batch_size is not None:
        claims.append(("--speculative-disable-by-batch-size", config.speculative_disable_by_batch_size))
    if config.speculative_config is not None:
        limit = _vllm_object(config.speculative_config).get("disable_by_batch_size")
        name = "--speculative-config disable_by_batch_size"
        if limit is not None:
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, not {limit!r}")
            claims.append((name, limit))
    limit = _agreed(claims)
    if limit is not None and speculation(config)[0] == "none":
        raise ConfigError(f"{claims[0][0]} {limit} needs a method; add --spec eagle4 (or eagle3, eagle)")
    return limit


def _agreed(claims: list[tuple[str, Any]]) -> Any:
    """The one value that all claims give; None without claims."""
    if not claims:
        return None
    first, agreed = claims[0]
    for name, value in claims[1:]:
        if value != agreed:
            raise ConfigError(f"{first} says {agreed}, but {name} says {value}; give one of the two")
    return agreed


def _add_vllm(text: str | dict[str, Any], methods: list, drafts: list, shapes: list) -> None:
    """Adds what vLLM's speculative_config says. `LLM(...)` may hand over the dictionary itself."""
    name, given = "--speculative-config", _vllm_object(text)
    method, model = given.get("method"), given.get("model")
    if method is not None:
        if method not in METHODS[1:]:
            raise ConfigError(
                f"{name}: method {method!r} is not supported; methods: {', '.join(METHODS[1:])}"
            )
        methods.append((f"{name} method", method))
    if model is not None:
        if not isinstance(model, str) or not model:
            raise ConfigError(f"{name}: model must be a directory or a hub name, not {model!r}")
        drafts.append((f"{name} model", model))
    if (tokens := given.get("num_speculative_tokens")) is not None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 1 <= tokens <= MAX_STEPS:
            raise ConfigError(f"{name}: num_speculative_tokens must be from 1 to {MAX_STEPS}, not {tokens!r}")
        shapes.append((f"{name} num_speculative_tokens", Shape(tokens, 1, tokens + 1)))
    size = given.get("draft_tensor_parallel_size")
    if size is not None and (isinstance(size, bool) or size != 1):
        raise ConfigError(f"{name}: draft_tensor_parallel_size must be 1, not {size!r}")


def _vllm_object(text: str | dict[str, Any]) -> dict[str, Any]:
    name = "--speculative-config"
    try:
        given = json.loads(text) if isinstance(text, str) else text
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{name} must be a JSON object, not {text!r}")
    for key in given.keys() & _REFUSED_KEYS.keys():
        nothing, reason = _REFUSED_KEYS[key]
        if given[key] is not None and given[key] not in nothing:
            raise ConfigError(f"{name}: key {key!r} is not supported: {reason}")
    if unknown := [key for key in given if key not in _CONFIG_KEYS and key not in _REFUSED_KEYS]:
        raise ConfigError(f"{name}: key {unknown[0]!r} is not supported; keys: {', '.join(_CONFIG_KEYS)}")
    return given


def _algorithm(name: str) -> str:
    if name.upper() not in _ALGORITHMS:
        raise ConfigError(
            f"--speculative-algorithm {name} is not supported; supported: {', '.join(_ALGORITHMS)}"
        )
    return _ALGORITHMS[name.upper()]


def _sglang_shape(config: Config) -> tuple[str, Shape] | None:
    """From steps, top-k and nodes: top-k defaults to 1, nodes to steps * top-k + 1 (at most MAX_NODES)."""
    given = {
        "--speculative-num-steps": config.speculative_num_steps,
        "--speculative-eagle-topk": config.speculative_eagle_topk,
        "--speculative-num-draft-tokens": config.speculative_num_draft_tokens,
    }
    steps, topk, nodes = given.values()
    if steps is None and topk is None and nodes is None:
        return None
    topk = 1 if topk is None else topk
    if steps is None:
        if nodes is None or topk != 1:
            raise ConfigError("--speculative-num-steps is missing; it is the number of draft steps")
        steps = nodes - 1
    if nodes is None:
        nodes = min(steps * topk + 1, MAX_NODES)
    names = " ".join(f"{name} {value}" for name, value in given.items() if value is not None)
    if topk == 1 and nodes != steps + 1:
        raise ConfigError(
            f"{names}: with top-k 1 the draft is a chain, so --speculative-num-draft-tokens must be "
            f"{steps + 1} (steps plus the root); or give --speculative-eagle-topk more than 1"
        )
    return names, check_shape(Shape(steps, topk, nodes), names)


def _largest(steps: int, topk: int) -> int:
    """Nodes, root included, that S steps of top-k K can offer: K, then K of each of K lanes a step."""
    return 1 + topk + (steps - 1) * topk * topk
