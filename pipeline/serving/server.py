"""`hamlet serve`: the process around the engine: sockets, signals, reloads, the log."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

from hamlet.artifacts import HamletError
from hamlet.serving.app import App
from hamlet.serving.engine import Engine
from hamlet.serving.headers import MAX_BODY
from hamlet.serving.metrics import Metrics
from hamlet.serving.saved import StateFile
from hamlet.serving.signature import maybe_state
from hamlet.serving.source import FileSource, Source

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

POLL_SECONDS = 2.0  # between two looks at the source
SAVE_SECONDS = 2.0  # between two looks at what is new for the state file
DRAIN_SECONDS = 30  # for what was asked before SIGTERM
GRPC_GRACE_SECONDS = 2.0  # in which streams may end of themselves
MAX_FILES = 65_536  # open at once: connections, mostly
HEADER_SECONDS = 10.0  # in which the headers of a request must have come


def log(event: str, **facts: Any) -> None:
    """One JSON line on stderr."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, **facts}
    print(json.dumps(line, ensure_ascii=False), file=sys.stderr, flush=True)


def serve(
    source: Source,
    host: str = "127.0.0.1",
    port: int = 8080,
    state_file: Path | None = None,
    max_sessions: int = 10_000,
    session_ttl: float = 600.0,
    name: str | None = None,
    origins: tuple[str, ...] = (),
    drain: float = 0.0,
    grpc_port: int | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what was asked and save the sessions.

    Args:
        name: of the model as clients call it; default: the source's.
        origins: web pages that may ask (CORS), "*" for all.
        drain: seconds between the signal and the closing of the socket: not ready, but answering.
        grpc_port: where gRPC is answered too, 0 takes a free one; None: nowhere.

    The bearer token is HAMLET_TOKEN, if set. Port 0 takes a free one; the log says which.

    Raises:
        HamletError: the file cannot be served, the port is taken, the sessions cannot be read or
            written. (A registry that is not there is waited for instead.)
    """
    import uvicorn

    from hamlet.serving.connection import Connection

    # A finished run must not wait 5 ms for the interpreter while requests are read.
    sys.setswitchinterval(0.0005)
    # A secret that comes from a file often ends with a line break, which no header can carry.
    token = os.environ.get("HAMLET_TOKEN", "").strip() or None
    raise_file_limit()
    engine = Engine(Metrics(), max_sessions, session_ttl, name or source.model)
    watch = Watch(source, engine)
    if isinstance(source, FileSource):
        watch.load()
    saved = StateFile(engine, state_file, log) if state_file is not None else None
    if saved is not None:
        log("sessions restored", sessions=saved.restore(), file=str(state_file))

    writes: list[asyncio.Task[None]] = []  # the last: it goes on, though who waits is cancelled

    async def write(saved: StateFile) -> None:
        try:
            await asyncio.to_thread(saved.write, saved.changes())
        except HamletError as error:
            saved.failed(error)

    async def save() -> None:
        if saved is not None:
            writes[:] = [asyncio.create_task(write(saved))]
            await asyncio.shield(writes[0])

    class Server(uvicorn.Server):
        """Ends quietly on a signal: draining is the orderly end, not an interrupt."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            again, app.draining = app.draining, True
            if again:
                if sig == signal.SIGINT:
                    self.force_exit = True  # Ctrl-C twice: at once, without the sessions
                self.should_exit = True
            elif drain:
                log("not ready", drain=drain)
                asyncio.get_running_loop().call_later(drain, self._leave)
            else:
                self.should_exit = True

        def _leave(self) -> None:
            self.should_exit = True

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            where = self.servers[0].sockets[0].getsockname()
            url = f"http://{f'[{where[0]}]' if ':' in where[0] else where[0]}:{where[1]}"
            log("serving", url=url, source=source.name, token=token is not None)
            if token is None and not ip_address(where[0].partition("%")[0]).is_loopback:
                log("warning", text="no token: anyone who reaches this port can use it")

    background: list[asyncio.Task[None]] = []
    failure: list[HamletError] = []
    closing: list[Any] = []  # the gRPC server

    async def begin() -> None:
        sweeper = Sweeper(app, server)
        if grpc_port is not None:
            from hamlet.serving.rpc import start

            try:
                rpc, taken = await start(app, host, grpc_port)
            except HamletError as error:
                failure.append(error)
                server.should_exit = True
            else:
                closing.append(rpc)
                log("serving grpc", port=taken)
        background.append(asyncio.create_task(every(POLL_SECONDS, watch.look)))
        background.append(asyncio.create_task(every(1.0, sweeper.sweep)))
        background.append(asyncio.create_task(every(SAVE_SECONDS, save)))
        gc.collect()
        gc.freeze()  # what is here now stays: not worth looking at again and again

    async def end() -> None:
        log("draining", sessions=len(engine.sessions))
        await engine.drain()
        for rpc in closing:
            await rpc.stop(GRPC_GRACE_SECONDS)
        for task in background:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await asyncio.gather(*writes)  # two at once would write to the same place
        if saved is not None:
            try:
                saved.write(saved.changes())
                log("sessions saved", sessions=len(engine.sessions), file=str(state_file))
            except HamletError as error:
                failure.append(error)
        engine.shutdown()

    app = App(engine, log, token, begin, end, origins)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        ws="websockets-sansio",
        ws_max_size=MAX_BODY,
        ws_per_message_deflate=False,
        http=Connection,
        loop="asyncio",  # uvloop was 4 % faster and is 14 MB
        lifespan="on",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        backlog=4096,
    )
    server = Server(config)
    try:
        server.run()
    except SystemExit:
        raise HamletError(
            f"{host}:{port} cannot be listened on", "another process has it: name another --port"
        ) from None
    if failure:
        raise failure[0]
    log("ended")


async def every(seconds: float, do: Callable[[], Any]) -> None:
    """Do something at intervals until cancelled; it may be a coroutine function."""
    while True:
        result = do()
        if result is not None:
            await result
        await asyncio.sleep(seconds)


class Watch:
    """Takes up what the source holds, whenever it changes."""

    def __init__(self, source: Source, engine: Engine) -> None:
        self.source, self.engine = source, engine
        self._seen: str | None = None
        self._complaint = ""

    def load(self) -> None:
        """Load what is there now; raises HamletError if that cannot be served."""
        seen = self.source.look()
        self.engine.install(self.engine.prepare(*self.source.fetch()))
        self._take(seen)

    async def look(self) -> None:
        """Load what is there if it changed. Whatever is wrong, the server goes on as it is."""
        try:
            seen = await asyncio.to_thread(self.source.look)
            if seen == self._seen:
                self._complaint = ""
                return
            agent, version = await asyncio.to_thread(self.source.fetch)
            model = await asyncio.to_thread(self.engine.prepare, agent, version)
            if model is self.engine.current:
                self._seen = seen
                return
            self.engine.install(model)
            await asyncio.to_thread(give_back_memory)
            self.engine.metrics.reloads["done"] += 1
            self._take(seen)
        except Exception as error:
            # A HamletError, or whatever a library makes of a broken file: nothing may stop serving.
            if str(error) != self._complaint:  # once, not at every look
                self._complaint = str(error)
                self.engine.metrics.reloads["failed"] += 1
                log("not loaded", source=self.source.name, error=str(error)[:500])

    def _take(self, seen: str) -> None:
        self._seen, self._complaint = seen, ""
        model = self.engine.current
        assert model is not None
        providers = model.agent.session.get_providers()
        sha = model.agent.sha
        log("loaded", version=model.version, sha256=sha, provider=providers[0])
        signature = model.signature
        log(
            "policy",
            observation=signature.observation,
            states=signature.states,
            action=model.action,
            batched=signature.batched,
        )
        if (told := maybe_state(signature)) is not None:
            log("warning", text=told)


def raise_file_limit() -> None:
    """Every connection is an open file, and many systems allow 1,024 unless asked for more."""
    if resource is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def give_back_memory() -> None:
    """Let glibc return what is free: loading leaves holes that grow from reload to reload."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


class Sweeper:
    """Every second: idle sessions and connections, bodies and headers that do not come."""

    def __init__(self, app: App, server: Any) -> None:
        self.app, self.server = app, server
        self._waiting: dict[Any, float] = {}

    def sweep(self) -> None:
        self.app.engine.sweep()
        self.app.sweep()
        now = time.monotonic()
        waiting = {}
        for connection in list(self.server.server_state.connections):
            if not hasattr(connection, "give_up"):
                continue  # a WebSocket: uvicorn pings it
            connection.give_up(now)
            asked = connection.cycle is not None and not connection.cycle.response_complete
            if connection.idle_since is None and not asked:  # within a request's headers
                waiting[connection] = since = self._waiting.get(connection, now)
                if now - since > HEADER_SECONDS:
                    connection.transport.close()
        self._waiting = waiting
