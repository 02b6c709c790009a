"""Headers that change what a request is or may: the token, browsers of other origins, packed
bodies, traces."""

from __future__ import annotations

import hmac
import re
import time
import zlib
from collections.abc import Callable

from hamlet.artifacts import HamletError
from hamlet.serving.errors import Headers, HTTPError, Reply

MAX_BODY = 1 << 20  # bytes; a full batch of observations and states is a quarter of it
_TRACE = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


def authorize(headers: Headers, token: bytes | None) -> None:
    """HTTPError with 401 without the bearer token, where one is asked for."""
    if token is None:
        return
    for name, value in headers:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            right = hmac.compare_digest(given.strip(), token)
            if scheme.lower() == b"bearer" and right:
                return
    raise HTTPError(401, "the bearer token is missing or wrong")


def cors(headers: Headers, origins: tuple[bytes, ...]) -> Headers:
    """What a browser must read in the answer to a page of another origin that may ask."""
    if not origins:
        return []
    origin = next((value for name, value in headers if name == b"origin"), None)
    if origin is None or (b"*" not in origins and origin not in origins):
        return []
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", b"inference-header-content-length, retry-after"),
        (b"vary", b"origin"),
    ]


def same_origin(headers: Headers, origins: tuple[bytes, ...]) -> None:
    """HTTPError with 403 where a browser says that a page of another origin, which may not ask,
    opens a WebSocket: browsers let any page do so."""
    told = dict(headers)
    origin = told.get(b"origin")
    if origin is None or b"*" in origins or origin in origins:
        return
    if origin.partition(b"://")[2].lower() != told.get(b"host", b"").lower():
        raise HTTPError(403, "pages of this origin may not ask: see --allow-origin")


def preflight(method: str, headers: Headers, origins: tuple[bytes, ...]) -> Reply | None:
    """The answer to a browser that asks whether a page may ask; None if it is no such."""
    asked = dict(headers)
    if method != "OPTIONS" or b"access-control-request-method" not in asked:
        return None
    if not cors(headers, origins):
        return 204, b"", []
    wanted = asked.get(b"access-control-request-headers", b"")
    return (
        204,
        b"",
        [
            (b"access-control-allow-methods", b"GET, POST, PUT, DELETE"),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", b"600"),
        ],
    )


def trace(headers: Headers, path: str, status: int, began: float, log: Callable[..., None]) -> None:
    """A line of the log for a request that is being traced (W3C Trace Context, sampled)."""
    for name, value in headers:
        if name == b"traceparent":
            found = _TRACE.fullmatch(value)
            if found and int(found[3], 16) & 1:
                log(
                    "request",
                    trace=found[1].decode(),
                    parent=found[2].decode(),
                    path=path,
                    status=status,
                    seconds=round(time.monotonic() - began, 6),
                )
            return


def unpacked(body: bytes) -> bytes:
    """A body that was sent as gzip or deflate; never more than `MAX_BODY`.

    Raises:
        HTTPError: 413 it is larger. HamletError: it is neither.
    """
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either, by its first bytes
    try:
        plain = unpacker.decompress(body, MAX_BODY + 1)
    except zlib.error as error:
        raise HamletError(f"the body is not what its Content-Encoding says ({error})") from None
    if len(plain) > MAX_BODY:
        raise HTTPError(413, f"the body unpacks to more than the {MAX_BODY} bytes that are read")
    if not unpacker.eof:
        raise HamletError("the packed body is cut short")
    return plain
