"""The rules of the tree, as tests: who may import whom, what stays free of torch, how long a file may be, and
what must stand in no file at all."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tokenspeed"
MAX_LINES = 400

# What each unit may import of ours, beside itself; cli and the package's own __init__ may import anything.
# A unit is a package, but for the files named with a dot: they lie in a package that needs torch and need
# none themselves, so that the launcher and the scheduler can use them.
SETS = {
    "leaves": "errors params config log progress versions models.config",
    "draft": "spec.eagle4.config spec.eagle4.formats spec.eagle4.checkpoint",
    "control": "leaves ipc metrics cache hub",
    "plan": "spec.options spec.cost spec.gain spec.calibration spec.choose spec.plan",
    "compute": "kernels distributed layers attention models sampling structured spec plan draft",
}
LAYERS = """
    errors versions:
    models.config:           errors
    config:                  errors models.config
    params log progress:     errors config
    ipc cache hub:           leaves
    spec.options spec.cost spec.gain: leaves
    spec.calibration:        leaves hub
    spec.choose:             leaves spec.calibration spec.gain
    spec.plan:               leaves spec.calibration spec.choose spec.cost spec.gain
    metrics:                 leaves ipc
    scheduler:               leaves ipc cache metrics plan
    tokenizer:               leaves ipc hub
    server:                  leaves ipc hub metrics
    bench:                   leaves hub
    spec.eagle4.formats:     leaves spec.options
    spec.eagle4.checkpoint:  leaves spec.eagle4.formats
    spec.eagle4.config:      leaves spec.eagle4.formats spec.eagle4.checkpoint
    kernels distributed:     errors
    layers attention:        leaves kernels distributed
    models:                  leaves kernels distributed layers attention
    sampling:                leaves ipc kernels
    structured:              leaves
    spec:                    leaves hub kernels distributed layers attention models sampling plan draft
    worker:                  control compute
    train:                   control compute tokenizer bench launch worker
    launch:                  control server tokenizer scheduler worker plan draft
    llm:                     control server tokenizer launch
"""
NEEDS_TORCH = {
    "kernels",
    "distributed",
    "layers",
    "attention",
    "models",
    "sampling",
    "structured",
    "spec",
    "worker",
    "train",
}
HEAVY = {"torch", "triton", "flashinfer", "sgl_kernel", "transformers"}
CONTROL_PROCESSES = ("scheduler.process", "tokenizer.process", "server.process", "launch", "cli")

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
FORBIDDEN_CALLS = {"recv_pyobj", "send_pyobj", "os.system", "os.popen", "eval", "exec", "hasattr"}
FORBIDDEN_KEYWORDS = {"shell", "trust_remote_code"}  # with True
# Written in pieces, so that this file does not hold them.
MACHINE_PATHS = [f"/{'work'}/", f"/{'tmp'}/venv", f"/{'tmp'}/models", f"/{'root'}/"]
REGISTRY_HOSTS = [
    f"{'pypi'}.org",
    f"{'pythonhosted'}.org",
    f"registry.{'npmjs'}",
    f"deb.{'debian'}",
    "/opt/" + "pypi",
]


def names(text: str) -> set[str]:
    """Units of a line of the table, its sets spelled out."""
    return {unit for word in text.split() for unit in (names(SETS[word]) if word in SETS else [word])}


ALLOWED = {
    here: names(below)
    for left, below in (line.split(":") for line in LAYERS.strip().splitlines())
    for here in left.split()
}
TORCH_FREE = ALLOWED.keys() - NEEDS_TORCH
OWN_FILES = {unit for unit in ALLOWED if "." in unit}


def unit(module: str) -> str:
    """tokenspeed.spec.plan -> spec.plan, tokenspeed.ipc.channel -> ipc, tokenspeed -> the empty string."""
    tail = module.removeprefix("tokenspeed").removeprefix(".")
    return tail if tail in OWN_FILES else tail.split(".")[0]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file names, those imported inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: a relative import"
            for alias in node.names:  # `from package import module` names the module, not the package
                child = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = child.is_dir() or child.with_suffix(".py").exists()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def modules() -> Iterator[tuple[Path, str]]:
    """Files of the package with their unit, without those that may import anything."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if unit(module) not in ("", "cli", "__main__"):
            yield path, unit(module)


def tree(*suffixes: str) -> list[Path]:
    """Files of the repository, without what git ignores and without weights and results."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout, so the tree can't be told from build output")
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return [p for p in paths if p.is_file() and (p.suffix in suffixes if suffixes else True)]


def test_imports_follow_the_layers():
    bad = set()
    for path, here in modules():
        assert here in ALLOWED, f"{path.relative_to(ROOT)}: give {here!r} a line in ALLOWED"
        for name in imports(path):
            there = unit(name)
            if name.split(".")[0] == "tokenspeed" and there and there not in ALLOWED[here] | {here}:
                bad.add(f"{path.relative_to(ROOT)}: {here} -> {there}")
    assert not bad, "\n".join(sorted(bad))


def test_layers_have_no_cycle():
    done: set[str] = set()
    while ready := {u for u, below in ALLOWED.items() if u not in done and below <= done}:
        done |= ready
    assert done == set(ALLOWED), f"these import each other: {sorted(set(ALLOWED) - done)}"


def test_control_plane_imports_no_torch():
    bad = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, here in modules()
        if here in TORCH_FREE
        for name in imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("module", CONTROL_PROCESSES)
def test_control_process_starts_without_torch(module):
    """Third parties may pull torch in, which no reading of our own files shows."""
    code = f"import sys, tokenspeed.{module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_files_are_short_and_say_their_duty():
    bad = []
    for path in tree(".py"):
        text = path.read_text()
        if (count := text.count("\n")) > MAX_LINES:
            bad.append(f"{path.relative_to(ROOT)}: {count} lines, {MAX_LINES} at most")
        if text.strip() and not ast.get_docstring(ast.parse(text)):
            bad.append(f"{path.relative_to(ROOT)}: begins with no docstring")
    assert not bad, "\n".join(bad)


def forbidden(path: Path) -> Iterator[str]:
    """What the file does that no file may: unsafe loading, shells, code made of data, probing."""
    yield from (name for name in imports(path) if name.split(".")[0] in FORBIDDEN_MODULES)
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in FORBIDDEN_CALLS or name.split(".")[-1] in FORBIDDEN_CALLS - {
            "eval"
        }:  # model.eval() is fine
            yield f"{name}() in line {node.lineno}"
        true = {k.arg for k in node.keywords if isinstance(k.value, ast.Constant) and k.value.value is True}
        if name == "torch.load" and "weights_only" not in true:
            yield f"torch.load without weights_only=True in line {node.lineno}"
        yield from (f"{word}=True in line {node.lineno}" for word in true & FORBIDDEN_KEYWORDS)


def test_no_forbidden_code():
    bad = [
        f"{path.relative_to(ROOT)}: {what}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for what in forbidden(path)
    ]
    assert not bad, "\n".join(bad)


def test_forbidden_code_is_found(tmp_path):
    lines = ["import pickle", "torch.load(path)", "run(it, shell=True)", "hasattr(run, it)", "model.eval()"]
    source = "\n".join(lines)
    (tmp_path / "bad.py").write_text(source)
    assert [w.split(" ")[0] for w in forbidden(tmp_path / "bad.py")] == [
        "pickle", "torch.load", "shell=True", "hasattr()",
    ]  # fmt: skip


def test_no_tests_are_left_out_silently():
    bad = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.name != Path(__file__).name
        and re.search(r"\bxfail\b|skip\(\)|@pytest\.mark\.skip\b", path.read_text())
    ]
    assert not bad, f"a skip needs a reason that is checked when the test runs: {bad}"


def test_no_file_names_a_machine_or_a_registry():
    words = MACHINE_PATHS + REGISTRY_HOSTS
    bad = []
    for path in tree():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # weights and pictures
        if any(word in text for word in words):
            bad += [f"{path.relative_to(ROOT)}: {word}" for word in words if word in text]
    assert not bad, "\n".join(bad)


def test_basenames_of_tests_are_unique():
    """tests/ has no __init__.py, so two test files of one name would be one module."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)), sorted(n for n in set(names) if names.count(n) > 1)
