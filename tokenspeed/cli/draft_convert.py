"""`tokenspeed draft convert`: safetensors from a draft of pickled .bin weights.

Here is what needs no torch, so that a mistake in the command line is told at once; the work itself is
spec/eagle4/convert.py.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenspeed.cli.args import Parser, require_torch
from tokenspeed.errors import ConfigError
from tokenspeed.hub.checkpoint import PICKLED
from tokenspeed.hub.resolve import HUB_NAME, conversion
from tokenspeed.progress import Bars

SUFFIX = "-safetensors"  # of the directory that is written by default
SINGLE, INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def run(argv: Sequence[str]) -> int:
    """Converts and says how to serve the result. Returns 0.

    Raises:
        ConfigError: `source_directory`, `pickled_files`, `output_directory` or `convert_draft` refuses.
    """
    parser = Parser(
        prog="tokenspeed draft convert",
        usage="%(prog)s SRC [--output DIR]",
        description="Writes the draft in SRC, whose weights are pickled (pytorch_model.bin, in one file or in "
        "shards), as safetensors, the one format that tokenspeed loads. Nothing in SRC is run or changed.",
    )
    parser.add_argument("source", metavar="SRC", help="directory of the draft: config.json and the weights")
    parser.add_argument("--output", metavar="DIR", help=f"directory to write (default: SRC{SUFFIX})")
    args = parser.parse(argv)
    source = source_directory(args.source)
    files = pickled_files(source)
    output = output_directory(source, args.output)
    require_torch()
    from tokenspeed.spec.eagle4.convert import convert_draft

    bars = Bars(sys.stderr)
    try:
        done = convert_draft(source, files, output.resolve(), bars.update)
    finally:
        bars.close()
    print(
        f"wrote {output}: {done.num_tensors} tensors, {done.num_bytes / 2**20:.1f} MiB; serve it: "
        f"tokenspeed serve MODEL --spec {done.method} --draft {shlex.quote(str(output))}"
    )
    return 0


def source_directory(name: str) -> Path:
    """The directory that `name` is. Raises ConfigError when it is none, with the way to fetch a hub name."""
    path = Path(name).expanduser()
    if path.is_file():
        raise ConfigError(f"{name} is a file; give the directory that holds it and its config.json")
    if not path.is_dir():
        hub = HUB_NAME.fullmatch(name) and "/" in name
        hint = f"if it is a hub name, fetch it first: {conversion(name)}" if hub else "give that of a draft"
        raise ConfigError(f"there is no directory {name}; {hint}")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{name} has no config.json; give the directory of a draft checkpoint")
    return path


def pickled_files(source: Path) -> dict[Path, list[str]]:
    """The files that hold the weights, each with the tensors that the index, if there is one, places in it.

    Raises:
        ConfigError: there are safetensors already, no weights, files whose meaning is unclear, or an index
            that is broken or names a file that is not there.
    """
    if any(source.glob("*.safetensors")):
        raise ConfigError(f"{source} has safetensors already, nothing is to be converted; serve it as it is")
    if (source / INDEX).is_file():
        return _indexed(source)
    if (source / SINGLE).is_file():
        return {source / SINGLE: []}
    found = sorted(path for pattern in PICKLED for path in source.glob(pattern))
    if len(found) == 1:
        return {found[0]: []}
    if not found:
        raise ConfigError(f"{source} holds no weights; it should have {SINGLE}, or shards and {INDEX}")
    raise ConfigError(
        f"{source} holds {found[0].name}, {found[1].name} and no {INDEX} to tell which of them are the weights; "
        f"fetch it, or name the one file {SINGLE}"
    )


def _indexed(source: Path) -> dict[Path, list[str]]:
    index = source / INDEX
    files: dict[Path, list[str]] = {}
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        for tensor, name in sorted(places.items(), key=lambda place: (place[1], place[0])):
            if Path(name).name != name:
                raise ValueError(name)  # a file elsewhere is none of this draft's
            files.setdefault(source / name, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index} is no index of weight files; fetch it again") from None
    if missing := [path.name for path in files if not path.is_file()]:
        raise ConfigError(f"{index} names {missing[0]}, which is not there; fetch the whole draft")
    if not files:
        raise ConfigError(f"{index} names no files; fetch it again")
    return files


def output_directory(source: Path, name: str | None) -> Path:
    """Where to write. Raises ConfigError when something is there, or no directory to make it in."""
    if name is not None:
        output = Path(name).expanduser()
    else:
        spelled = source if source.name not in ("", "..") else Path(os.path.abspath(source))
        output = spelled.with_name(spelled.name + SUFFIX)
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; name another directory with --output, or remove it")
    if (output.exists() or output.is_symlink()) and not output.is_dir():
        raise ConfigError(f"{output} exists and is no directory; name another with --output, or remove it")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory {output.parent} to write {output.name} in; make it first")
    return output
