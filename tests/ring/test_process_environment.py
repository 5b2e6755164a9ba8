"""What a child process is told of OpenMP."""

import pytest

from tokenspeed.ipc.process import _environment


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_children_spin_briefly_unless_the_user_says_otherwise(monkeypatch, given, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert _environment().get("GOMP_SPINCOUNT") == expected
