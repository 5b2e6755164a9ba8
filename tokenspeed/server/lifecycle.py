"""Where the server stands: starting, ready, draining or dead. Health and admission follow from it."""

from tokenspeed.errors import RequestError

STARTING, READY, DRAINING, DEAD = "starting", "ready", "draining", "dead"
_ORDER = (STARTING, READY, DRAINING, DEAD)


class Lifecycle:
    """Moves forward only: a dead engine does not become ready again."""

    def __init__(self) -> None:
        self.state = STARTING
        self.reason = "the engine is starting"

    def move(self, state: str, reason: str) -> None:
        """To a later state; a move backwards is ignored."""
        if _ORDER.index(state) > _ORDER.index(self.state):
            self.state, self.reason = state, reason

    @property
    def healthy(self) -> bool:
        return self.state == READY

    def check(self) -> None:
        """Raises RequestError 503 unless requests can be served."""
        if not self.healthy:
            message = f"the server is {self.state}: {self.reason}"
            raise RequestError(message, status=503, code=f"server_{self.state}")
