"""HTTP as others write it: headers, methods, paths, bodies, and connections that are misused."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import socket
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest
import tritonclient.http as triton
from pilot import INFER, LINE, observation, request, tick
from policies import OBS
from served import Served

from hamlet.serving.client import Agent
from hamlet.serving.connection import MAX_HEAD


def send_raw(server: Served, head: str, body: bytes, pieces: int = 1) -> list[bytes]:
    """The same request twice on one connection, in so many pieces; both answers."""
    data = (head.format(length=len(body)) + "\r\n").encode("latin-1") + body
    answers = []
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        for _ in range(2):
            size = -(-len(data) // pieces)
            for i in range(0, len(data), size):
                s.sendall(data[i : i + size])
                time.sleep(0.01 if pieces > 1 else 0)
            got = b""
            while not got.endswith(b"]}]}") and b'"error"' not in got:
                more = s.recv(65536)
                assert more, got
                got += more
            answers.append(got)
    return answers


H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAA\r\n"


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize(
    "headers",
    [
        H2C,
        H2C + "Content-Type: application/json\r\n",
        "Upgrade: h2c\r\nConnection: upgrade\r\n",
        "Connection: Upgrade\r\nUpgrade: TLS/1.0, HTTP/2.0\r\n",
        "Connection: Upgrade\r\nUpgrade: websocket\r\n",  # without the rest of a handshake, a POST
        "Upgrade: h2c\r\n",
        "Connection: keep-alive, TE\r\nTE: trailers, deflate;q=0.5\r\n",
        "Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n",
        "Accept-Encoding: gzip, br, zstd\r\nAccept: text/html;q=0.1\r\n",
        "Content-Type: text/plain; charset=utf-8\r\nContent-Encoding: identity\r\n",
        "Content-Encoding: gzip\r\n",
        H2C + "Content-Encoding: gzip\r\n",
        "Via: 1.1 proxy\r\nForwarded: for=1.2.3.4\r\nPragma: no-cache\r\nX-Empty:\r\n",
        "Cookie: a=b\r\nRange: bytes=0-3\r\nIf-None-Match: *\r\nDNT: 1\r\n",
        "Expect: something-else\r\n",
        "Accept: application/msgpack\r\nUser-Agent: \xe4\r\n",
        "Accept:\r\nAuthorization: Basic eDp5\r\nProxy-Authorization: Basic eDp5\r\n",
        "Inference-Header-Content-Length:  {length} \t\r\n",
        "X-Twice: 1\r\nX-Twice: 2\r\nAccept: a/b\r\nAccept: */*\r\n",
        "Content-Encoding: identity  \r\n",
    ],
)
def test_headers_that_change_nothing(pilot, rows, expected, headers, pieces):
    body = json.dumps(request(rows[0], "head", sequence_start=True, sequence_end=True)).encode()
    if "Content-Encoding: gzip" in headers:
        body = gzip.compress(body)
    for answer in send_raw(pilot, LINE + headers, body, pieces):
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert answer.endswith(b'"data":[%d]}]}' % expected[0])


def test_chunks_with_an_offer_and_trailers(pilot, rows, expected):
    body = json.dumps(request(rows[0], "head", sequence_start=True, sequence_end=True)).encode()
    chunks = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(p), p) for p in (body[:90], body[90:]))
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n"
    for more in ("", H2C):
        data = (head + more + "\r\n").encode() + chunks + b"0\r\nX-Sum: 1\r\n\r\n"
        with socket.create_connection(("127.0.0.1", pilot.port), timeout=20) as s:
            s.sendall(data)
            answer = b""
            while not answer.endswith(b"}"):
                answer += s.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        assert answer.endswith(b'"data":[%d]}]}' % expected[0])


def test_expect_is_answered_before_the_body(pilot, rows):
    body = json.dumps(request(rows[0], "head", sequence_start=True, sequence_end=True)).encode()
    head = (LINE + "Expect: 100-continue\r\n\r\n").format(length=len(body))
    with socket.create_connection(("127.0.0.1", pilot.port), timeout=20) as s:
        s.sendall(head.encode())
        assert s.recv(65536).startswith(b"HTTP/1.1 100")
        s.sendall(body)
        assert s.recv(65536).startswith(b"HTTP/1.1 200")


def test_connect_is_refused_and_holds_nobody_up(pilot):
    with socket.create_connection(("127.0.0.1", pilot.port), timeout=20) as s:
        s.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
        assert s.recv(65536).startswith(b"HTTP/1.1 400")
    assert pilot.ask("GET", "/v2/health/live").status == 200


@pytest.mark.parametrize("given", ["S3cret", " S3cret\n"])
def test_the_token_in_any_spelling_of_its_scheme(policy, rows, given):
    """Secrets that come from files end with a line break."""
    with Served(policy, env={**os.environ, "HAMLET_TOKEN": given}) as server:
        data = request(rows[0], 3, sequence_start=True)
        for word, status in (
            ("Bearer S3cret", 200), ("bearer S3cret", 200), ("BEARER  S3cret", 200),
            ("Bearer s3cret", 401), ("Basic S3cret", 401), ("S3cret", 401), ("Bearer", 401),
        ):  # fmt: skip
            assert server.ask("POST", INFER, data, authorization=word).status == status, word
            assert server.ask("GET", "/docs", authorization=word).status == status, word
        with Agent(f"http://127.0.0.1:{server.port}", token=given) as agent:
            assert agent.act(observation(rows[0])) in range(5)


# ------------------------------------------------------------------------------------------------
# Methods and paths


def raw(server: Served, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Bytes as they are, and the first answer: status, headers, body."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        s.sendall(data)
        got = b""
        while b"\r\n\r\n" not in got:
            more = s.recv(65536)
            assert more, got
            got += more
        head, _, body = got.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        while len(body) < int(headers.get("content-length", 0)) and data[:4] != b"HEAD":
            body += s.recv(65536)
        return int(status.split()[1]), headers, body


@pytest.mark.parametrize(
    "path",
    [
        INFER, INFER + "/", "/" + INFER, INFER + "?a=1&b", "http://x" + INFER,
        "/v2/models/%6Dasked/infer", "/v2/models/masked/versions/VERSION/infer",
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["1.1\r\n", "1.1\r\nConnection: close\r\n", "1.0\r\n"])
def test_ways_to_write_one_path(pilot, rows, expected, path, end):
    path = path.replace("VERSION", tick(pilot, rows[0], 0).json["model_version"])
    body = json.dumps(request(rows[0], "path", sequence_start=True, sequence_end=True)).encode()
    head = f"POST {path} HTTP/{end}Host: x\r\nContent-Length: {len(body)}\r\n\r\n"
    status, headers, answer = raw(pilot, head.encode() + body)
    assert status == 200, answer
    assert json.loads(answer)["outputs"][0]["data"] == [expected[0]]
    assert headers.get("connection") == (None if end == "1.1\r\n" else "close")


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("OPTIONS", INFER, 204, "POST, OPTIONS"),
        ("OPTIONS", "/v2/sessions/x", 204, "GET, PUT, DELETE, OPTIONS"),
        ("OPTIONS", "*", 204, "OPTIONS"),
        ("OPTIONS", "/nowhere", 404, None),
        ("GET", INFER, 405, "POST"),
        ("HEAD", INFER, 405, "POST"),
        ("PATCH", INFER, 405, "POST"),
        ("TRACE", "/v2", 405, "GET"),
        ("DELETE", "/v2/models/masked", 405, "GET"),
    ],
)
def test_other_methods_hear_which_are_meant(pilot, method, path, status, allow):
    got = raw(pilot, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert (got[0], got[1].get("allow")) == (status, allow and allow.lower())


@pytest.mark.parametrize("path", ["/", "/docs", "/v2", "/v2/models/masked", "/v2/health/live"])
def test_head_is_get_without_its_body(pilot, path):
    answers = [
        raw(pilot, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        for method in ("GET", "HEAD")
    ]
    assert answers[0][:2] == answers[1][:2]
    assert answers[0][2]
    assert not answers[1][2]


@pytest.mark.parametrize(
    ("method", "path", "status", "told"),
    [
        ("POST", "/v2/models/other/infer", 404, "'other' is not served: 'masked' is"),
        ("GET", "/v2/models/other/ready", 404, "'other' is not served: 'masked' is"),
        ("POST", "/v1/models/masked:predict", 404, "POST /v2/models/masked/infer"),
        ("POST", "/invocations", 404, "POST /v2/models/masked/infer"),
        ("POST", "/v2/repository/models/masked/load", 409, "move the registry's alias"),
        ("POST", "/v2/repository/models/masked/unload", 409, "loaded or unloaded on request"),
        ("POST", "/v2/repository/models/other/load", 404, "'other' is not served"),
        ("GET", "/v2/systemsharedmemory/status", 404, "there is nothing at"),
        ("GET", "/v2/models/masked/versions/77", 404, "version 77 is not loaded"),
        ("DELETE", "/v2/sessions/%FF%FE", 404, "is not open here"),
        ("POST", INFER, 400, "JSON"),
    ],
)
def test_what_is_not_there_says_what_is(pilot, method, path, status, told):
    answer = pilot.ask(method, path, b"" if method == "POST" else None)
    assert answer.status == status
    assert told in answer.error


def test_the_models_are_listed(pilot):
    assert pilot.ask("GET", "/v2/models").json == {"models": ["masked"]}
    for method, body in (("POST", b""), ("POST", b'{"ready": true}'), ("GET", None)):
        (listed,) = pilot.ask(method, "/v2/repository/index", body).json
        assert (listed["name"], listed["state"]) == ("masked", "READY")


@pytest.mark.parametrize(
    "wrong",
    [
        "POST " + INFER + " HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        "POST " + INFER + " HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        "POST " + INFER + " HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        "POST " + INFER + " HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        "GET /v2 HTTP/1.1\r\nX-A: a\r\n folded\r\n\r\n",
        "GET /v2/\xff HTTP/1.1\r\n\r\n",
        "BREW /pot HTTP/1.1\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(pilot, wrong):
    assert raw(pilot, wrong.encode("latin-1"))[0] == 400
    assert pilot.ask("GET", "/v2/health/live").status == 200


@pytest.mark.parametrize("key", ["classification", "shared_memory_region"])
def test_an_extension_that_is_not_there_is_not_passed_over(pilot, rows, key):
    asked = [{"name": "action", "parameters": {key: 1}}]
    answer = tick(pilot, rows[0], 0, outputs=asked)
    assert answer.status == 400
    assert answer.error == f"output 'action' asks for {key}, which is not done here"


def test_tritonclient_packs_what_it_sends(pilot, rows, expected):
    """Its gzip and deflate, of binary tensors too, and it asks for packed answers."""
    sent = {"obs": rows[:1], "action_mask": np.ones((1, 5), bool), "level": np.array([[1, 0]])}
    with triton.InferenceServerClient(f"127.0.0.1:{pilot.port}") as client:
        for algorithm in ("gzip", "deflate"):
            for binary in (True, False):
                inputs = []
                for name, kind in (("obs", "FP32"), ("action_mask", "BOOL"), ("level", "INT64")):
                    inputs.append(triton.InferInput(name, list(sent[name].shape), kind))
                    inputs[-1].set_data_from_numpy(sent[name], binary_data=binary)
                result = client.infer(
                    "masked", inputs, request_compression_algorithm=algorithm,
                    response_compression_algorithm=algorithm,
                )  # fmt: skip
                assert result.as_numpy("action").tolist() == [expected[0]]


# ------------------------------------------------------------------------------------------------
# The binary extension


def binary(parts: list[tuple[str, str, list[int], bytes]], tail: bytes = b"", **more) -> bytes:
    inputs = [
        {"name": n, "datatype": d, "shape": s, "parameters": {"binary_data_size": len(b)}}
        for n, d, s, b in parts
    ]
    header = json.dumps({"inputs": inputs, **more}).encode()
    body = header + b"".join(b for *_, b in parts) + tail
    head = LINE.format(length=len(body))
    return f"{head}Inference-Header-Content-Length: {len(header)}\r\n\r\n".encode() + body


@pytest.fixture
def parts(rows):
    return [
        ("level", "INT64", [1, 2], np.array([1, 0]).tobytes()),
        ("obs", "FP32", [1, OBS], rows[0].tobytes()),
        ("action_mask", "BOOL", [1, 5], bytes([1] * 5)),
    ]


def test_binary_tensors_in_any_order_and_mixed_with_json(pilot, parts, expected):
    for order in (parts, parts[::-1], parts[1:] + parts[:1]):
        status, headers, body = raw(
            pilot, binary(order, parameters={"sequence_id": "b", "sequence_start": True})
        )
        assert status == 200
        assert "inference-header-content-length" not in headers  # none was asked for
        assert json.loads(body)["outputs"][0]["data"] == [expected[0]]
    asked = {"outputs": [
        {"name": "action", "parameters": {"binary_data": True}}, {"name": "logits"},
        {"name": "h_out", "parameters": {"binary_data": True}},
    ]}  # fmt: skip
    status, headers, body = raw(pilot, binary(parts, **asked))
    length = int(headers["inference-header-content-length"])
    action, logits, state = json.loads(body[:length])["outputs"]
    assert action["parameters"] == {"binary_data_size": 8}
    assert len(logits["data"]) == 5
    assert len(body) - length == 8 + state["parameters"]["binary_data_size"]
    assert int.from_bytes(body[length : length + 8], "little") == expected[0]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda p: [*p[:2], (*p[2][:3], b"")], "'action_mask' has binary_data_size 0"),
        (lambda p: [*p[:2], (*p[2][:3], b"\1" * 6)], "'action_mask' has binary_data_size 6"),
        (lambda p: [*p, p[0]], "'level' is given twice"),
        (lambda p: p[:2], "'action_mask' is missing"),
        (lambda p: [*p[:2], (*p[2][:3], b"\1\1\2\1\1")], "'action_mask' holds 2"),
        (lambda p: [("obs", "FP64", *p[1][2:]), p[0], p[2]], "'obs' is FP64"),
    ],
)
def test_binary_tensors_that_do_not_fit(pilot, parts, spoil, told):
    for named in ({}, {"parameters": {"sequence_id": "c", "sequence_start": True}}):
        status, _, body = raw(pilot, binary(spoil(parts), **named))
        assert status == 400
        assert told in json.loads(body)["error"]


# ------------------------------------------------------------------------------------------------
# Connections


def test_endless_headers_are_refused(pilot):
    """As one line, and as many; and as many bytes as may be are read."""
    for lines, status in (
        (b"X-Long: " + b"a" * 40 * MAX_HEAD, 431),
        (b"X-Many: a\r\n" * 300_000, 431),
        (b"X-Long: " + b"a" * (MAX_HEAD - 200) + b"\r\n", 200),
    ):
        data = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n" + lines
        with socket.create_connection(("127.0.0.1", pilot.port), timeout=20) as s:
            for at in range(0, len(data), 1000):
                try:
                    s.sendall(data[at : at + 1000])
                except OSError:
                    break
            else:
                s.sendall(b"\r\n")
            try:
                got = s.recv(65536)
            except ConnectionResetError:  # it was still sending: nothing is left to read
                assert status == 431
                continue
            assert got.startswith(b"HTTP/1.1 %d" % status)


def test_who_reads_no_answers_is_not_listened_to(pilot, rows):
    """Answers that nobody reads are not piled up: the client must wait."""
    body = json.dumps(request(rows[0], 0)).encode()
    one = (LINE + "\r\n").format(length=len(body)).encode() + body
    process = psutil.Process(pilot.process.pid)
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", pilot.port))
        s.settimeout(1.0)
        before, sent = process.memory_info().rss, 0
        with suppress(TimeoutError):
            while sent < 200_000:
                s.sendall(one * 100)
                sent += 100
        assert sent < 200_000
        assert process.memory_info().rss - before < 50e6
        assert pilot.ask("GET", "/v2/health/live").status == 200


def test_more_connections_than_files_are_allowed_at_first(policy, rows):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))"
    with Served(policy, before=limit) as server:
        line = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
        held = []
        for _ in range(200):
            held.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            held[-1].sendall(line)
            assert held[-1].recv(4096).startswith(b"HTTP/1.1 200")
        soft = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0]
        assert soft == 4096
        for connection in held:
            connection.close()


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_other_addresses(policy, rows, expected, host):
    with Served(policy, "--host", host) as server:
        url = server.first("serving")["url"]
        assert re.fullmatch(r"http://(\[::1\]|127\.0\.0\.1):\d+", url)
        assert not [line for line in server.log if line["event"] == "warning"]
        with Agent(url) as agent:
            assert agent.act(observation(rows[0])) == expected[0]
    with Served(policy, "--host", "::" if host == "::1" else "0.0.0.0") as server:
        assert "no token" in server.wait("warning")["text"]
