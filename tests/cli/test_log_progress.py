"""Logging's format and the bars, on a terminal and off it."""

import io
import logging
import os
import threading

import pytest

import tokenspeed.progress
from tokenspeed.log import setup_logging
from tokenspeed.progress import Bars


@pytest.fixture
def root_logger():
    root, ours = logging.getLogger(), logging.getLogger("tokenspeed")
    kept = root.handlers[:], root.level, ours.level
    yield root
    root.handlers[:] = kept[0]
    root.setLevel(kept[1])
    ours.setLevel(kept[2])


def test_records_name_process_pid_and_level(root_logger):
    out = io.StringIO()
    setup_logging("worker", "info", out)
    setup_logging("worker", "info", out)  # again: no second handler
    logging.getLogger("tokenspeed.x").info("loaded %d of %s", 3, "five")
    logging.getLogger("tokenspeed.x").debug("hidden")
    logging.getLogger("other").info("hidden")
    logging.getLogger("other").warning("shown")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert f"INFO [worker {os.getpid()}] loaded 3 of five" in lines[0]
    assert "WARNING" in lines[1] and "shown" in lines[1]


def test_debug_shows_everything(root_logger):
    out = io.StringIO()
    setup_logging("100%", "debug", out)
    logging.getLogger("other").debug("shown")
    assert "[100% " in out.getvalue() and "shown" in out.getvalue()


def test_plain_lines_are_few(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tokenspeed.progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    bars = Bars(out)
    for done in range(1001):
        bars.update("loading weights", done, 1000)
    lines = out.getvalue().splitlines()
    assert 10 <= len(lines) <= 12
    assert lines[0] == "loading weights 0% (0/1000)" and lines[-1] == "loading weights 100% (1000/1000)"
    bars.update("slow", 0, 1000)
    now[0] += 1.0
    bars.update("slow", 1, 1000)  # too soon
    now[0] += 1.5
    bars.update("slow", 2, 1000)
    assert out.getvalue().splitlines()[len(lines) :] == ["slow 0% (0/1000)", "slow 0% (2/1000)"]
    bars.update("download", 10**8, 10**9)
    assert out.getvalue().splitlines()[-1] == "download 10%"
    bars.close()
    bars.close()


def test_a_text_without_total_is_a_line():
    out = io.StringIO()
    Bars(out).update("[bold]model[/bold] is ready")
    assert out.getvalue() == "[bold]model[/bold] is ready\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_bars_and_no_thread():
    out = Terminal()
    bars = Bars(out)
    before = threading.active_count()
    for done in (0, 5, 10):
        bars.update("capturing [graphs]", done, 10)
    bars.update("a line")
    assert threading.active_count() == before
    bars.close()
    text = out.getvalue()
    assert "capturing [graphs]" in text and "100%" in text and "a line" in text
    bars.update("again", 1, 2)  # after close a new display begins
    bars.close()
