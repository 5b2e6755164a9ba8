"""`tokenspeed draft convert`: the bits that were saved, drafts that serve, and pickles that run nothing."""

import errno
import json
import os
import resource
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from harness import InProcessEngine, greedy
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import make_tiny_draft

from tokenspeed.cli import draft_convert, main
from tokenspeed.errors import ConfigError
from tokenspeed.hub import resolve


@pytest.fixture
def target(tiny_model_dir) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture
def make(tmp_path, target, tiny_draft_dir):
    """make(method, dtype) -> a directory without safetensors, and the tensors that are to be saved in it."""

    def made(method: str = "eagle3", dtype: torch.dtype = torch.float16) -> tuple[Path, dict]:
        original, source = tiny_draft_dir(target, method), tmp_path / "in" / "draft"
        source.mkdir(parents=True)
        shutil.copy(original / "config.json", source)
        (source / "tokenizer_config.json").write_text('{"a": 1}')
        tensors = load_file(original / "model.safetensors")
        return source, {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}

    return made


def bits(tensors: dict) -> dict:
    return {
        name: (
            t.dtype,
            tuple(t.shape),
            t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, t in tensors.items()
    }


def convert(*argv) -> None:
    assert main(["draft", "convert", *map(str, argv)]) == 0


def left(source: Path) -> list[str]:
    return sorted(path.name for path in source.parent.iterdir())


def refused(capsys, *argv) -> str:
    """The one line that the command says when it refuses, having changed nothing beside its source."""
    parent = Path(argv[0]).parent
    before = left(Path(argv[0])) if parent.is_dir() else None
    assert main(["draft", "convert", *map(str, argv)]) == 2
    captured = capsys.readouterr()
    line = captured.err.splitlines()[-1]
    assert line.startswith("tokenspeed: error: ") and "Traceback" not in captured.err
    assert captured.out == "" and "converting" not in line
    assert before is None or left(Path(argv[0])) == before
    return line


# ---- what is written


@pytest.mark.parametrize("method", ["eagle", "eagle3", "eagle4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_bits_are_those_that_were_saved(make, capsys, method, dtype):
    source, tensors = make(method, dtype)
    torch.save(tensors, source / "pytorch_model.bin")
    convert(source)
    output = source.with_name("draft-safetensors")
    assert sorted(p.name for p in output.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
    ]
    assert bits(load_file(output / "model.safetensors")) == bits(tensors)
    assert (output / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert left(source) == ["draft", "draft-safetensors"]
    assert output.stat().st_mode == source.stat().st_mode  # others may read it as far as they could the first
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 and captured.out.startswith(
        f"wrote {output}: {len(tensors)} tensors, "
    )
    assert captured.out.endswith(f"tokenspeed serve MODEL --spec {method} --draft {output}\n")
    assert "converting draft 100%" in captured.err


def test_odd_tensors_of_an_old_file(make):
    """Transposed, shared, cut from a larger one, parameters, an OrderedDict, and the format before torch 1.6."""
    source, tensors = make("eagle3")
    tensors["fc.weight"] = tensors["fc.weight"].t().contiguous().t()
    big = torch.arange(200).half()
    tensors["norm.weight"] = big[100:164]
    tensors["midlayer.hidden_norm.weight"] = tensors["midlayer.input_layernorm.weight"] = big[:128:2]
    tensors["lm_head.weight"] = torch.nn.Parameter(tensors["lm_head.weight"])
    assert not tensors["fc.weight"].is_contiguous()
    torch.save(OrderedDict(tensors), source / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    convert(source)
    assert bits(load_file(str(source) + "-safetensors/model.safetensors")) == bits(tensors)


def shards(source: Path, tensors: dict) -> list[str]:
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    half = len(tensors) // 2
    places = {name: names[i >= half] for i, name in enumerate(tensors)}
    for file in names:
        torch.save({name: t for name, t in tensors.items() if places[name] == file}, source / file)
    index = {"metadata": {}, "weight_map": places}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return names


def test_shards(make, tmp_path):
    source, tensors = make("eagle4")
    shards(source, tensors)
    torch.save([1], source / "training_args.bin")  # no weights, and not in the index
    (tmp_path / "out").mkdir()  # empty: may be used
    convert(source, "--output", tmp_path / "out")
    assert bits(load_file(tmp_path / "out" / "model.safetensors")) == bits(tensors)
    assert not (tmp_path / "out" / "pytorch_model.bin.index.json").exists()


def test_every_tensor_is_aligned(tiny_model_dir, tmp_path):
    """An odd number of bytes before a wider tensor makes readers copy; the library's own writer sorts as well."""
    source = make_tiny_draft(tmp_path / "draft", tiny_model_dir("llama", vocab_size=321), "eagle3")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save({"model.t2d": tensors.pop("t2d"), **tensors}, source / "pytorch_model.bin")
    convert(source)
    file = tmp_path / "draft-safetensors" / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    widths = {"F32": 4, "I64": 8, "BOOL": 1}
    assert header.pop("__metadata__") == {"format": "pt"} and size % 8 == 0
    assert all(entry["data_offsets"][0] % widths[entry["dtype"]] == 0 for entry in header.values())
    with safe_open(file, framework="pt") as opened:
        assert set(opened.keys()) == set(header)


def test_a_converted_draft_serves(target, tmp_path, make):
    """Tokens, and how many of them were drafted, are those of the draft that was never a pickle."""
    source, tensors = make("eagle3", torch.float32)
    torch.save(tensors, source / "pytorch_model.bin")
    convert(source, "--output", tmp_path / "out")
    original = make_tiny_draft(tmp_path / "original", target, "eagle3")
    found = []
    for draft in (original, tmp_path / "out"):
        engine = InProcessEngine(target, spec="eagle3", draft=str(draft), spec_shape="3/2/6")
        answers = engine.generate([[5, 9, 17, 33], [40, 41, 42]], greedy(12))
        found.append([(a.token_ids, a.finished) for a in answers])
    assert found[0] == found[1]
    assert sum(finished.num_accepted for _, finished in found[1]) > 0


# ---- pickles


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["value", "whole"])
def test_a_pickle_runs_nothing(make, tmp_path, capsys, zipped, place):
    source, tensors = make()
    evil = Evil(f"touch {tmp_path}/pwned")
    content = evil if place == "whole" else {**tensors, "norm.weight": evil}
    torch.save(content, source / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    line = refused(capsys, source)
    assert "it asks to run posix.system" in line and "weights_only" not in line
    assert not (tmp_path / "pwned").exists()
    torch.load(source / "pytorch_model.bin", weights_only=False)  # the test is one only if this does run it
    assert (tmp_path / "pwned").exists()


def saved(content, **options):
    return lambda file, tensors: torch.save(content, file, **options)


def changed(**changes):
    """The draft's tensors with some others, dots written as __."""
    new = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda file, tensors: torch.save({**tensors, **new}, file)


def cut(number: int, **options):
    def write(file: Path, tensors: dict) -> None:
        torch.save(tensors, file, **options)
        file.write_bytes(file.read_bytes()[:number])

    return write


NOT_PLAIN = {
    "it asks to run torch.nn.modules.linear.Linear": saved(torch.nn.Linear(2, 2)),
    "holds a list; only a dictionary of tensors": saved([torch.ones(2)]),
    "holds a Tensor; only a dictionary of tensors": saved(torch.ones(2)),
    "state_dict is a dict": saved({"state_dict": {"a": torch.ones(2)}}),
    "epoch is a int": saved({"epoch": 3}),
    "a name is 3": saved({3: torch.ones(2)}),
    "a name is '__metadata__'": saved({"__metadata__": torch.ones(2)}),
    "holds no tensors": saved({}),
    "norm.weight is torch.float16, torch.sparse_coo": changed(norm__weight=torch.ones(64).half().to_sparse()),
    "norm.weight is torch.float32, torch.strided, on meta": changed(
        norm__weight=torch.ones(64, device="meta")
    ),
    "norm.weight is torch.complex64": changed(norm__weight=torch.ones(64, dtype=torch.complex64)),
    "norm.weight of [1125899906842624] is larger than the file": changed(
        norm__weight=torch.ones(1).expand(1 << 50)
    ),
    "can't be read (EOFError); fetch it again": lambda file, tensors: file.write_bytes(b""),
    "is damaged, or holds more than": lambda file, tensors: file.write_bytes(b"no pickle at all"),
    "is only a Git LFS pointer": lambda file, tensors: file.write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    ),
    "Invalid argument": cut(5000),
    "unexpected EOF": cut(5000, _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("words", NOT_PLAIN)
def test_no_state_dict(make, capsys, recwarn, words):
    source, tensors = make()
    NOT_PLAIN[words](source / "pytorch_model.bin", tensors)
    recwarn.clear()
    line = refused(capsys, source)
    assert words in line and str(source / "pytorch_model.bin") in line
    assert not recwarn.list


# ---- other mistakes


def test_a_source_that_is_none(make, capsys, tmp_path):
    source, _ = make()
    assert main(["draft", "convert"]) == 2 and "SRC" in capsys.readouterr().err
    assert f"there is no directory {tmp_path}/gone" in refused(capsys, tmp_path / "gone")
    assert "holds no weights; it should have pytorch_model.bin" in refused(capsys, source)
    (source / "a.bin").write_bytes(b"")
    (source / "b.pt").write_bytes(b"")
    assert "holds a.bin, b.pt and no pytorch_model.bin.index.json" in refused(capsys, source)
    assert "is a file; give the directory that holds it" in refused(capsys, source / "a.bin")
    (source / "config.json").unlink()
    assert "has no config.json" in refused(capsys, source)


def test_nothing_to_do(target, capsys, tiny_draft_dir):
    line = refused(capsys, tiny_draft_dir(target, "eagle3"))
    assert "has safetensors already, nothing is to be converted" in line


def test_a_hub_name_is_told_how_to_fetch(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, "yuhuili/EAGLE3-L")
    assert line.endswith(
        "hf download yuhuili/EAGLE3-L --local-dir EAGLE3-L && tokenspeed draft convert EAGLE3-L"
    )


@pytest.mark.parametrize("damage", ["missing", "short", "outside", "twice", "broken"])
def test_shards_that_are_not_whole(make, capsys, damage):
    source, tensors = make()
    first, second = shards(source, tensors)
    index = source / "pytorch_model.bin.index.json"
    places = json.loads(index.read_text())["weight_map"]
    name = next(name for name in places if places[name] == second)
    if damage == "missing":
        (source / second).unlink()
        words = f"names {second}, which is not there"
    elif damage == "short":
        torch.save({n: t for n, t in tensors.items() if n != name and places[n] == second}, source / second)
        words = f"{second} lacks {name}, which the index promises"
    elif damage == "outside":
        index.write_text(json.dumps({"weight_map": {**places, name: f"../draft/{second}"}}))
        words = "is no index of weight files"
    elif damage == "twice":
        torch.save({n: t for n, t in tensors.items() if n == name or places[n] == first}, source / first)
        words = f"{second} holds {name}, which another file holds too"
    else:
        index.write_text("{")
        words = "is no index of weight files"
    assert words in refused(capsys, source)


def test_a_draft_that_is_not_understood(make, capsys):
    """Only what the engine would take is written; the message names what the user has, not what was in the making."""
    source, tensors = make()
    torch.save({n: t for n, t in tensors.items() if n != "norm.weight"}, source / "pytorch_model.bin")
    assert refused(capsys, source).endswith(f"{source} lacks tensor norm.weight")
    torch.save({**tensors, "d2t": tensors["d2t"] + 10_000}, source / "pytorch_model.bin")
    assert f"d2t of {source} maps draft token 0 to " in refused(capsys, source)
    torch.save(tensors, source / "pytorch_model.bin")
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "expert_count": 4}))
    assert f"{source}/config.json can't be used as eagle3 draft: unknown key expert_count" in refused(
        capsys, source
    )


def test_an_output_that_is_there(make, capsys, tmp_path):
    source, tensors = make()
    torch.save(tensors, source / "pytorch_model.bin")
    (tmp_path / "file").write_text("mine")
    assert "is not empty; name another" in refused(capsys, source, "--output", source)
    assert "exists and is no directory" in refused(capsys, source, "--output", tmp_path / "file")
    assert f"there is no directory {tmp_path}/no " in refused(
        capsys, source, "--output", tmp_path / "no" / "out"
    )
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def small_files():
    """A file may have 20,000 bytes, so that a write fails half-way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_leaves_nothing(make, capsys, request):
    source, tensors = make()
    torch.save(tensors, source / "pytorch_model.bin")
    request.getfixturevalue("small_files")
    assert "can't be written (File too large)" in refused(capsys, source)


@pytest.mark.parametrize("moment", ["before", "at the end"])
def test_a_full_disk(make, capsys, monkeypatch, moment):
    source, tensors = make()
    torch.save(tensors, source / "pytorch_model.bin")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    if moment == "before":
        usage = shutil.disk_usage(source)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    else:
        monkeypatch.setattr(os, "fsync", full)
    assert f"no room for {source}-safetensors, 0.1 MiB; name a directory elsewhere" in refused(capsys, source)


def test_ctrl_c_leaves_nothing(make, monkeypatch):
    source, tensors = make()
    torch.save(tensors, source / "pytorch_model.bin")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    assert main(["draft", "convert", str(source)]) == 130
    assert left(source) == ["draft"]


def test_where_the_output_goes_by_default(make, monkeypatch):
    source, _ = make()
    expected = source.with_name("draft-safetensors")
    assert draft_convert.output_directory(source, None) == expected
    monkeypatch.chdir(source)
    assert draft_convert.output_directory(Path("."), None) == expected
    assert draft_convert.output_directory(Path("../draft/"), None) == Path("../draft-safetensors")


# ---- where a draft of pickles is refused


def test_the_refusal_names_a_command_that_works(make, target):
    source, tensors = make()
    torch.save(tensors, source / "pytorch_model.bin")
    with pytest.raises(ConfigError) as refusal:
        resolve.resolve_draft(str(source), "x", target, "eagle3")
    command = str(refusal.value).rsplit("convert it first: tokenspeed ", 1)[1]
    assert main(command.split()) == 0
    converted = str(source) + "-safetensors"
    assert resolve.resolve_draft(converted, "x", target, "eagle3") == Path(converted)
