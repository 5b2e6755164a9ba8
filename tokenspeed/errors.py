"""The kinds of failure: a user's start-up mistake, a user's request mistake, an engine that is gone."""


class ConfigError(Exception):
    """A start-up problem the user can mend. The message is one line that says what to do; the CLI exits with 2."""


class RequestError(Exception):
    """A request that can't be served as asked.

    Args:
        message: one sentence for the client.
        param: the request field at fault, or None.
        status: HTTP status (400 invalid, 404 unknown model, 413 too large, 429/503 no room).
        code: OpenAI's error code where there is one, for example "context_length_exceeded".
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


class EngineDead(Exception):
    """A process of the ring has died; nothing more can be generated."""
