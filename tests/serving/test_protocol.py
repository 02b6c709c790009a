"""The Open Inference Protocol as others speak it: an independent client, and fuzzing by the
server's own OpenAPI document."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
import tritonclient.http as triton
from served import INFER, Served, lives_by_raw_onnxruntime
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from benchmarks.serving import binary_request, json_request
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.client import Agent

NAME = "hamlet-agent"


def tensors(client, observation, binary=True):
    """The observation as tritonclient's inputs, described as the server's metadata says."""
    made = []
    for entry in client.get_model_metadata(NAME)["inputs"]:
        array = observation[entry["name"]][None].astype(triton_to_np_dtype(entry["datatype"]))
        made.append(triton.InferInput(entry["name"], list(array.shape), entry["datatype"]))
        made[-1].set_data_from_numpy(array, binary_data=binary)
    return made


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


def test_tritonclient_asks_about_the_server(client, agent):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(NAME)
    version = OnnxAgent(agent).card["sha256"][:12]
    assert client.is_model_ready(NAME, version)
    assert not client.is_model_ready(NAME, "7")
    assert "sequence" in client.get_server_metadata()["extensions"]
    described = client.get_model_metadata(NAME)
    assert described["versions"] == [version]
    card = OnnxAgent(agent).card["schema"]
    shapes = {e["name"]: e["shape"][1:] for e in card["inputs"] + card["outputs"]}
    for entry in described["inputs"] + described["outputs"]:
        assert entry["shape"] == [-1, *shapes[entry["name"]]]
    with pytest.raises(InferenceServerException, match="is not served"):
        client.get_model_metadata("other-model")


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", [77, "a-session"])
def test_tritonclient_plays_a_life(client, agent, seen, binary, name):
    rows = seen[:8]
    expected = lives_by_raw_onnxruntime(agent, [[row] for row in rows], [0])
    expected = lives_of(agent, rows, name)
    outputs = [triton.InferRequestedOutput("action", binary_data=binary)]
    got = []
    for tick, row in enumerate(rows):
        result = client.infer(
            NAME, tensors(client, row, binary), outputs=outputs, request_id=f"r{tick}",
            sequence_id=name, sequence_start=tick == 0, sequence_end=tick == len(rows) - 1,
        )  # fmt: skip
        assert result.get_response()["id"] == f"r{tick}"
        got += result.as_numpy("action").tolist()
    assert got == expected
    with pytest.raises(InferenceServerException, match="is not open here"):
        client.infer(NAME, tensors(client, rows[0], binary), sequence_id=name)


def lives_of(agent, rows, name) -> list[int]:
    from hamlet.serving.engine import rng_of

    batches = [[row] for row in rows]
    return lives_by_raw_onnxruntime(agent, batches, [rng_of(str(name))])[:, 0].tolist()


def test_tritonclient_gets_every_output(client, agent, seen):
    player = OnnxAgent(agent)
    state = player.start(1)
    state["state_rng"][:] = 5
    feeds = {n: x[None] for n, x in seen[3].items()}
    want = dict(zip(player.outputs, player.session.run(None, feeds | state), strict=True))
    inputs = tensors(client, seen[3])
    stateless = client.infer(NAME, inputs, parameters={"seed": 5})
    with_sequence = client.infer(
        NAME, inputs, sequence_id=9, sequence_start=True, sequence_end=True, parameters={"seed": 5}
    )
    for name, array in want.items():
        np.testing.assert_array_equal(stateless.as_numpy(name), array, err_msg=name)
        if not name.startswith("next_") or name == "next_action_of_others":
            np.testing.assert_array_equal(with_sequence.as_numpy(name), array, err_msg=name)


def test_tritonclient_keeps_the_state_itself(client, agent, seen):
    """Without a sequence id: several rows at once, the state in and out as ordinary tensors."""
    rows = [seen[:3], seen[40:43], seen[80:83]]
    expected = lives_by_raw_onnxruntime(agent, rows, [1, 2, 3])
    player = OnnxAgent(agent)
    state = player.start(3)
    state["state_rng"] = np.array([1, 2, 3])
    for tick, row in enumerate(rows):
        feeds = {n: np.stack([o[n] for o in row]) for n in row[0]} | state
        inputs = []
        for name, array in feeds.items():
            datatype = {"uint8": "UINT8", "bool": "BOOL", "int64": "INT64", "float32": "FP32"}
            tensor = triton.InferInput(name, list(array.shape), datatype[str(array.dtype)])
            inputs.append(tensor.set_data_from_numpy(array))
        result = client.infer(NAME, inputs)
        assert result.as_numpy("action").tolist() == expected[tick].tolist()
        state = {n: result.as_numpy(n.replace("state_", "next_")) for n in state}


def test_a_state_that_is_none_is_refused(client, seen, agent):
    inputs = tensors(client, seen[0])
    entry = OnnxAgent(agent).inputs["state_belief"]
    bad = np.full((1, *entry["shape"][1:]), 1e6, np.float32)
    inputs.append(triton.InferInput("state_belief", list(bad.shape), "FP32"))
    inputs[-1].set_data_from_numpy(bad)
    with pytest.raises(InferenceServerException, match="none of this agent's"):
        client.infer(NAME, inputs)


def test_many_tritonclients_at_once(server, agent, seen):
    rows = seen[:12]
    wrong: list[str] = []

    def play(number: int) -> None:
        with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            inputs = [tensors(client, row) for row in rows]
            got = [
                int(
                    client.infer(
                        NAME, x, sequence_id=f"many-{number}", sequence_start=t == 0,
                        sequence_end=t == len(rows) - 1,
                    ).as_numpy("action")[0]
                )
                for t, x in enumerate(inputs)
            ]  # fmt: skip
        if got != lives_of(agent, rows, f"many-{number}"):
            wrong.append(f"{number}: {got}")

    threads = [threading.Thread(target=play, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_json_and_binary_say_the_same(server, seen):
    for request in (json_request, binary_request):
        raw = request(seen[5], sequence_id="same", sequence_start=True, sequence_end=True, seed=8)
        head, _, data = raw.partition(b"\r\n\r\n")
        headers = dict(line.split(": ") for line in head.decode().split("\r\n")[3:] if line)
        answer = server.ask("POST", INFER, data, **headers)
        assert answer.status == 200
        if request is json_request:
            action = answer.action
        else:
            length = int(answer.headers["inference-header-content-length"])
            assert np.frombuffer(answer.body[length:], np.int64).tolist() == [action]


def test_act_speaks_names(server, agent, seen):
    plain = {n: x.tolist() for n, x in seen[0].items()}
    first = server.ask("POST", "/act", {"observation": plain, "seed": 3})
    assert first.status == 200
    town = OnnxAgent(agent).card["town"]
    assert first.json["action"] in town["action_names"]
    assert (first.json["tick"], "thoughts" in first.json) == (1, False)
    again = {"observation": plain, "session": first.json["session"], "end": True}
    second = server.ask("POST", "/act?thoughts=1", again).json
    assert second["tick"] == 2
    assert set(second["thoughts"]) >= {"goal", "believed_places", "imagined_futures", "others"}
    assert server.ask("POST", "/act", again).status == 404
    assert server.ask("POST", "/act?thoughts=2", again).status == 400
    for broken, told in (
        ({"observation": plain | {"view": [[0]]}}, "'view' has shape"),
        ({"observation": plain | {"more": 1}}, "'more' is unknown"),
        ({"observation": {}}, "is missing"),
        ({"observation": plain, "what": 1}, "'what' is unknown"),
        ({"observation": plain, "session": "x", "seed": 1}, "'seed' belongs to a new session"),
        ({"observation": plain | {"view": [[0] * 5] * 4 + [[0] * 4]}}, "'view'"),
    ):
        answer = server.ask("POST", "/act", broken)
        assert answer.status == 400
        assert told in answer.error


def test_both_clients_are_one_interface(server, agent, seen):
    with Agent(agent, seed=4) as here, Agent(f"http://127.0.0.1:{server.port}", seed=4) as there:
        for row in seen[:9]:
            assert here.act(row) == there.act(row)
        assert here.think(seen[9]) == there.think(seen[9])
        here.reset(8)
        there.reset(8)
        assert here.think(seen[0]) == there.think(seen[0])
        assert [here.act(row) for row in seen[:5]] == [there.act(row) for row in seen[:5]]
        for either in (here, there):
            with pytest.raises(Exception, match="'view'"):
                either.act({**seen[0], "view": np.zeros((4, 4), np.uint8)})
            with pytest.raises(Exception, match="'view' holds 200"):
                either.act({**seen[0], "view": np.full((5, 5), 200, np.uint8)})
        assert here.act(seen[6]) == there.act(seen[6])  # what was refused changed nothing


def test_metrics_are_what_prometheus_reads(server, seen):
    server.tick(seen[0], "counted", sequence_start=True, sequence_end=True)
    answer = server.ask("GET", "/metrics")
    names = set()
    for line in answer.body.decode().splitlines():
        if line.startswith("#"):
            names.add(line.split()[2])
            continue
        name, value = line.rsplit(" ", 1)
        float(value)
        assert any(name.startswith(known) for known in names), line
    assert {
        "hamlet_seconds", "hamlet_batch_rows", "hamlet_sessions", "hamlet_queue",
        "hamlet_reloads_total", "hamlet_info",
    } <= names  # fmt: skip


def test_nothing_but_what_there_is(server):
    assert server.ask("GET", "/nowhere").status == 404
    assert server.ask("GET", "/v2/models/other").status == 404
    answer = server.ask("PUT", INFER, b"{}")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert server.ask("HEAD", "/v2/health/live").body == b""


@pytest.mark.slow
def test_fuzzing_finds_nothing(agent, tmp_path):
    """schemathesis: every check it has, over everything the OpenAPI document names."""
    with Served(agent, "--max-sessions", "100000") as server:
        command = [
            sys.executable, "-m", "schemathesis.cli", "run",
            f"http://127.0.0.1:{server.port}/openapi.json", "--checks", "all",
            "--max-examples", "60", "--seed", "1", "--no-color", "--workers", "1",
            "--exclude-method", "PUT",  # a session's bytes, which no schema describes
        ]  # fmt: skip
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert server.process.poll() is None
        assert not [line for line in server.log if line["event"] == "error"]
        document = server.ask("GET", "/openapi.json").json
        assert json.dumps(document).count("sequence_id") >= 2
