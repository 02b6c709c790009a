"""The Triton repository, as Triton's own protobuf reads it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from hamlet.export.triton import MAX_BATCH, write_repository
from hamlet.ort import open_unchecked
from hamlet.serving.agent import OnnxAgent


@pytest.fixture(scope="module")
def schema():
    """`model_config.proto` as tritonclient brings it, without its gRPC."""
    found = importlib.util.find_spec("tritonclient")
    path = Path(found.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(agent, tmp_path):
    write_repository(agent, OnnxAgent(agent).card, tmp_path / "triton")
    return tmp_path / "triton"


def test_the_configuration_is_one_of_tritons(repository, agent, schema):
    from google.protobuf import text_format

    text = (repository / "hamlet-agent" / "config.pbtxt").read_text()
    config = text_format.Parse(text, schema.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == (
        "hamlet-agent", "onnxruntime", MAX_BATCH,
    )  # fmt: skip
    player = OnnxAgent(agent)
    kinds = {
        "uint8": schema.TYPE_UINT8, "bool": schema.TYPE_BOOL, "int64": schema.TYPE_INT64,
        "float32": schema.TYPE_FP32,
    }  # fmt: skip
    states = {s.input_name: s for s in config.sequence_batching.state}
    # Every input and output of the graph is there once, with its type and shape.
    described = {e["name"]: e for side in player.card["schema"].values() for e in side}
    named = [*config.input, *config.output]
    assert {t.name for t in config.input} | states.keys() == set(player.inputs)
    assert {t.name for t in config.output} | {s.output_name for s in states.values()} == set(
        player.outputs
    )
    for tensor in named:
        entry = described[tensor.name]
        assert tensor.data_type == kinds[entry["dtype"]]
        assert list(tensor.dims) == (entry["shape"][1:] or [1])
        assert tensor.HasField("reshape") == (not entry["shape"][1:])
    for state in states.values():
        for name in (state.input_name, state.output_name):
            entry = described[name]
            assert state.data_type == kinds[entry["dtype"]]
            assert list(state.dims) == (entry["shape"][1:] or [1])
        (initial,) = state.initial_state
        assert initial.zero_data
        assert list(initial.dims) == list(state.dims)
    assert config.sequence_batching.oldest.max_candidate_sequences > 0
    (warm,) = config.model_warmup
    assert set(warm.inputs) == {t.name for t in config.input}


def test_the_graph_is_the_agent(repository, agent, seen):
    """Its state as the configuration declares it, its outputs those of the agent."""
    player = OnnxAgent(agent)
    session = open_unchecked(str(repository / "hamlet-agent" / "1" / "model.onnx"))
    state = player.start(3)
    for rows in (seen[:3], seen[50:53], seen[90:93]):
        feeds = {n: np.stack([row[n] for row in rows]) for n in rows[0]}
        wide = {n: x[:, None] if x.ndim == 1 else x for n, x in state.items()}
        want = dict(zip(player.outputs, player.session.run(None, feeds | state), strict=True))
        got = dict(zip(player.outputs, session.run(None, feeds | wide), strict=True))
        for name, value in want.items():
            wider = name.replace("next_", "state_") in state and value.ndim == 1
            np.testing.assert_array_equal(got[name], value[:, None] if wider else value)
        state = {n: want[n.replace("state_", "next_")] for n in state}
