"""Policies that Hamlet did not make: served from their file alone, equal to raw ONNX Runtime."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from policies import HIDDEN, MAKERS, OBS, by_raw_onnxruntime, hand_made_gru, rl_games_lstm
from served import Served

from benchmarks.serving import http, json_request
from benchmarks.serving_load import load
from hamlet.artifacts import HamletError
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.client import Agent


def observations(ticks: int, lives: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    return rng.uniform(-1, 1, (ticks, lives, OBS)).round(4).astype(np.float32)


@pytest.mark.parametrize(
    ("make", "ticks"),
    [
        *((make, 30) for make in MAKERS),
        *(pytest.param(make, 200, marks=pytest.mark.slow) for make in MAKERS),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_interleaved_lives_act_as_raw_onnxruntime(make, ticks, tmp_path):
    """100 lives over 16 connections, each tick by whoever comes next."""
    made = make(tmp_path)
    lives = 100
    seen = observations(ticks, lives)
    expected = by_raw_onnxruntime(made, seen)
    name = made.path.stem
    got = np.zeros_like(expected)
    at, free, chance = [0] * lives, list(range(lives)), random.Random(1)
    first = next(n for n in OnnxAgent(made.path, **options_of(made)).signature.observation)

    def talk():
        while free:
            life = free.pop(chance.randrange(len(free)))
            tick = at[life]
            observation = {first: seen[tick, life]}
            if name == "cleanrl":
                observation["done"] = np.zeros((), np.float32)
            raw = json_request(
                observation, sequence_id=f"life {life}", sequence_start=tick == 0,
                sequence_end=tick == ticks - 1,
            )  # fmt: skip
            body = json.loads(raw.partition(b"\r\n\r\n")[2])
            body["outputs"] = [{"name": made.action}]
            response = yield http("POST", f"/v2/models/{name}/infer", json.dumps(body).encode())
            assert response.startswith(b"HTTP/1.1 200"), response
            output = json.loads(response.partition(b"\r\n\r\n")[2])["outputs"][0]
            got[tick, life] = np.array(output["data"]).reshape(output["shape"])[0]
            at[life] += 1
            if at[life] < ticks:
                free.append(life)

    with Served(made.path, *made.options) as server:
        told = server.first("policy")
        assert told["states"] == dict(made.states)
        assert told["action"] == made.action
        load("127.0.0.1", server.port, [talk() for _ in range(16)], 300)
        rows = server.ask("GET", "/metrics").body.decode()
    assert at == [ticks] * lives
    if told["batched"]:  # lives were in batches together
        assert f'hamlet_batch_rows_bucket{{le="1.0"}} {lives * ticks}.0' not in rows
    if expected.dtype == np.int64:
        np.testing.assert_array_equal(got, expected)
        assert len(np.unique(expected)) > 1
    else:
        np.testing.assert_allclose(got, expected, atol=2e-6)
        assert expected.std(axis=1).max() > 0.01


def options_of(made) -> dict:
    pairs = [o.split("=") for o in made.options[1::2]]
    return {"states": dict(pairs), "action": made.action} if pairs else {}


def test_the_memory_is_used(tmp_path):
    """A life that forgot would act otherwise: the test above can fail."""
    made = hand_made_gru(tmp_path)
    seen = observations(40, 8)
    forgetful = by_raw_onnxruntime(made._replace(states={}), seen)
    assert (by_raw_onnxruntime(made, seen) != forgetful).any()


def test_a_card_says_names_limits_mask_and_first_state(tmp_path):
    made = hand_made_gru(tmp_path)
    code = "from hamlet.cli import app; app()"
    command = [sys.executable, "-c", code, "card", str(made.path), "--action", "action"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path = made.path.with_name("gru.onnx.json")
    card = json.loads(path.read_text())
    assert card["policy"] == {"states": {"h": "h_out"}, "action": "action"}
    names = ["north", "east", "south", "west", "wait"]
    first = np.linspace(-1, 1, HIDDEN).round(2)
    card["policy"] |= {"actions": names, "initial": {"h": first.tolist()}}
    card["limits"] = {"obs": [-1, 1]}
    path.write_text(json.dumps(card))
    seen = observations(1, 1)[0, 0]
    session = OnnxAgent(made.path).session
    feeds = {"obs": seen[None], "h": first[None].astype(np.float32)}
    expected = int(session.run(["action"], feeds)[0][0])
    with Served(made.path, "--name", "pilot") as server:
        answer = server.ask("POST", "/act", {"observation": {"obs": seen.tolist()}})
        assert answer.json["action"] == names[expected]
        wrong = server.ask("POST", "/act", {"observation": {"obs": [2.0] * OBS}})
        assert wrong.status == 400
        assert "'obs' holds 2: it must be -1 to 1" in wrong.error
        assert server.ask("GET", "/v2/models/pilot").json["inputs"][0]["shape"] == [-1, OBS]
        with Agent(f"http://127.0.0.1:{server.port}") as there, Agent(made.path) as here:
            for row in observations(9, 1)[:, 0]:
                assert there.act({"obs": row}) == here.act({"obs": row})


def test_a_client_keeps_the_state_in_the_graphs_layout(tmp_path):
    """Without a sequence: states [layers, B, H] go in and out as the graph has them."""
    made = rl_games_lstm(tmp_path)
    seen = observations(3, 4)
    expected = by_raw_onnxruntime(made, seen)
    states = {name: np.zeros((2, 4, HIDDEN), np.float32) for name in made.states}
    with Served(made.path) as server:
        for tick in range(3):
            feeds = {"obs": seen[tick], **states}
            inputs = [
                {"name": n, "shape": x.shape, "datatype": "FP32", "data": x.tolist()}
                for n, x in feeds.items()
            ]
            path = f"/v2/models/{made.path.stem}/infer"
            answer = server.ask("POST", path, {"inputs": inputs}).json
            outputs = {
                o["name"]: np.array(o["data"], np.float32).reshape(o["shape"])
                for o in answer["outputs"]
            }
            np.testing.assert_allclose(outputs["mu"], expected[tick], atol=2e-6)
            states = {given: outputs[following] for given, following in made.states.items()}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--state", "h"], "--state h is no pair"),
        (["--state", "h=nothing"], "has no output 'nothing'"),
        (["--state", "obs=h_out"], "a state must keep its type and shape"),
        (["--action", "reaction"], "its action is said to be 'reaction'"),
        (["--session-ttl", "nan"], "session-ttl"),
        (["--name", "a/b"], "cannot stand in a URL"),
        (["--max-sessions", "1000000", "--session-ttl", "inf"], None),
    ],
)
def test_options_that_cannot_be(tmp_path, options, told):
    made = hand_made_gru(tmp_path)
    if told is None:
        with Served(made.path, *options) as server:
            assert server.ask("GET", "/v2/health/ready").status == 200
        return
    with pytest.raises(AssertionError, match=told):
        Served(made.path, *options)


def test_a_graph_that_cannot_be_served_is_refused_by_name(tmp_path):
    import onnx
    from onnx import TensorProto, helper

    def graph(shape, kind):
        x = helper.make_tensor_value_info("x", kind, shape)
        y = helper.make_tensor_value_info("y", kind, shape)
        g = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
        path = tmp_path / f"{time.monotonic_ns()}.onnx"
        onnx.save(
            helper.make_model(g, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]), path
        )
        return path

    with pytest.raises(HamletError, match="dimension 1 of input 'x' is open"):
        OnnxAgent(graph(["batch", "width"], TensorProto.FLOAT))
    with pytest.raises(HamletError, match="'x' is tensor\\(string\\), which is not served"):
        OnnxAgent(graph(["batch"], TensorProto.STRING))


def test_a_full_server_whose_sessions_never_time_out(tmp_path):
    made = hand_made_gru(tmp_path)
    body = {"observation": {"obs": [0.0] * OBS}}
    with Served(made.path, "--max-sessions", "1", "--session-ttl", "inf") as server:
        assert server.ask("POST", "/act", body).status == 200
        full = server.ask("POST", "/act", body)
        assert full.status == 429
        assert "1 sessions are open: end one" in full.error
        assert 0 < int(full.headers["retry-after"]) <= 3600
