"""From a model's name to a checkpoint directory: 'demo', a directory, a GGUF file, a hub name."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from tokenspeed.errors import ConfigError
from tokenspeed.hub.checkpoint import check_checkpoint

DEMO = "demo"
DEMO_DRAFT = Path(__file__).parent.parent / "drafts" / "smollm2-135m-eagle4"
# (method, model) -> draft, both as hub names
KNOWN_DRAFTS = {
    ("eagle3", "meta-llama/Llama-3.1-8B-Instruct"): "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    ("eagle3", "meta-llama/Llama-3.3-70B-Instruct"): "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
    ("eagle", "meta-llama/Llama-3.1-8B-Instruct"): "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
MODEL_HINT = "tokenspeed loads safetensors only; save the model as safetensors (save_pretrained does)"


def resolve_model(name: str, revision: str | None, progress: Callable[[str, int, int], None]) -> Path:
    """The checkpoint directory (config.json, *.safetensors, tokenizer.json) of a model.

    Args:
        name: 'demo', a directory, a GGUF file, or a hub name.
        revision: of a hub name.
        progress: told what takes long: text, done, total (0, 0: unknown).

    Raises:
        ConfigError: there is no such model, it can't be fetched, is damaged or unknown, or the disk is full.
    """
    if name == DEMO:
        from tokenspeed.hub.demo import demo_model  # the GGUF reader takes a while to import

        return demo_model(progress)
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(
                f"{name} is a file but no .gguf; give a directory, a GGUF file, a hub name or 'demo'"
            )
        from tokenspeed.hub.gguf import cached_conversion

        return cached_conversion(path, progress)
    return _directory(name, revision, progress, MODEL_HINT)


def resolve_draft(
    name: str | None,
    model_name: str,
    model_dir: Path,
    method: str,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> Path:
    """The draft's directory: the one named, else a known pair's, else MODEL/draft.

    Raises:
        ConfigError: none is known, or it can't be used.
    """
    if name is not None:
        return _draft(name, progress)
    if model_name == DEMO and method == "eagle4":
        return _draft(str(DEMO_DRAFT), progress)
    if (known := KNOWN_DRAFTS.get((method, model_name))) is not None:
        return _draft(known, progress)
    if (own := Path(model_dir) / "draft").is_dir():
        return _draft(str(own), progress)
    raise ConfigError(
        f"no {method} draft is known for {model_name}; name one with --draft, or make one: "
        f"tokenspeed draft data {model_name}, then tokenspeed draft train"
    )


def conversion(name: str) -> str:
    """The commands that make safetensors of a draft that has none, given its directory or its hub name."""
    if Path(name).expanduser().is_dir():
        return f"tokenspeed draft convert {shlex.quote(name)}"
    local = name.rsplit("/", 1)[-1]
    return f"hf download {name} --local-dir {local} && tokenspeed draft convert {local}"


def _draft(name: str, progress: Callable[[str, int, int], None]) -> Path:
    return _directory(name, None, progress, f"convert it first: {conversion(name)}")


def _directory(name: str, revision: str | None, progress: Callable[[str, int, int], None], hint: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_dir():
        if path.exists() or not HUB_NAME.fullmatch(name) or path.suffix.lower() == ".gguf":
            raise ConfigError(
                f"there is no directory {name}; give a directory, a GGUF file, a hub name or 'demo'"
            )
        from tokenspeed.hub.snapshot import fetch_snapshot

        path = fetch_snapshot(name, revision, progress, hint)
    check_checkpoint(path, hint)
    return path
