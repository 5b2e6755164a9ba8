"""The command line of `Config`: argparse options made from its fields, and spellings that are no field."""

import argparse
import difflib
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn, get_args, get_origin

from tokenspeed.config import Config
from tokenspeed.errors import ConfigError

_SUFFIXES = {"k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}  # vLLM's: small is decimal, large is binary

_SWITCHES = {  # spellings of other engines -> (field, value); None: already so
    "--disable-radix-cache": ("enable_prefix_caching", False),
    "--disable-cuda-graph": ("enforce_eager", True),
    "--enable-metrics": (None, None),
}
_REFUSED = {
    "--mem-fraction-static": "counts weights and KV only in SGLang; use --gpu-memory-utilization, the share "
    "of the GPU's memory that the whole engine may take",
    "--speculative-token-map": "is not offered: a draft brings its reduced vocabulary itself (d2t)",
    "--speculative-draft-model-revision": "is not offered: give the directory of that revision with --draft",
    "--speculative-draft-model-quantization": "is not offered: a draft is run as it is stored",
    "--speculative-attention-mode": "is not offered: draft and target use the engine's one attention",
    "--speculative-draft-attention-backend": "is not offered: draft and target use the engine's one attention",
    "--trust-remote-code": "is not offered: tokenspeed runs no code from a checkpoint",
}
_ONE_VALUE = {  # spellings of other engines that may say what is so anyway -> (that value, why no other)
    "--speculative-draft-tensor-parallel-size": (1.0, "the draft runs where the target does"),
    "--speculative-accept-threshold-single": (1.0, "acceptance is exact and can't be relaxed"),
    "--speculative-accept-threshold-acc": (1.0, "acceptance is exact and can't be relaxed"),
}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors of one line, with a guess at what an unknown option meant."""

    def __init__(self, **kwargs: Any):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parses `argv`; underscores in long options count as dashes. Raises ConfigError."""
        known, extra = self.parse_known_args([_dashed(word) for word in argv])
        if not extra:
            return known
        word = next((word for word in extra if word.startswith("-")), None)
        if word is None:
            raise ConfigError(f"unexpected argument {extra[0]!r}")
        name = word.split("=")[0]
        close = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]}?" if close else f"; see {self.prog} --help"
        raise ConfigError(f"unknown option {name}{hint}")


def parse_config(
    argv: Sequence[str], prog: str = "tokenspeed serve", description: str | None = None
) -> Config:
    """The Config that `argv` asks for. Raises ConfigError (one line); SystemExit(0) for --help."""
    parser = Parser(prog=prog, description=description, usage="%(prog)s [MODEL] [options]")
    add_config(parser)
    return make_config(parser.parse(argv))


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds the model as positional argument and every field of Config as an option, in groups."""
    parser.add_argument(
        "model_argument", nargs="?", metavar="MODEL", help=_fields()["model"].metadata["help"]
    )
    groups: dict[str, Any] = {}
    for f in fields(Config):
        name = f.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        _add_field(groups[name], f)
    for flag, (name, value) in _SWITCHES.items():
        parser.add_argument(
            flag, action=_Switch, dest=name or argparse.SUPPRESS, const=value, nargs=0, **_HIDDEN
        )
    for flag, reason in _REFUSED.items():
        parser.add_argument(flag, action=_Refuse, const=reason, nargs="?", **_HIDDEN)
    for flag, only in _ONE_VALUE.items():
        parser.add_argument(flag, action=_OneValue, const=only, type=float, **_HIDDEN)


def make_config(args: argparse.Namespace) -> Config:
    """A Config from what `add_config`'s options parsed; other attributes of `args` are left alone."""
    values = {f.name: getattr(args, f.name) for f in fields(Config) if f.name in args}
    if args.model_argument is not None:
        if values.get("model", args.model_argument) != args.model_argument:
            raise ConfigError(f"two models are given: {args.model_argument} and --model {values['model']}")
        values["model"] = args.model_argument
    if "api_key" not in values and os.environ.get("TOKENSPEED_API_KEY"):
        values["api_key"] = os.environ["TOKENSPEED_API_KEY"]
    return Config(**values)


def overrides(config: Config) -> dict[str, Any]:
    """The fields of `config` that differ from their defaults: what `LLM(...)` needs to be told."""
    return {f.name: value for f in fields(Config) if (value := getattr(config, f.name)) != f.default}


def public(config: Config) -> dict[str, Any]:
    """`overrides` for a file that others may read: without the API key."""
    return {name: value for name, value in overrides(config).items() if name != "api_key"}


def arguments(config: Config) -> list[str]:
    """The command line of `public(config)`, for a `tokenspeed serve` started by a program."""
    words = []
    for name, value in public(config).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag}={','.join(map(str, value)) if isinstance(value, tuple) else value}")
    return words


def parse_int(text: str) -> int:
    """An integer; a suffix k or m multiplies by 1000 or 1000^2, K or M by 1024 or 1024^2 (16k, 25.6k, 8K)."""
    factor = _SUFFIXES.get(text[-1:])
    if factor is None:
        return int(text)
    number = float(text[:-1]) * factor
    if number != int(number):
        raise ValueError(text)
    return int(number)


class _Switch(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self.dest != argparse.SUPPRESS:
            setattr(namespace, self.dest, self.const)


class _Refuse(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        raise ConfigError(f"{option_string} {self.const}")


class _OneValue(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        only, reason = self.const
        if values != only:
            raise ConfigError(f"{option_string} must be {only:g}, not {values:g}: {reason}")


class _Extend(argparse.Action):
    """Comma lists and repeats, in order."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *values))


_HIDDEN: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}


def _add_field(group: Any, f: Field) -> None:
    flags = [flag := "--" + f.name.replace("_", "-"), *f.metadata["names"]]
    meta = f.metadata
    about = meta["help"] + _default_text(f.default, meta["help"])
    common: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS, "help": about.replace("%", "%%")}
    kind = _kind(f)
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        return
    if meta["choices"]:
        common["metavar"] = "{" + ",".join(map(str, meta["choices"])) + "}"
    else:
        common["metavar"] = meta["metavar"] or flag[2:].rsplit("-", 1)[-1].upper()
    optional = isinstance(f.type, types.UnionType)
    if get_origin(kind) is tuple:
        group.add_argument(*flags, action=_Extend, type=_list_of(get_args(kind)[0]), **common)
    else:
        group.add_argument(*flags, type=_reader(kind, optional), **common)


def _kind(f: Field) -> Any:
    """The type of a field without its `| None`."""
    if isinstance(f.type, types.UnionType):
        return next(kind for kind in get_args(f.type) if kind is not type(None))
    return f.type


def _reader(kind: type, optional: bool) -> Callable[[str], Any]:
    """Turns an argument into `kind`; "auto" (and -1 for numbers) leaves an optional number to the engine."""
    if kind is str:
        return str
    read = parse_int if kind is int else float

    def reader(text: str) -> Any:
        if optional and text in ("auto", "-1"):
            return None
        try:
            return read(text)
        except (ValueError, OverflowError):
            wanted = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {text!r}") from None

    return reader


def _list_of(kind: type) -> Callable[[str], tuple]:
    read = _reader(kind, optional=False)
    return lambda text: tuple(read(part.strip()) for part in text.split(",") if part.strip())


def _default_text(default: Any, about: str) -> str:
    if default is MISSING or default is None or default == () or "default" in about:
        return ""
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f" (default: {default})"


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _fields() -> dict[str, Field]:
    return {f.name: f for f in fields(Config)}


def require_torch() -> None:
    """Raises ConfigError with the command that installs torch, where it is missing. Imports nothing."""
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ConfigError(
            f"torch is not installed for this Python ({python}); install it with: pip install torch"
        )


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1, with the suffixes of `parse_int`."""
    value = _reader(int, optional=False)(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def positives(text: str) -> tuple[int, ...]:
    """An argparse type: a comma list of `positive`."""
    return tuple(positive(part) for part in text.split(","))
