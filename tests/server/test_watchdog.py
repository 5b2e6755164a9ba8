"""When silence of the ring counts as death, and when not (B36)."""

import asyncio

import pytest
from server_fakes import FakeRing

from tokenspeed.errors import EngineDead
from tokenspeed.ipc.messages import Drain, Stats, Texts, TokenIds, pack
from tokenspeed.params import SamplingParams
from tokenspeed.server.client import EngineClient
from tokenspeed.server.watchdog import Watchdog

PARAMS = SamplingParams(max_tokens=50, ignore_eos=True).resolved()


def looks(watchdog: Watchdog, seconds: float, num_open: int = 1) -> bool:
    return any(watchdog.look(num_open) for _ in range(round(seconds / watchdog.interval)))


def test_only_silence_while_something_is_open_counts():
    watchdog = Watchdog(5.0)
    assert not looks(watchdog, 100, num_open=0)
    assert not looks(watchdog, 5)
    assert looks(watchdog, 0.5)


@pytest.mark.parametrize(
    "sign", [Texts([]), TokenIds(1, pack([1])), Stats(num_running=1), Stats(num_waiting=1)]
)
def test_signs_of_life(sign):
    watchdog = Watchdog(5.0)
    for _ in range(10):
        assert not looks(watchdog, 4.5)
        watchdog.hear(sign)


@pytest.mark.parametrize("message", [Stats(), Drain(1.0)])
def test_no_signs_of_life(message):
    watchdog = Watchdog(5.0)
    assert not looks(watchdog, 4)
    watchdog.hear(message)
    assert looks(watchdog, 2)


def hanging(ticks):
    """A generation whose ring never ends it, `ticks` times with statistics of a busy scheduler after 0.05 s."""

    async def go():
        ring = FakeRing()
        client = EngineClient(ring, ring, watchdog_timeout=0.2)
        client.start()
        generation = client.generate(PARAMS, text="!hang")
        for _ in range(ticks):
            await asyncio.sleep(0.05)
            ring.give(Stats(num_running=1))
        assert client.error is None
        try:
            await asyncio.wait_for(_drain(generation), 1.0)
        finally:
            await client.close()
        return client.error

    return asyncio.run(go())


async def _drain(generation) -> None:
    async for _ in generation:
        pass


@pytest.mark.parametrize("ticks", [0, 20])
def test_a_silent_ring_fails_what_is_open(ticks):
    with pytest.raises(EngineDead, match=r"no sign of life for 0\.2 seconds"):
        hanging(ticks)


def test_an_idle_client_may_wait_for_ever():
    async def go():
        ring = FakeRing()
        client = EngineClient(ring, ring, watchdog_timeout=0.1)
        client.start()
        await asyncio.sleep(0.4)
        assert client.error is None
        await client.close()

    asyncio.run(go())


def test_a_consumer_that_does_not_read_is_no_silence():
    """The pieces of a paused stream wait in the server; nothing is open in the ring once they have come."""

    async def go():
        ring = FakeRing()
        client = EngineClient(ring, ring, watchdog_timeout=0.1)
        client.start()
        generation = client.generate(PARAMS, text="abc")
        await asyncio.sleep(0.5)
        assert client.error is None
        assert len("".join([piece.text async for piece in generation])) == 50
        await client.close()

    asyncio.run(go())
