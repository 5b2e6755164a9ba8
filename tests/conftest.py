"""Fixtures that tests of several areas share, and which marked tests run."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread costs more than it brings

import pytest
import torch
from tiny import make_tiny_draft, make_tiny_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="run the tests marked long too (or TOKENSPEED_LONG_TESTS=1)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = config.getoption("--long") or os.environ.get("TOKENSPEED_LONG_TESTS") == "1"
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU that torch can use"))
        if item.get_closest_marker("long") and not long:
            item.add_marker(pytest.mark.skip(reason="takes minutes to hours; ask for it with --long"))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model_dir(kind="llama", seed=0, **overrides) -> checkpoint directory; equal calls share it."""
    made: dict[str, Path] = {}

    def make(kind: str = "llama", seed: int = 0, **overrides) -> Path:
        key = repr((kind, seed, sorted(overrides.items())))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(kind), kind, seed, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_draft_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_draft_dir(target_dir, method="eagle4", **options) -> draft directory, as above."""
    made: dict[str, Path] = {}

    def make(target_dir: Path, method: str = "eagle4", **options) -> Path:
        key = repr((target_dir, method, sorted(options.items())))
        if key not in made:
            made[key] = make_tiny_draft(tmp_path_factory.mktemp(method), target_dir, method, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo model, fetched once into the cache (TOKENSPEED_CACHE or ~/.cache/tokenspeed)."""
    from tokenspeed.hub.resolve import resolve_model

    return resolve_model("demo", None, lambda *progress: None)


@pytest.fixture(scope="session")
def demo_draft_dir() -> Path:
    """The demo model's draft, which the package brings."""
    from tokenspeed.hub.resolve import DEMO_DRAFT

    return DEMO_DRAFT
