"""Start-up checks of a draft against its target. No torch and well under a second: the launcher runs them."""

import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tokenspeed.config import Shape
from tokenspeed.errors import ConfigError
from tokenspeed.models.config import ModelConfig
from tokenspeed.spec.eagle4.checkpoint import check_d2t, check_tensors, read_headers
from tokenspeed.spec.eagle4.formats import DraftConfig, method_of, parse_draft

log = logging.getLogger(__name__)

__all__ = [
    "DraftConfig",
    "check_draft",
    "check_keeps",
    "detect_method",
    "fitting_shapes",
    "keep_acceptance",
    "load_draft_config",
]


def detect_method(draft_dir: str | Path) -> str:
    """The method a draft was made for: eagle, eagle3 or eagle4. Raises ConfigError when it is none."""
    path = Path(draft_dir)
    raw = _read_config(path)
    return method_of(raw, frozenset(read_headers(path)), path)


def load_draft_config(draft_dir: str | Path, target: ModelConfig) -> DraftConfig:
    """The config of a draft with the target's aux layers filled in; no check against the target's sizes.

    The aux layers default to outputs 1, n // 2 - 1 and n - 4 of n layers (EAGLE-3), to the final norm's
    (EAGLE-1/2).
    """
    path = Path(draft_dir)
    raw = _read_config(path)
    config = parse_draft(raw, method_of(raw, frozenset(read_headers(path)), path), path)
    if config.aux_layers:
        return config
    n = target.num_layers
    layers = (n,) if config.method == "eagle" else (1, n // 2 - 1, n - 4)
    if config.num_aux != len(layers):
        raise ConfigError(f"{path}/config.json wants {config.num_aux} aux layers and does not name them")
    return replace(config, aux_layers=layers)


def check_draft(
    draft_dir: str | Path, method: str, target: ModelConfig, target_dir: str | Path, steps: int = 1
) -> DraftConfig:
    """Checks that a draft fits its target and returns its config.

    Args:
        method: what the user asked for with --spec.
        steps: depth of the deepest tree in use; a window shorter than that works, and is worth a warning.

    Raises:
        ConfigError: the method is another, a size differs, a tensor is missing, wrong or unreachable, the
            vocabularies differ, or the checkpoint is one that can't be loaded. The message names both values.
    """
    path = Path(draft_dir)
    found = detect_method(path)
    if found != method:
        raise ConfigError(
            f"--spec {method} was asked for, but {path} is an {found} draft; use --spec {found}"
        )
    config = load_draft_config(path, target)
    _check_sizes(config, target, path, steps)
    tensors = read_headers(path)
    check_tensors(config, tensors, path)
    check_d2t(tensors, config, path)
    _check_tokenizer(path, Path(target_dir))
    return config


def fitting_shapes(config: DraftConfig, shapes: tuple[Shape, ...], full_head: bool) -> tuple[Shape, ...]:
    """Those of `shapes` whose top-k the draft's head can give.

    Args:
        full_head: every token is scored, though the draft may have a candidate head.

    Raises:
        ConfigError: there is none.
    """
    candidates = None if full_head else config.num_candidates
    most = candidates or config.draft_vocab_size
    fitting = tuple(shape for shape in shapes if shape.topk <= most)
    if not fitting:
        narrowest = min(shapes, key=lambda shape: shape.topk)
        what = "tokens in its vocabulary" if candidates is None else "candidates (candidate_head)"
        raise ConfigError(
            f"tree {narrowest} asks for {narrowest.topk} tokens a step, the draft has {most} {what}"
        )
    return fitting


def check_keeps(draft_dir: str | Path) -> None:
    """Raises ConfigError where `keep_acceptance` could write nothing: before the minutes that measuring takes."""
    path = Path(draft_dir)
    if (method := detect_method(path)) != "eagle4":
        raise ConfigError(f"{path} is an {method} draft; only an eagle4 draft's config.json has acceptance")
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _unwritable(path, error) from None


def keep_acceptance(draft_dir: str | Path, priors: Mapping[Shape, Sequence[float]]) -> Path:
    """Writes acceptance by depth of trees into a draft's config.json, in place of what it states.

    The file is written whole or not at all.

    Raises:
        ConfigError: it can't be written.
    """
    path = Path(draft_dir)
    file = path / "config.json"
    raw = _read_config(path) | {"acceptance": {str(shape): list(prior) for shape, prior in priors.items()}}
    parse_draft(raw, "eagle4", path)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(file, error) from None
    return file


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} can't be written: {error.strerror}; copy the draft to where it can and give --draft"
    )


def _check_sizes(config: DraftConfig, target: ModelConfig, path: Path, steps: int) -> None:
    def same(what: str, draft: int, ours: int) -> None:
        if draft != ours:
            raise ConfigError(f"draft expects {what} {draft}, target gives {ours} ({path})")

    same("hidden size", config.target_hidden_size, target.hidden_size)
    same("vocabulary", config.vocab_size, target.vocab_size)
    if config.method == "eagle":
        same("hidden size", config.hidden_size, target.hidden_size)
    for layer in config.aux_layers:
        if type(layer) is not int or not 0 <= layer <= target.num_layers:
            raise ConfigError(
                f"draft expects aux layer {layer}, target has layers 0 to {target.num_layers} ({path})"
            )
    if config.hidden_size != target.hidden_size and (config.tie_embed or config.tie_lm_head):
        raise ConfigError(
            f"draft hidden size {config.hidden_size} can't share the target's {target.hidden_size} wide rows"
        )
    if config.tie_lm_head and config.draft_vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft_vocab_size {config.draft_vocab_size} can't use the target's lm_head, {target.vocab_size}"
        )
    if config.head_dim % 2 or not 16 <= config.head_dim <= 256:
        raise ConfigError(f"draft head_dim {config.head_dim} is not supported (even, 16 to 256) ({path})")
    if config.window is not None and config.window < steps:
        log.warning("sliding_window %d of %s is smaller than the tree's %d steps", config.window, path, steps)


def _check_tokenizer(draft_dir: Path, target_dir: Path) -> None:
    """A draft that ships a tokenizer must ship the target's: token ids are all that passes between them."""
    ours, theirs = target_dir / "tokenizer.json", draft_dir / "tokenizer.json"
    if not theirs.exists() or not ours.exists() or theirs.read_bytes() == ours.read_bytes():
        return
    target, draft = _tokens(ours), _tokens(theirs)
    differing = [i for i in target.keys() | draft.keys() if target.get(i) != draft.get(i)]
    if differing:
        i = min(differing)
        raise ConfigError(
            f"draft and target use different tokenizers: token {i} is {draft.get(i)!r} in {draft_dir} and "
            f"{target.get(i)!r} in {target_dir}"
        )


def _tokens(path: Path) -> dict[int, str]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        vocab = raw["model"]["vocab"]
        pairs = vocab.items() if isinstance(vocab, dict) else ((t[0], i) for i, t in enumerate(vocab))
        return {i: t for t, i in pairs} | {t["id"]: t["content"] for t in raw.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} can't be read as a tokenizer: {error!r}") from None


def _read_config(path: Path) -> dict:
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} has no config.json; give the directory of a draft checkpoint") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} is not a JSON object")
    if "auto_map" in raw and "speculators_config" not in raw:
        raise ConfigError(f"{file} names code to run (auto_map); tokenspeed runs no code from a checkpoint")
    return raw
