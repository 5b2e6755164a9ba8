"""Answers on disk: shards of token ids in safetensors, and data.json, which says what they are."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tokenspeed.errors import ConfigError

FORMAT = 1
INDEX = "data.json"
SHARD_TOKENS = 2_000_000  # of a full shard; what an interrupted run can lose
_FIELDS = {
    "model": str, "vocab_size": int, "num_answers": int, "num_tokens": int, "shards": list, "sources": dict,
    "temperatures": dict, "looping": dict, "dropped_for_ngrams": int,
}  # fmt: skip
_TENSORS = {"tokens": np.int32, "offsets": np.int64, "num_prompt": np.int32, "temperatures": np.float32}


class Answer(NamedTuple):
    """A prompt and what the model answered."""

    tokens: np.ndarray  # int32 [n] prompt, then answer, with the stop token if one ended it
    num_prompt: int  # of them, 1 to n - 1
    temperature: float = 0.0  # at which the answer was sampled


def read_answers(directory: str | Path) -> list[Answer]:
    """Every answer in `directory`, in the order in which they were written.

    Raises:
        ConfigError: no answers there, an index that can't be read, a shard that is missing, damaged, or holds
            something else than the index says.
    """
    directory = Path(directory)
    index = read_index(directory)
    answers: list[Answer] = []
    for name in index["shards"]:
        tensors = _read_shard(directory / name, index["vocab_size"])
        offsets = tensors["offsets"]
        answers += [
            Answer(tensors["tokens"][offsets[i] : offsets[i + 1]], int(count), float(temperature))
            for i, (count, temperature) in enumerate(
                zip(tensors["num_prompt"], tensors["temperatures"], strict=True)
            )
        ]
    found = len(answers), sum(len(answer.tokens) for answer in answers)
    if found != (index["num_answers"], index["num_tokens"]):
        raise ConfigError(
            f"{directory / INDEX} names {index['num_answers']} answers of {index['num_tokens']} tokens, but the "
            f"shards hold {found[0]} of {found[1]}; generate them again"
        )
    if not answers:
        raise ConfigError(f"{directory} holds no answers; run tokenspeed draft data again")
    return answers


def read_index(directory: Path) -> dict[str, Any]:
    """data.json of a directory of answers. Raises ConfigError when it is missing, broken or of another format."""
    path = directory / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{directory} has no {INDEX}; write it with tokenspeed draft data") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ConfigError(f"{path} is not of format {FORMAT}; generate the answers again")
    for name, kind in _FIELDS.items():
        if not isinstance(index.get(name), kind) or isinstance(index[name], bool):
            raise ConfigError(f"{path}: {name} is missing or of a wrong type; generate the answers again")
    names = index["shards"]
    if not all(isinstance(name, str) and name == Path(name).name for name in names):
        raise ConfigError(f"{path}: shards must be file names; generate the answers again")
    return index


class AnswerWriter:
    """Adds answers to a directory. Every shard and every index replaces its file whole, so that a run that is
    cut off leaves what it had saved.

    Raises:
        ConfigError: the directory can't be written, or holds answers of another model.
    """

    def __init__(self, directory: str | Path, model: str, vocab_size: int, shard_tokens: int = SHARD_TOKENS):
        """model: its name, by which a directory of another one is told."""
        self.directory = Path(directory)
        self._shard_tokens = shard_tokens
        self._texts: list[np.ndarray] = []  # of the shard that is not saved yet
        self._num_unsaved = 0  # tokens in it
        self._num_prompt: list[int] = []
        self._temperatures: list[float] = []
        self._answered: set[tuple[bytes, np.float32]] = set()  # prompt and temperature
        self._prompts: set[bytes] = set()
        self._index: dict[str, Any] = {
            "format": FORMAT,
            "model": model,
            "vocab_size": vocab_size,
            "num_answers": 0,
            "num_tokens": 0,
            "shards": [],
            "sources": {},
            "temperatures": {},
            "looping": {},
            "dropped_for_ngrams": 0,
        }
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.directory, error) from None
        if (self.directory / INDEX).exists():
            self._resume(model, vocab_size)
        else:
            self._save_index()  # a disk that can't be written is told before the work

    @property
    def num_answers(self) -> int:
        return self._index["num_answers"] + len(self._texts)

    @property
    def num_tokens(self) -> int:
        """Of prompts and answers."""
        return self._index["num_tokens"] + self._num_unsaved

    def num_prompts_of(self, source: str) -> int:
        """Prompts of a source that have an answer."""
        return self._index["sources"].get(source, {}).get("prompts", 0)

    def has(self, prompt_ids: np.ndarray, temperature: float) -> bool:
        """Whether the prompt (int32 [n]) has an answer at this temperature."""
        return (prompt_ids.tobytes(), np.float32(temperature)) in self._answered

    def add(
        self,
        tokens: np.ndarray,
        num_prompt: int,
        temperature: float,
        looping: bool,
        source: str,
        licence: str | None = None,
    ) -> None:
        """Adds an answer; saves a shard when there are enough.

        Args:
            tokens: int32 [n], prompt and answer. looping: it was cut where it began to repeat itself.
            source: where the prompt is from. licence: of the source.
        """
        prompt = tokens[:num_prompt].tobytes()
        found = self._index["sources"].setdefault(source, {"prompts": 0, "licence": licence})
        found["prompts"] += prompt not in self._prompts
        self._prompts.add(prompt)
        self._answered.add((prompt, np.float32(temperature)))
        for name, count in (("temperatures", 1), ("looping", int(looping))):
            counts = self._index[name]
            counts[f"{temperature:g}"] = counts.get(f"{temperature:g}", 0) + count
        self._texts.append(tokens)
        self._num_prompt.append(num_prompt)
        self._temperatures.append(temperature)
        self._num_unsaved += len(tokens)
        if self._num_unsaved >= self._shard_tokens:
            self.save()

    def save(self, dropped_for_ngrams: int | None = None) -> None:
        """Writes what is not on the disk yet.

        Args:
            dropped_for_ngrams: prompts that were left out for n-grams of an evaluation set, if that is known.
        """
        if dropped_for_ngrams is not None:
            self._index["dropped_for_ngrams"] = dropped_for_ngrams
        if self._texts:
            name = f"answers-{len(self._index['shards']):05d}.safetensors"
            lengths = [len(text) for text in self._texts]
            tensors = {
                "tokens": np.concatenate(self._texts).astype(np.int32),
                "offsets": np.cumsum([0, *lengths], dtype=np.int64),
                "num_prompt": np.asarray(self._num_prompt, dtype=np.int32),
                "temperatures": np.asarray(self._temperatures, dtype=np.float32),
            }
            self._replace(name, lambda path: save_file(tensors, path))
            self._index["shards"].append(name)
            self._index["num_answers"] += len(lengths)
            self._index["num_tokens"] += sum(lengths)
            self._texts, self._num_prompt, self._temperatures = [], [], []
            self._num_unsaved = 0
        self._save_index()

    def _save_index(self) -> None:
        text = json.dumps(self._index, indent=1) + "\n"
        self._replace(INDEX, lambda path: path.write_text(text, encoding="utf-8"))

    def _replace(self, name: str, write: Any) -> None:
        path = self.directory / name
        temporary = path.with_name(f"{name}.part")
        try:
            write(temporary)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            raise _unwritable(path, error) from None

    def _resume(self, model: str, vocab_size: int) -> None:
        """Takes over what an earlier run has saved."""
        index = read_index(self.directory)
        if (index["model"], index["vocab_size"]) != (model, vocab_size):
            raise ConfigError(
                f"{self.directory} holds answers of {index['model']} (vocabulary {index['vocab_size']}), not of "
                f"{model} ({vocab_size}); name another directory with --output"
            )
        self._index |= index
        for name in index["shards"]:
            tensors = _read_shard(self.directory / name, vocab_size)
            starts, counts = tensors["offsets"][:-1], tensors["num_prompt"]
            for start, count, temperature in zip(starts, counts, tensors["temperatures"], strict=True):
                prompt = tensors["tokens"][start : start + count].tobytes()
                self._prompts.add(prompt)
                self._answered.add((prompt, temperature))


def _read_shard(path: Path, vocab_size: int) -> dict[str, np.ndarray]:
    """The tensors of a shard. Raises ConfigError when they are not what `AnswerWriter` writes."""
    try:
        tensors = load_file(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing; {INDEX} beside it names it; generate the answers again"
        ) from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} can't be read ({error}); generate the answers again") from None
    if wrong := _fault(tensors, vocab_size):
        raise ConfigError(f"{path} is damaged: {wrong}; generate the answers again")
    return tensors


def _fault(tensors: dict[str, np.ndarray], vocab_size: int) -> str | None:
    """What is wrong with a shard's tensors, if anything is."""
    for name, dtype in _TENSORS.items():
        if name not in tensors or tensors[name].dtype != dtype or tensors[name].ndim != 1:
            return f"{name} is missing or of a wrong type"
    tokens, offsets, num_prompt = tensors["tokens"], tensors["offsets"], tensors["num_prompt"]
    if not len(offsets) == len(num_prompt) + 1 == len(tensors["temperatures"]) + 1:
        return "its tensors are of different lengths"
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(tokens) or (lengths < 0).any():
        return "its offsets do not fit its tokens"
    if (num_prompt < 1).any() or (num_prompt >= lengths).any():
        return "a prompt is empty or as long as its text"
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
        return "a token is not in the vocabulary"
    return None


def _unwritable(path: Path, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return ConfigError(f"{path} can't be written ({reason}); name another directory with --output")
