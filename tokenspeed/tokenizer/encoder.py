"""Text to token ids and back: tokenizer.json, the special tokens, and the exact bytes of single tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenspeed.errors import ConfigError, RequestError
from tokenspeed.tokenizer.chat import ChatTemplate, load_chat_template

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
METASPACE = "\u2581"  # how SentencePiece writes a space


class Encoder:
    """A model's tokenizer. Holds no state of any request.

    Special tokens are added in one place only: `encode(..., add_special_tokens=True)` adds what the
    post-processor of tokenizer.json adds (a plain prompt); a rendered chat has them: encoded with False.

    Attributes:
        chat: the model's chat template, or None.
        byte_level: the decoder joins the tokens' bytes and does nothing else, so `token_bytes` says all.
        special_ids: ids that `skip_special_tokens` leaves out.
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate | None = None):
        tokenizer.no_truncation()  # a saved tokenizer may carry either; both would change prompts
        tokenizer.no_padding()
        self.tokenizer, self.chat = tokenizer, chat
        self.special_ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        kinds = _decoder_kinds(tokenizer)
        self.byte_level = kinds == {"ByteLevel"}
        self._byte_fallback = "ByteFallback" in kinds
        self._bytes: dict[int, bytes] = {}
        self._max_chars_per_token = _max_chars_per_token(tokenizer)

    @classmethod
    def load(cls, model_dir: str | Path) -> "Encoder":
        """Reads tokenizer.json, tokenizer_config.json and the chat template of a checkpoint directory.

        Raises:
            ConfigError: tokenizer.json is missing or can't be read, or the chat template does not compile.
        """
        model_dir = Path(model_dir)
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{model_dir} has no tokenizer.json; save the model's fast tokenizer there (save_pretrained)"
            )
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the tokenizers library raises no narrower class
            raise ConfigError(f"{path} can't be read: {str(error).splitlines()[0]}") from None
        config = _read_config(model_dir / "tokenizer_config.json")
        special = special_tokens({**_read_config(model_dir / "special_tokens_map.json"), **config})
        return cls(tokenizer, load_chat_template(model_dir, config, special))

    def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. The texts must be valid Unicode (`check_text`)."""
        if len(texts) == 1:
            return [self.tokenizer.encode(texts[0], add_special_tokens=add_special_tokens).ids]
        batch = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in batch]

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """The token ids of a word at the start of a text and after a space: one or two sequences, or none."""
        both = (word, " " + word.lstrip())
        return sorted({tuple(ids) for ids in self.encode(both, add_special_tokens=False) if ids})

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`, without encoding it."""
        return len(text) // self._max_chars_per_token if self._max_chars_per_token else 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id without a token (a padding row)."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._token_bytes(token_id)
        return data

    def token_text(self, token_id: int) -> str:
        """A token alone, as text: a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _token_bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            try:
                return bytes(map(BYTE_OF_CHAR.__getitem__, token))
            except KeyError:  # an added token with characters outside the alphabet stands for itself
                return token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(METASPACE, " ").encode()


def check_text(text: str, param: str) -> None:
    """Raises RequestError for a text that is not valid Unicode (a lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{param} holds a lone surrogate, which is not valid Unicode text", param
        ) from None


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of a tokenizer_config.json: strings, or objects with `content`."""
    out = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            out[name] = content
    return out


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return config


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Names of the decoder's steps, such as {"ByteLevel"} or {"Replace", "ByteFallback", "Fuse", "Strip"}."""
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    return {step["type"] for step in steps}


def _max_chars_per_token(tokenizer: Tokenizer) -> int | None:
    """The most characters of a prompt that one token can stand for; None where there is no bound.

    A normalizer may shorten the text, and an added token with lstrip or rstrip swallows any number of spaces.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    if tokenizer.normalizer is not None or any(token.lstrip or token.rstrip for token in added):
        return None
    return max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=None)


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return {**{chr(b): b for b in shown}, **{chr(256 + i): b for i, b in enumerate(hidden)}}


BYTE_OF_CHAR = _byte_alphabet()
