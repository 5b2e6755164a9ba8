"""`tokenspeed serve MODEL`: an OpenAI-compatible server."""

from collections.abc import Sequence

from tokenspeed.cli.args import parse_config, require_torch


def run(argv: Sequence[str]) -> int:
    """Serves until told to stop. Returns the exit code."""
    config = parse_config(argv, "tokenspeed serve", "Serves MODEL through an OpenAI-compatible API.")
    require_torch()
    from tokenspeed.launch import serve

    return serve(config)
