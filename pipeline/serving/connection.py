"""The short way for the one request that comes thousands of times a second.

A connection of uvicorn as it is, except that `POST /v2/models/NAME/infer` goes from the
HTTP parser to the engine, and its answer to the socket, without a task and ASGI messages between
them: that is a third of the work of a request. Everything else, pipelined requests behind an
unanswered one too, takes uvicorn's way to the ASGI application.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sized
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from hamlet.serving.app import App
from hamlet.serving.errors import READ_SECONDS, Reply, failed, too_slow
from hamlet.serving.headers import MAX_BODY, authorize, cors, trace

MAX_HEAD = 1 << 16  # bytes of a request's line and headers
MAX_KNOWN, MAX_KNOWN_BYTES = 1000, 2048  # heads remembered, and how long they may be
_OFFERS = (b"upgrade", b"http2-settings")  # of another protocol
_OK = STATUS_LINE[HTTPStatus.OK]


class Head(NamedTuple):
    """The line and the headers of requests on the short way, understood: a client sends the same
    ones at every tick."""

    keep_alive: bool
    header_length: bytes | None
    headers: list[tuple[bytes, bytes]]
    body_bytes: int


class _Short:
    """A request on the short way; to uvicorn, a cycle like its own."""

    __slots__ = (
        "began", "body", "disconnected", "header_length", "headers", "keep_alive", "message_event",
        "reading", "response_complete",
    )  # fmt: skip

    def __init__(
        self, keep_alive: bool, header_length: bytes | None, headers: list[tuple[bytes, bytes]]
    ) -> None:
        self.keep_alive, self.header_length, self.headers = keep_alive, header_length, headers
        self.body = b""
        self.began = time.monotonic()
        self.reading = True
        self.disconnected = self.response_complete = False
        self.message_event = _NOTHING


class _Nothing:
    """Where nobody waits."""

    def set(self) -> None:
        pass


_NOTHING = _Nothing()


class _Flow(FlowControl):
    """Reads nothing more while requests wait that were read already: uvicorn reads on with each
    of them, so that they pile up where a client sends faster than it is answered."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self.pipeline = pipeline

    def resume_reading(self) -> None:
        if not self.pipeline:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """A client's connection.

    Attributes:
        idle_since: when its last request was answered; None before the first and within a request.
            `give_up` closes who is idle for too long: a timer for every request costs more.
    """

    idle_since: float | None = None

    upgrade_ignored = False

    in_head = head_is_new = False
    """Whether a request's head is being read, and whether it began in the last piece."""
    in_message = False
    """Whether the parser has a part of a request."""
    head_bytes = 0
    """Of that head, without its first piece, which may hold other requests too."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)

    def data_received(self, data: bytes) -> None:
        """Feed the parser. It ends a message at the headers where one offers another protocol
        (`Upgrade: h2c`, as curl and Java do): unless that is a WebSocket, the offer is declined as
        HTTP/1.1 allows, and the request is parsed again without it, with its body."""
        self._unset_keepalive_if_required()
        fresh = not self.in_message
        if fresh and self._is_known(data):
            return
        while True:
            try:
                self.parser.feed_data(data)
                if self.in_head:
                    self._head_goes_on(len(data))
                if fresh:
                    self._remember(data)
                return
            except httptools.HttpParserUpgrade as error:
                if not self.upgrade_ignored:
                    self.handle_websocket_upgrade()
                    return
                if self.parser.get_method() == b"CONNECT":
                    self.send_400_response("This is no proxy.")
                    return
                data = self._without_upgrade() + data[error.args[0] :]
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def _is_known(self, data: bytes) -> bool:
        """Whether these bytes are one whole request with a head that was understood before; then it
        is on its way, past the parser."""
        if self.pipeline or self.flow.write_paused:
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        end = data.find(b"\r\n\r\n") + 4
        app: Any = self.config.app
        head = app.heads.get(data[:end])
        if head is None or len(data) - end != head.body_bytes:
            return False
        short = _Short(head.keep_alive, head.header_length, head.headers)
        short.body = data[end:]
        self.cycle = short  # type: ignore[assignment]
        self._read(short)
        return True

    def _remember(self, data: bytes) -> None:
        """Keep the head if these bytes are one whole request on the short way: then what follows
        the head is as long as it says."""
        cycle: Any = self.cycle
        end = data.find(b"\r\n\r\n") + 4
        if type(cycle) is not _Short or end > MAX_KNOWN_BYTES:
            return
        body_bytes = len(data) - end
        if (b"content-length", b"%d" % body_bytes) in cycle.headers:
            app: Any = self.config.app
            if len(app.heads) >= MAX_KNOWN:
                app.heads.clear()
            head = Head(cycle.keep_alive, cycle.header_length, cycle.headers, body_bytes)
            app.heads[data[:end]] = head

    def _head_goes_on(self, size: int) -> None:
        if self.head_is_new:
            self.head_is_new = False
            return
        self.head_bytes += size
        if self.head_bytes > MAX_HEAD and not self.transport.is_closing():
            body = b'{"error": "the headers are more than %d bytes"}' % MAX_HEAD
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
            more = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(head + more + body)
            self.transport.close()

    def _should_upgrade(self) -> bool:
        return self.parser.get_method() == b"GET" and super()._should_upgrade()

    def _without_upgrade(self) -> bytes:
        """The head of the present request as if it had offered nothing, for a new parser."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(o for o in options if o.lower() not in _OFFERS)
            if name not in _OFFERS:
                lines += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.upgrade_ignored = False
        return b"".join([*lines, b"\r\n"])

    def _unset_keepalive_if_required(self) -> None:
        self.idle_since = None

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        waits = bool(self.pipeline)
        if waits:
            self._start_asgi_task(*self.pipeline.pop())
        self.flow.resume_reading()
        if not waits:
            self.idle_since = time.monotonic()

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self.in_head, self.head_is_new, self.head_bytes = True, True, 0
        self.in_message = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Blanks around its value are none of it, which the parser only knows of
        those before."""
        name, value = name.lower(), value.strip(b" \t")
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.in_head = False
        if self.parser.should_upgrade() and not self._should_upgrade():
            self.upgrade_ignored = True
            return
        app: Any = self.config.app
        if self.url == app.infer_path and (self.cycle is None or self.cycle.response_complete):
            short = self._short()
            if short is not None:
                self.cycle = short  # type: ignore[assignment]
                return
        url, headers, expect = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expect
        self.headers += headers
        super().on_headers_complete()

    def _short(self) -> _Short | None:
        """The request if it may go the short way: whatever is unusual may not."""
        if self.expect_100_continue or self.pipeline or self.parser.get_method() != b"POST":
            return None
        if self.flow.write_paused:  # it does not read its answers: uvicorn waits for that
            return None
        header_length = None
        for name, value in self.headers:
            if name == b"inference-header-content-length":
                header_length = value
            elif name == b"content-length":
                if int(value) > MAX_BODY:
                    return None
            elif name in (b"transfer-encoding", b"content-encoding", b"upgrade"):
                return None
        keep_alive = self.parser.get_http_version() == "1.1" and self.parser.should_keep_alive()
        return _Short(keep_alive, header_length, self.headers)

    def on_body(self, body: bytes) -> None:
        if self.upgrade_ignored:
            return
        cycle: Any = self.cycle
        if type(cycle) is _Short:
            cycle.body = cycle.body + body if cycle.body else body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.upgrade_ignored:
            return
        self.in_message = False
        cycle: Any = self.cycle
        if type(cycle) is not _Short:
            super().on_message_complete()
            return
        self._read(cycle)

    def _read(self, cycle: _Short) -> None:
        """A whole request is here: hand it to the engine."""
        cycle.reading = False
        app: App = self.config.app  # type: ignore[assignment]

        def done(status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
            self._answer(app, cycle, status, body, headers)

        try:
            authorize(cycle.headers, app.token)
            once = app.infer(cycle.body, cycle.header_length, None, done)
        except Exception as error:
            done(*failed(error, app.log))
        else:
            if once is not None:
                task = self.loop.create_task(_awaited(once, app, done))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    def give_up(self, now: float) -> None:
        """Close when it has been idle for too long; answer 408 to a request on the short way whose
        body does not come."""
        if self.idle_since is not None:
            if now - self.idle_since > self.timeout_keep_alive:
                self.transport.close()
            return
        cycle: Any = self.cycle
        if type(cycle) is _Short and cycle.reading and now - cycle.began > READ_SECONDS:
            cycle.reading = False
            app: App = self.config.app  # type: ignore[assignment]
            self._answer(app, cycle, *failed(too_slow(), app.log))

    def _answer(
        self, app: App, cycle: Any, status: int, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        app.metrics.responses[status] += 1
        app.metrics.seconds["request"].observe(time.monotonic() - cycle.began)
        if app.origins:
            headers = [*headers, *cors(cycle.headers, app.origins)]
        trace(cycle.headers, app.infer_path.decode(), status, cycle.began, app.log)
        if cycle.disconnected:
            return
        lines = [_OK if status == 200 else STATUS_LINE[status]]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
            if name == b"connection":
                cycle.keep_alive = False
        if not cycle.keep_alive and (b"connection", b"close") not in headers:
            lines.append(b"connection: close\r\n")
        lines += (b"content-length: %d\r\n\r\n" % len(body), body)
        self.transport.write(b"".join(lines))
        cycle.response_complete = True
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()


async def _awaited(once: Awaitable[Reply], app: App, done: Any) -> None:
    try:
        reply = await once
    except asyncio.CancelledError:
        raise
    except Exception as error:
        reply = failed(error, app.log)
    done(*reply)
