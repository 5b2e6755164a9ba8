"""A GGUF file's byte-level BPE vocabulary as tokenizer.json, with tokenizer_config.json and chat template."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from tokenspeed.errors import ConfigError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types of the format


def _split(digits: str) -> str:
    """The pattern of words, numbers, punctuation and spaces that GPT-4 made common; `digits` differs."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True)
class Family:
    """What the name of a pre-tokenizer stands for.

    Attributes:
        pattern: how text is split before BPE; None: single digits, then byte level's own pattern.
        nfc: text is normalised first.
        add_bos: prompts begin with the first special token, unless the file says otherwise.
        ignore_merges: a word that is a token is taken whole.
        specials_in_vocab: special tokens are entries of the BPE vocabulary too.
        plain: added tokens that are no special tokens, though the file calls them control tokens.
    """

    pattern: str | None = None
    nfc: bool = False
    add_bos: bool = False
    ignore_merges: bool = False
    specials_in_vocab: bool = False
    plain: tuple[str, ...] = ()


FAMILIES = {
    "smollm": Family(specials_in_vocab=True),
    "qwen2": Family(
        pattern=_split(r"\p{N}"),
        nfc=True,
        plain=(
            "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
            "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
            "<|file_sep|>",
        ),
    ),
    "llama-bpe": Family(pattern=_split(r"\p{N}{1,3}"), add_bos=True, ignore_merges=True),
}  # fmt: skip


def write_tokenizer(fields: dict[str, Any], config: dict[str, Any], directory: Path) -> None:
    """Writes the tokenizer's files.

    Args:
        fields: the file's metadata, with tokens, token types and merges.
        config: config.json's values (context length, ids of special tokens).

    Raises:
        ConfigError: the vocabulary is not byte-level BPE with a known pre-tokenizer, or contradicts itself.
        KeyError: a value is missing.
    """
    if (model := fields["tokenizer.ggml.model"]) != "gpt2":
        raise ConfigError(f"tokenizer {model} is not supported, only byte-level BPE (gpt2)")
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in FAMILIES:
        raise ConfigError(f"pre-tokenizer {name} is not supported ({', '.join(FAMILIES)})")
    family, tokens = FAMILIES[name], fields["tokenizer.ggml.tokens"]
    bos = config["bos_token_id"]
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", family.add_bos)) and bos is not None
    tokenizer = _tokenizer(fields, family)
    tokenizer.post_processor = _post_processor(family, (tokens[bos], bos) if add_bos else None)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {
        "bos": None if name == "qwen2" else bos,
        "eos": config["eos_token_id"],
        "pad": config["pad_token_id"],
    }
    ids["unk"] = fields.get("tokenizer.ggml.unknown_token_id")
    template = fields.get("tokenizer.chat_template")
    saved = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "add_bos_token": add_bos,
        **{f"{kind}_token": None if i is None else tokens[i] for kind, i in ids.items()},
    }
    if template:
        saved["chat_template"] = template
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    text = json.dumps(saved, indent=1, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _tokenizer(fields: dict[str, Any], family: Family) -> Tokenizer:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    if len(tokens) != len(types):
        raise ConfigError(f"the file holds {len(tokens)} tokens but {len(types)} token types")
    added = [(i, token) for i, token in enumerate(tokens) if types[i] in (CONTROL, USER_DEFINED)]
    vocab = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    if family.specials_in_vocab:
        vocab.update({token: i for i, token in added})
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    try:
        model = BPE(vocab=vocab, merges=merges, ignore_merges=family.ignore_merges)
    except Exception as error:  # the tokenizers library raises no narrower class
        raise ConfigError(f"the vocabulary contradicts its merges ({error})") from None
    tokenizer = Tokenizer(model)
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(family)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=True)
    for i, token in added:  # one by one: an added token gets the next free id, and that must be the file's
        special = types[i] == CONTROL and token not in family.plain
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(token, special=special, normalized=False)])
        if tokenizer.token_to_id(token) != i:
            raise ConfigError(
                f"token {token!r} would get the id {tokenizer.token_to_id(token)} instead of {i}"
            )
    return tokenizer


def _pre_tokenizer(family: Family) -> pre_tokenizers.PreTokenizer:
    if family.pattern is None:
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    split = pre_tokenizers.Split(Regex(family.pattern), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def _post_processor(family: Family, bos: tuple[str, int] | None) -> processors.PostProcessor | None:
    offsets = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    if bos is None:
        return None if family.pattern is None else offsets
    single, pair = f"{bos[0]} $A", f"{bos[0]} $A {bos[0]} $B:1"
    prefix = processors.TemplateProcessing(single=single, pair=pair, special_tokens=[bos])
    return processors.Sequence([offsets, prefix])
