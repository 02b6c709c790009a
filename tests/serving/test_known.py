"""What the server remembers of requests changes nothing: only numbers differ from tick to tick."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import uvicorn
from served import INFER, Served, action_of
from uvicorn.server import ServerState

from benchmarks.gru import SEEN, lives, write_gru
from benchmarks.serving import json_request
from benchmarks.serving_load import response_length
from hamlet.artifacts import HamletError
from hamlet.serving import engine as engines
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.app import App
from hamlet.serving.connection import Connection
from hamlet.serving.metrics import Metrics
from hamlet.serving.protocol import Parser

TICKS = 12
UNDERSTOOD = ("nested", "spaces", "backwards", "too large")  # that it is too large is seen later
OUTPUTS = [{"name": "action"}, {"name": "h_out"}]


def body_of(observation: dict[str, np.ndarray], **parameters: Any) -> dict[str, Any]:
    return json.loads(json_request(observation, **parameters).partition(b"\r\n\r\n")[2])


@dataclass
class Told:
    """What a parser makes of a body."""

    record: bytes = b""
    error: str = ""


def told(parser: Parser, text: bytes, model: Any) -> Told:
    try:
        request, _ = parser.parse(text, None, lambda request: model)
    except HamletError as error:
        return Told(error=str(error))
    return Told(record=request.record)


def spoiled(body: dict[str, Any]) -> dict[str, bytes]:
    """The same frame around other lists, and nearly the same frame."""
    inputs = body["inputs"]
    first = next(i for i, entry in enumerate(inputs) if entry["datatype"] == "FP32")
    other = next(i for i, entry in enumerate(inputs) if entry["datatype"] != "FP32")

    def with_data(index: int, data: Any) -> bytes:
        changed = [{**e, "data": data} if i == index else e for i, e in enumerate(inputs)]
        return json.dumps({**body, "inputs": changed}).encode()

    numbers = inputs[first]["data"]
    text = json.dumps(body)
    return {
        "one less": with_data(first, numbers[1:]),
        "one more": with_data(first, [*numbers, 0.5]),
        "one moved to another": with_data(first, numbers[1:]).replace(
            b'"data": [', b'"data": [0, ', other + 1 if other < first else 1
        ),
        "true": with_data(first, [True, *numbers[1:]]),
        "null": with_data(first, [None, *numbers[1:]]),
        "a string": with_data(first, ["1", *numbers[1:]]),
        "too large": with_data(first, [1e39, *numbers[1:]]),
        "a half": with_data(other, [0.5, *inputs[other]["data"][1:]]),
        "nested": with_data(first, [numbers]),
        "empty": with_data(first, []),
        "a comma too many": text.replace('"data": [', '"data": [,', 1).encode(),
        "no number": text.replace('"data": [', '"data": [x, ', 1).encode(),
        "spaces": text.replace(", ", " ,\n ").encode(),
        "backwards": json.dumps({**body, "inputs": inputs[::-1]}).encode(),
        "twice": json.dumps({**body, "inputs": [*inputs, inputs[0]]}).encode(),
    }


def test_known_and_new_requests_are_understood_alike(engine, seen):
    model = engine.current
    warm = Parser()
    for observation in seen[:4]:
        body = body_of(observation, sequence_id="life")
        found = told(warm, json.dumps(body).encode(), model)
        assert found.record
        assert found == told(Parser(), json.dumps(body).encode(), model)
    assert len(warm.known) == 1
    for what, text in spoiled(body_of(seen[9], sequence_id="life")).items():
        cold = told(Parser(), text, model)
        for _ in range(2):  # also when this was seen before
            assert told(warm, text, model) == cold, what
        assert bool(cold.error) != (what in UNDERSTOOD), what
    assert len(warm.known) == 3, "other spaces and another order are frames of their own"


def test_a_list_that_is_no_input_is_not_taken_for_one(engine, seen):
    """Where a comment holds a list called data, inputs are still read from where they stand."""
    model, warm = engine.current, Parser()
    for observation in seen[:3]:
        body = body_of(observation, sequence_id="life")
        comment = {"data": body["inputs"][0]["data"]}
        text = json.dumps({"comment": comment, **body}).replace('"data": [', '"data" : [', 2)
        text = text.replace('"data" : [', '"data": [', 1).encode()
        assert told(warm, text, model) == told(Parser(), text, model)
        assert told(warm, text, model).record
    assert not warm.known


def test_another_version_looks_at_a_known_request_itself(engine, seen):
    model, warm = engine.current, Parser()
    text = json.dumps(body_of(seen[0], sequence_id="life")).encode()
    told(warm, text, model)
    new = type("Other", (), {**vars(model), "version": "2", "plain": {}, "by_name": {}})
    assert "is unknown" in told(warm, text, new).error


# ------------------------------------------------------------------------------------------------
# Heads, over a real socket


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_gru(tmp_path_factory.mktemp("gru") / "gru.onnx")


@pytest.fixture(scope="module")
def server(policy):
    with Served(policy, "--name", "hamlet-agent") as running:
        yield running


class Raw:
    """A connection that sends what it is told, in the pieces it is told."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.got = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> bytes:
        while (length := response_length(self.got)) is None or len(self.got) < length:
            more = self.socket.recv(65536)
            assert more, f"closed after {self.got!r}"
            self.got += more
        answer, self.got = self.got[:length], self.got[length:]
        return answer


def ticks(rows: np.ndarray, name: str) -> list[bytes]:
    """A life's requests, all with the same head: the numbers have the same length."""
    texts = []
    for i, row in enumerate(rows):
        data = ", ".join(f"{value:+.6f}".replace("+", " ") for value in row)
        start = "true " if i == 0 else "false"
        texts.append(
            f'{{"parameters": {{"sequence_id": "{name}", "sequence_start": {start}}}, "inputs": '
            f'[{{"name": "obs", "shape": [1, {SEEN}], "datatype": "FP32", "data": [{data}]}}]}}'
        )
    assert len({len(text) for text in texts}) == 1
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(texts[0])}\r\n\r\n"
    return [(head + text).encode() for text in texts]


@pytest.fixture(scope="module")
def played(policy):
    seen, actions = lives(policy, TICKS, 3)
    seen = np.round(seen, 6)
    return seen, actions


WAYS = ("whole", "in two pieces", "cut within the head", "two at once", "and a half")


@pytest.mark.parametrize("way", WAYS)
def test_a_known_head_is_the_same_request_however_it_arrives(server, played, way):
    seen, expected = played
    connection = Raw(server.port)
    requests = ticks(seen[:, 0], f"life {way}")
    found = []
    if way in ("two at once", "and a half"):
        step = 60 if way == "and a half" else 0
        for one, two in zip(requests[::2], requests[1::2], strict=True):
            connection.send(one + two[: len(two) - step])
            found.append(connection.answer())
            connection.send(two[len(two) - step :])
            found.append(connection.answer())
    else:
        cut = {"whole": 0, "in two pieces": 120, "cut within the head": 30}[way]
        for request in requests:
            if cut:
                connection.send(request[:cut])
            connection.send(request[cut:])
            found.append(connection.answer())
    assert [action_of(answer)[0] for answer in found] == expected[:, 0].tolist()


def test_lives_of_two_connections_with_one_head_are_not_mixed(server, played):
    seen, expected = played
    both = [Raw(server.port), Raw(server.port)]
    plans = [ticks(seen[:, i], f"life-{i}") for i in (1, 2)]
    for tick in range(TICKS):
        for connection, plan in zip(both, plans, strict=True):
            connection.send(plan[tick])
        answers = [action_of(connection.answer())[0] for connection in both]
        assert answers == expected[tick, 1:].tolist()


def test_a_known_head_that_asks_to_close_is_closed_and_a_shorter_body_is_waited_for(server, played):
    seen, expected = played
    requests = ticks(seen[:, 0], "shorter")
    connection = Raw(server.port)
    for request in requests[:2]:
        connection.send(request)
        connection.answer()
    connection.send(requests[2][:-7])
    connection.socket.settimeout(0.3)
    with pytest.raises(TimeoutError):
        connection.answer()
    connection.socket.settimeout(30)
    connection.send(requests[2][-7:])
    assert action_of(connection.answer())[0] == expected[2, 0]
    for request in requests[3:5]:
        closing = Raw(server.port)
        closing.send(request.replace(b"Host: x", b"Host: x\r\nConnection: close"))
        assert b"connection: close" in closing.answer()
        assert closing.socket.recv(100) == b""


def test_what_looks_like_a_known_request_within_another_is_none(server, played):
    requests = ticks(played[0][:, 0], "within")
    for before in (
        b"POST /nowhere HTTP/1.1\r\nX: y",
        b"POST /nowhere HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(requests[2]),
    ):
        connection = Raw(server.port)
        for request in requests[:2]:
            connection.send(request)
            connection.answer()
        connection.send(before)
        time.sleep(0.1)
        connection.send(requests[2])
        assert connection.answer().startswith(b"HTTP/1.1 404")


def test_the_token_is_asked_for_at_every_request(policy, played):
    seen, expected = played
    with Served(policy, "--name", "hamlet-agent", env={**os.environ, "HAMLET_TOKEN": "s"}) as run:
        connection = Raw(run.port)
        requests = ticks(seen[:, 0], "life")
        for tick, request in enumerate(requests[:6]):
            for header in (b"", b"Authorization: Bearer t\r\n", b"Authorization: Bearer s\r\n"):
                connection.send(request.replace(b"Host: x\r\n", b"Host: x\r\n" + header))
                answer = connection.answer()
                if header.endswith(b" s\r\n"):
                    assert action_of(answer)[0] == expected[tick, 0]
                else:
                    assert answer.startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("quick", [True, False])
def test_a_short_batch_needs_no_thread_and_a_long_one_has_it(policy, played, monkeypatch, quick):
    """The same actions; what decides is how long a full batch took before the first request."""
    monkeypatch.setattr(engines, "INLINE_SECONDS", 60.0 if quick else 0.0)
    engine = engines.Engine(Metrics(), 100, 60.0)
    engine.install(engine.prepare(OnnxAgent(policy), "1"))
    handed: list[Any] = []
    submit = ThreadPoolExecutor.submit
    monkeypatch.setattr(
        ThreadPoolExecutor, "submit", lambda pool, run: handed.append(run) or submit(pool, run)
    )
    seen, expected = played

    async def live() -> np.ndarray:
        found = []
        for tick, rows in enumerate(seen):
            done = [asyncio.get_running_loop().create_future() for _ in rows]
            for i, row in enumerate(rows):
                engine.tick(
                    f"life{i}", row.tobytes(),
                    lambda action, more, i=i, done=done: done[i].set_result(action), start=not tick,
                )  # fmt: skip
            found.append(await asyncio.gather(*done))
        return np.array(found)

    assert np.array_equal(asyncio.run(live()), expected)
    assert len(handed) == (0 if quick else TICKS)
    engine.shutdown()


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    resume_reading = close = pause_reading


def test_answers_come_in_the_order_of_their_requests(policy, played):
    """A quick request with a known head does not overtake a slow one before it."""
    engine = engines.Engine(Metrics(), 100, 60.0, "hamlet-agent")
    engine.install(engine.prepare(OnnxAgent(policy), "1"))
    seen, expected = played
    requests = ticks(seen[:, 0], "life")
    alone = json.dumps({"inputs": body_of({"obs": seen[0, 1]})["inputs"], "outputs": OUTPUTS})
    slow = f"POST {INFER} HTTP/1.1\r\nContent-Length: {len(alone)}\r\n\r\n{alone}".encode()

    async def talk() -> bytes:
        app = App(engine, print)
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        config.loaded_app = app
        connection = Connection(config, ServerState(), {}, asyncio.get_running_loop())
        written = Written()
        connection.connection_made(written)
        for i, request in enumerate([requests[0], slow, requests[1], slow, requests[2]]):
            connection.data_received(request)
            if i == 0:
                await until(lambda: written.data)
        await until(lambda: written.data.count(b"HTTP/1.1 200") == 5)
        connection.connection_lost(None)
        return written.data

    async def until(done: Any) -> None:
        for _ in range(1000):
            if done():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("no answer")

    answers = asyncio.run(talk()).split(b"HTTP/1.1 ")[1:]
    shapes = [b"h_out" in answer for answer in answers]
    assert shapes == [False, True, False, True, False]
    actions = [json.loads(a[a.find(b"\r\n\r\n") :])["outputs"][0]["data"][0] for a in answers[::2]]
    assert actions == expected[:3, 0].tolist()
    engine.shutdown()
