"""What a connection costs and when it ends, on real sockets in one process."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from benchmarks.serving import binary_request, json_request
from hamlet.serving.app import App
from hamlet.serving.connection import Connection
from hamlet.serving.protocol import MAX_KNOWN_BYTES, Parser
from hamlet.serving.server import Sweeper


@pytest.mark.parametrize("way", ["short", "uvicorn's"])
def test_an_idle_connection_is_closed_and_a_busy_one_is_not(engine, seen, way):
    if way == "short":
        request = json_request(seen[0], sequence_id="idle", sequence_start=True)
    else:
        request = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def run() -> None:
        app = App(engine, print)
        config = uvicorn.Config(app, timeout_keep_alive=0, lifespan="off", log_config=None)
        config.load()
        config.loaded_app = app
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(config, state, {}, loop), "127.0.0.1", 0
        )
        sweeper = Sweeper(app, type("Server", (), {"server_state": state}))
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(request[:40])
        await asyncio.sleep(0.05)
        sweeper.sweep()  # within its headers it is not idle
        writer.write(request[40:])
        answer = await asyncio.wait_for(reader.readuntil(b"}"), 10)
        assert answer.startswith(b"HTTP/1.1 200")
        await asyncio.sleep(0.05)
        assert len(state.connections) == 1  # nobody has looked yet
        sweeper.sweep()
        rest = await asyncio.wait_for(reader.read(), 10)  # until the end of the connection
        assert b"HTTP" not in rest
        writer.close()
        server.close()

    asyncio.run(run())


def test_a_long_header_is_not_remembered(engine, seen):
    def remembered(**parameters) -> int:
        request = binary_request(seen[0], sequence_id="long", **parameters)
        head, _, body = request.partition(b"\r\n\r\n")
        length = head.rpartition(b"Inference-Header-Content-Length: ")[2]
        parser = Parser()
        request, _ = parser.parse(body, length, lambda request: engine.current)
        assert len(request.record) == engine.current.record_bytes
        return len(parser.known)

    assert remembered() == 1
    assert remembered(comment="x" * MAX_KNOWN_BYTES) == 0
