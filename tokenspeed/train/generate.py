"""Answers of the target itself, to train a draft on: prompts in, a directory of answers out."""

import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from tokenspeed.attention.kv_pool import KvPool
from tokenspeed.bench.workload import Prompt
from tokenspeed.config import Config, Resolved
from tokenspeed.errors import ConfigError, RequestError
from tokenspeed.hub.checkpoint import num_elements
from tokenspeed.launch import resolve
from tokenspeed.tokenizer.encoder import Encoder, check_text
from tokenspeed.train.answers import AnswerWriter
from tokenspeed.train.bulk import BulkDecoder, Task
from tokenspeed.train.loops import loop_end
from tokenspeed.train.overlap import Overlap
from tokenspeed.worker.setup import Built, build, choose_device, choose_dtype

MIX = (0.0, 0.7, 0.0, 1.0)  # temperatures of prompts in turn
OWN = "own"  # the source of prompts that the model writes itself
OWN_LICENCE = "written by the model"
OWN_TOKENS = (8, 160)  # of a prompt of its own
CPU_SLOTS, GPU_SLOTS = 16, 3072
GPU_PREFILL = 16384
REPORT_SECONDS = 5.0
_MARK = "\u2402"  # stands for the user's text, to find what the chat template puts around it
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """temperatures: of the prompts in turn; an answer more to a prompt takes the next one."""

    max_tokens: int = 512
    max_prompt_tokens: int = 512
    answers: int = 1  # to each prompt
    own: int = 0  # prompts that the model writes itself
    temperatures: tuple[float, ...] = MIX
    seconds: float | None = None  # limit for the generation, starting the engine not counted


@dataclass
class Outcome:
    """What a run has added, and what it left out."""

    num_answers: int = 0
    num_looping: int = 0
    num_failed: int = 0  # NaN logits
    num_generated: int = 0  # tokens, before loops were cut
    seconds: float = 0.0
    dropped: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("ngrams", "too_long", "repeated", "refused"), 0)
    )


@dataclass(frozen=True)
class _Encoded:
    ids: np.ndarray  # int32 [n]
    source: str
    licence: str | None


def generate(
    config: Config,
    prompts: Sequence[Prompt],
    exclude: Sequence[Prompt],
    output: Path,
    options: Options,
    progress: Progress,
) -> Outcome:
    """Answers the prompts that have no answer in `output` yet, and saves as it goes.

    Args:
        exclude: evaluation prompts; a prompt that shares 13 words in a row with one of them is left out.

    Raises:
        ConfigError: anything the user can mend.
    """
    resolved = resolve(config, progress)
    pages = -(-(options.max_prompt_tokens + options.max_tokens) // config.page_size)
    length = min(pages * config.page_size, resolved.max_model_len)
    if length <= options.max_tokens:
        raise ConfigError(
            f"--max-tokens {options.max_tokens} leaves no room for a prompt in {length} tokens of context"
        )
    resolved = replace(resolved, max_model_len=length, config=_sized(resolved, length))
    writer = AnswerWriter(output, _name(config.model), resolved.model.vocab_size)
    outcome, seed = Outcome(), abs(config.seed or 0)
    most = min(options.max_prompt_tokens, length - options.max_tokens)
    maker = _PromptMaker(resolved, exclude, most, outcome.dropped)
    encoded = maker.encode(prompts)
    if not encoded and not options.own:
        reasons = ", ".join(f"{count} {name}" for name, count in outcome.dropped.items() if count)
        raise ConfigError(f"no prompt is left to answer ({reasons})")
    decoder = BulkDecoder(_built(resolved, progress), length, resolved.eos_token_ids, maker.vocab_size)
    progress(f"{len(encoded)} prompts, {decoder.num_slots} at once", 0, 0)
    started = time.monotonic()
    deadline = started + (float("inf") if options.seconds is None else options.seconds)
    try:
        wanted = options.own - writer.num_prompts_of(OWN)
        if wanted > 0:
            seeds = np.random.default_rng([seed, writer.num_answers]).integers(2**62, size=wanted)
            texts = _own_texts(decoder, maker, seeds.tolist(), deadline)
            encoded += maker.encode([Prompt(OWN, _user(text), OWN_LICENCE) for text in texts])
            progress(f"{len(texts)} prompts of its own in {time.monotonic() - started:.1f} s", 0, 0)
        tasks = _tasks(encoded, options, seed, writer)
        report = _Report(outcome, len(tasks), started, progress)
        for task, answer in decoder.run(tasks, deadline):
            _book(writer, outcome, task, answer)
            report.tick()
    finally:
        outcome.seconds = time.monotonic() - started
        writer.save(outcome.dropped["ngrams"])
    return outcome


class _PromptMaker:
    """Prompts as token ids, without those that are to be left out; `dropped` counts why.

    Args:
        max_tokens: of a prompt.

    Raises:
        ConfigError: the model has no chat template.
    """

    def __init__(
        self, resolved: Resolved, exclude: Sequence[Prompt], max_tokens: int, dropped: dict[str, int]
    ):
        self.encoder = Encoder.load(resolved.model_dir)
        self.vocab_size = resolved.model.vocab_size
        if self.encoder.chat is None:
            raise ConfigError(f"{resolved.model_dir} has no chat template, so it answers no prompts")
        self._overlap = Overlap(text for prompt in exclude for text in _texts(prompt))
        self._max_tokens, self._dropped = max_tokens, dropped
        self._seen: set[bytes] = set()

    def encode(self, prompts: Sequence[Prompt]) -> list[_Encoded]:
        kept: list[tuple[Prompt, str]] = []
        for prompt in prompts:
            if any(self._overlap.shares(text) for text in _texts(prompt)):
                self._dropped["ngrams"] += 1
            elif (text := self._render(prompt)) is None:
                self._dropped["refused"] += 1
            else:
                kept.append((prompt, text))
        found = self.encoder.encode([text for _, text in kept], False) if kept else []
        out = []
        for (prompt, _), ids in zip(kept, found, strict=True):
            key = np.asarray(ids, dtype=np.int32)
            if not 1 <= len(ids) <= self._max_tokens:
                self._dropped["too_long"] += 1
            elif key.tobytes() in self._seen:
                self._dropped["repeated"] += 1
            else:
                self._seen.add(key.tobytes())
                out.append(_Encoded(key, prompt.category, prompt.licence))
        return out

    def around_user(self) -> str:
        """What the chat template puts before the text of a first user turn."""
        before, mark, _ = (self._render(Prompt(OWN, _user(_MARK))) or "").partition(_MARK)
        if not mark:
            raise ConfigError("the chat template does not show the user's text as it is; leave out --own")
        return before

    def _render(self, prompt: Prompt) -> str | None:
        """None: the chat template refuses it, or it is no valid text."""
        try:
            text = self.encoder.chat.render(json.dumps(prompt.messages).encode())
            check_text(text, "messages")
        except RequestError:
            return None
        return text


def _own_texts(decoder: BulkDecoder, maker: _PromptMaker, seeds: Sequence[int], deadline: float) -> list[str]:
    """What the model writes as the user, at temperature 1; only what it ended itself."""
    ids = np.asarray(maker.encoder.encode([maker.around_user()], False)[0], dtype=np.int32)
    least, most = OWN_TOKENS
    tasks = [Task(ids, 1.0, most, seed) for seed in seeds]
    texts = [
        maker.encoder.decode(answer.tolist(), skip_special_tokens=True).strip()
        for _, answer in decoder.run(tasks, deadline)
        if least < len(answer) < most and loop_end(answer) is None
    ]
    return [text for text in dict.fromkeys(texts) if text]


def _tasks(encoded: list[_Encoded], options: Options, seed: int, writer: AnswerWriter) -> list[Task]:
    """One for each answer that is not there yet: first one to every prompt, in an order that mixes sources.

    A prompt's temperatures follow from its tokens, so that a run that is continued asks for the same ones.
    """
    order = np.random.default_rng(seed).permutation(len(encoded))
    mix = options.temperatures
    tasks = []
    for turn in range(options.answers):
        for number in order:
            prompt = encoded[number]
            temperature = mix[(zlib.crc32(prompt.ids) + turn) % len(mix)]
            if not writer.has(prompt.ids, temperature):
                tasks.append(Task(prompt.ids, temperature, options.max_tokens, seed + len(tasks), prompt))
    return tasks


def _book(writer: AnswerWriter, outcome: Outcome, task: Task, answer: np.ndarray) -> None:
    """Adds an answer, cut where it has begun to loop."""
    if not len(answer):
        outcome.num_failed += 1
        return
    outcome.num_generated += len(answer)
    end = loop_end(answer)
    outcome.num_answers += 1
    outcome.num_looping += end is not None
    tokens = np.concatenate([task.ids, answer[:end]])
    prompt = task.source
    writer.add(tokens, len(task.ids), task.temperature, end is not None, prompt.source, prompt.licence)


@dataclass
class _Report:
    """A line every few seconds."""

    outcome: Outcome
    total: int
    started: float
    progress: Progress
    told: float = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        if now - self.told < REPORT_SECONDS and self.outcome.num_answers < self.total:
            return
        self.told = now
        rate = self.outcome.num_generated / (now - self.started)
        self.progress(
            f"{self.outcome.num_answers} of {self.total} answers, {self.outcome.num_generated} tokens, "
            f"{rate:,.0f} tok/s",
            0,
            0,
        )


# ---- the engine


def _sized(resolved: Resolved, length: int) -> Config:
    """The configuration with as many requests at once as memory holds, each with room for `length` tokens."""
    config = resolved.config
    on_cpu = choose_device(config.device).type == "cpu"
    prefill = config.max_num_batched_tokens or (None if on_cpu else GPU_PREFILL)
    slots = config.max_num_seqs or (CPU_SLOTS if on_cpu else _fitting_slots(resolved, length))
    return replace(config, max_num_seqs=slots, max_num_batched_tokens=prefill)


def _fitting_slots(resolved: Resolved, length: int) -> int:
    """Requests whose K/V and logits fit beside the weights on the GPU."""
    config, model = resolved.config, resolved.model
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device, resolved)
    free, total = torch.cuda.mem_get_info(device)
    left = (
        min(free, total * config.gpu_memory_utilization)
        - num_elements(Path(resolved.model_dir)) * dtype.itemsize
    )
    page = KvPool.page_bytes(model.num_layers, config.page_size, model.num_kv_heads, model.head_dim, dtype)
    each = page * -(-length // config.page_size) + 2 * 4 * model.vocab_size
    return max(1, min(GPU_SLOTS, int(left // each)))


def _built(resolved: Resolved, progress: Progress) -> Built:
    try:
        return build(resolved, progress)
    except (torch.OutOfMemoryError, MemoryError):
        raise ConfigError(
            f"memory ran out with {resolved.config.max_num_seqs} requests at once; give fewer with --max-num-seqs"
        ) from None


def _name(model: str) -> str:
    """A model's name wherever it lies: of a directory or file its own."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def _user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def _texts(prompt: Prompt) -> Iterator[str]:
    for message in prompt.messages:
        content = message.get("content")
        yield content if isinstance(content, str) else json.dumps(content)
