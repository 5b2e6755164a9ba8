"""A fake server for the tests of the clients."""

import pytest
from bench.fake_openai import Behaviour, running


@pytest.fixture
def behaviour() -> Behaviour:
    return Behaviour()


@pytest.fixture
def url(behaviour):
    with running(behaviour) as address:
        yield address
