"""A model of the Hugging Face hub, by name. An unreachable hub is told within seconds, not minutes."""

import errno
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenspeed.errors import ConfigError

TIMEOUT = 4.0  # seconds for the hub to answer one question
DEADLINE = 8.0  # seconds for the first answer, name resolution and all
PATTERNS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "*.jinja", "*.safetensors", "*.safetensors.index.json",
)  # fmt: skip
NOT_THOSE = ("*/*", "consolidated*")  # other copies of the same weights


def fetch_snapshot(
    name: str, revision: str | None, progress: Callable[[str, int, int], None], hint: str
) -> Path:
    """The local directory of a hub model; fetched, or as an earlier start left it if the hub is unreachable.

    Raises:
        ConfigError: no such model or revision, no right to it, no safetensors in it, or neither hub nor copy.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision {revision}" if revision else ""
    try:
        info = _within(DEADLINE, lambda: HfApi().model_info(name, revision=revision, timeout=TIMEOUT))
        files = [sibling.rfilename for sibling in info.siblings or []]
        if not any(file.endswith(".safetensors") for file in files):
            raise ConfigError(f"{name} on the hub holds no *.safetensors; {hint}")
        progress(f"fetching {name}", 0, 0)
        return Path(
            snapshot_download(
                name, revision=info.sha, allow_patterns=list(PATTERNS), ignore_patterns=list(NOT_THOSE),
                etag_timeout=TIMEOUT,
            )
        )  # fmt: skip
    except GatedRepoError:
        raise ConfigError(f"{name} asks for consent on the hub; give it there and set HF_TOKEN") from None
    except RevisionNotFoundError:
        raise ConfigError(f"{name} has no revision {revision} on the hub") from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"there is no directory {name}, and no model of that name on the hub (or HF_TOKEN has no right)"
        ) from None
    except (HTTPError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ConfigError(
                f"the disk is full while fetching {name}; set HF_HOME to a directory with room"
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    try:
        return Path(
            snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=list(PATTERNS))
        )
    except (OSError, ValueError):
        raise ConfigError(
            f"there is no directory {name}, and the hub can't be asked for {name}{at} ({reason[:120]}); "
            "check the name and the network, or give a directory"
        ) from None


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What `call` returns or raises; TimeoutError if it takes longer (name resolution has no limit)."""
    results: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

    def work() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:  # handed to the caller, which raises it
            results.put((None, error))

    threading.Thread(target=work, daemon=True, name="hub").start()
    try:
        value, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer in {seconds:.0f} s") from None
    if error is not None:
        raise error
    return value
