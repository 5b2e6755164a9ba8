"""The command `tokenspeed`: a table of subcommands, each imported when it is called."""

import importlib
import sys
from collections.abc import Sequence

from tokenspeed.errors import ConfigError, EngineDead, RequestError

COMMANDS = {
    "serve": "serve a model through an OpenAI-compatible API",
    "bench": "measure a server or the offline engine with real prompts",
    "chat": "talk to a server in the terminal",
    "draft": "judge or convert a draft model",
    "calibrate": "time this machine, so that serve picks the best trees from the start",
    "version": "print the versions of tokenspeed and of what it runs on",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0 good, 1 the engine broke, 2 the user's mistake, 130 Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(argv)
    except ConfigError as error:
        return _fail(str(error), 2)
    except RequestError as error:
        return _fail(error.message, 2)
    except EngineDead as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone: `tokenspeed ... | head`
        sys.stderr.close()
        return 1
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        argv = ["version"]
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"commands: {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name!r}; {hint}")
    return importlib.import_module(f"tokenspeed.cli.{name}").run(rest)


def _usage() -> str:
    rows = "\n".join(f"  {name:<11}{about}" for name, about in COMMANDS.items())
    return (
        "usage: tokenspeed COMMAND [options]\n\n"
        f"commands:\n{rows}\n\n"
        "`tokenspeed COMMAND --help` lists a command's options."
    )


def _fail(message: str, code: int) -> int:
    print(f"tokenspeed: error: {' '.join(message.split())}", file=sys.stderr)
    return code
