"""Bad input and faults, each over a real socket: a 4xx that names the field, and the server lives.

After every fault a session that was open before acts as raw ONNX Runtime says it must.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from served import INFER, Served, action_of, lives_by_raw_onnxruntime

from benchmarks.serving import binary_request, http, json_request, observations, put
from benchmarks.serving_load import load
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.app import MAX_IGNORED
from hamlet.serving.headers import MAX_BODY
from hamlet.serving.model import RNG_RANGE


def talk_raw(server: Served, data: bytes, *, close: bool = False, seconds: float = 30) -> bytes:
    """Send bytes as they are and read until the server has nothing more to say."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as s:
        s.sendall(data)
        if close:
            s.shutdown(socket.SHUT_WR)
        got = b""
        while b"\r\n\r\n" not in got:
            more = s.recv(65536)
            if not more:
                return got
            got += more
        return got


@pytest.fixture
def witness(server, agent, seen):
    """An innocent session: whatever happens in between, its life is what it must be."""
    name = f"witness-{time.monotonic_ns()}"
    rows = seen[:6]
    expected = lives_by_raw_onnxruntime(agent, [[row] for row in rows], [11])[:, 0].tolist()
    got = [server.tick(rows[0], name, sequence_start=True, seed=11).action]
    got += [server.tick(row, name).action for row in rows[1:3]]
    yield
    got += [server.tick(row, name).action for row in rows[3:]]
    assert got == expected
    assert server.ask("DELETE", f"/v2/sessions/{name}").status == 204
    assert server.process.poll() is None
    assert not [line for line in server.log if line["event"] == "error"]


def body(observation, **parameters):
    raw = json_request(observation, sequence_id="bad", sequence_start=True, **parameters)
    return json.loads(raw.partition(b"\r\n\r\n")[2])


def spoil(request_, field, **changes):
    next(e for e in request_["inputs"] if e["name"] == field).update(changes)
    return request_


def without(data, name):
    data["inputs"] = [e for e in data["inputs"] if e["name"] != name]
    return data


def twice(data, name):
    data["inputs"].append(next(e for e in data["inputs"] if e["name"] == name))
    return data


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: spoil(d, "view", shape=[1, 4, 5]), "'view' is UINT8 \\[1, 4, 5\\].*expected"),
        (lambda d: spoil(d, "view", shape=[2, 5, 5]), "'view'"),
        (lambda d: spoil(d, "view", shape="5x5"), "'view'"),
        (lambda d: spoil(d, "view", data=[0] * 24), "'view' has 24 numbers"),
        (lambda d: spoil(d, "view", data=[[0] * 5] * 5), "'view' has nested data"),
        (lambda d: spoil(d, "view", data=None), "'view'"),
        (lambda d: spoil(d, "view", datatype="INT32"), "'view' is INT32"),
        (lambda d: spoil(d, "view", data=[0.5] * 25), "'view' holds what is not UINT8"),
        (lambda d: spoil(d, "view", data=["0"] * 25), "'view' holds what is not UINT8"),
        (lambda d: spoil(d, "view", data=[300] * 25), "'view' holds what is not UINT8"),
        (lambda d: spoil(d, "view", data=[255] * 25), "'view' holds 255: it must be 0 to"),
        (lambda d: spoil(d, "self_state", data=[1e30] * 15), "'self_state' holds"),
        (lambda d: spoil(d, "self_state", data=[1e300] * 15), "'self_state' holds inf"),
        (lambda d: spoil(d, "others_action", data=[99] * 3), "'others_action' holds 99"),
        (lambda d: spoil(d, "others_action", data=[2**70] * 3), "'others_action'"),
        (lambda d: spoil(d, "visible", data=[2, 0, 1]), "'visible' holds what is not BOOL"),
        (lambda d: spoil(d, "action_mask", data=[False] * 8), "'action_mask' forbids every action"),
        (lambda d: spoil(d, "view", name="vista"), "'vista' is unknown: known: "),
        (lambda d: without(d, "cues"), "'cues' is missing: expected FP32"),
        (lambda d: twice(d, "cues"), "'cues' is given twice"),
        (lambda d: d | {"inputs": {}}, "'inputs'"),
        (lambda d: d | {"inputs": [7]}, "'inputs'"),
        (lambda d: d | {"outputs": [{"name": "next_day"}]}, "output 'next_day' is unknown"),
        (lambda d: d | {"outputs": 3}, "'outputs'"),
        (lambda d: d | {"id": 3}, "'id'"),
        (lambda d: d | {"parameters": []}, "'parameters'"),
        (lambda d: d | {"parameters": {"sequence_id": 1.5}}, "1.5 cannot be the sequence_id"),
        (lambda d: d | {"parameters": {"sequence_id": "a\nb"}}, "cannot be the sequence_id"),
        (lambda d: d | {"parameters": {"sequence_id": -1}}, "-1 cannot be the sequence_id"),
        (lambda d: d | {"parameters": {"sequence_id": True}}, "True cannot be the sequence_id"),
        (lambda d: d | {"parameters": {"sequence_id": "x" * 300}}, "sequence_id"),
        (lambda d: d | {"parameters": {"sequence_start": True}}, "'sequence_id' is missing"),
        (lambda d: d | {"parameters": {"sequence_id": 1, "sequence_start": 2}}, "'sequence_start'"),
        (lambda d: d | {"parameters": {"sequence_id": 1, "timeout": -4}}, "'timeout'"),
        (lambda d: d | {"parameters": {"sequence_id": 1, "seed": RNG_RANGE}}, "'seed'"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(server, seen, witness, change, told):
    import re

    before = server.metric("hamlet_sessions_opened_total") - closed(server)
    answer = server.ask("POST", INFER, change(body(seen[0])))
    assert answer.status == 400
    assert re.search(told, answer.error), answer.error
    # and it left no session behind
    assert server.metric("hamlet_sessions_opened_total") - closed(server) == before


def closed(server) -> float:
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    return sum(
        float(x.rpartition(" ")[2]) for x in lines if x.startswith("hamlet_sessions_closed_total{")
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_named(server, seen, witness, value):
    bad = {**seen[0], "cues": np.full_like(seen[0]["cues"], value)}
    raw = binary_request(bad, sequence_id="nan", sequence_start=True)
    got = talk_raw(server, raw)
    assert got.startswith(b"HTTP/1.1 400")
    assert b"'cues' holds" in got
    answer = server.ask("POST", INFER, b'{"inputs": [{"name": "cues", "data": [NaN]}]}')
    assert answer.status == 400
    assert "JSON" in answer.error


def test_a_byte_that_is_no_bool_is_named(server, seen, witness):
    raw = binary_request(seen[0], sequence_id="bool", sequence_start=True)
    mask = seen[0]["action_mask"].tobytes()
    assert raw.endswith(mask)
    got = talk_raw(server, raw[: -len(mask)] + b"\x02" * len(mask))
    assert b"'action_mask' holds 2" in got


@pytest.mark.parametrize("length", ["0", "-1", "999999", "ten", ""])
def test_a_wrong_length_of_the_header_is_named(server, seen, witness, length):
    raw = binary_request(seen[0], sequence_id="length", sequence_start=True)
    head, _, rest = raw.partition(b"Inference-Header-Content-Length: ")
    got = talk_raw(server, head + b"Inference-Header-Content-Length: " + length.encode()
                   + rest[rest.index(b"\r\n"):])  # fmt: skip
    assert got.startswith(b"HTTP/1.1 400")
    assert b"Inference-Header-Content-Length" in got or b"JSON" in got


def test_binary_data_too_short_or_too_long(server, seen, witness):
    raw = binary_request(seen[0], sequence_id="cut", sequence_start=True)
    head, _, data = raw.partition(b"\r\n\r\n")
    length = next(x for x in head.split(b"\r\n") if x.startswith(b"Inference"))
    for given, told in ((data[:-3], b"is cut short"), (data + b"abc", b"belong to none")):
        got = talk_raw(server, http("POST", INFER, given, length.decode() + "\r\n"))
        assert got.startswith(b"HTTP/1.1 400")
        assert told in got


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"null", b'{"inputs":' * 40])
def test_what_is_not_json(server, witness, data):
    for path in (INFER, "/act"):
        answer = server.ask("POST", path, data)
        assert answer.status == 400
        assert "JSON" in answer.error


def test_deep_nesting_is_refused(server, witness):
    deep = b"[" * 50_000 + b"]" * 50_000
    answer = server.ask("POST", INFER, b'{"inputs": ' + deep + b"}")
    assert answer.status == 400


def test_an_oversized_body(server, witness):
    for size in (MAX_BODY + 1, 4 * MAX_BODY):  # the client is still sending: it must hear of it
        assert server.ask("POST", INFER, b" " * size).status == 413
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_IGNORED + 1}\r\n\r\n"
    assert talk_raw(server, head.encode()).startswith(b"HTTP/1.1 413")  # without reading it
    chunk = b"%x\r\n%s\r\n" % (1 << 18, b" " * (1 << 18))
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    got = talk_raw(server, head + chunk * 5)
    assert got.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in got


def test_a_packed_body(server, agent, seen, witness):
    """gzip and deflate as clients send them; a bomb, nonsense and half of one are refused."""
    plain = json.dumps(body(seen[0], sequence_end=True, seed=4)).encode()
    expected = lives_by_raw_onnxruntime(agent, [[seen[0]]], [4])[0, 0]
    for encoding, packed in (
        ("gzip", gzip.compress(plain)),
        ("x-gzip", gzip.compress(plain)),
        ("deflate", zlib.compress(plain)),
    ):
        assert server.ask("POST", INFER, packed, content_encoding=encoding).action == expected
    bomb = gzip.compress(b" " * (64 * MAX_BODY))
    for packed, status, told in (
        (bomb, 413, "unpacks to more than"),
        (b"nonsense", 400, "not what its Content-Encoding says"),
        (gzip.compress(plain)[:-20], 400, "cut short"),
    ):
        answer = server.ask("POST", INFER, packed, content_encoding="gzip")
        assert answer.status == status
        assert told in answer.error
    assert server.ask("POST", INFER, b"{}", content_encoding="br").status == 415


def test_a_chunked_body_is_a_body(server, seen, witness):
    data = json_request(seen[0], sequence_id="chunked", sequence_start=True, sequence_end=True)
    data = data.partition(b"\r\n\r\n")[2]
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    pieces = [data[i : i + 100] for i in range(0, len(data), 100)]
    sent = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    assert talk_raw(server, head + sent).startswith(b"HTTP/1.1 200")


def test_a_body_cut_short(server, seen, witness):
    raw = json_request(seen[0], sequence_id="short", sequence_start=True)
    assert talk_raw(server, raw[:-50], close=True, seconds=20) == b""
    assert server.ask("DELETE", "/v2/sessions/short").status == 404  # it never began
    got = talk_raw(server, b"POST /act HTTP/1.1\r\nContent-Length: 50\r\n\r\n{", close=True)
    assert got == b""


def test_nonsense_instead_of_http(server, witness):
    assert talk_raw(server, b"\x16\x03\x01 hello\r\n\r\n").startswith(b"HTTP/1.1 400")


@pytest.mark.slow
def test_slow_clients_are_answered_408_and_hold_nobody_up(server, seen, witness):
    """A body, and headers, of which one byte comes now and then; meanwhile others are served."""
    raw = json_request(seen[0], sequence_id="slow", sequence_start=True)
    slow = (raw[:-1], raw[:60], b"POST /act HTTP/1.1\r\nContent-Length: 9\r\n\r\n{")
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(talk_raw, server, data) for data in slow]
        while not all(answer.done() for answer in answers):
            began = time.monotonic()
            assert server.ask("GET", "/v2/health/live").status == 200
            assert time.monotonic() - began < 5
            time.sleep(0.2)
    for data, answer in zip(slow, answers):
        got = answer.result()
        assert got.startswith(b"HTTP/1.1 408") if b"\r\n\r\n" in data else got == b""


def test_sessions_unknown_foreign_ended_twice(server, seen, witness):
    answer = server.tick(seen[0], "nobody")
    assert answer.status == 404
    assert "'nobody'" in answer.error
    assert server.tick(seen[0], "nobody", sequence_end=True).status == 404
    assert server.ask("DELETE", "/v2/sessions/nobody").status == 404
    assert server.tick(seen[0], "twice", sequence_start=True).status == 200
    assert server.tick(seen[0], "twice", sequence_start=True).status == 200  # anew
    assert server.tick(seen[0], "twice", sequence_end=True).status == 200
    assert server.tick(seen[0], "twice", sequence_end=True).status == 404
    assert server.tick(seen[0], "twice", sequence_start=True, sequence_end=True).status == 200
    act = {"observation": {n: x.tolist() for n, x in seen[0].items()}, "session": "nobody"}
    assert server.ask("POST", "/act", act).status == 404


def test_a_session_of_another_version(server, seen, witness):
    path = "/v2/models/hamlet-agent/versions/12345/infer"
    assert server.ask("POST", path, body(seen[0])).status == 404


def test_requests_of_one_session_keep_their_order(server, agent, seen, witness):
    """Eight at once on one session, from as many connections, and more: all answered, in a row."""
    rows = [seen[0]] * 9
    expected = lives_by_raw_onnxruntime(agent, [[row] for row in rows], [5])[:, 0]
    first = server.tick(seen[0], "crowded", sequence_start=True, seed=5)
    got: list[int] = []
    clients = [
        threading.Thread(target=lambda: got.append(server.tick(seen[0], "crowded").action))
        for _ in range(8)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert first.action == expected[0]
    assert sorted(got) == sorted(expected[1:].tolist())
    # and down one pipelined connection in exactly their order
    server.ask("DELETE", "/v2/sessions/crowded")
    requests = [json_request(seen[0], sequence_id="piped", sequence_start=True, seed=5)]
    requests += [json_request(seen[0], sequence_id="piped") for _ in range(8)]
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        s.sendall(b"".join(requests))
        data = b""
        while data.count(b"HTTP/1.1 200") < 9 or not data.endswith(b"]}]}"):
            more = s.recv(65536)
            assert more, data
            data += more
    answers = [b"HTTP/1.1 200" + part for part in data.split(b"HTTP/1.1 200")[1:]]
    assert [action_of(a)[0] for a in answers] == expected.tolist()
    server.ask("DELETE", "/v2/sessions/piped")


def test_too_many_for_one_session_are_pushed_back(server, agent, seen, witness):
    """Forty at once: one acts, sixteen wait for it, the others are told to come again."""
    expected = lives_by_raw_onnxruntime(agent, [[seen[0]]] * 18, [7])[:, 0].tolist()
    assert server.tick(seen[0], "flooded", sequence_start=True, seed=7).action == expected[0]
    before = server.metric("hamlet_pushed_back_total")
    request = json_request(seen[0], sequence_id="flooded")
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(40)]
    for client in clients:  # it has taken up each of them
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        got = b""
        while not got.endswith(b'{"live":true}'):
            got += client.recv(4096)
    server.process.send_signal(signal.SIGSTOP)
    while psutil.Process(server.process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    for client in clients:
        client.sendall(request)
    server.process.send_signal(signal.SIGCONT)  # and now reads all of them in one turn
    answers = [client.recv(65536) for client in clients]
    acted = [action_of(answer)[0] for answer in answers if answer.startswith(b"HTTP/1.1 200")]
    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 429")]
    assert (len(acted), len(refused)) == (17, 23)
    assert sorted(acted) == sorted(expected[1:])
    for answer in refused:
        assert b"retry-after: 1\r\n" in answer
        assert b"too many requests are waiting" in answer
    assert server.metric("hamlet_pushed_back_total") == before + len(refused)
    server.ask("DELETE", "/v2/sessions/flooded")


def test_a_deadline_that_passed_changes_nothing(server, agent, seen, witness):
    rows = seen[:3]
    expected = lives_by_raw_onnxruntime(agent, [[row] for row in rows], [9])[:, 0]
    before = server.metric("hamlet_late_total")
    assert server.tick(rows[0], "late", sequence_start=True, seed=9).action == expected[0]
    for _ in range(5):  # a microsecond has passed before anything can run
        late = server.tick(rows[1], "late", timeout=1)
        assert late.status == 429
        assert "no turn within the timeout of 1e-06 s" in late.error
    assert server.metric("hamlet_late_total") == before + 5
    assert server.tick(rows[1], "late").action == expected[1]
    assert server.tick(rows[2], "late").action == expected[2]
    server.ask("DELETE", "/v2/sessions/late")


def test_ten_thousand_sessions(agent, seen):
    """As many open as may; the others are told when to come again, and nothing grows."""
    with Served(agent, "--max-sessions", "2000") as server:
        count = iter(range(10_000))
        statuses: list[bytes] = []
        memory = []

        def talk():
            template = binary_request(seen[0], sequence_id="s-000000", sequence_start=True)
            for i in count:
                response = yield template.replace(b"s-000000", b"s-%06d" % i)
                statuses.append(response[9:12])
                if statuses[-1] == b"429":
                    assert b"retry-after: " in response
                if len(statuses) in (3000, 10_000):
                    memory.append(psutil.Process(server.process.pid).memory_info().rss)

        load("127.0.0.1", server.port, [talk() for _ in range(32)], 300)
        assert len(statuses) == 10_000
        assert statuses.count(b"200") == 2000
        assert statuses.count(b"429") == 8000
        assert memory[0] < 400e6
        assert memory[1] - memory[0] < 5e6  # 7,000 were refused between: 700 bytes each
        assert server.tick(seen[0], "s-000000", sequence_end=True).status == 200
        assert server.tick(seen[0], "one-more", sequence_start=True).status == 200


def test_idle_sessions_end(agent, seen):
    with Served(agent, "--session-ttl", "1") as server:
        assert server.tick(seen[0], "idle", sequence_start=True).status == 200
        until = time.monotonic() + 20
        while time.monotonic() < until:
            assert (
                server.tick(seen[0], "busy", sequence_start=True, sequence_end=True).status == 200
            )
            if 'closed_total{reason="timeout"} 1' in server.ask("GET", "/metrics").body.decode():
                break
            time.sleep(0.1)
        assert server.tick(seen[0], "idle").status == 404


def test_the_model_file_replaced_by_garbage(agent, other, seen, tmp_path):
    path = tmp_path / agent.name
    put(agent, path)
    with Served(path) as server:
        assert server.tick(seen[0], "a", sequence_start=True).status == 200
        path.write_bytes(b"garbage" * 1000)
        assert "does not match its card" in server.wait("not loaded", 30)["error"]
        assert server.tick(seen[0], "a").status == 200
        assert server.tick(seen[0], "b", sequence_start=True).status == 200
        path.unlink()
        assert "No such file" in server.wait("not loaded", 30)["error"]
        assert server.tick(seen[0], "a").status == 200
        assert server.ask("GET", "/v2/health/ready").status == 200
        put(other, path)
        server.wait("loaded", 30)
        assert server.tick(seen[0], "c", sequence_start=True).status == 200
        assert server.metric('hamlet_reloads_total{result="done"}') == 1


def test_a_card_whose_graph_is_another_is_refused(agent, seen, tmp_path):
    """A healthy ONNX file of something else, with a card that fits its bytes."""
    import onnx
    from onnx import TensorProto, helper

    from hamlet.artifacts import write_card

    path = tmp_path / agent.name
    put(agent, path)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch"])
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    with Served(path) as server:
        onnx.save(model, path)
        write_card(path, "agent", OnnxAgent(agent).card["schema"])
        while "does not match its card" in (error := server.wait("not loaded", 30)["error"]):
            pass  # it looked between the two writes
        assert "its card says" in error
        assert server.tick(seen[0], "a", sequence_start=True).status == 200


def test_a_missing_file_a_taken_port_and_no_model(agent, tmp_path):
    for source, told in (
        (tmp_path / "none.onnx", "No such file"),
        ("models:/hamlet-agent", "names no model"),
    ):
        with pytest.raises(AssertionError, match=told):
            Served(source)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(AssertionError, match="cannot be listened on"):
            Served(agent, "--port", port)


def test_the_token(agent, seen):
    env = {**os.environ, "HAMLET_TOKEN": "s3cret"}
    with Served(agent, env=env) as server:
        data = body(seen[0])
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            for method, path in (
                ("POST", INFER), ("POST", "/act"), ("GET", "/metrics"), ("GET", "/v2"),
                ("DELETE", "/v2/sessions/bad"), ("GET", "/openapi.json"), ("GET", "/nowhere"),
            ):  # fmt: skip
                answer = server.ask(method, path, data if method == "POST" else None, **headers)
                assert answer.status == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
        assert server.ask("GET", "/v2/health/ready").status == 200
        assert server.ask("POST", INFER, data, authorization="Bearer s3cret").status == 200
        # nothing of it is in the log
        assert "s3cret" not in json.dumps(server.log)


def test_observations_of_the_benchmark_are_legal(agent, server):
    for i, observation in enumerate(observations(OnnxAgent(agent), 20)):
        assert server.tick(observation, f"o{i}", sequence_start=True, sequence_end=True).action >= 0
