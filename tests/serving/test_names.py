"""What is state in a policy made elsewhere, by what its inputs and outputs are called."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from served import Served

from hamlet.serving.signature import card_of, maybe_state, signature_of

SIZE = 4


def recurrent(given: str, following: str, width: int = SIZE) -> bytes:
    """A policy that remembers by one pair of these names, and says its version, as ML-Agents' do: a
    number for all rows."""
    weights = np.random.default_rng(0).normal(size=(width, SIZE)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["obs", "weights"], ["seen"]),
        helper.make_node("Add", ["seen", given], ["both"]),
        helper.make_node("Tanh", ["both"], [following]),
        helper.make_node("ArgMax", [following], ["action"], axis=1, keepdims=0),
        helper.make_node("Identity", ["version"], ["version_number"]),
    ]

    def value(name: str, *shape: object, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        nodes, "policy",
        [value("obs", "batch", width), value(given, "batch", SIZE)],
        [
            value("action", "batch", kind=TensorProto.INT64), value(following, "batch", SIZE),
            value("version_number", 1),
        ],
        [
            numpy_helper.from_array(weights, "weights"),
            numpy_helper.from_array(np.float32([3]), "version"),
        ],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made.SerializeToString()


def card(given: str, following: str, width: int = SIZE) -> dict:
    session = onnxruntime.InferenceSession(
        recurrent(given, following, width), providers=["CPUExecutionProvider"]
    )
    return card_of(session, "policy")


@pytest.mark.parametrize(
    ("given", "following"),
    [
        ("state_hidden", "next_hidden"),
        ("h_in", "h_out"),
        ("h0", "hn"),
        ("hx", "hx_out"),
        ("hidden", "new_hidden"),
        ("prev_hidden", "hidden"),
        ("recurrent_in", "recurrent_out"),  # ML-Agents
        ("state_in_0", "state_out_0"),  # RLlib
        ("rnn_state_in_1", "rnn_state_out_1"),
        ("state_ins", "state_outs"),
        ("past_h", "present_h"),
        ("lstm.h", "lstm.h.next"),
        ("core/state", "core/state/out"),
        ("hiddenIn", "hiddenOut"),
    ],
)
def test_a_pair_is_found_by_its_names(given, following):
    found = card(given, following)
    assert found["policy"] == {"states": {given: following}, "action": "action"}
    assert maybe_state(signature_of(found, "policy")) is None


def test_other_names_are_no_pair_and_it_is_said():
    found = card("foo", "bar", width=3)
    assert found["policy"]["states"] == {}
    assert "--state foo=bar" in maybe_state(signature_of(found, "policy"))


def test_a_card_by_hand_need_not_name_states():
    found = card("foo", "bar", width=3)
    del found["policy"]["states"]
    assert "--state foo=bar" in maybe_state(signature_of(found, "policy"))


def test_a_server_that_remembers_nothing_says_so(tmp_path):
    policy = tmp_path / "policy.onnx"
    policy.write_bytes(recurrent("foo", "bar", width=3))
    with Served(policy) as server:
        assert "nothing is remembered" in server.first("warning")["text"]
    with Served(policy, "--state", "foo=bar") as server:
        assert server.first("policy")["states"] == {"foo": "bar"}
        assert not [line for line in server.log if line["event"] == "warning"]
