"""The logging of a process: one format, set once by the process entry, to stderr."""

import logging
import sys
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")


def setup_logging(process: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Sends the records of this process to `stream` (stderr), marked with process name, pid and level.

    Args:
        process: "server", "worker", ...
        level: one of LEVELS, for tokenspeed; other packages are heard from WARNING on, or all with "debug".
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname)s [{process.replace('%', '%%')} %(process)d] %(message)s",
            datefmt="%H:%M:%S",
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    logging.getLogger("tokenspeed").setLevel(level.upper())
