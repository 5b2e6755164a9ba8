"""Chat templates: a model's Jinja template, rendered in a sandbox to the text its authors trained with."""

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenspeed.errors import ConfigError, RequestError

MAX_RENDERED_CHARS = 64 * 2**20  # twice the largest body a server takes by default
MAX_RENDER_SECONDS = 10.0
# What an expression over a client's values can raise; a number where a string belongs is the client's fault
TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled template. Rendering depends on the messages alone (and the date, if the template asks)."""

    def __init__(self, source: str, special_tokens: dict[str, str]):
        """Raises jinja2.TemplateSyntaxError."""
        self._template = _environment().from_string(source)
        self._special_tokens = special_tokens

    def render(self, messages: bytes) -> str:
        """The prompt of a JSON list of messages, ready for the assistant's answer.

        Raises:
            RequestError: the messages are no list of objects with a role, the template refuses them or fails
                on them, or the text grows past the limits.
        """
        chat = _parse_messages(messages)
        pieces: list[str] = []
        size, deadline = 0, time.monotonic() + MAX_RENDER_SECONDS
        try:
            for piece in self._template.generate(
                messages=chat, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                    raise RequestError("the chat template's output is too long or takes too long", "messages")
        except TEMPLATE_FAULTS as error:
            raise RequestError(
                f"the model's chat template can't render these messages: {error}", "messages"
            ) from None
        return "".join(pieces)


def load_chat_template(
    model_dir: Path, tokenizer_config: dict[str, Any], special_tokens: dict[str, str]
) -> ChatTemplate | None:
    """chat_template.jinja, else `chat_template` of tokenizer_config.json: a string, or a list of named ones.

    Raises:
        ConfigError: the template does not compile.
    """
    path = model_dir / "chat_template.jinja"
    source: Any = tokenizer_config.get("chat_template")
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template of {model_dir} does not compile: {error}") from None


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training; for serving its body is all there is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """As templates on the hub expect it (transformers' conventions)."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], autoescape=False
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _parse_messages(data: bytes) -> list[dict[str, Any]]:
    try:
        chat = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"messages is not valid JSON: {error}", "messages") from None
    if not isinstance(chat, list) or not chat:
        raise RequestError("messages must be a list with at least one message", "messages")
    for message in chat:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError("each message must be an object with a role", "messages")
    return [{**message, "content": _content(message.get("content"))} for message in chat]


def _content(content: Any) -> Any:
    """Text parts joined by newlines, as templates know only strings; no content becomes an empty one."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise RequestError("only text parts are supported in a message's content", "messages")
    return "\n".join(texts)
