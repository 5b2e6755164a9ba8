"""The cache directory: what is made once (a converted model) and shared by all starts after that."""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenspeed.errors import ConfigError

HINT = "set TOKENSPEED_CACHE to a directory with room"
BUILDING = ".building"  # suffix of a directory in the making; also of what a killed process left


def cache_root() -> Path:
    """$TOKENSPEED_CACHE, else ~/.cache/tokenspeed."""
    given = os.environ.get("TOKENSPEED_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "tokenspeed"


def build_once(name: str, build: Callable[[Path], None], needed: int, intact: Callable[[Path], bool]) -> Path:
    """The directory `name` of the cache; made by `build` if it is not there.

    Of several processes one builds while the others wait. `build` fills an empty directory beside the final
    one, which is then renamed, so a directory under its final name is whole; one that is not `intact` (a
    machine crashed) is built again. A build that fails leaves nothing; one that is killed leaves a directory
    that the next start removes.

    Args:
        build: called with the empty directory.
        needed: bytes that must be free.
        intact: whether the finished directory can be used.

    Raises:
        ConfigError: no room, or the cache directory can't be written. Also whatever `build` raises.
    """
    root = cache_root()
    final, temporary = root / name, root / (name + BUILDING)
    with _user_errors(root, needed):
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root, name):
            if final.is_dir():
                if intact(final):
                    return final
                shutil.rmtree(final)
            _sweep(root, name)
            free = shutil.disk_usage(root).free
            if free < needed:
                raise ConfigError(f"{root} needs {_size(needed)} but has {_size(free)} free; {HINT}")
            temporary.mkdir()
            try:
                build(temporary)
                os.rename(temporary, final)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    return final


def file_key(path: Path, version: int) -> str:
    """12 hex digits that change when the file (path, size, time) or the converter does. Reads no content."""
    stat = path.stat()
    text = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{version}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@contextlib.contextmanager
def _lock(root: Path, name: str) -> Iterator[None]:
    """Held by one process at a time, and free again when that process is gone, however it went."""
    with open(root / f".{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(root: Path, mine: str) -> None:
    """Removes what killed builds have left: mine (I hold the lock), and others whose lock is free."""
    for path in root.glob("*" + BUILDING):
        name = path.name.removesuffix(BUILDING)
        if name == mine:
            shutil.rmtree(path)
            continue
        with open(root / f".{name}.lock", "w") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _user_errors(root: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(f"the disk of {root} is full ({_size(needed)} needed); {HINT}") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise ConfigError(
                f"the cache directory {root} can't be written ({error.strerror}); {HINT}"
            ) from None
        raise


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
