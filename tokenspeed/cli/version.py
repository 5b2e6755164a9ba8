"""`tokenspeed version`: what is installed, without importing any of it."""

from collections.abc import Sequence

from tokenspeed.errors import ConfigError
from tokenspeed.versions import gpu_names, versions


def run(argv: Sequence[str]) -> int:
    """Prints the versions. Returns 0."""
    if argv:
        raise ConfigError(f"tokenspeed version takes no arguments, not {argv[0]!r}")
    for name, version in versions().items():
        print(f"{name:<13}{version}")
    for name in gpu_names() or ["none"]:
        print(f"{'gpu':<13}{name}")
    return 0
