"""Names of models and drafts: what is found, and what is refused in one line before anything slow begins."""

import json
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tokenspeed.errors import ConfigError
from tokenspeed.hub import resolve, snapshot
from tokenspeed.hub.checkpoint import check_safetensors, weight_files
from tokenspeed.hub.resolve import resolve_draft, resolve_model


def quiet(text, done, total):
    pass


def checkpoint(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    save_file({"a": np.zeros((4, 8), np.float16), "b": np.ones(3, np.float32)}, path / "model.safetensors")
    return path


def refused(name: str) -> str:
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        resolve_model(name, None, quiet)
    assert time.monotonic() - begin < 10
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_directory(tmp_path, monkeypatch):
    path = checkpoint(tmp_path / "org" / "name")
    assert resolve_model(str(path), None, quiet) == path
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name", None, quiet) == Path("org/name")  # a directory goes before the hub
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org/name", None, quiet) == path


@pytest.mark.parametrize(
    "name", ["/no/such", "./no", "../no", "~/no", "a/b/c", "no/", "no.gguf", "a b", "-x"]
)
def test_paths_that_are_not_there(name):
    assert "there is no directory" in refused(name)


def test_files_that_are_no_model(tmp_path):
    (tmp_path / "x.txt").write_text("")
    assert "no .gguf" in refused(str(tmp_path / "x.txt"))
    (tmp_path / "x.gguf").write_text("not")
    assert "cut short or damaged" in refused(str(tmp_path / "x.gguf"))


def test_directories_that_cannot_be_loaded(tmp_path):
    path = checkpoint(tmp_path / "m")
    weights = path / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    assert "model.safetensors is cut short" in refused(str(path))
    weights.unlink()
    assert "holds no *.safetensors" in refused(str(path))
    (path / "pytorch_model.bin").write_text("")
    said = refused(str(path))
    assert "pytorch_model.bin" in said and "safetensors only" in said
    (path / "config.json").unlink()
    assert "no config.json" in refused(str(path))


def header(entries: dict, data: bytes = b"") -> bytes:
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"{{{{",
        struct.pack("<Q", 2) + b"\xff\xff",
        header({"a": 5}),
        header({"a": {"dtype": "F32"}}),
        header({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"0" * 12),
        header({"a": entry(4, 12, [2])}, b"0" * 12),
        header({"a": entry(0, 8, [3])}, b"0" * 8),
        header({"a": entry(0, 8, ["x"])}, b"0" * 8),
        header({"a": entry(0, 8, [2])}, b"0" * 7),
    ],
)
def test_damaged_safetensors(tmp_path, data):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"x\.safetensors") as caught:
        check_safetensors(path)
    assert "\n" not in str(caught.value)


def test_sound_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    for entries, data in (
        ({}, b""),
        ({"__metadata__": {"format": "pt"}, "b": entry(8, 12, []), "a": entry(0, 8, [2, 1])}, b"0" * 12),
        ({"empty": entry(0, 0, [0, 5]), "a": entry(0, 4, [4], "U8")}, b"0" * 4),
        ({"odd": entry(0, 3, [6], "F4")}, b"0" * 3),
    ):
        path.write_bytes(header(entries, data))
        check_safetensors(path)


def test_the_index_names_the_files(tmp_path):
    path = checkpoint(tmp_path / "m")
    index = path / "model.safetensors.index.json"
    (path / "stray.safetensors").write_bytes(b"")
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}))
    assert weight_files(path) == [path / "model.safetensors"]
    for content, says in (
        ('{"weight_map": {"a": "gone.safetensors"}}', "names gone.safetensors"),
        ('{"weight_map": {"a": "../m/model.safetensors"}}', "names ../m"),
        ("{}", "not an index"),
        ("[1]", "not an index"),
        ("{", "not an index"),
    ):
        index.write_text(content)
        assert says in refused(str(path))


# ---- the hub, without a network


@pytest.fixture
def hub(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return huggingface_hub


def test_hub_that_cannot_be_asked(hub):
    said = refused("no-such-org/no-such-model")
    assert (
        "there is no directory no-such-org/no-such-model" in said and "check the name and the network" in said
    )


def test_hub_that_never_answers(hub, monkeypatch):
    monkeypatch.setattr(snapshot, "DEADLINE", 0.2)
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *a, **k: time.sleep(30))
    assert "no answer in" in refused("org/name")


def test_hub_without_the_model_or_without_safetensors(hub, monkeypatch):
    from types import SimpleNamespace

    from huggingface_hub import errors

    def raising(kind):
        def ask(*args, **kwargs):
            raise kind(
                "said at length\nand more",
                response=SimpleNamespace(headers={}, request=None, status_code=404),
            )

        return ask

    for kind, says in (
        (errors.RepositoryNotFoundError, "no model of that name"),
        (errors.GatedRepoError, "HF_TOKEN"),
        (errors.RevisionNotFoundError, "no revision"),
        (errors.HfHubHTTPError, "said at length"),
    ):
        monkeypatch.setattr(hub.HfApi, "model_info", raising(kind))
        assert says in refused("org/name")
    files = SimpleNamespace(sha="1", siblings=[SimpleNamespace(rfilename="pytorch_model.bin")])
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *a, **k: files)
    assert "holds no *.safetensors" in refused("org/name")


def test_hub_model_is_fetched(hub, monkeypatch, tmp_path):
    from types import SimpleNamespace

    path = checkpoint(tmp_path / "snapshot")
    files = SimpleNamespace(sha="abc", siblings=[SimpleNamespace(rfilename="model.safetensors")])
    asked = {}
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *a, **k: files)
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **k: asked.update(k, name=name) or str(path))
    assert resolve_model("org/name", "main", quiet) == path
    assert asked["revision"] == "abc" and not any(
        p.endswith((".bin", ".py", "*")) for p in asked["allow_patterns"]
    )


# ---- drafts


def test_drafts(tmp_path, monkeypatch):
    model, named = checkpoint(tmp_path / "model"), checkpoint(tmp_path / "named")
    with pytest.raises(ConfigError, match="no eagle4 draft is known for x; name one with --draft"):
        resolve_draft(None, "x", model, "eagle4")
    own = checkpoint(model / "draft")
    assert resolve_draft(None, "x", model, "eagle4") == own
    assert resolve_draft(str(named), "x", model, "eagle4") == named
    packaged = checkpoint(tmp_path / "packaged")
    monkeypatch.setattr(resolve, "DEMO_DRAFT", packaged)
    assert resolve_draft(None, "demo", model, "eagle4") == packaged
    asked = []
    monkeypatch.setattr(snapshot, "fetch_snapshot", lambda name, *a: asked.append(name) or packaged)
    assert resolve_draft(None, "meta-llama/Llama-3.1-8B-Instruct", model, "eagle3") == packaged
    assert asked == ["yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"]


def test_a_draft_of_pickles(tmp_path):
    path = checkpoint(tmp_path / "draft")
    (path / "model.safetensors").rename(path / "pytorch_model.pt")
    with pytest.raises(ConfigError, match="tokenspeed draft convert"):
        resolve_draft(str(path), "x", tmp_path, "eagle3")
    with pytest.raises(ConfigError, match="there is no directory"):
        resolve_draft("./gone", "x", tmp_path, "eagle3")
