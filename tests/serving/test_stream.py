"""One life per connection, over a WebSocket."""

from __future__ import annotations

import json
import signal
import time
from contextlib import ExitStack

import numpy as np
import pytest
from served import Served
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from benchmarks.gru import HIDDEN, SEEN, lives, write_gru

TICKS, LIVES = 12, 4
PATH = "/v2/models/gru/stream"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_gru(tmp_path_factory.mktemp("gru") / "gru.onnx")


@pytest.fixture(scope="module")
def server(policy):
    with Served(policy, "--session-ttl", "3") as served:
        yield served


@pytest.fixture(scope="module")
def known(policy):
    return lives(policy, TICKS, LIVES)


def stream(server, path: str = PATH, **options) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}{path}", **options)


def ask(socket, row, *more, outputs=("action",), **parameters):
    obs = {"name": "obs", "datatype": "FP32", "shape": [1, SEEN], "data": row.tolist()}
    socket.send(
        json.dumps(
            {
                "inputs": [obs, *more],
                "outputs": [{"name": name} for name in outputs],
                "parameters": parameters,
            }
        )
    )
    return json.loads(socket.recv(10))


def action(told) -> int:
    assert "outputs" in told, told
    return told["outputs"][0]["data"][0]


def eventually(true) -> bool:
    until = time.monotonic() + 5
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    return true()


def test_each_connection_is_a_life(server, known):
    seen, expected = known
    opened = server.metric("hamlet_sessions_opened_total")
    with ExitStack() as open_ones:
        sockets = [open_ones.enter_context(stream(server)) for _ in range(LIVES)]
        got = [[action(ask(s, row)) for s, row in zip(sockets, tick)] for tick in seen]
        assert got == expected.tolist()
        assert server.metric("hamlet_sessions_opened_total") == opened + LIVES
    assert eventually(lambda: server.metric('hamlet_sessions_closed_total{reason="deleted"}') >= 4)


def test_messages_sent_at_once_are_answered_in_order(server, known):
    seen, expected = known
    with stream(server) as socket:
        for tick in range(TICKS):
            obs = {"name": "obs", "datatype": "FP32", "shape": [1, SEEN]}
            obs["data"] = seen[tick, 0].tolist()
            socket.send(json.dumps({"id": str(tick), "inputs": [obs]}))
        told = [json.loads(socket.recv(10)) for _ in range(TICKS)]
    assert [t["id"] for t in told] == [str(tick) for tick in range(TICKS)]
    by_name = [{o["name"]: o["data"] for o in t["outputs"]} for t in told]
    assert [b["action"] for b in by_name] == expected[:, :1].tolist()


def test_binary_messages(server, known):
    seen, expected = known
    size = {"binary_data_size": 4 * SEEN}
    header = json.dumps(
        {
            "inputs": [{"name": "obs", "datatype": "FP32", "shape": [1, SEEN], "parameters": size}],
            "outputs": [{"name": "action", "parameters": {"binary_data": True}}],
        }
    ).encode()
    got = []
    with stream(server) as socket:
        for tick in range(TICKS):
            socket.send(len(header).to_bytes(4, "little") + header + seen[tick, 0].tobytes())
            told = socket.recv(10)
            end = 4 + int.from_bytes(told[:4], "little")
            assert json.loads(told[4:end])["outputs"][0]["name"] == "action"
            got.append(int(np.frombuffer(told[end:], np.int64)[0]))
    assert got == expected[:, 0].tolist()


def test_a_life_begins_anew_and_ends_when_asked(server, known):
    seen, expected = known
    with stream(server) as socket:
        assert [action(ask(socket, seen[t, 0])) for t in range(3)] == expected[:3, 0].tolist()
        first = action(ask(socket, seen[0, 1], sequence_start=True))
        assert [first, action(ask(socket, seen[1, 1]))] == expected[:2, 1].tolist()
        assert action(ask(socket, seen[2, 1], sequence_end=True)) == expected[2, 1]
        assert action(ask(socket, seen[0, 2])) == expected[0, 2]


def test_a_life_that_timed_out_is_told_so(server, known):
    seen, expected = known
    with stream(server) as socket:
        ask(socket, seen[0, 0])
        time.sleep(4.5)
        told = ask(socket, seen[1, 0])
        assert told["status"] == 404
        assert "timed out" in told["error"]
        assert action(ask(socket, seen[0, 1], sequence_start=True)) == expected[0, 1]


def test_a_name_reaches_a_life_from_any_connection(server, known):
    seen, expected = known
    with stream(server) as one, stream(server) as two:
        assert action(ask(one, seen[0, 0], sequence_id="kept", sequence_start=True)) >= 0
        assert action(ask(one, seen[0, 1])) == expected[0, 1]  # the connection's own
        assert action(ask(two, seen[1, 0], sequence_id="kept")) == expected[1, 0]
    with stream(server) as three:
        assert action(ask(three, seen[2, 0], sequence_id="kept")) == expected[2, 0]


def test_state_that_the_client_keeps(server, known):
    seen, expected = known
    state = {"name": "h_in", "datatype": "FP32", "shape": [1, HIDDEN], "data": [0.0] * HIDDEN}
    with stream(server) as socket:
        for tick in range(3):
            told = ask(socket, seen[tick, 0], state, outputs=("action", "h_out"))
            assert action(told) == expected[tick, 0]
            state = {**state, "data": told["outputs"][1]["data"]}


def test_many_lives_on_one_connection(server, known):
    seen, expected = known
    got = []
    with stream(server) as socket:
        for tick in range(TICKS):
            inputs = [
                {"name": "obs", "datatype": "FP32", "shape": [LIVES, SEEN],
                 "data": seen[tick].ravel().tolist()},
                {"name": "sequence_id", "datatype": "BYTES", "shape": [LIVES],
                 "data": [f"row {i}" for i in range(LIVES)]},
                {"name": "sequence_start", "datatype": "BOOL", "shape": [LIVES],
                 "data": [tick == 0] * LIVES},
            ]  # fmt: skip
            socket.send(json.dumps({"inputs": inputs, "outputs": [{"name": "action"}]}))
            got.append(json.loads(socket.recv(10))["outputs"][0]["data"])
    assert got == expected.tolist()


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "'inputs' is missing"),
        ('{"inputs": []}', "'obs' is missing"),
        ('{"inputs": [], "parameters": 3}', "'parameters' is not an object"),
        (b"abc", "begins with its header's length"),
        (b"\xff\xff\xff\xff{}", "Inference-Header-Content-Length"),
    ],
)
def test_what_is_wrong_is_said_and_the_life_goes_on(server, known, sent, told):
    seen, expected = known
    with stream(server) as socket:
        assert action(ask(socket, seen[0, 0])) == expected[0, 0]
        socket.send(sent)
        answer = json.loads(socket.recv(10))
        assert answer["status"] == 400
        assert told in answer["error"]
        assert action(ask(socket, seen[1, 0])) == expected[1, 0]


def test_a_refused_beginning_begins_nothing(server, known):
    seen, expected = known
    with stream(server) as socket:
        assert ask(socket, np.full(SEEN, 1e39))["status"] == 400
        assert action(ask(socket, seen[0, 0])) == expected[0, 0]


def test_there_is_one_place_for_it(server):
    with pytest.raises(InvalidStatus) as refused:
        stream(server, "/v2/models/other/stream")
    assert refused.value.response.status_code == 404
    assert b"it is at /v2/models/gru/stream" in refused.value.response.body
    assert server.ask("GET", PATH).status == 404


def test_a_token_is_asked_for(policy, known):
    with Served(policy, env={"HAMLET_TOKEN": "secret", "PATH": "/bin"}) as server:
        with pytest.raises(InvalidStatus) as refused:
            stream(server)
        assert refused.value.response.status_code == 401
        headers = {"Authorization": "Bearer secret"}
        with stream(server, additional_headers=headers) as socket:
            assert action(ask(socket, known[0][0, 0])) == known[1][0, 0]


def test_a_server_that_ends_says_goodbye(policy, known):
    with Served(policy) as server, stream(server) as socket:
        ask(socket, known[0][0, 0])
        assert server.stop(signal.SIGTERM) == 0
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(10)
        assert closed.value.rcvd.code in (1001, 1012)
