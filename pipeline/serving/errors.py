"""What a request that is not done is answered."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path

from hamlet.artifacts import HamletError

Headers = list[tuple[bytes, bytes]]
Reply = tuple[int, bytes, Headers]
JSON = (b"content-type", b"application/json")
READ_SECONDS = 10.0  # in which a body must have come


class HTTPError(Exception):
    """A request that is answered with an HTTP status of its own and one line.

    `retry` is the number of seconds after which trying again makes sense, where it does.
    """

    def __init__(self, status: int, message: str, retry: int | None = None) -> None:
        self.status, self.message, self.retry = status, message, retry
        super().__init__(message)


def too_slow() -> HTTPError:
    return HTTPError(408, f"the body did not come within {READ_SECONDS:g} s")


def failed(error: Exception, log: Callable[..., None]) -> Reply:
    """What a client is told of an error; what no client should cause is logged."""
    if isinstance(error, HTTPError):
        status, body, headers = error_reply(error.status, error.message)
        if error.retry is not None:
            headers.append((b"retry-after", b"%d" % error.retry))
        return status, body, headers
    if isinstance(error, HamletError):
        return error_reply(400, str(error))
    where = traceback.extract_tb(error.__traceback__)[-1:]
    at = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in where]
    log("error", error=f"{type(error).__name__}: {error}"[:500], at=at)
    return error_reply(500, "the server failed; its log says why")


def error_reply(status: int, message: str) -> Reply:
    headers = [JSON]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    return status, json.dumps({"error": message}, ensure_ascii=False).encode(), headers
