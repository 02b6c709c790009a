"""Around inference: other origins, traces, pages for people, and how a server goes away."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time

import pytest
from pilot import INFER, request, tick
from served import Answer, Served
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from hamlet.serving.agent import OnnxAgent
from hamlet.serving.app import App
from hamlet.serving.engine import Engine
from hamlet.serving.metrics import Metrics
from hamlet.serving.openapi import document

PAGE, OTHER = "https://page.example", "https://other.example"


# ------------------------------------------------------------------------------------------------
# Pages of other origins


@pytest.fixture(scope="module")
def open_to_a_page(policy):
    with Served(
        policy, "--allow-origin", PAGE, "--allow-origin", "http://localhost:3000"
    ) as served:
        yield served


def preflight(server: Served, origin: str, path: str = INFER) -> Answer:
    return server.ask(
        "OPTIONS", path, origin=origin, access_control_request_method="POST",
        access_control_request_headers="content-type, authorization",
    )  # fmt: skip


def test_a_page_that_may_ask(open_to_a_page, rows, expected):
    for path in (INFER, INFER + "/", "/v2/sessions/x", "/metrics"):
        answer = preflight(open_to_a_page, PAGE, path)
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-headers"] == "content-type, authorization"
        assert "POST" in answer.headers["access-control-allow-methods"]
    data = request(rows[0], 0)
    for path in (INFER, INFER + "/", INFER + "?a"):  # the short way and uvicorn's
        answer = open_to_a_page.ask("POST", path, data, origin=PAGE)
        assert answer.action == expected[0]
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["vary"] == "origin"
        assert "inference-header-content-length" in answer.headers["access-control-expose-headers"]
        wrong = open_to_a_page.ask("POST", path, b"{}", origin=PAGE)  # it may read errors too
        assert (wrong.status, wrong.headers["access-control-allow-origin"]) == (400, PAGE)


@pytest.mark.parametrize("origin", [OTHER, "null", PAGE + ".evil.example", PAGE.upper(), ""])
def test_a_page_that_may_not(open_to_a_page, rows, origin):
    for answer in (
        preflight(open_to_a_page, origin),
        open_to_a_page.ask("POST", INFER, request(rows[0], 0), origin=origin),
        open_to_a_page.ask("GET", "/v2", origin=origin),
    ):
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_without_the_option_no_page_may(pilot, rows):
    for answer in (
        preflight(pilot, PAGE),
        pilot.ask("POST", INFER, request(rows[0], 0), origin=PAGE),
    ):
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_any_page_may_with_a_star_and_the_token_stays(policy, rows, expected, monkeypatch):
    monkeypatch.setenv("HAMLET_TOKEN", "S3cret")
    with Served(policy, "--allow-origin", "*") as server:
        assert preflight(server, OTHER).headers["access-control-allow-origin"] == OTHER
        refused = server.ask("POST", INFER, request(rows[0], 0), origin=OTHER)
        assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, OTHER)
        answer = server.ask(
            "POST", INFER, request(rows[0], 0), origin=OTHER, authorization="Bearer S3cret"
        )
        assert answer.action == expected[0]


def test_a_page_s_websocket(open_to_a_page, pilot, rows, expected):
    """Browsers let every page open one: the server must look at the origin itself."""

    def act(server: Served, origin: str | None, path: str = "/v2/models/masked/stream") -> int:
        with connect(f"ws://127.0.0.1:{server.port}{path}", origin=origin) as s:
            s.send(json.dumps(request(rows[0], None)))
            return json.loads(s.recv(10))["outputs"][0]["data"][0]

    assert act(open_to_a_page, PAGE) == expected[0]
    assert act(open_to_a_page, None, "/v2/models/masked/stream/") == expected[0]
    assert act(pilot, f"http://127.0.0.1:{pilot.port}") == expected[0]  # its own page
    for server in (open_to_a_page, pilot):
        with pytest.raises(InvalidStatus) as refused:
            act(server, OTHER)
        assert refused.value.response.status_code == 403
        assert b"--allow-origin" in refused.value.response.body


# ------------------------------------------------------------------------------------------------
# Traces


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def requests_of(server: Served) -> list[dict]:
    return [line for line in server.log if line["event"] == "request"]


def test_a_sampled_trace_is_in_the_log(pilot, rows):
    before = len(requests_of(pilot))
    sent = f"00-{TRACE}-{PARENT}-01"
    for path in (INFER, INFER + "/", "/v2/models/masked", "/nowhere"):
        method = "POST" if "infer" in path else "GET"
        body = request(rows[0], 0) if "infer" in path else None
        pilot.ask(method, path, body, traceparent=sent, tracestate="a=b")
    until = time.monotonic() + 10
    while len(requests_of(pilot)) < before + 4 and time.monotonic() < until:
        time.sleep(0.01)
    told = requests_of(pilot)[before:]
    assert [(t["trace"], t["parent"]) for t in told] == [(TRACE, PARENT)] * 4
    assert [t["status"] for t in told] == [200, 200, 200, 404]
    assert [t["path"].rstrip("/") for t in told] == [INFER, INFER, "/v2/models/masked", "/nowhere"]
    assert all(0 < t["seconds"] < 10 for t in told)


@pytest.mark.parametrize(
    "traceparent",
    [
        f"00-{TRACE}-{PARENT}-00",  # not sampled
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}",
        "nonsense",
        "",
    ],
)
def test_a_trace_that_is_none_or_not_wanted(pilot, rows, traceparent):
    before = len(requests_of(pilot))
    assert tick(pilot, rows[0], 0).status == 200
    assert pilot.ask("POST", INFER, request(rows[0], 0), traceparent=traceparent).status == 200
    time.sleep(0.05)
    assert len(requests_of(pilot)) == before


# ------------------------------------------------------------------------------------------------
# Pages for people


def test_the_front_page_says_what_is_served(pilot):
    answer = pilot.ask("GET", "/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    text = answer.body.decode()
    for told in (
        "<h1>masked</h1>", "<code>obs</code><td>FP32<td>[-1, 6]", "<code>action</code><td>INT64",
        "<code>h</code><td>becomes<td><code>h_out</code>",
    ):  # fmt: skip
        assert told in text
    assert "<script" not in text
    for link in re.findall(r'href="([^"]+)"', text):
        assert pilot.ask("GET", link).status == 200, link


def test_the_openapi_document_has_every_route_and_method(pilot):
    """Asked with a method that nobody knows, a path says which it takes."""
    paths = pilot.ask("GET", "/openapi.json").json["paths"]
    version = pilot.ask("GET", "/v2/models/masked").json["versions"][0]
    for path, methods in paths.items():
        answer = pilot.ask("PATCH", path.replace("{version}", version).replace("{id}", "x"))
        assert answer.status == 405, path
        taken = {method.lower() for method in answer.headers["allow"].split(", ")}
        assert taken == methods.keys() - {"parameters"}, path


def test_no_route_is_left_out_of_the_openapi_document(policy):
    """But for the pages and what is asked of every name."""
    engine = Engine(Metrics(), 1, 60.0, "masked")
    engine.install(engine.prepare(OnnxAgent(policy), "1"))
    written = document(engine.current)["paths"]
    known = {re.sub(r"\{\w+\}", "*", path) for path in written}
    for parts in App(engine, print).routes:
        path = "/" + "/".join(parts).replace("repository/models/*", "repository/models/masked")
        assert path in known or path in ("/", "/docs"), path
    engine.shutdown()


def test_the_docs_name_every_route_of_the_openapi_document(pilot):
    text = pilot.ask("GET", "/docs").body.decode()
    paths = pilot.ask("GET", "/openapi.json").json["paths"]
    assert len(paths) > 10
    for path, methods in paths.items():
        for method in methods.keys() - {"parameters"}:
            assert f"<b>{method.upper()}</b> <code>{path}</code>" in text


# ------------------------------------------------------------------------------------------------
# Going away


def test_a_server_that_goes_away_answers_until_it_closes(policy, rows, expected, tmp_path):
    """Not ready at once, so that a balancer turns away; until the socket closes all is answered,
    on connections that are open and on new ones; what is asked last is not lost."""
    file = tmp_path / "lives"
    with Served(policy, "--drain-seconds", "2", "--state-file", str(file)) as server:
        assert tick(server, rows[0], "stays", sequence_start=True).action == expected[0]
        assert server.ask("GET", "/v2/health/ready").status == 200
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait("not ready")["drain"] == 2
        at = 1
        while time.monotonic() - began < 1.5:
            ready = server.ask("GET", "/v2/health/ready")
            assert (ready.status, "going away" in ready.error) == (503, True)
            assert ready.headers["retry-after"] == "1"
            assert server.ask("GET", "/v2/models/masked/ready").status == 503
            assert server.ask("GET", "/v2/health/live").status == 200
            if at < 8:
                assert tick(server, rows[at], "stays").action == expected[at]
                at += 1
        assert tick(server, rows[0], "new", sequence_start=True).action == expected[0]
        assert server.process.wait(20) == 0
        assert 2 <= time.monotonic() - began < 10
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port), timeout=5)
    with Served(policy, "--state-file", str(file)) as server:
        assert tick(server, rows[at], "stays").action == expected[at]


def test_a_second_signal_does_not_wait(policy):
    with Served(policy, "--drain-seconds", "60") as server:
        server.process.send_signal(signal.SIGTERM)
        server.wait("not ready")
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert time.monotonic() - began < 15


def test_without_the_option_it_ends_at_once_and_answers_what_came(policy, rows, expected):
    with Served(policy) as server:
        got: list[int] = []
        body = json.dumps(request(rows[0], 0)).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
            head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            s.sendall(head.encode() + body[:-10])
            time.sleep(0.2)
            ending = threading.Thread(target=lambda: got.append(server.stop()))
            ending.start()
            time.sleep(0.3)
            s.sendall(body[-10:])
            answer = s.recv(65536)
        ending.join()
    assert b'"data":[%d]' % expected[0] in answer
    assert got == [0]
