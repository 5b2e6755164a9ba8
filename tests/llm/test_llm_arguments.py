"""What `LLM` does on its own side of the ring: how many requests it keeps open, and what it refuses."""

import asyncio

import pytest

from tokenspeed.errors import RequestError
from tokenspeed.llm import LLM, RequestOutput
from tokenspeed.params import SamplingParams


class Counting(LLM):
    """Has no engine: an answer takes a few turns of the loop, the longer the higher its number."""

    def __init__(self):
        self.open = self.most = 0
        self.started: list[int] = []

    async def _one(self, number, prompt, params):
        self.started.append(number)
        self.open += 1
        self.most = max(self.most, self.open)
        for _ in range(number + 1):
            await asyncio.sleep(0)
        self.open -= 1
        return RequestOutput(str(number), None)


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (100, 10)])
def test_concurrency_is_a_closed_loop(concurrency, most):
    llm = Counting()
    work = llm._generate([{}] * 10, [SamplingParams()] * 10, False, concurrency)
    outputs = asyncio.run(work)
    assert [out.request_id for out in outputs] == [str(i) for i in range(10)]
    assert llm.most == most and llm.started == list(range(10))


@pytest.mark.parametrize("concurrency", [0, -1])
def test_concurrency_must_be_positive(concurrency):
    for call in (Counting().generate, Counting().chat):
        with pytest.raises(RequestError, match="concurrency must be at least 1"):
            call([], concurrency=concurrency)
