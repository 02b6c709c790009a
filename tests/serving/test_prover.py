"""The prover's scorer, served as what it is: no state, a score for every row."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tritonclient.http as triton
from served import Served

from hamlet.artifacts import HamletError, read_json, write_card
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.model import DATATYPES


@pytest.fixture(scope="module")
def raw(prover) -> dict[str, np.ndarray]:
    """What it answers, by onnxruntime alone."""
    import onnxruntime

    file, asked = prover
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, asked), strict=True))


@pytest.fixture(scope="module")
def server(prover):
    with Served(prover[0]) as served:
        yield served


def test_the_card_says_what_the_graph_has(prover):
    schema = read_json(prover[0].with_name("prover.onnx.json"))["schema"]
    actions = next(e["shape"][1] for e in schema["inputs"] if e["name"] == "action_mask")
    assert {e["name"]: e["shape"] for e in schema["outputs"]} == {
        "logits": ["batch", actions], "value": ["batch"], "score": ["batch"],
    }  # fmt: skip


def test_scores_are_those_of_raw_onnxruntime(server, prover, raw):
    _, asked = prover
    assert len(np.unique(raw["score"])) > 3
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        described = client.get_model_metadata("prover")
        assert [x["name"] for x in described["outputs"]] == ["score", "logits", "value"]
        for rows in (slice(0, 1), slice(0, 24), slice(7, 12)):
            inputs = []
            for name, x in asked.items():
                inputs.append(triton.InferInput(name, list(x[rows].shape), DATATYPES[str(x.dtype)]))
                inputs[-1].set_data_from_numpy(x[rows])
            result = client.infer("prover", inputs)
            for name, want in raw.items():
                np.testing.assert_allclose(result.as_numpy(name), want[rows], atol=1e-5)
    config = server.ask("GET", "/v2/models/prover/config").json
    assert "sequence_batching" not in config
    assert "It answers with <code>score</code>" in server.ask("GET", "/").body.decode()


def test_it_is_asked_by_names_too(server, prover, raw):
    _, asked = prover
    for row in (0, 5):
        seen = {name: x[row].tolist() for name, x in asked.items()}
        answer = server.ask("POST", "/act", {"observation": seen, "end": True})
        assert answer.status == 200, answer.body
        assert answer.json["action"] == pytest.approx(float(raw["score"][row]), abs=1e-5)
    data = {
        "inputs": [
            {
                "name": n, "shape": [1, *x.shape[1:]], "datatype": DATATYPES[str(x.dtype)],
                "data": x[3].ravel().tolist(),
            }
            for n, x in asked.items()
        ],
        "parameters": {"sequence_id": "q", "sequence_start": True},
    }  # fmt: skip
    outputs = server.ask("POST", "/v2/models/prover/infer", data).json["outputs"]
    for output in outputs:
        want = raw[output["name"]][3:4]
        assert output["shape"] == list(want.shape)
        np.testing.assert_allclose(output["data"], want.ravel(), atol=1e-5)


def test_a_card_that_says_another_shape_or_type_is_refused(prover, tmp_path):
    """As cards of the prover did, of which the server died."""
    file, _ = prover
    copy = tmp_path / file.name
    copy.write_bytes(file.read_bytes())
    good = read_json(file.with_name("prover.onnx.json"))["schema"]

    def with_(where: str, name: str, **wrong) -> dict:
        schema = json.loads(json.dumps(good))
        next(e for e in schema[where] if e["name"] == name).update(wrong)
        return schema

    for schema, told in (
        (with_("outputs", "logits", shape=["batch"]), "'logits' is float32 \\['batch', "),
        (with_("inputs", "query", shape=["batch", 4]), "'query' is int64 \\['batch', 3\\]"),
        (with_("inputs", "prior", dtype="float64"), "'prior' is float32"),
    ):
        write_card(copy, "prover scorer", schema)
        with pytest.raises(HamletError, match=told):
            OnnxAgent(copy)
    with pytest.raises(AssertionError, match="its card says"):
        Served(copy)
    write_card(copy, "prover scorer", good)
    OnnxAgent(copy)
