"""Notices that the ring hangs: something is open, and nothing comes that shows work on it."""

from tokenspeed.ipc.messages import Decoded, Message, Stats, Texts, TokenIds


class Watchdog:
    """Counts how long the ring has shown no sign of life.

    Signs are answers, and the statistics of a scheduler that has requests: it sends them every half second,
    however long the worker's step takes. The statistics of an idle scheduler are none, since what is open is
    then in the tokenizer, which itself tells that it is at work (a `Texts` without any).

    Time is counted in looks of `interval` seconds and not by the clock, so that a pause of this very process
    is no silence of the others.
    """

    def __init__(self, timeout: float):
        """timeout: seconds of silence that are too many."""
        self.timeout = timeout
        self.interval = min(timeout / 10, 1.0)
        self._looks = 0

    def hear(self, message: Message) -> None:
        """Takes note of a message of the ring."""
        working = isinstance(message, Stats) and message.num_running + message.num_waiting > 0
        if working or isinstance(message, (Texts, TokenIds, Decoded)):
            self._looks = 0

    def look(self, num_open: int) -> bool:
        """Whether the silence has lasted too long. Call it once every `interval`."""
        self._looks = self._looks + 1 if num_open else 0
        return self._looks * self.interval > self.timeout
