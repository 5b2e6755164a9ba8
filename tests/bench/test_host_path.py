"""benchmarks/host_path.py measures what it says: every row of every round goes through each stage."""

import importlib.util
from pathlib import Path

import pytest

from tokenspeed.config import Config
from tokenspeed.launch import resolve
from tokenspeed.tokenizer.encoder import Encoder

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "host_path.py"


@pytest.fixture(scope="module")
def host_path():
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tokens", [1, 4])
def test_every_stage_sees_every_row(host_path, tiny_model_dir, tokens):
    resolved = resolve(Config(model=str(tiny_model_dir("llama")), device="cpu"), lambda *_: None)
    load = host_path.Load(resolved, Encoder.load(resolved.model_dir), 3, tokens, 5)
    scheduler, _ = host_path.decoding_scheduler(load)
    step = scheduler.schedule()
    outputs = scheduler.update(host_path.answer(load, step, 0))
    assert [len(output.token_ids) // 4 for output in outputs] == [tokens] * 3
    loop, to_server = host_path.tokenizer_loop(load)
    loop.handle([next(load.outputs())])
    assert [len(text.token_ids) // 4 for text in to_server[-1].texts] == [tokens] * 3
    us = {
        "worker": host_path.worker_time(load),
        **host_path.scheduler_times(load),
        **host_path.message_times(load),
        "tokenizer": host_path.tokenizer_time(load),
        "offline client": host_path.uvloop.run(host_path.offline_time(load)),
    }
    assert len(us) == 9 and min(us.values()) > 0
