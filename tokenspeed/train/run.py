"""A training run: its directory, and the two stages one after the other.

The directory holds config.json (what was asked for), draft.safetensors and head.safetensors (the state of each
stage), log.jsonl and loss.png.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokenspeed import __version__
from tokenspeed.errors import ConfigError
from tokenspeed.hub.resolve import resolve_model
from tokenspeed.models.config import load_model_config
from tokenspeed.spec.eagle4.formats import DraftConfig, parse_draft
from tokenspeed.train.answers import INDEX, Answer, read_answers, read_index
from tokenspeed.train.checkpoint import unwritable, write_whole
from tokenspeed.train.head import HeadStage, head_shape
from tokenspeed.train.model import TrainableDraft
from tokenspeed.train.options import TrainOptions, draft_config
from tokenspeed.train.packing import Packer, Shape
from tokenspeed.train.plot import plot_log
from tokenspeed.train.stage1 import DraftStage
from tokenspeed.train.start import read_start, start_draft, start_head
from tokenspeed.train.target import Target, load_target
from tokenspeed.train.trainer import Budget, Interrupt, Loop
from tokenspeed.worker.setup import choose_device

CONFIG, DRAFT, HEAD, LOG, PLOT = (
    "config.json",
    "draft.safetensors",
    "head.safetensors",
    "log.jsonl",
    "loss.png",
)
FORMAT = 1
START_SHARE = 0.3  # of a row's columns; more would repeat one another's work
Progress = Callable[[str, int, int], None]


def train(
    options: TrainOptions,
    output: Path,
    progress: Progress,
    *,
    resume: bool = False,
    device: str = "auto",
    capture: bool = True,
    log_every: int = 50,
) -> bool:
    """Trains a draft into the run directory `output`, or goes on with it.

    Args:
        options: checked. capture: the step in a CUDA graph, where the device has them.

    Returns:
        True when all is done, False when Ctrl-C ended it: then the state is saved.

    Raises:
        ConfigError: model or data can't be used or do not fit each other, `output` holds another run, or it
            can't be written.
    """
    where = choose_device(device)
    index = read_index(Path(options.data))
    model_dir = resolve_model(options.model, None, progress)
    target_config = load_model_config(model_dir)
    if index["vocab_size"] != target_config.vocab_size:
        raise ConfigError(
            f"{options.data} was made with a vocabulary of {index['vocab_size']} tokens, {options.model} has "
            f"{target_config.vocab_size}; make it anew with tokenspeed draft data {options.model}"
        )
    if options.max_length > target_config.max_position_embeddings:
        raise ConfigError(
            f"--max-length {options.max_length} is more than the {target_config.max_position_embeddings} "
            f"positions of {options.model}"
        )
    raw = draft_config(target_config, options)
    start = None if options.start_from is None else read_start(Path(options.start_from).expanduser(), raw)
    shape = batch_shape(options)
    answers = read_answers(options.data)
    packer = _packer(answers, options, shape)
    progress(f"{packer.num_texts} of {len(answers)} answers of {options.data}", 0, 0)
    _open_directory(output, options, raw, index, resume)
    model = load_target(
        model_dir, target_config, where, lambda done, total: progress("loading the model", done, total)
    )
    config = parse_draft(raw, "eagle4", output)
    target = Target(model, shape, config.aux_layers)
    draft = new_draft(config, target, options)
    if start is not None:
        start_draft(draft, start)
    log = RunLog(output / LOG, progress)
    finished = True
    with Interrupt() as interrupt:
        stages: list[tuple[Any, Shape, Budget, Path]] = []
        draft_budget = Budget(options.steps, None if options.minutes is None else 60 * options.minutes)
        stages.append((DraftStage(target, draft, options), shape, draft_budget, output / DRAFT))
        if options.head_steps or options.head_seconds:
            head_budget = Budget(options.head_steps, options.head_seconds)
            stage = HeadStage(target, draft, options)
            if start is not None:
                start_head(stage, start)
            stages.append((stage, head_shape(shape), head_budget, output / HEAD))
        for stage, stage_shape, budget, path in stages:
            loop = Loop(
                stage,
                _packer(answers, options, stage_shape),
                budget,
                where,
                path,
                log.add,
                progress,
                capture,
                log_every,
            )
            log.forget(stage.name, loop.done)
            if not path.exists():
                loop.save()  # a disk that is full says so now
            finished = loop.run(interrupt)
            if not finished:
                break
    if not plot_log(output / LOG, output / PLOT):
        progress("no loss plot: matplotlib is not installed", 0, 0)
    return finished


def batch_shape(options: TrainOptions) -> Shape:
    """The shape of stage 1's batches."""
    starts = max(8, int(START_SHARE * options.max_length) // 8 * 8)
    return Shape(options.num_rows, options.max_length, min(starts, options.max_length), options.unroll)


def new_draft(config: DraftConfig, target: Target, options: TrainOptions) -> TrainableDraft:
    """An untrained draft of `target`."""
    norm = target.model.norm.weight
    return TrainableDraft(config, target.embedding, norm, options.max_length, options.unroll, options.seed)


def read_run(directory: Path) -> dict[str, Any]:
    """config.json of a run directory. Raises ConfigError when it is none."""
    path = directory / CONFIG
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} holds no training run; make one with tokenspeed draft train MODEL --data DIR "
            f"--output {directory}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    fields = ("options", "draft", "data")
    if (
        not isinstance(run, dict)
        or run.get("format") != FORMAT
        or not all(isinstance(run.get(name), dict) for name in fields)
    ):
        raise ConfigError(f"{path} is no training run's of format {FORMAT}")
    return run


def _packer(answers: list[Answer], options: TrainOptions, shape: Shape) -> Packer:
    try:
        return Packer(answers, shape, options.seed)
    except ValueError as error:
        raise ConfigError(
            f"{options.data} is of no use with --max-length {options.max_length}: {error}"
        ) from None


def _open_directory(
    output: Path, options: TrainOptions, raw: dict[str, Any], index: dict[str, Any], resume: bool
) -> None:
    """Makes the run directory, or checks that the one there is of the same run. Raises ConfigError."""
    data = {
        "sha256": hashlib.sha256((Path(options.data) / INDEX).read_bytes()).hexdigest(),
        "model": index["model"],
        "num_answers": index["num_answers"],
        "num_tokens": index["num_tokens"],
    }
    if (output / CONFIG).exists():
        run = read_run(output)
        if not resume:
            raise ConfigError(f"{output} holds a run; go on with it with --resume, or name another --output")
        if different := options.differences(run["options"]):
            name = different[0]
            flag, there = "--" + name.replace("_", "-"), run["options"].get(name)
            raise ConfigError(
                f"{output} is a run with {flag} {there}, not {getattr(options, name)}; give its options to "
                "go on with it, or name another --output"
            )
        if run["data"]["sha256"] != data["sha256"]:
            raise ConfigError(f"{options.data} has changed since {output} began; name another --output")
        return
    if resume:
        raise ConfigError(f"{output} holds no run to go on with; leave --resume out to begin one")
    if output.is_dir() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty; name another directory with --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(output, error) from None
    run = {
        "format": FORMAT,
        "version": __version__,
        "torch": torch.__version__,
        "options": dataclasses.asdict(options),
        "draft": raw,
        "data": data,
    }
    write_whole(output / CONFIG, json.dumps(run, indent=1).encode())


class RunLog:
    """log.jsonl: a record a line, and a line of text for the person who waits."""

    def __init__(self, path: Path, progress: Progress):
        self._path, self._progress = path, progress

    def add(self, record: dict[str, Any]) -> None:
        """Appends a record. Raises ConfigError when it can't be written."""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise unwritable(self._path, error) from None
        kind = "top1" if "top1" in record else "recall"
        shares = " ".join(f"{share:.3f}" for share in record[kind])
        self._progress(
            f"{record['stage']} step {record['step']} {record['seconds']:.0f} s loss {record['loss']:.4f} "
            f"{kind} {shares} | {record['padded_tokens_per_s']} padded tokens/s, "
            f"{record['starts_per_s']} starts/s",
            0,
            0,
        )

    def forget(self, stage: str, step: int) -> None:
        """Drops records of steps after `step`, which a run that goes on from there will make again."""
        records = read_log(self._path)
        kept = [r for r in records if r["stage"] != stage or r["step"] <= step]
        if len(kept) < len(records):
            write_whole(self._path, "".join(json.dumps(r) + "\n" for r in kept).encode())


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log.jsonl, as far as they are whole."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break  # cut off while it was written
    return records
