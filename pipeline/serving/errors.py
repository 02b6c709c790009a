"""What a request that is not done is answered."""

from __future__ import annotations


class HTTPError(Exception):
    """A request that is answered with an HTTP status of its own and one line.

    `retry` is the number of seconds after which trying again makes sense, where it does.
    """

    def __init__(self, status: int, message: str, retry: int | None = None) -> None:
        self.status, self.message, self.retry = status, message, retry
        super().__init__(message)
