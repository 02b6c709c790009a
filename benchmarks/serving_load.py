"""HTTP load from one process, as cheap as Python makes it: on a small machine the generator must
not be what is measured. One thread, one epoll loop, requests prepared as bytes.

A *talk* is a generator that yields requests and is sent the responses, one connection each.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

Talk = Generator[bytes, bytes, None]


class Connection:
    """One keep-alive connection and its talk."""

    def __init__(self, host: str, port: int, talk: Talk) -> None:
        self.talk, self.got, self.sent_at = talk, b"", 0.0
        self.request = next(talk, None)
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> None:
        self.sent_at = time.perf_counter()
        assert self.request is not None
        self.socket.sendall(self.request)

    def receive(self) -> bytes | None:
        """A whole response, or None while some of it is missing."""
        more = self.socket.recv(65536)
        if not more:
            raise ConnectionError("the server closed the connection")
        self.got = got = self.got + more if self.got else more
        length = response_length(got)
        if length is None or len(got) < length:
            return None
        self.got = b""
        return got


def response_length(got: bytes) -> int | None:
    """Length of a whole HTTP response or WebSocket message (of one unmasked frame), or None if not
    enough of it is here to know."""
    if got[:1] != b"H":
        if len(got) < 2:
            return None
        short, more = got[1], {126: 2, 127: 8}.get(got[1], 0)
        if len(got) < 2 + more:
            return None
        return 2 + more + (int.from_bytes(got[2 : 2 + more]) if more else short)
    end = got.find(b"\r\n\r\n")
    if end < 0:
        return None
    at = got.find(b"content-length: ", 0, end)
    return end + 4 + (int(got[at + 16 : got.find(b"\r", at)]) if at > 0 else 0)


def status_of(response: bytes) -> bytes:
    """The status of an HTTP response; of a WebSocket message 200, or 400 where it is no answer."""
    if response[:1] == b"H":
        return response[9:12]
    return b"200" if b'"outputs"' in response else b"400"


def upgrade(path: str) -> bytes:
    """The request that begins a WebSocket."""
    return (
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n"
    ).encode()


def message(text: bytes) -> bytes:
    """A text message of a client; its mask is zero, which changes nothing."""
    if len(text) < 126:
        size = bytes([0x80 | len(text)])
    else:
        size = bytes([0x80 | 126]) + len(text).to_bytes(2)
    return b"\x81" + size + bytes(4) + text


def load(
    host: str, port: int, talks: Iterable[Talk], seconds: float, rate: float | None = None
) -> dict[str, Any]:
    """Talk for `seconds`, each connection sending its next request when it is answered.

    Args:
        talks: one per connection; one that ends closes its connection.
        rate: requests per second of all together at most; None: as fast as they are answered.

    Returns:
        requests_per_s, p50_ms and p99_ms (without the first fifth, at most a second), counts by
        status, and how many connections the server closed: the talks of these are closed too.
    """
    selector = selectors.DefaultSelector()
    open_ = [c for c in (Connection(host, port, talk) for talk in talks) if c.request is not None]
    for connection in open_:
        selector.register(connection.socket, selectors.EVENT_READ, connection)
    latencies: list[float] = []
    statuses: Counter[bytes] = Counter()
    began = now = time.perf_counter()
    measured_from, until = began + min(1.0, seconds / 5), began + seconds
    ready = deque(open_)
    sent = closed = 0

    def end(connection: Connection) -> None:
        connection.talk.close()
        selector.unregister(connection.socket)
        connection.socket.close()

    def broken(connection: Connection) -> None:
        nonlocal closed
        if connection.socket.fileno() >= 0:  # it may wait to send and be found closed as well
            closed += 1
            end(connection)

    def send(connection: Connection) -> None:
        nonlocal sent
        try:
            connection.send()
        except OSError:
            broken(connection)
        sent += 1

    while now < until and (ready or selector.get_map()):
        while ready and (rate is None or sent < rate * (now - began)):
            send(ready.popleft())
        for key, _ in selector.select(0.001 if ready else 1.0):
            connection = key.data
            try:
                response = connection.receive()
            except OSError:
                broken(connection)
                continue
            if response is None:
                continue
            now = time.perf_counter()
            statuses[status_of(response)] += 1
            if now > measured_from:
                latencies.append(now - connection.sent_at)
            try:
                connection.request = connection.talk.send(response)
            except StopIteration:
                end(connection)
                continue
            if rate is None:
                send(connection)
            else:
                ready.append(connection)
        now = time.perf_counter()
    for connection in open_:
        connection.socket.close()
    latencies.sort()
    count = len(latencies)
    return {
        "requests_per_s": count / (now - measured_from),
        "p50_ms": 1e3 * latencies[count // 2] if count else None,
        "p99_ms": 1e3 * latencies[int(count * 0.99)] if count else None,
        "closed": closed,
        "statuses": {status.decode(): n for status, n in sorted(statuses.items())},
    }


def repeat(first: bytes, rest: Sequence[bytes]) -> Talk:
    """`first` once, then `rest` in turn for ever."""
    yield first
    while True:
        for request in rest:  # noqa: UP028 - a list takes no responses
            yield request


def main() -> None:
    """`serving_load.py HOST PORT SECONDS FILE`: lines of JSON [first, rest...], each in hex."""
    if hasattr(os, "SCHED_BATCH"):  # never interrupt the server on a core that both need
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    host, port, seconds, file = sys.argv[1:]
    talks = []
    for line in Path(file).read_text().splitlines():
        first, *rest = (bytes.fromhex(text) for text in json.loads(line))
        talks.append(repeat(first, rest))
    print(json.dumps(load(host, int(port), talks, float(seconds))))


if __name__ == "__main__":
    main()
