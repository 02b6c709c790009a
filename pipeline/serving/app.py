"""The server's HTTP face: a plain ASGI application, nothing between a request and its batch."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
import time
import traceback
import zlib
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

import orjson

from hamlet.artifacts import HamletError
from hamlet.serving import protocol
from hamlet.serving.engine import DEADLINE_SECONDS, Done, Engine, Session
from hamlet.serving.errors import HTTPError
from hamlet.serving.model import RNG_RANGE, Model, pack
from hamlet.serving.openapi import document
from hamlet.serving.protocol import InferRequest
from hamlet.serving.results import results_of
from hamlet.serving.stream import talk
from hamlet.serving.words import action_in_words

MAX_BODY = 1 << 20  # bytes; a full batch of observations and states is a quarter of it
MAX_IGNORED = 1 << 23  # bytes of too large a body that are still read, so that 413 can be heard
LISTEN_SECONDS = 1.0  # between the pieces of such a body
READ_SECONDS = 10.0  # in which a body must have come

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Reply = tuple[int, bytes, list[tuple[bytes, bytes]]]

ACT_FIELDS = ("session", "observation", "start", "seed", "end", "id")
EXTENSIONS = ["binary_tensor_data", "sequence", "schedule_policy"]
JSON = (b"content-type", b"application/json")
BINARY = (b"content-type", b"application/octet-stream")
TEXT = (b"content-type", b"text/plain; version=0.0.4")


_TRACE = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


class Gone(Exception):
    """The client went away before its request was complete."""


class App:
    """The ASGI application.

    Args:
        engine: who acts.
        log: takes (event, facts) of what a person should see.
        token: what clients must send as `Authorization: Bearer ...`; None: nothing.
        begin, end: awaited before the first request and after the last one.
        origins: web pages that may ask, "*" for all.
    """

    def __init__(
        self,
        engine: Engine,
        log: Callable[..., None],
        token: str | None = None,
        begin: Callable[[], Awaitable[None]] | None = None,
        end: Callable[[], Awaitable[None]] | None = None,
        origins: tuple[str, ...] = (),
    ) -> None:
        self.engine, self.log, self.begin, self.end = engine, log, begin, end
        self.metrics = engine.metrics
        self.draining = False
        self._token = token.encode() if token else None
        self.origins = tuple(origin.encode() for origin in origins)
        self._reading: dict[asyncio.Task[Any], float] = {}
        self.parser = protocol.Parser()
        name = engine.name
        self.infer_path = f"/v2/models/{quote(name)}/infer".encode()
        self._routes: dict[tuple[str, ...], dict[str, Callable[..., Awaitable[Reply]]]] = {
            ("v2", "health", "live"): {"GET": self._live},
            ("v2", "health", "ready"): {"GET": self._ready},
            ("v2",): {"GET": self._server},
            ("v2", "models", name): {"GET": self._model},
            ("v2", "models", name, "ready"): {"GET": self._model_ready},
            ("v2", "models", name, "infer"): {"POST": self._infer},
            ("v2", "models", name, "versions", "*"): {"GET": self._model},
            ("v2", "models", name, "versions", "*", "ready"): {"GET": self._model_ready},
            ("v2", "models", name, "versions", "*", "infer"): {"POST": self._infer},
            ("v2", "repository", "index"): {"POST": self._index, "GET": self._index},
            ("v2", "sessions", "*"): {"DELETE": self._delete},
            ("act",): {"POST": self._act},
            ("metrics",): {"GET": self._metrics},
            ("openapi.json",): {"GET": self._openapi},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] == "websocket":
            await talk(self, scope, receive, send)
            return
        began = time.monotonic()
        try:
            status, body, headers = self._preflight(scope) or await self._reply(scope, receive)
        except Gone:
            return
        except Exception as error:
            status, body, headers = failed(error, self.log)
        self.metrics.responses[status] += 1
        self.metrics.seconds["request"].observe(time.monotonic() - began)
        headers = [*headers, *self.cors(scope["headers"])]
        if status not in (204, 304):
            headers.append((b"content-length", b"%d" % len(body)))
        self.trace(scope["headers"], scope["path"], status, began)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body}
        )

    async def _reply(self, scope: Scope, receive: Receive) -> Reply:
        path = scope["path"]
        parts = tuple(unquote(part) for part in scope["raw_path"].decode().strip("/").split("/"))
        route = next((route for route in self._routes if _fits(route, parts)), None)
        if parts[:2] != ("v2", "health"):
            self.authorize(scope["headers"])
        if route is None:
            raise HTTPError(404, f"there is nothing at {path[:100]}: see /openapi.json")
        methods, method = self._routes[route], scope["method"]
        if method == "HEAD" and "GET" in methods:
            method = "GET"
        if method not in methods:
            status, body, headers = _error(405, f"{path[:100]} takes {', '.join(methods)}")
            return status, body, [*headers, (b"allow", ", ".join(methods).encode())]
        wild = [have for want, have in zip(route, parts, strict=True) if want == "*"]
        return await methods[method](scope, receive, *wild)

    def authorize(self, headers: list[tuple[bytes, bytes]]) -> None:
        """HTTPError with 401 without the token, where one is asked for."""
        if self._token is None:
            return
        for name, value in headers:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                right = hmac.compare_digest(given.strip(), self._token)
                if scheme.lower() == b"bearer" and right:
                    return
        raise HTTPError(401, "the bearer token is missing or wrong")

    def cors(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """What a browser must read in the answer to a page of another origin that may ask."""
        if not self.origins:
            return []
        origin = next((value for name, value in headers if name == b"origin"), None)
        if origin is None or (b"*" not in self.origins and origin not in self.origins):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"inference-header-content-length, retry-after"),
            (b"vary", b"origin"),
        ]

    def _preflight(self, scope: Scope) -> Reply | None:
        """The answer to a browser that asks whether a page may ask; None if it is no such."""
        asked = dict(scope["headers"])
        if scope["method"] != "OPTIONS" or b"access-control-request-method" not in asked:
            return None
        headers = self.cors(scope["headers"])
        if headers:
            wanted = asked.get(b"access-control-request-headers", b"")
            headers += [
                (b"access-control-allow-methods", b"GET, POST, PUT, DELETE"),
                (b"access-control-allow-headers", wanted),
                (b"access-control-max-age", b"600"),
            ]
        return 204, b"", headers

    def trace(
        self, headers: list[tuple[bytes, bytes]], path: str, status: int, began: float
    ) -> None:
        """A line of the log for a request that is being traced (W3C Trace Context, sampled)."""
        for name, value in headers:
            if name == b"traceparent":
                found = _TRACE.fullmatch(value)
                if found and int(found[3], 16) & 1:
                    self.log(
                        "request",
                        trace=found[1].decode(),
                        parent=found[2].decode(),
                        path=path,
                        status=status,
                        seconds=round(time.monotonic() - began, 6),
                    )
                return

    def failed(self, error: Exception) -> Reply:
        """What a client is told of an error, as `failed` says."""
        return failed(error, self.log)

    def is_ready(self) -> bool:
        """Whether new work should come here."""
        return self.engine.current is not None and not self.draining

    def model_named(self, name: str, version: str | None) -> Model:
        """The version of a model; HTTPError with 404 where it is not served."""
        if name != self.engine.name:
            raise HTTPError(404, f"model {name[:60]!r} is not served: {self.engine.name!r} is")
        return self._version(version)

    # -- reading

    async def _body(self, scope: Scope, receive: Receive) -> tuple[bytes, bytes | None]:
        """The body and the header Inference-Header-Content-Length."""
        header_length, expects, encoding = None, False, b"identity"
        declared = 0
        for name, value in scope["headers"]:
            if name == b"content-length":
                declared = int(value)
            elif name == b"expect":
                expects = True
            elif name == b"inference-header-content-length":
                header_length = value
            elif name == b"content-encoding":
                encoding = value.strip().lower()
                if encoding not in (b"identity", b"gzip", b"deflate"):
                    raise HTTPError(415, "Content-Encoding may be gzip, deflate or identity")
        if declared > (MAX_BODY if expects else MAX_IGNORED):
            raise HTTPError(413, f"the body has {declared} bytes, at most {MAX_BODY} do")
        task = asyncio.current_task()
        assert task is not None
        self._reading[task] = time.monotonic() + READ_SECONDS
        body, size, more = b"", 0, True
        try:
            # Who is still sending when the connection closes may never read the answer.
            while more and size <= MAX_IGNORED:
                message = await receive()
                if message["type"] != "http.request":
                    raise Gone
                piece, more = message.get("body", b""), message["more_body"]
                size += len(piece)
                if size <= MAX_BODY:
                    body += piece
                else:
                    self._reading[task] = time.monotonic() + LISTEN_SECONDS
        except asyncio.CancelledError:
            if task.uncancel():
                raise
            if size <= MAX_BODY:
                raise too_slow() from None
        finally:
            del self._reading[task]
        if size > MAX_BODY:
            raise HTTPError(413, f"the body has more than the {MAX_BODY} bytes that are read")
        if encoding != b"identity":
            body = unpacked(body)
        return body, header_length

    def sweep(self) -> None:
        """Give up on bodies that do not come."""
        now = time.monotonic()
        for task, limit in list(self._reading.items()):
            if limit < now:
                task.cancel()

    # -- inference

    async def _infer(self, scope: Scope, receive: Receive, version: str | None = None) -> Reply:
        body, header_length = await self._body(scope, receive)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def done(status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
            if not reply.done():
                reply.set_result((status, body, headers))

        once = self.infer(body, header_length, version, done)
        return await (once or reply)

    def infer(
        self,
        body: bytes,
        header_length: bytes | None,
        version: str | None,
        done: Callable[[int, bytes, list[tuple[bytes, bytes]]], None],
    ) -> Awaitable[Reply] | None:
        """Understand an inference request and queue it.

        Returns:
            None: `done` will be called with the reply. Without a sequence: the reply to await.

        Raises:
            HTTPError, HamletError: it was not queued.
        """
        request, model = self.parser.parse(body, header_length, partial(self.model_for, version))
        if request.sequence is None:
            return self._answered(request, model)
        outputs = request.outputs

        def acted(action: Any, more: Any) -> None:
            if action is None:
                done(*failed(more, self.log))
            elif more is None:
                done(*_inferred(model, request, action))
            else:
                wanted = outputs or [(n, request.binary) for n in protocol.outputs_of(model, True)]
                results = [(n, protocol.from_decision(model, more, n), b) for n, b in wanted]
                done(*_inferred(model, request, results))

        more = outputs is None or any(name != model.action for name, _ in outputs)
        self.submit(request, acted, more)
        return None

    def submit(self, request: InferRequest, done: Done, thoughts: bool) -> Session:
        """Queue a tick of a request's session, begun or found; `done` as `PendingTick` says."""
        assert request.sequence is not None
        return self.engine.tick(
            request.sequence,
            request.record,
            done,
            start=request.start,
            end=request.end,
            seed=request.seed,
            seconds=request.timeout or DEADLINE_SECONDS,
            thoughts=thoughts,
            request=request.id,
        )

    async def _answered(self, request: InferRequest, model: Model) -> Reply:
        return _inferred(model, request, await results_of(self.engine, request, model))

    def model_for(self, version: str | None, request: InferRequest) -> Model:
        """The version that serves a request: its session's, else the one named, else current."""
        if request.sequence is None or request.start:
            model = self._version(version)
            if request.start and model is not self.engine.current:
                raise HTTPError(409, f"version {version} takes no new sessions")
            return model
        session = self.engine.get(request.sequence)
        if version not in (None, session.model.version):
            raise HTTPError(
                409, f"sequence_id '{session.id}' is on version {session.model.version}"
            )
        return session.model

    def _version(self, version: str | None) -> Model:
        current = self.engine.ready()
        if version is None:
            return current
        model = self.engine.models.get(version)
        if model is None:
            raise HTTPError(404, f"version {version[:60]} is not loaded: {current.version} is")
        return model

    # -- for people

    async def _act(self, scope: Scope, receive: Receive) -> Reply:
        body, _ = await self._body(scope, receive)
        thoughts = parse_qs(scope["query_string"].decode("latin-1")).get("thoughts", ["0"])[-1]
        if thoughts not in ("0", "1"):
            raise HamletError("query parameter 'thoughts' is neither 0 nor 1")
        header, _ = protocol.header_of(body, None)
        for name in header:
            if name not in ACT_FIELDS:
                raise HamletError(f"'{name[:40]}' is unknown", f"known: {', '.join(ACT_FIELDS)}")
        request = InferRequest()
        given = header.get("session")
        request.start = given is None or protocol.flag(header, "start")
        request.sequence = protocol.sequence_name(given or secrets.token_urlsafe(16))
        request.seed = protocol.whole(header, "seed", 0, RNG_RANGE - 1)
        request.end = protocol.flag(header, "end")
        request.id = header.get("id")
        if not isinstance(request.id, str | None):
            raise HamletError("'id' is not a string")
        if request.seed is not None and not request.start:
            raise HamletError("'seed' belongs to a new session", "give 'start' or leave it out")
        observation = header.get("observation")
        if not isinstance(observation, dict):
            raise HamletError("'observation' is missing or not an object")
        model = self.model_for(None, request)
        request.record = pack(model.fields, observation)
        tick: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()
        session = self.submit(
            request, lambda *got: None if tick.done() else tick.set_result(got), thoughts == "1"
        )
        action, decision = await tick
        if action is None:
            raise decision
        shaped = protocol.shaped(model, model.action, action)
        said = {
            "session": session.id,
            "tick": session.ticks,
            "action": action_in_words(model.signature.names, shaped[0]),
            "version": model.version,
        }
        if decision is not None:
            said["thoughts"] = model.agent.readable(decision)
        return 200, orjson.dumps(said), [JSON]

    async def _delete(self, scope: Scope, receive: Receive, id_: str) -> Reply:
        self.engine.close(self.engine.get(id_), "deleted")
        return 204, b"", []

    # -- about the server

    async def _live(self, scope: Scope, receive: Receive) -> Reply:
        return 200, b'{"live":true}', [JSON]

    async def _ready(self, scope: Scope, receive: Receive) -> Reply:
        self._must_be_ready()
        return 200, b'{"ready":true}', [JSON]

    def _must_be_ready(self) -> None:
        self.engine.ready()
        if self.draining:
            raise HTTPError(503, "the server is going away", retry=1)

    async def _model_ready(self, scope: Scope, receive: Receive, version: str = "") -> Reply:
        self._must_be_ready()
        model = self._version(version or None)
        said = {"name": model.name, "version": model.version, "ready": True}
        return 200, orjson.dumps(said), [JSON]

    async def _server(self, scope: Scope, receive: Receive) -> Reply:
        said = {
            "name": "hamlet",
            "version": installed("hamlet"),
            "extensions": EXTENSIONS,
        }
        return 200, orjson.dumps(said), [JSON]

    async def _model(self, scope: Scope, receive: Receive, version: str = "") -> Reply:
        model = self._version(version or None)
        said = protocol.metadata(model)
        if not version:
            said["versions"] = list(self.engine.models)
        return 200, orjson.dumps(said), [JSON]

    async def _index(self, scope: Scope, receive: Receive) -> Reply:
        await self._body(scope, receive)  # {"ready": true} asks for what is loaded: all of it is
        said = [
            {"name": self.engine.name, "version": version, "state": "READY", "reason": ""}
            for version in self.engine.models
        ]
        return 200, orjson.dumps(said), [JSON]

    async def _metrics(self, scope: Scope, receive: Receive) -> Reply:
        engine = self.engine
        sessions = {version: model.sessions for version, model in engine.models.items()}
        current = engine.current
        provider = current.agent.session.get_providers()[0] if current else "none"
        version = current.version if current else "none"
        text = self.metrics.text(sessions, engine.queued, provider, version)
        return 200, text.encode(), [TEXT]

    async def _openapi(self, scope: Scope, receive: Receive) -> Reply:
        return 200, orjson.dumps(document(self.engine.ready())), [JSON]

    # -- life of the process

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        if self.begin:
            await self.begin()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self.end:
            await self.end()
        await send({"type": "lifespan.shutdown.complete"})


def _inferred(model: Model, request: InferRequest, results: protocol.Results) -> Reply:
    body, header_length = protocol.answer(model, request, results)
    if header_length is None:
        return 200, body, [JSON]
    return 200, body, [BINARY, (b"inference-header-content-length", b"%d" % header_length)]


def _fits(route: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    return len(route) == len(parts) and all(
        want in ("*", have) for want, have in zip(route, parts, strict=True)
    )


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


def too_slow() -> HTTPError:
    return HTTPError(408, f"the body did not come within {READ_SECONDS:g} s")


def failed(error: Exception, log: Callable[..., None]) -> Reply:
    """What a client is told of an error; what no client should cause is logged."""
    if isinstance(error, HTTPError):
        status, body, headers = _error(error.status, error.message)
        if error.retry is not None:
            headers.append((b"retry-after", b"%d" % error.retry))
        return status, body, headers
    if isinstance(error, HamletError):
        return _error(400, str(error))
    where = traceback.extract_tb(error.__traceback__)[-1:]
    at = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in where]
    log("error", error=f"{type(error).__name__}: {error}"[:500], at=at)
    return _error(500, "the server failed; its log says why")


def _error(status: int, message: str) -> Reply:
    headers = [JSON]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if status in (408, 413):
        headers.append((b"connection", b"close"))
    return status, json.dumps({"error": message}, ensure_ascii=False).encode(), headers
