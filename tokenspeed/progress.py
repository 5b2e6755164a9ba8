"""Progress of slow starts (download, conversion, loading, capture) for the person who waits. No threads."""

import atexit
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LINE_SECONDS = 2.0  # without a terminal: a line at most this often...
LINE_SHARE = 0.1  # ...or when this much more is done

COUNTED_BELOW = 100_000  # larger totals are bytes, whose count says nothing to people


class Bars:
    """Shows steps by their text: live bars on a terminal, plain lines elsewhere.

    A text that comes again moves its bar, and `done == total` ends it. A text without a total is a line.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._rich: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._shown: dict[str, tuple[float, int]] = {}  # text -> (time, done) of its last plain line
        self._ended: set[str] = set()
        self._terminal = stream.isatty()

    def update(self, text: str, done: int = 0, total: int = 0) -> None:
        """Shows that `done` of `total` parts of the step `text` are there (any unit)."""
        if total <= 0:
            self._line(text)
        elif self._terminal:
            self._bar(text, done, total)
        else:
            self._sparse_line(text, done, total)

    def close(self) -> None:
        """Leaves the bars as they stand and gives the line back. Safe to call twice; `update` may follow."""
        if self._rich is not None:
            self._rich.stop()
            atexit.unregister(self.close)
        self._rich = None
        self._tasks.clear()

    def _line(self, text: str) -> None:
        if self._rich is not None:
            self._rich.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def _bar(self, text: str, done: int, total: int) -> None:
        if self._rich is None:
            self._rich = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                console=Console(file=self._stream),
                auto_refresh=False,  # a refresh thread would be one thread too many
                redirect_stdout=False,  # stdout may be a file: it is not ours
            )
            self._rich.start()
            atexit.register(self.close)  # an error may end us first, and rich hides the cursor
        if text not in self._tasks:
            self._tasks[text] = self._rich.add_task(text, total=total)
        self._rich.update(self._tasks[text], completed=done, total=total)
        self._rich.refresh()

    def _sparse_line(self, text: str, done: int, total: int) -> None:
        now = time.monotonic()
        last_time, last_done = self._shown.get(text, (-LINE_SECONDS, 0))
        ended = done >= total
        due = now - last_time >= LINE_SECONDS or done - last_done >= LINE_SHARE * total or ended
        if not due or (ended and text in self._ended):
            return
        if ended:
            self._ended.add(text)
        else:
            self._ended.discard(text)
        self._shown[text] = (now, done)
        count = f" ({done}/{total})" if total < COUNTED_BELOW else ""
        print(f"{text} {100 * min(done, total) // total}%{count}", file=self._stream, flush=True)
