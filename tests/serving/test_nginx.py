"""Two servers behind a real nginx, as `deploy/nginx.conf` says; one of them is killed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest
from copied_repo import ROOT
from served import Answer, Served
from tritonclient import grpc as triton
from websockets.sync.client import connect

from benchmarks.gru import SEEN, lives, write_gru
from benchmarks.serving import free_port
from hamlet.serving.client import Agent

NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="there is no nginx to run it"),
]
LIVES, TICKS = 24, 10


@pytest.fixture
def place(tmp_path):
    """The two servers and nginx before them: (servers, port, port for gRPC)."""
    policy = write_gru(tmp_path / "gru.onnx")
    with ExitStack() as running:
        servers = [running.enter_context(Served(policy, "--grpc-port", "0")) for _ in range(2)]
        ports = {8080: free_port(), 8081: free_port()}
        for server, (over_http, over_grpc) in zip(servers, ((8090, 8091), (8190, 8191))):
            ports[over_http] = server.port
            ports[over_grpc] = server.first("serving grpc")["port"]
        text = (ROOT / "deploy/nginx.conf").read_text()
        for said, real in ports.items():
            assert f"{said}" in text
            text = text.replace(f":{said} ", f":{real} ").replace(
                f"listen {said}", f"listen 127.0.0.1:{real}"
            )
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in kinds)
        conf = tmp_path / "nginx.conf"
        conf.write_text(
            f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/errors;\n"
            f"events {{}}\nhttp {{ access_log off;\n{temporary}{text}}}\n"
        )
        proxy = subprocess.Popen([NGINX, "-p", tmp_path, "-c", conf], stderr=subprocess.PIPE)
        running.callback(proxy.wait)
        running.callback(proxy.terminate)
        until = time.monotonic() + 20
        while True:
            try:
                if ask(ports[8080], "health/ready").status == 200:
                    break
            except OSError:
                assert proxy.poll() is None, proxy.stderr.read()
                assert time.monotonic() < until
                time.sleep(0.1)
        yield servers, ports[8080], ports[8081]


def ask(port: int, path: str, body: dict | None = None, **headers: str) -> Answer:
    data = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v2/{path}", data, named)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return Answer(answer.status, dict(answer.headers), answer.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, dict(error.headers), error.read())


def tick(port: int, life: str, row, start: bool) -> Answer:
    obs = {"name": "obs", "datatype": "FP32", "shape": [1, SEEN], "data": row.tolist()}
    body = {
        "inputs": [obs],
        "outputs": [{"name": "action"}],
        "parameters": {"sequence_id": life, "sequence_start": start},
    }
    return ask(port, "models/gru/infer", body, Hamlet_Session=life)


def test_a_life_stays_where_it_is_and_is_told_when_that_is_gone(place, tmp_path):
    servers, port, _ = place
    seen, expected = lives(tmp_path / "gru.onnx", TICKS, LIVES)
    names = [f"life-{i}" for i in range(LIVES)]
    for t in range(5):
        got = [tick(port, name, seen[t, i], t == 0).action for i, name in enumerate(names)]
        assert got == expected[t].tolist()
    opened = [server.metric("hamlet_sessions_opened_total") for server in servers]
    assert sum(opened) == LIVES
    assert min(opened) > 0
    servers[0].stop(signal.SIGKILL)

    told = [tick(port, name, seen[5, i], False) for i, name in enumerate(names)]
    lost = [i for i, answer in enumerate(told) if answer.status != 200]
    assert len(lost) == opened[0]
    for i, answer in enumerate(told):
        if i in lost:
            assert answer.status == 404
            assert f"'{names[i]}' is not open here" in answer.error
        else:
            assert answer.action == expected[5, i]
    # Those that were lost begin again, on the other server, and stay there.
    for t in range(3):
        for i in lost:
            assert tick(port, names[i], seen[t, i], t == 0).action == expected[t, i]
    assert servers[1].metric("hamlet_sessions_opened_total") == LIVES


def test_a_websocket_and_a_grpc_stream_through_it(place, tmp_path):
    _, port, grpc_port = place
    seen, expected = lives(tmp_path / "gru.onnx", TICKS, 2)
    with connect(f"ws://127.0.0.1:{port}/v2/models/gru/stream") as socket:
        for t in range(TICKS):
            obs = {"name": "obs", "datatype": "FP32", "shape": [1, SEEN]}
            obs["data"] = seen[t, 0].tolist()
            socket.send(json.dumps({"inputs": [obs], "outputs": [{"name": "action"}]}))
            assert json.loads(socket.recv(10))["outputs"][0]["data"] == [expected[t, 0]]
    with triton.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        for t in range(TICKS):
            obs = triton.InferInput("obs", [1, SEEN], "FP32")
            obs.set_data_from_numpy(seen[t, 1:])
            told = client.infer(
                "gru", [obs], sequence_id=5, sequence_start=t == 0, headers={"hamlet-session": "5"}
            )
            assert told.as_numpy("action").tolist() == [expected[t, 1]]


def test_our_client_stays_with_its_server(place, tmp_path):
    servers, port, _ = place
    seen, expected = lives(tmp_path / "gru.onnx", TICKS, LIVES)
    for life in range(LIVES):
        with Agent(f"http://127.0.0.1:{port}") as agent:
            assert [agent.act({"obs": row}) for row in seen[:, life]] == expected[:, life].tolist()
    opened = [server.metric("hamlet_sessions_opened_total") for server in servers]
    assert sum(opened) == LIVES
    # The names of its lives are random: all 24 with one server is one run in a million.
    assert min(opened) > 0
