"""What a training run is asked to do, and the draft that it makes for a target. No torch: mistakes are told at
once."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from tokenspeed.config import check_option
from tokenspeed.errors import ConfigError
from tokenspeed.models.config import ModelConfig
from tokenspeed.train.packing import PAGE

_BOUNDS: dict[str, tuple[float | None, float | None]] = {
    "minutes": (0.01, None),
    "steps": (1, None),
    "unroll": (1, 16),
    "aux_layers": (0, None),
    "ffn": (1, None),
    "window": (1, None),
    "lr": (1e-6, 1.0),
    "tau": (0.05, 5.0),
    "lk": (0.0, 100.0),
    "decay": (0.01, 1.0),
    "rank": (1, None),
    "num_candidates": (1, None),
    "head_seconds": (0.0, None),
    "head_steps": (0, None),
    "max_length": (32, None),
    "tokens_per_step": (32, None),
    "seed": (0, 2**31 - 1),
}


@dataclass(frozen=True)
class TrainOptions:
    """Everything that decides what is learned. Two runs with equal options and steps give the same draft."""

    model: str
    data: str
    minutes: float | None = None  # of stage 1; one of minutes and steps is set
    steps: int | None = None
    unroll: int = 7
    aux_layers: tuple[int, ...] = ()
    ffn: int = 2048
    window: int = 512
    lr: float = 8e-3
    tau: float = (
        0.6  # of the target's distribution; an answer sampled at more is learned at its own temperature
    )
    lk: float = 1.0
    decay: float = 0.8  # of the weight of each further step of the unroll
    rank: int = 96
    num_candidates: int = 64
    head_seconds: float | None = None  # of stage 2; 0 leaves the candidate head out
    head_steps: int | None = None
    max_length: int = 1024
    tokens_per_step: int = 24576
    seed: int = 0
    start_from: str | None = None  # directory of a draft whose weights the run begins with

    def check(self) -> None:
        """Raises ConfigError for a value out of range, or a budget that is missing or given twice."""
        for name, bounds in _BOUNDS.items():
            check_option(name, getattr(self, name), (), bounds)
        if (self.minutes is None) == (self.steps is None):
            raise ConfigError("give one of --minutes and --steps: how long to train")
        if (self.head_seconds is None) == (self.head_steps is None):
            raise ConfigError("give one of --head-seconds and --head-steps: how long to train the head")
        if self.max_length % PAGE:
            raise ConfigError(f"--max-length must be a multiple of {PAGE}, not {self.max_length}")
        if self.tokens_per_step < self.max_length:
            raise ConfigError(
                f"--tokens-per-step {self.tokens_per_step} holds no text of --max-length {self.max_length}"
            )

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Names of the options whose values differ from those in `other`, as JSON has them."""
        ours = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        return [name for name in ours if other.get(name) != ours[name]]

    @property
    def num_rows(self) -> int:
        """Rows of a batch, `max_length` tokens each."""
        return self.tokens_per_step // self.max_length


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """An early, a middle and a late layer: outputs 4, 18 and 28 of 30. Fewer where layers are few."""
    wanted = (round(0.13 * num_layers), round(0.6 * num_layers), num_layers - 2)
    return tuple(sorted({min(max(layer, 0), num_layers - 1) for layer in wanted}))


def draft_config(target: ModelConfig, options: TrainOptions) -> dict[str, Any]:
    """The config.json of the draft that the options ask for.

    RoPE is the plain one with the target's theta: a windowed layer sees no distance beyond its window, so the
    target's scaling for long contexts has nothing to do here.

    Raises:
        ConfigError: an aux layer, the rank or the number of candidates does not fit the target.
    """
    aux = options.aux_layers or default_aux_layers(target.num_layers)
    if bad := [layer for layer in aux if layer > target.num_layers]:
        raise ConfigError(f"--aux-layers names {bad[0]}; {options.model} has layers 0 to {target.num_layers}")
    if options.rank > target.hidden_size:
        raise ConfigError(f"--rank {options.rank} is more than the hidden size {target.hidden_size}")
    if options.num_candidates > target.vocab_size:
        raise ConfigError(
            f"--num-candidates {options.num_candidates} is more than the vocabulary {target.vocab_size}"
        )
    return {
        "architectures": ["LlamaForCausalLMEagle4"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": options.ffn,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        "max_position_embeddings": target.max_position_embeddings,
        "attention_bias": False,
        "sliding_window": options.window,
        "eagle_aux_hidden_state_layer_ids": list(aux),
        "num_aux_hidden_states": len(aux),
        "fc_norm": True,
        "norm_output": True,
        "tie_embed_to_target": True,
        "tie_lm_head_to_target": True,
    }
