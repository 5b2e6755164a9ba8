"""Builds csrc into the wheel where nvcc is found; all else stands in pyproject.toml.

TOKENSPEED_BUILD_CUDA=0 forbids it and 1 demands it; an editable install does it only where demanded.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
ENV = "TOKENSPEED_BUILD_CUDA"


def load_build():
    """tokenspeed.kernels.build by its path: by its name it would bring torch, which need not be here."""
    sys.path.insert(0, str(ROOT))
    path = ROOT / "tokenspeed" / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("kernels_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithCuda(build_py):
    """The package, and the CUDA library in it."""

    def run(self) -> None:
        super().run()
        choice = os.environ.get(ENV, "")
        if choice not in ("", "0", "1"):
            sys.exit(f"error: {ENV} is {choice!r}; 0 forbids the CUDA library, 1 demands it")
        if not self.editable_mode:
            self.library.unlink(missing_ok=True)  # of an earlier build
        if choice == "0" or (self.editable_mode and not choice):
            return
        build = load_build()
        try:
            build.build(self.library)
        except build.ConfigError as error:
            if choice:
                sys.exit(f"error: {error}")
            self.warn(f"going on without the CUDA library: {str(error).splitlines()[0]}")

    @property
    def library(self) -> Path:
        top = ROOT if self.editable_mode else Path(self.build_lib)
        return top / "tokenspeed" / "kernels" / "libtokenspeed_cuda.so"


class WheelWithCuda(bdist_wheel):
    """For one platform where the library is inside, else for any; for every Python in both cases."""

    def run(self) -> None:
        self.run_command("build")
        if self.get_finalized_command("build_py").library.exists():
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True  # all goes where libraries of a platform go
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithCuda, "bdist_wheel": WheelWithCuda})
