"""The server's HTTP face: a plain ASGI application, nothing between a request and its batch."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qs, quote, unquote

import orjson

from hamlet.artifacts import HamletError
from hamlet.serving import protocol
from hamlet.serving.about import About
from hamlet.serving.engine import DEADLINE_SECONDS, Done, Engine, Session
from hamlet.serving.errors import (
    JSON,
    READ_SECONDS,
    Headers,
    HTTPError,
    Reply,
    error_reply,
    failed,
    too_slow,
)
from hamlet.serving.headers import MAX_BODY, authorize, cors, preflight, trace, unpacked
from hamlet.serving.model import RNG_RANGE, Model, pack
from hamlet.serving.protocol import InferRequest
from hamlet.serving.results import results_of
from hamlet.serving.saved import STATE, frames, open_session, session_frames
from hamlet.serving.stream import talk
from hamlet.serving.words import action_in_words

MAX_IGNORED = 1 << 23  # bytes of too large a body that are still read, so that 413 can be heard
LISTEN_SECONDS = 1.0  # between the pieces of such a body

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Route = Callable[..., Awaitable[Reply]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

ACT_FIELDS = ("session", "observation", "start", "seed", "end", "id")
BINARY = (b"content-type", b"application/octet-stream")


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
        self.token = token.encode() if token else None
        self.origins = tuple(origin.encode() for origin in origins)
        self._reading: dict[asyncio.Task[Any], float] = {}
        self.parser = protocol.Parser()
        self.heads: dict[bytes, Any] = {}
        """What `Connection` remembers of requests."""
        name = engine.name
        self.infer_path = f"/v2/models/{quote(name)}/infer".encode()
        model = ("v2", "models", name)
        self.routes: dict[tuple[str, ...], dict[str, Route]] = {
            (*model, "infer"): {"POST": self._infer},
            (*model, "versions", "*", "infer"): {"POST": self._infer},
            ("v2", "sessions", "*"): {
                "GET": self._export, "PUT": self._import, "DELETE": self._delete,
            },
            ("act",): {"POST": self._act},
            **About(self).routes(),
        }  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] == "websocket":
            await talk(self, scope, receive, send)
            return
        began = time.monotonic()
        try:
            status, body, headers = preflight(
                scope["method"], scope["headers"], self.origins
            ) or await self._reply(scope, receive)
        except Gone:
            return
        except Exception as error:
            status, body, headers = failed(error, self.log)
        self.metrics.responses[status] += 1
        self.metrics.seconds["request"].observe(time.monotonic() - began)
        headers = [*headers, *cors(scope["headers"], self.origins)]
        if status not in (204, 304):
            headers.append((b"content-length", b"%d" % len(body)))
        trace(scope["headers"], scope["path"], status, began, self.log)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body}
        )

    async def _reply(self, scope: Scope, receive: Receive) -> Reply:
        path = scope["path"]
        parts = tuple(unquote(part) for part in scope["raw_path"].decode().strip("/").split("/"))
        route = next((route for route in self.routes if _fits(route, parts)), None)
        if parts[:2] != ("v2", "health"):
            authorize(scope["headers"], self.token)
        if route is None and path != "*":
            raise HTTPError(404, self._nothing_at(path, parts))
        methods, method = self.routes[route] if route else {}, scope["method"]
        if method == "HEAD" and "GET" in methods:
            method = "GET"
        if method == "OPTIONS" and method not in methods:
            return 204, b"", [(b"allow", ", ".join([*methods, "OPTIONS"]).encode())]
        if method not in methods:
            status, body, headers = error_reply(405, f"{path[:100]} takes {', '.join(methods)}")
            return status, body, [*headers, (b"allow", ", ".join(methods).encode())]
        wild = [have for want, have in zip(route or (), parts, strict=True) if want == "*"]
        return await methods[method](scope, receive, *wild)

    def _nothing_at(self, path: str, parts: tuple[str, ...]) -> str:
        name = self.engine.name
        if parts[:2] == ("v2", "models") and len(parts) > 2 and parts[2] != name:
            return f"model {parts[2][:60]!r} is not served: {name!r} is"
        if parts[0] in ("v1", "invocations"):  # KServe's first protocol, MLflow's
            return f"{path[:100]} is of another protocol: POST /v2/models/{quote(name)}/infer"
        return f"there is nothing at {path[:100]}: see /openapi.json"

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
                encoding = value.strip().lower().removeprefix(b"x-")
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

        def done(status: int, body: bytes, headers: Headers) -> None:
            if not reply.done():
                reply.set_result((status, body, headers))

        once = self.infer(body, header_length, version, done)
        return await (once or reply)

    def infer(
        self,
        body: bytes,
        header_length: bytes | None,
        version: str | None,
        done: Callable[[int, bytes, Headers], None],
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
            model = self.version(version)
            if request.start and model is not self.engine.current:
                raise HTTPError(409, f"version {version} takes no new sessions")
            return model
        session = self.engine.ended.get(request.sequence) if request.id else None
        if session is None or request.sequence in self.engine.sessions:
            session = self.engine.get(request.sequence)
        if version not in (None, session.model.version):
            raise HTTPError(
                409, f"sequence_id '{session.id}' is on version {session.model.version}"
            )
        return session.model

    def version(self, version: str | None) -> Model:
        """The version named, else the current one; HTTPError with 404 where there is none."""
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

    async def _export(self, scope: Scope, receive: Receive, id_: str) -> Reply:
        session = self.engine.get(id_)
        if session.busy:
            raise HTTPError(409, f"session '{id_[:60]}' is within a tick", retry=1)
        return 200, session_frames([session])[0], [BINARY]

    async def _import(self, scope: Scope, receive: Receive, id_: str) -> Reply:
        body, _ = await self._body(scope, receive)
        id_ = protocol.sequence_name(id_) or ""
        found = next(frames(body), None)
        if found is None or found.kind != STATE or found.size != len(body):
            raise HamletError("the body is no session", "send what GET /v2/sessions/ID returned")
        sha = found.head["sha"]
        model = next((m for m in self.engine.models.values() if m.agent.sha == sha), None)
        if model is None:
            raise HTTPError(409, f"the session is on version {sha[:12]}, which is not loaded here")
        try:
            open_session(self.engine, model, id_, found.head, found.body)
        except (ValueError, KeyError, TypeError) as error:
            raise HamletError(f"the body is no session ({error})") from None
        return 204, b"", []

    # -- who answers

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
        return self.version(version)

    def must_be_ready(self) -> None:
        """HTTPError with 503 before a version is loaded and while the server goes away."""
        self.engine.ready()
        if self.draining:
            raise HTTPError(503, "the server is going away", retry=1)

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
