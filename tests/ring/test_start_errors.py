"""Mistakes at start-up through the command itself: one line on stderr, exit code 2, no traceback, and soon.

What the launcher can see is told before any child is started. The areas' own tests look at every single case;
here it is the way to the user that counts.
"""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import HIDDEN, tensors, write_gguf
from harness import InProcessEngine
from safetensors.torch import load_file, save_file
from servers import ROOT
from tiny import make_tiny_draft

import tokenspeed.launch
from tokenspeed.cli import main
from tokenspeed.errors import ConfigError
from tokenspeed.worker import setup

SECONDS = 10.0


@pytest.fixture
def no_children(monkeypatch):
    def start(who, *_):
        raise AssertionError(f"the {who} was started")

    monkeypatch.setattr(tokenspeed.launch, "start_child", start)


@pytest.fixture(scope="module")
def target(tiny_model_dir) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture
def copy(target, tmp_path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(target, tmp_path / "model"))


def said(capsys, *argv) -> str:
    """The one line that `tokenspeed serve` ends with."""
    started = time.monotonic()
    code = main(["serve", *map(str, argv), "--port", "0"])
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == "" and time.monotonic() - started < SECONDS
    return one_line(captured.err)


def one_line(text: str) -> str:
    """The last line; before it there may only be what start-up reports of its progress."""
    *before, last = text.splitlines()
    assert last.startswith("tokenspeed: error: "), text
    assert not any(word in line for line in before for word in ("Traceback", "Error", "tokenspeed: error"))
    return last


# ---- the model


def spoil_config(**changes) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        raw = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(raw))

    return spoil


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes(data)


def cut(keep: int | float) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        data = (path / "model.safetensors").read_bytes()
        size = keep if isinstance(keep, int) else int(len(data) * keep)
        (path / "model.safetensors").write_bytes(data[:size])

    return spoil


def pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


MODELS = {
    "has no config.json": lambda path: (path / "config.json").unlink(),
    "config.json can't be read": write("config.json", b"{not json"),
    "config.json is not a JSON object": write("config.json", b"[]"),
    "config.json can't be read: 'utf-8'": write("config.json", b"\xff\xfe"),
    "hidden_size is missing": spoil_config(hidden_size=None),
    "architecture GemmaForCausalLM of": spoil_config(architectures=["GemmaForCausalLM"]),
    "names code to run (auto_map)": spoil_config(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}),
    "quantized checkpoints are not supported": spoil_config(quantization_config={"quant_method": "awq"}),
    "is not a safetensors file, or damaged": cut(5),
    "model.safetensors is cut short (100 bytes)": cut(100),
    "model.safetensors is cut short: ": cut(0.7),
    "holds pytorch_model.bin but no *.safetensors": pickled,
}


@pytest.mark.parametrize("words", MODELS)
def test_a_spoiled_model(words, copy, no_children, capsys):
    MODELS[words](copy)
    assert words in said(capsys, copy)


@pytest.mark.parametrize("name", ["no/such/directory/at/all", "./nowhere", "nothing.gguf"])
def test_a_model_that_is_not_there(name, no_children, capsys):
    assert f"there is no directory {name}" in said(capsys, name)


def q3_k(path: Path) -> None:
    write_gguf(path, quantised={"blk.0.ffn_down.weight": (Type.Q3_K, np.zeros((HIDDEN, 220), np.uint8))})


def cut_gguf(path: Path) -> None:
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-40])


GGUF_MISTAKES = {
    "architecture gemma3 is not supported": lambda path: write_gguf(
        path, "gemma3", weights=tensors("llama", 10)
    ),
    "of type Q3_K": q3_k,
    "cut short or damaged": cut_gguf,
    "not a GGUF file": lambda path: path.write_bytes(bytes(5000)),
}


@pytest.mark.parametrize("words", GGUF_MISTAKES)
def test_a_gguf_that_is_not_supported(words, tmp_path, monkeypatch, no_children, capsys):
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    GGUF_MISTAKES[words](tmp_path / "m.gguf")
    assert words in said(capsys, tmp_path / "m.gguf")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


# ---- the draft


def draft(**changes) -> Callable[[Path, Path], None]:
    return lambda path, target: make_tiny_draft(path, target, **changes)


def without(name: str) -> Callable[[Path, Path], None]:
    def spoil(path: Path, target: Path) -> None:
        file = make_tiny_draft(path, target) / "model.safetensors"
        save_file({k: v for k, v in load_file(file).items() if k != name}, file)

    return spoil


def changed(**changes) -> Callable[[Path, Path], None]:
    """A draft whose config says something else than its tensors."""

    def make(path: Path, target: Path) -> None:
        spoil_config(**changes)(make_tiny_draft(path, target))

    return make


def other_tokenizer(path: Path, target: Path) -> None:
    make_tiny_draft(path, target)
    text = (target / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|begin|>"))


def pickled_draft(path: Path, target: Path) -> None:
    pickled(make_tiny_draft(path, target))


DRAFTS = {
    "draft expects hidden size 128, target gives 64": draft(target_hidden_size=128),
    "draft expects vocabulary 32000, target gives": draft(vocab_size=32000),
    "draft expects aux layer 9, target has layers 0 to 4": draft(eagle_aux_hidden_state_layer_ids=[0, 2, 9]),
    "lacks tensor layers.0.mlp.up_proj.weight": without("layers.0.mlp.up_proj.weight"),
    "unknown key expert_count": draft(expert_count=4),
    "is [320, 32], its config.json calls for [320, 24]": changed(
        candidate_head={"rank": 24, "num_candidates": 16}
    ),
    "num_candidates 400 is more than the vocabulary": changed(
        candidate_head={"rank": 32, "num_candidates": 400}
    ),
    "tree 12/4/16 asks for 4 tokens a step, the draft has 3 candidates": changed(
        candidate_head={"rank": 32, "num_candidates": 3}
    ),
    "token 1 is '<|begin|>' in": other_tokenizer,
    "is an eagle3 draft; use --spec eagle3": draft(method="eagle3"),
    "convert it first: tokenspeed draft convert": pickled_draft,
    "names code to run (auto_map)": draft(auto_map={"AutoModel": "evil.Evil"}),
}


@pytest.mark.parametrize("words", DRAFTS)
def test_a_draft_that_does_not_fit(words, target, tmp_path, no_children, capsys):
    DRAFTS[words](tmp_path / "draft", target)
    argv = ("--spec", "eagle4", "--draft", tmp_path / "draft", "--spec-shape", "12/4/16")
    assert words in said(capsys, target, *argv)


def test_no_draft_is_known(target, no_children, capsys):
    assert "name one with --draft" in said(capsys, target, "--spec", "eagle3")


# ---- the options

OPTIONS = {
    "--tensor-parallel-size 2": "--tensor-parallel-size 2 is not supported yet; leave it at 1",
    "--pp-size 2": "--pipeline-parallel-size 2 is not supported yet",
    "-dp 2": "--data-parallel-size 2 is not supported yet",
    "--max-model-len 1025": "give at most 1024",
    "--spec eagle4 --spec-shape 8x4": "--spec-shape must be STEPS/TOPK/NODES",
    "--spec eagle4 --spec-shape 99/4/16": "steps must be from 1 to 16, not 99",
    "--spec eagle4 --spec-shape 0/4/16": "steps must be from 1 to 16, not 0",
    "--spec eagle4 --spec-shape 8/4/65": "nodes (with the root) must be from 2 to 64, not 65",
    "--spec eagle4 --spec-shape 3/400/64": "(steps - 1) * top-k must be at most 64, not 800",
    "--spec-shape 8/4/16": "needs a method",
    "--speculative-config {not": "--speculative-config is not valid JSON",
    "--speculative-config []": "must be a JSON object",
    '--speculative-config {"method":"ngram"}': "method 'ngram' is not supported",
    '--speculative-config {"rejection":1}': "key 'rejection' is not supported",
    "--mem-fraction-static 0.8": "use --gpu-memory-utilization",
    "--trust-remote-code": "runs no code from a checkpoint",
    "--enforce-eagr": "did you mean --enforce-eager?",
    "--kv-cache-tokens 0": "must be at least 1",
    "--watchdog-timeout nan": "must be from 1.0",
    "--host no.such.host.invalid": "can't listen on no.such.host.invalid",
}


@pytest.mark.parametrize("argv", OPTIONS)
def test_options(argv, target, no_children, capsys):
    assert OPTIONS[argv] in said(capsys, target, *argv.split())


def test_a_port_in_use(target, no_children, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code = main(["serve", str(target), "--port", str(port)])
    assert code == 2 and f"can't listen on 127.0.0.1:{port}" in one_line(capsys.readouterr().err)


def test_the_port_is_looked_at_before_the_model(no_children, capsys):
    """A big model is not fetched for a port that can't be had."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["serve", "no/such/model", "--port", str(other.getsockname()[1])]) == 2
    assert "can't listen on" in capsys.readouterr().err


# ---- what only a worker can see


def missing(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")


def no_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


CHILDREN = {
    "has no tensor model.layers.1.mlp.up_proj.weight": (missing, ()),
    "has no tokenizer.json": (no_tokenizer, ()),
    "give --kv-cache-tokens": (lambda path: None, ("--kv-cache-tokens", 10**12)),
    "--device cuda: torch sees no GPU": (lambda path: None, ("--device", "cuda")),
}


@pytest.mark.parametrize("words", CHILDREN)
def test_what_a_child_finds(words, copy, capsys, monkeypatch):
    spoil, argv = CHILDREN[words]
    spoil(copy)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert words in said(capsys, copy, "--dtype", "float32", *argv)


def test_too_little_memory(target, monkeypatch):
    """Weights are not read for a machine that can't hold them."""
    monkeypatch.setattr(setup, "available_cpu_memory", lambda: 300_000)
    monkeypatch.setattr(setup, "load_model", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(ConfigError, match="not enough memory: the model needs") as caught:
        InProcessEngine(target, kv_cache_tokens=None)
    assert "\n" not in str(caught.value)


def test_python_without_torch(target, tmp_path):
    """A real interpreter, in which torch can't be found."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, *rest):\n"
        "        return None if name.split('.')[0] == 'torch' else plain.find_spec(name, *rest)\n"
        "names = [getattr(finder, '__name__', '') for finder in sys.meta_path]\n"
        "plain = sys.meta_path[names.index('PathFinder')]\n"
        "sys.meta_path[names.index('PathFinder')] = Finder\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tokenspeed", "serve", str(target), "--port", "0"],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "pip install torch" in one_line(done.stderr)
