"""What other clients send and mean: their JSON, their sequences, their retries."""

from __future__ import annotations

import json
import socket
import threading

import numpy as np
import pytest
import tritonclient.http as triton
from pilot import INFER, LINE, life, observation, request, tick
from policies import HIDDEN, OBS, masked_gru
from served import Served

from hamlet.artifacts import HamletError
from hamlet.serving.client import Agent


def test_the_actions_tell_lives_apart(policy, rows, expected):
    """A tick too many or too few, or two lives mixed, shows in the actions below."""
    assert len(set(expected)) > 2
    assert life(policy, np.insert(rows, 3, rows[3], axis=0))[5:] != expected[4:]
    assert life(policy, rows[1:]) != expected[1:]


# ------------------------------------------------------------------------------------------------
# JSON


def changed(body: dict, name: str, **entries: object) -> dict:
    next(e for e in body["inputs"] if e["name"] == name).update(entries)
    return body


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d | {"id": None},
        lambda d: d | {"id": ""},
        lambda d: d | {"outputs": None},
        lambda d: d | {"outputs": []},
        lambda d: d | {"outputs": [{"name": "action", "parameters": None}]},
        lambda d: d | {"outputs": [{"name": "action", "parameters": {"binary_data": None}}]},
        lambda d: d | {"outputs": [{"name": "action", "parameters": {"binary_data": 0}}]},
        lambda d: d | {"parameters": d["parameters"] | {"seed": None, "timeout": None}},
        lambda d: d | {"parameters": d["parameters"] | {"timeout": 0, "priority": 0}},
        lambda d: d | {"parameters": d["parameters"] | {"sequence_end": 1, "sequence_start": 1.0}},
        lambda d: d | {"parameters": d["parameters"] | {"binary_data_output": None}},
        lambda d: changed(d, "obs", parameters=None, more=None),
        lambda d: changed(d, "obs", parameters={"content_type": None}),
        lambda d: changed(d, "obs", shape=[1.0, float(OBS)]),
        lambda d: changed(d, "action_mask", data=[1] * 5),
        lambda d: changed(d, "action_mask", data=[1.0] * 5),
        lambda d: changed(d, "action_mask", data=[True, 1, 1.0, True, 1]),
        lambda d: changed(d, "action_mask", data=[[1, 1, 1, 1, True]]),
        lambda d: changed(d, "level", data=[1.0, 0.0]),
        lambda d: changed(d, "level", data=[[1, 0.0]]),
        lambda d: changed(d, "level", data=[1e0, -0.0]),
    ],
)
def test_json_as_others_write_it(pilot, rows, expected, change):
    data = request(rows[0], "json", sequence_start=True, sequence_end=True)
    answer = pilot.ask("POST", INFER, change(data))
    assert answer.status == 200, answer.body
    assert answer.json["outputs"][0]["data"] == [expected[0]]


def test_a_mark_of_byte_order_is_no_part_of_the_json(pilot, rows, expected):
    data = request(rows[0], "bom", sequence_start=True, sequence_end=True)
    answer = pilot.ask("POST", INFER, b"\xef\xbb\xbf" + json.dumps(data).encode())
    assert answer.action == expected[0]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("action_mask", [2, 1, 1, 1, 1]),
        ("action_mask", [0.5, 1, 1, 1, 1]),
        ("action_mask", ["true", 1, 1, 1, 1]),
        ("action_mask", [None, 1, 1, 1, 1]),
        ("level", [True, False]),
        ("level", [0.5, 1]),
        ("level", [None, 1]),
        ("level", [-(2**63) - 1, 0]),
        ("level", [1e300, 0]),
        ("obs", [True] * OBS),
    ],
)
def test_json_that_means_nothing_is_refused(pilot, rows, name, data):
    wrong = changed(request(rows[0], "json", sequence_start=True), name, data=data)
    answer = pilot.ask("POST", INFER, wrong)
    assert answer.status == 400
    assert f"'{name}' holds what is not" in answer.error


def test_act_takes_the_same_json(pilot, rows, expected):
    seen = {"obs": rows[0].tolist(), "action_mask": [1, 1.0, True, 1, 1], "level": [1.0, 0]}
    asked = {"observation": seen, "session": None, "seed": None, "end": None, "id": None}
    assert pilot.ask("POST", "/act", asked).json["action"] == expected[0]
    wrong = asked | {"observation": seen | {"action_mask": [2, 1, 1, 1, 1]}}
    assert pilot.ask("POST", "/act", wrong).status == 400


# ------------------------------------------------------------------------------------------------
# Sequences


@pytest.mark.parametrize("name", [0, 0.0, "", None])
def test_no_name_is_no_sequence(pilot, rows, expected, name):
    for _ in range(2):
        assert tick(pilot, rows[0], name).action == expected[0]
    if name is not None:  # tritonclient sends the flags with every id
        assert tick(pilot, rows[0], name, sequence_start=True).action == expected[0]


def test_start_begins_a_living_sequence_anew(pilot, rows, expected):
    assert tick(pilot, rows[0], "anew", sequence_start=True).action == expected[0]
    for at in (1, 2):
        assert tick(pilot, rows[at], "anew").action == expected[at]
    for at in range(4):
        assert tick(pilot, rows[at], "anew", sequence_start=at == 0).action == expected[at]
    # What is refused changes nothing: the life goes on.
    wrong = changed(request(rows[0], "anew", sequence_start=True), "action_mask", data=[False] * 5)
    assert pilot.ask("POST", INFER, wrong).status == 400
    assert tick(pilot, rows[4], "anew", sequence_end=True).action == expected[4]


def test_a_start_behind_waiting_requests_leaves_them_their_life(pilot, rows, expected):
    """Down one connection: five ticks, START, five ticks."""
    order = [*range(5), *range(5)]
    raw = b""
    for at in order:
        body = json.dumps(request(rows[at], "queue", sequence_start=at == 0)).encode()
        raw += (LINE.format(length=len(body)) + "\r\n").encode() + body
    with socket.create_connection(("127.0.0.1", pilot.port), timeout=20) as s:
        s.sendall(raw)
        got = b""
        while got.count(b'"data":[') < len(order):
            got += s.recv(65536)
    actions = [int(part.partition(b"]")[0]) for part in got.split(b'"data":[')[1:]]
    assert actions == [expected[at] for at in order]


@pytest.mark.parametrize(
    "name",
    ["a b", "a/b", "../x", "%2F", "für Elise", "日本", "💡", '"', "\\", "?&#=", "x" * 256, 7],
)
def test_names_of_printable_characters(pilot, rows, expected, name):
    from urllib.parse import quote

    for at in range(3):
        assert tick(pilot, rows[at], name, sequence_start=at == 0).action == expected[at]
    path = f"/v2/sessions/{quote(str(name), safe='')}"
    assert pilot.ask("DELETE", path).status == 204
    assert tick(pilot, rows[3], name).status == 404


@pytest.mark.parametrize("name", ["a\nb", "\x00", "x" * 257, -1, 1.5, True, [], {}, 2**64])
def test_names_that_cannot_be(pilot, rows, name):
    answer = tick(pilot, rows[0], name, sequence_start=True)
    assert answer.status == 400
    assert "cannot be the sequence_id" in answer.error


def test_the_next_state_of_a_sequence_can_be_asked_for(pilot, rows, policy):
    import onnxruntime

    session = onnxruntime.InferenceSession(policy, providers=["CPUExecutionProvider"])
    feeds = {
        "obs": rows[:1], "action_mask": np.ones((1, 5), bool), "level": np.array([[1, 0]]),
        "h": np.zeros((1, HIDDEN), np.float32),
    }  # fmt: skip
    want = session.run(["h_out"], feeds)[0]
    asked = [{"name": "h_out"}, {"name": "action"}]
    answer = tick(pilot, rows[0], "state", sequence_start=True, outputs=asked).json
    assert [o["name"] for o in answer["outputs"]] == ["h_out", "action"]
    assert answer["outputs"][0]["shape"] == [1, HIDDEN]
    np.testing.assert_array_equal(np.float32(answer["outputs"][0]["data"]), want[0])


def test_tritonclient_asks_for_everything_about_it(pilot, rows):
    tick(pilot, rows[0], 5, sequence_start=True)
    with triton.InferenceServerClient(f"127.0.0.1:{pilot.port}") as client:
        said = client.get_server_metadata()["extensions"]
        assert {"sequence", "sequence(string_id)", "statistics", "model_configuration"} <= set(said)
        (listed,) = client.get_model_repository_index()
        assert (listed["name"], listed["state"]) == ("masked", "READY")
        config = client.get_model_config("masked")
        assert config["max_batch_size"] == 32
        assert [x["name"] for x in config["input"]] == ["obs", "action_mask", "level"]
        assert config["input"][0] == {"name": "obs", "data_type": "TYPE_FP32", "dims": [OBS]}
        (state,) = config["sequence_batching"]["state"]
        assert (state["input_name"], state["output_name"]) == ("h", "h_out")
        before = client.get_inference_statistics("masked")["model_stats"][0]
        tick(pilot, rows[1], 5)
        tick(pilot, rows[0], 0)  # stateless ones count too
        (after,) = client.get_inference_statistics()["model_stats"]
        assert after["inference_count"] == before["inference_count"] + 2
        for part in ("success", "queue", "compute_infer"):
            old, new = (x["inference_stats"][part] for x in (before, after))
            assert new["count"] == old["count"] + 2
            assert new["ns"] > old["ns"]


def test_stateless_requests_are_in_the_histograms(pilot, rows):
    before = [pilot.metric(f"hamlet_{name}") for name in ("batch_rows_count", "batch_rows_sum")]
    queue = pilot.metric('hamlet_seconds_count{stage="queue"}')
    tick(pilot, rows[0], 0)
    assert pilot.metric("hamlet_batch_rows_count") == before[0] + 1
    assert pilot.metric("hamlet_batch_rows_sum") == before[1] + 1
    assert pilot.metric('hamlet_seconds_count{stage="queue"}') == queue + 1


# ------------------------------------------------------------------------------------------------
# Nothing lost


def test_the_same_request_is_answered_again_and_not_done_again(pilot, rows, expected):
    for at in range(6):
        for _ in range(3):
            answer = tick(pilot, rows[at], "again", sequence_start=at == 0, id=f"r{at}")
            assert answer.action == expected[at]
            assert answer.json["id"] == f"r{at}"
    assert tick(pilot, rows[2], "again", id="r2").action == expected[2]  # an older one
    # The end too, after which nobody is there to ask.
    for _ in range(2):
        assert tick(pilot, rows[6], "again", sequence_end=True, id="r6").action == expected[6]
    assert tick(pilot, rows[7], "again", id="r7").status == 404
    assert pilot.metric("hamlet_repeated_total") >= 12


def test_requests_that_come_twice_at_once_are_one_tick(pilot, rows, expected):
    assert tick(pilot, rows[0], "both", sequence_start=True).action == expected[0]
    for at in range(1, 6):
        got: list[int] = []

        def ask(at=at, got=got) -> None:
            got.append(tick(pilot, rows[at], "both", id=f"r{at}").action)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [expected[at]] * 6


def test_an_id_that_is_always_the_same_is_none(pilot, rows, expected):
    """Some clients number nothing; and the ids of one life say nothing of the next."""
    for _ in range(2):
        for at in range(6):
            answer = tick(pilot, rows[at], "const", sequence_start=at == 0, id="42")
            assert answer.action == expected[at]
    for _ in range(2):
        for at in range(3):
            answer = tick(
                pilot, rows[at], "lives", sequence_start=at == 0, sequence_end=at == 2, id=f"r{at}"
            )
            assert answer.action == expected[at]


def test_the_client_survives_connections_that_died(policy, rows, expected):
    """A proxy that closes every connection after its second answer, once before passing it on."""
    with Served(policy) as server, Proxy(server.port) as proxy:
        seen = [observation(row) for row in rows]
        with Agent(f"http://127.0.0.1:{proxy.port}") as agent:
            got = [agent.act(row) for row in seen]
        assert got == expected
        assert proxy.broken > 10
        assert proxy.named == {proxy.first}  # every request named its session
        assert server.metric("hamlet_repeated_total") > 3


class Proxy:
    """Passes requests on and breaks connections: by turns after an answer was sent, and after a
    request was passed on and before its answer."""

    def __init__(self, port: int) -> None:
        self.behind, self.broken = port, 0
        self.named: set[str] = set()
        self.first = ""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        import http.client

        file = client.makefile("rwb")
        for turn in range(3):
            line = file.readline()
            if not line:
                break
            headers = http.client.parse_headers(file)
            body = file.read(int(headers.get("content-length", 0)))
            name = headers.get("Hamlet-Session")
            if b"/infer" in line:
                assert name is not None
                self.first = self.first or name
                self.named.add(name)
            behind = http.client.HTTPConnection("127.0.0.1", self.behind)
            method, path, _ = line.decode().split(" ")
            behind.request(method, path, body, dict(headers))
            answer = behind.getresponse()
            data = answer.read()
            behind.close()
            if turn == 2:  # done behind us, and never answered
                self.broken += 1
                break
            head = f"HTTP/1.1 {answer.status} x\r\ncontent-length: {len(data)}\r\n\r\n"
            file.write(head.encode() + data)
            file.flush()
        file.close()
        client.close()


def test_a_server_that_is_not_there_is_told(policy, rows):
    with Served(policy) as server:
        agent = Agent(f"http://127.0.0.1:{server.port}")
        agent.act(observation(rows[0]))
        server.stop()
        with pytest.raises(HamletError, match="does not answer"):
            agent.act(observation(rows[1]))


def test_a_session_moves_to_another_server(policy, rows, expected, tmp_path):
    with Served(policy) as one, Served(policy) as two:
        for at in range(3):
            answer = tick(one, rows[at], "moves", sequence_start=at == 0, id=f"r{at}")
            assert answer.action == expected[at]
        moved = one.ask("GET", "/v2/sessions/moves")
        assert moved.status == 200
        assert two.ask("PUT", "/v2/sessions/moves", moved.body).status == 204
        assert two.ask("PUT", "/v2/sessions/moves", moved.body).status == 409
        assert one.ask("DELETE", "/v2/sessions/moves").status == 204
        assert tick(two, rows[2], "moves", id="r2").action == expected[2]  # asked there before
        for at in range(3, 8):
            assert tick(two, rows[at], "moves").action == expected[at]
        for broken in (b"", b"{}", moved.body[:-1], moved.body + b"x", moved.body[::-1]):
            answer = two.ask("PUT", "/v2/sessions/other", broken)
            assert answer.status == 400
            assert "no session" in answer.error
        assert one.ask("GET", "/v2/sessions/nobody").status == 404
    other = tmp_path / "other"
    other.mkdir()
    made = masked_gru(other).path
    made.write_bytes(made.read_bytes() + b"\x72\x00")  # another file, though it does the same
    with Served(made) as three:
        answer = three.ask("PUT", "/v2/sessions/moves", moved.body)
        assert answer.status == 409
        assert "which is not loaded here" in answer.error
