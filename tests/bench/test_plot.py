"""What benchmarks/plot.py reads from result files, and the figures that the documents show."""

import json

import pytest
from matplotlib.axes import Axes

from benchmarks import plot
from tokenspeed.errors import ConfigError

MAX_BYTES = 60_000


def row(concurrency, speed, **more):
    return {"concurrency": concurrency, "output_tokens_per_second": speed, **more}


OURS = {
    "kind": "throughput",
    "model": "m",
    "gpu": ["a card"],
    "date": "2026-12-02T00:00:00",
    "engines": {
        "none": {"memory_target": 1},
        "eagle4": {
            "memory_target": 8_000_000_000,
            "dtype": "bfloat16",
            "calibration": '{"times":[[1,null,3000.0],[1,[8,4,16],4000.0],[64,null,9000.0]]}',
        },
    },
    "results": [
        row(1, 100.0, spec="none"),
        row(1, 250.0, spec="eagle4", speedup=2.5),
        row(8, 400.0, spec="none"),
        row(8, 800.0, spec="eagle4", speedup=2.0),
    ],
}
PEERS = {
    "kind": "peers",
    "results": [
        {**row(1, [90, 110]), "beside": "ours", "engine": "E", "method": "plain"},
        {**row(1, [150, 170]), "beside": "ours", "engine": "E", "method": "chain"},
        {**row(1, [1, 1]), "beside": "another", "engine": "E", "method": "plain"},
    ],
    "claims": [{"engine": "F", "method": "M", "model": "n", "gpu": "g", "concurrency": 64, "speedup": 1.4}],
}
ANATOMY = {
    "kind": "anatomy",
    "date": "2026-12-02T00:00:00",
    "results": [{"shape": "plain", "us": 2500.0, "batch": 1, "context": 256}],
}


@pytest.fixture
def files(tmp_path):
    """Paths of the three results by name."""
    named = {"ours": OURS, "peers": PEERS, "anatomy": ANATOMY}
    for name, data in named.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    return {name: str(tmp_path / f"{name}.json") for name in named}


@pytest.fixture
def lines(monkeypatch):
    """label -> points of every line that is drawn."""
    drawn = {}
    real = Axes.plot

    def keep(self, x, y, *args, **kwargs):
        drawn[kwargs["label"]] = [(a, pytest.approx(b)) for a, b in zip(x, y, strict=True)]
        return real(self, x, y, *args, **kwargs)

    monkeypatch.setattr(Axes, "plot", keep)
    return drawn


def test_throughput_beside_peers_of_the_same_target(files, lines, tmp_path):
    out = tmp_path / "a.png"
    assert plot.run(["throughput", files["ours"], files["peers"], "--out", str(out)]) == 0
    assert lines == {
        "none": [(1, 100), (8, 400)],
        "eagle4": [(1, 250), (8, 800)],
        "E, plain": [(1, 100)],
        "E, chain": [(1, 160)],
    }
    assert out.read_bytes()[:4] == b"\x89PNG"


def test_speedups_are_each_engines_own(files, lines, tmp_path):
    assert plot.run(["speedup", files["ours"], files["peers"], "--out", str(tmp_path / "a.png")]) == 0
    assert lines == {
        "ours: m (ours)": [(1, 2.5), (8, 2.0)],
        "E, chain (ours)": [(1, 1.6)],
        "stated: F M, n, g": [(64, 1.4)],
    }


def test_rounds_over_the_roofline(files, lines, tmp_path):
    """8 GB at 4 TB/s take 2 ms; 4 G parameters at 100 TFLOP/s take 80 us a row."""
    argv = ["round", files["anatomy"], files["ours"], "--tbps", "4", "--tflops", "100"]
    assert plot.run([*argv, "--out", str(tmp_path / "a.png")]) == 0
    (floor,) = [points for label, points in lines.items() if "TFLOP/s" in label]
    assert floor == [(1, 2.0), (16, 2.0), (64, 5.12)]
    assert lines["plain"] == [(1, 3.0), (64, 9.0)] and lines["8/4/16"] == [(16, 4.0)]


def test_files_that_fit_no_figure(files, tmp_path, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="needs a result of anatomy"):
        plot.run(["round", files["ours"]])
    with pytest.raises(ConfigError, match="not a throughput result"):
        plot.series({"results": [{"x": 1}]})
    bad = tmp_path / "bad.json"
    bad.write_text("[]")
    for path, words in ((bad, "of a kind that is drawn"), (tmp_path / "none.json", "can't be read")):
        monkeypatch.setattr("sys.argv", ["plot.py", "speedup", str(path)])
        assert plot.main() == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1


def test_the_figures_of_the_documents_are_there_and_small():
    for name, (figure, *stems) in plot.FIGURES.items():
        assert figure in plot.DRAW and 0 < (plot.RESULTS / f"{name}.png").stat().st_size <= MAX_BYTES
        assert all(plot.read(plot.RESULTS / f"{stem}.json")["results"] for stem in stems)
