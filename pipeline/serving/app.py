"""The server's HTTP face: a plain ASGI application, nothing between a request and its batch."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson

from hamlet.artifacts import HamletError
from hamlet.serving import protocol
from hamlet.serving.engine import Engine, Item, Refused, Session
from hamlet.serving.model import NAME, RNG_RANGE, Model, pack
from hamlet.serving.openapi import document
from hamlet.serving.protocol import Ask

MAX_BODY = 1 << 20  # bytes; a full batch of observations and states is a quarter of it
MAX_IGNORED = 1 << 23  # bytes of too large a body that are still read, so that 413 can be heard
LISTEN_SECONDS = 1.0  # between the pieces of such a body
READ_SECONDS = 10.0  # in which a body must have come
DEADLINE_SECONDS = 10.0  # in which a request's turn must come, where it does not say

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Reply = tuple[int, bytes, list[tuple[bytes, bytes]]]

JSON = (b"content-type", b"application/json")
BINARY = (b"content-type", b"application/octet-stream")
TEXT = (b"content-type", b"text/plain; version=0.0.4")


class Gone(Exception):
    """The client went away before its request was complete."""


class App:
    """The ASGI application.

    Args:
        engine: who acts.
        log: takes (event, facts) of what a person should see.
        token: what clients must send as `Authorization: Bearer ...`; None: nothing.
        begin, end: awaited before the first request and after the last one.
    """

    def __init__(
        self,
        engine: Engine,
        log: Callable[..., None],
        token: str | None = None,
        begin: Callable[[], Awaitable[None]] | None = None,
        end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.engine, self.log, self.begin, self.end = engine, log, begin, end
        self.metrics = engine.metrics
        self.draining = False
        self._authorization = f"Bearer {token}".encode() if token else None
        self._reading: dict[asyncio.Task[Any], float] = {}
        self.parser = protocol.Parser()
        self._routes: dict[tuple[str, ...], dict[str, Callable[..., Awaitable[Reply]]]] = {
            ("v2", "health", "live"): {"GET": self._live},
            ("v2", "health", "ready"): {"GET": self._ready},
            ("v2",): {"GET": self._server},
            ("v2", "models", NAME): {"GET": self._model},
            ("v2", "models", NAME, "ready"): {"GET": self._model_ready},
            ("v2", "models", NAME, "infer"): {"POST": self._infer},
            ("v2", "models", NAME, "versions", "*"): {"GET": self._model},
            ("v2", "models", NAME, "versions", "*", "ready"): {"GET": self._model_ready},
            ("v2", "models", NAME, "versions", "*", "infer"): {"POST": self._infer},
            ("v2", "sessions", "*"): {"DELETE": self._delete},
            ("act",): {"POST": self._act},
            ("metrics",): {"GET": self._metrics},
            ("openapi.json",): {"GET": self._openapi},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        began = time.monotonic()
        try:
            status, body, headers = await self._reply(scope, receive)
        except Gone:
            return
        except Exception as error:
            status, body, headers = failed(error, self.log)
        self.metrics.responses[status] += 1
        self.metrics.seconds["request"].observe(time.monotonic() - began)
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body}
        )

    async def _reply(self, scope: Scope, receive: Receive) -> Reply:
        path = scope["path"]
        parts = tuple(path.strip("/").split("/"))
        route = next((route for route in self._routes if _fits(route, parts)), None)
        if parts[:2] != ("v2", "health"):
            self.authorize(scope["headers"])
        if route is None:
            raise Refused(404, f"there is nothing at {path[:100]}: see /openapi.json")
        methods, method = self._routes[route], scope["method"]
        if method == "HEAD" and "GET" in methods:
            method = "GET"
        if method not in methods:
            status, body, headers = _error(405, f"{path[:100]} takes {', '.join(methods)}")
            return status, body, [*headers, (b"allow", ", ".join(methods).encode())]
        wild = [have for want, have in zip(route, parts, strict=True) if want == "*"]
        return await methods[method](scope, receive, *wild)

    def authorize(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Refused with 401 without the token, where one is asked for."""
        if self._authorization is None:
            return
        for name, value in headers:
            if name == b"authorization" and hmac.compare_digest(value, self._authorization):
                return
        raise Refused(401, "the bearer token is missing or wrong")

    # -- reading

    async def _body(self, scope: Scope, receive: Receive) -> tuple[bytes, bytes | None]:
        """The body and the header Inference-Header-Content-Length."""
        header_length, expects = None, False
        declared = 0
        for name, value in scope["headers"]:
            if name == b"content-length":
                declared = int(value)
            elif name == b"expect":
                expects = True
            elif name == b"inference-header-content-length":
                header_length = value
            elif name == b"content-encoding" and value.lower() != b"identity":
                raise Refused(415, "Content-Encoding is not supported: send the body as it is")
        if declared > (MAX_BODY if expects else MAX_IGNORED):
            raise Refused(413, f"the body has {declared} bytes, at most {MAX_BODY} do")
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
            raise Refused(413, f"the body has more than the {MAX_BODY} bytes that are read")
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
            Refused, HamletError: it was not queued.
        """
        ask, model = self.parser.parse(body, header_length, partial(self._model_for, version))
        if ask.sequence is None:
            return self._once(ask, model)
        outputs = ask.outputs

        def acted(action: int, more: Any) -> None:
            if action < 0:
                done(*failed(more, self.log))
            elif more is None:
                done(*_inferred(model, ask, action))
            else:
                wanted = outputs or [(n, ask.binary) for n in protocol.outputs_of(model, True)]
                results = [(n, protocol.from_decision(more, n), b) for n, b in wanted]
                done(*_inferred(model, ask, results))

        self._submit(ask, acted, outputs is None or any(name != "action" for name, _ in outputs))
        return None

    def _submit(self, ask: Ask, done: Callable[[int, Any], None], thoughts: bool) -> Session:
        """Queue a tick of a session, begun or found."""
        engine = self.engine
        assert ask.sequence is not None
        session = engine.open(ask.sequence, ask.seed) if ask.start else engine.get(ask.sequence)
        seconds = ask.timeout or DEADLINE_SECONDS
        try:
            engine.submit(Item(session, ask.record, seconds, ask.end, thoughts, done))
        except Refused:
            if ask.start:
                engine.close(session, "refused")
            raise
        return session

    async def _once(self, ask: Ask, model: Model) -> Reply:
        outputs = ask.outputs or [(n, ask.binary) for n in protocol.outputs_of(model, False)]
        names = [name for name, _ in outputs]
        try:
            values = await self.engine.once(model, ask.feeds, names)
        except Refused:
            raise
        except Exception:  # an index in the given state that points nowhere
            raise HamletError(
                "the state that was given is none of this agent's", "give what it returned"
            ) from None
        results = [(n, x, b) for (n, b), x in zip(outputs, values, strict=True)]
        return _inferred(model, ask, results)

    def _model_for(self, version: str | None, ask: Ask) -> Model:
        """The version that serves a request: its session's, else the one named, else current."""
        if ask.sequence is None or ask.start:
            model = self._version(version)
            if ask.start and model is not self.engine.current:
                raise Refused(409, f"version {version} takes no new sessions")
            return model
        session = self.engine.get(ask.sequence)
        if version not in (None, session.model.version):
            raise Refused(409, f"sequence_id '{session.id}' is on version {session.model.version}")
        return session.model

    def _version(self, version: str | None) -> Model:
        current = self.engine.ready()
        if version is None:
            return current
        model = self.engine.models.get(version)
        if model is None:
            raise Refused(404, f"version {version[:60]} is not loaded: {current.version} is")
        return model

    # -- for people

    async def _act(self, scope: Scope, receive: Receive) -> Reply:
        body, _ = await self._body(scope, receive)
        thoughts = parse_qs(scope["query_string"].decode("latin-1")).get("thoughts", ["0"])[-1]
        if thoughts not in ("0", "1"):
            raise HamletError("query parameter 'thoughts' is neither 0 nor 1")
        header, _ = protocol.header_of(body, None)
        for name in header:
            if name not in ("session", "observation", "seed", "end"):
                raise HamletError(
                    f"'{name[:40]}' is unknown", "known: session, observation, seed, end"
                )
        ask = Ask()
        ask.start = "session" not in header
        given = secrets.token_urlsafe(16) if ask.start else header["session"]
        ask.sequence = protocol.sequence_name(given)
        ask.seed = protocol.whole(header, "seed", 0, RNG_RANGE - 1)
        ask.end = protocol.flag(header, "end")
        if ask.seed is not None and not ask.start:
            raise HamletError("'seed' belongs to a new session", "leave out 'session' or 'seed'")
        observation = header.get("observation")
        if not isinstance(observation, dict):
            raise HamletError("'observation' is missing or not an object")
        model = self._model_for(None, ask)
        ask.record = pack(model.fields, observation)
        tick: asyncio.Future[tuple[int, Any]] = asyncio.get_running_loop().create_future()
        session = self._submit(
            ask, lambda *got: None if tick.done() else tick.set_result(got), thoughts == "1"
        )
        action, decision = await tick
        if action < 0:
            raise decision
        town = model.agent.card["town"]
        said = {
            "session": session.id,
            "tick": session.ticks,
            "action": town["action_names"][action],
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
            raise Refused(503, "the server is going away", retry=1)

    async def _model_ready(self, scope: Scope, receive: Receive, version: str = "") -> Reply:
        self._must_be_ready()
        model = self._version(version or None)
        said = {"name": NAME, "version": model.version, "ready": True}
        return 200, orjson.dumps(said), [JSON]

    async def _server(self, scope: Scope, receive: Receive) -> Reply:
        said = {
            "name": "hamlet",
            "version": installed("hamlet"),
            "extensions": ["binary_tensor_data", "sequence", "schedule_policy"],
        }
        return 200, orjson.dumps(said), [JSON]

    async def _model(self, scope: Scope, receive: Receive, version: str = "") -> Reply:
        model = self._version(version or None)
        said = protocol.metadata(model)
        if not version:
            said["versions"] = list(self.engine.models)
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


def _inferred(model: Model, ask: Ask, results: protocol.Results) -> Reply:
    body, header_length = protocol.answer(model, ask, results)
    if header_length is None:
        return 200, body, [JSON]
    return 200, body, [BINARY, (b"inference-header-content-length", b"%d" % header_length)]


def _fits(route: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    return len(route) == len(parts) and all(
        want in ("*", have) for want, have in zip(route, parts, strict=True)
    )


def too_slow() -> Refused:
    return Refused(408, f"the body did not come within {READ_SECONDS:g} s")


def failed(error: Exception, log: Callable[..., None]) -> Reply:
    """What a client is told of an error; what no client should cause is logged."""
    if isinstance(error, Refused):
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
