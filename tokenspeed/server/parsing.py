"""A request's body, from bytes to a model of protocol.py. Every fault is a RequestError that names the field.

An unknown field is a fault, and so is a field of OpenAI's that this server does not serve, unless it holds
what amounts to its default.
"""

import re
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from tokenspeed.errors import RequestError
from tokenspeed.server.errors import shorten
from tokenspeed.server.protocol import Body, ChatMessage, Sampling, StreamOptions, TextPart

REFUSED: dict[str, tuple[Any, ...]] = {  # field of OpenAI's -> values that ask for nothing
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # without tools there are none
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "store": (False,),
    "metadata": ({},),
    "moderation": (),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
}
REFUSED_IN_MESSAGE = ("tool_calls", "function_call", "audio", "refusal", "reasoning_content")
MAX_FAULTS = 1000  # beyond so many nobody reads which
_ALTERNATIVE = re.compile(r"str|list\[.*|constrained-.*")  # so pydantic calls the branches of a union

AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], data: bytes) -> AnyBody:
    """The body `data` (JSON) as a `kind`. Raises RequestError that names the field at fault."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is no valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    if issubclass(kind, Sampling):
        _refuse_unserved(body)
    _check_keys(kind, body)
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _as_request_error(error) from None


def _check_keys(kind: type[Body], body: dict[str, Any]) -> None:
    """Raises for an unknown field, before pydantic makes a fault of each of a million."""

    def check(owner: type[Body], value: Any, path: str) -> None:
        if isinstance(value, dict) and (unknown := value.keys() - owner.model_fields.keys()):
            name = shorten(path + min(unknown), 100)
            raise RequestError(f"unknown field {name!r}", name, code="unknown_parameter")

    check(kind, body, "")
    check(StreamOptions, body.get("stream_options"), "stream_options.")
    for i, message in enumerate(_list(body.get("messages"))):
        check(ChatMessage, message, f"messages[{i}].")
        for j, part in enumerate(_list(message.get("content")) if isinstance(message, dict) else ()):
            if isinstance(part, dict) and part.get("type") == "text":
                check(TextPart, part, f"messages[{i}].content[{j}].")
            else:
                name = f"messages[{i}].content[{j}]"
                raise RequestError(f"{name} is no text; only parts of type 'text' are supported", name)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _refuse_unserved(body: dict[str, Any]) -> None:
    """Takes out of `body` what amounts to a default; raises for what does not."""
    for name in REFUSED.keys() & body.keys():
        value = body.pop(name)
        if value is not None and value not in REFUSED[name]:
            raise RequestError(f"{name} is not supported", name, code="unsupported_parameter")
    for i, message in enumerate(_list(body.get("messages"))):
        for name in REFUSED_IN_MESSAGE:
            if isinstance(message, dict) and name in message and message.pop(name) not in (None, []):
                path = f"messages[{i}].{name}"
                raise RequestError(f"{path} is not supported", path, code="unsupported_parameter")


def _as_request_error(error: ValidationError) -> RequestError:
    """The fault that lies deepest: in a union, it belongs to the alternative that fits best."""
    if error.error_count() > MAX_FAULTS:
        return RequestError(f"the body has {error.error_count()} faults")
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    fault = max(faults, key=lambda f: len(f["loc"]))
    path = ""
    for part in fault["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _ALTERNATIVE.fullmatch(part):
            path += f".{part}" if path else part
    if fault["type"] == "missing":
        return RequestError(f"field {path!r} is missing", path, code="missing_required_parameter")
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return RequestError(f"{path}: {message}", path)
