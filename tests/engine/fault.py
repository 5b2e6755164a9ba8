"""Puts changed functions in the place of others: what the tests of faults are made of."""

from collections.abc import Callable

import pytest


class Fault:
    """Changes functions for one test, and counts how often the changed ones were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls, self._monkeypatch = 0, monkeypatch

    def change(self, owner, name: str, changed: Callable) -> None:
        """changed(the function as it is, its arguments ...) takes the function's place."""
        original = getattr(owner, name)

        def counted(*args):
            self.calls += 1
            return changed(original, *args)

        self._monkeypatch.setattr(owner, name, counted)
