"""An int8 copy is written only if it acts as the agent does on a real trajectory."""

from __future__ import annotations

import onnx
import pytest

from hamlet.artifacts import HamletError
from hamlet.export import int8
from hamlet.serving.agent import OnnxAgent


def test_the_gate_lets_through_and_refuses(agent, tmp_path, monkeypatch):
    target = tmp_path / "agent.int8.onnx"
    lived = int8.live(agent, worlds=4, ticks=30)
    assert int8.agreement(OnnxAgent(agent), OnnxAgent(agent), lived) == 1.0
    names = int8.products(onnx.load(agent).graph)
    assert len(names) == len(set(names)) > 20
    with monkeypatch.context() as patch:
        patch.setattr(int8, "GATE", 1.01)
        patch.setattr(int8, "products", lambda graph: names[:2])
        with pytest.raises(HamletError, match=r"no product .* the gate asks"):
            int8.quantize(agent, target, lived)
    assert not list(tmp_path.iterdir())

    monkeypatch.setattr(int8, "GATE", 0.9)
    share = int8.quantize(agent, target, lived)
    small = OnnxAgent(target)  # its card fits it
    assert small.card["int8_agreement"] == pytest.approx(share)
    assert int8.agreement(OnnxAgent(agent), small, lived) == share
    assert small.card["upstream"]["agent"] == OnnxAgent(agent).card["sha256"]
    told = small.card["int8"]
    done = [node for node in nodes(onnx.load(target).graph) if node.op_type == "MatMulInteger"]
    assert 20 < told["products"] == len(done) <= told["of"] == len(names)
    assert told["left_out"] == []


def nodes(graph) -> list:
    inner = [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return [*graph.node, *(node for g in inner for node in nodes(g))]


def test_what_changes_actions_is_left_out(agent, tmp_path, monkeypatch):
    """One product is said to change every action: the others are int8, that one is not."""
    names = int8.products(onnx.load(agent).graph)[:2]
    bad = {names[1]}
    written: list[set[str]] = []
    write = int8.write_copy

    def noted(prepared, small, left_out):
        written.append(set(names) - set(left_out))
        write(prepared, small, left_out)

    monkeypatch.setattr(int8, "products", lambda graph: names)
    monkeypatch.setattr(int8, "write_copy", noted)
    monkeypatch.setattr(int8, "agreement", lambda *_: 0.5 if written[-1] & bad else 1.0)
    lived = int8.live(agent, worlds=1, ticks=2)
    target = tmp_path / "agent.int8.onnx"
    assert int8.quantize(agent, target, lived) == 1.0
    assert written[-1] == set(names) - bad
    assert OnnxAgent(target).card["int8"]["left_out"] == sorted(bad)
    integer = {
        node.name.removesuffix("_quant").removesuffix("_MatMul")
        for node in nodes(onnx.load(target).graph)
        if node.op_type == "MatMulInteger"
    }
    assert integer & set(names) == set(names) - bad


@pytest.mark.parametrize(
    ("bad", "kept"), [("", "abcdefg"), ("d", "abcefg"), ("ag", "bcdef"), ("abcdefg", "")]
)
def test_the_search_leaves_out_only_what_it_must(bad, kept):
    asked: list[str] = []

    def agrees(chosen) -> bool:
        asked.append("".join(chosen))
        return not set(chosen) & set(bad)

    assert sorted(int8.search("abcdefg", agrees)) == list(kept)
    assert len(asked) <= 13
    # Together they are too many, though each is fine alone.
    assert len(int8.search("abcdefg", lambda chosen: len(chosen) <= 3)) == 3
