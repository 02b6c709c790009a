"""An int8 copy is written only if it acts as the agent does on a real trajectory."""

from __future__ import annotations

import pytest

from hamlet.artifacts import HamletError
from hamlet.export import int8
from hamlet.serving.agent import OnnxAgent


def test_the_gate_lets_through_and_refuses(agent, tmp_path, monkeypatch):
    target = tmp_path / "agent.int8.onnx"
    lived = int8.live(OnnxAgent(agent), worlds=4, ticks=30)
    assert int8.agreement(OnnxAgent(agent), OnnxAgent(agent), lived) == 1.0
    monkeypatch.setattr(int8, "GATE", 1.01)
    with pytest.raises(HamletError, match="the gate asks"):
        int8.quantize(agent, target, lived)
    assert not list(tmp_path.iterdir())

    monkeypatch.setattr(int8, "GATE", 0.9)
    share = int8.quantize(agent, target, lived)
    small = OnnxAgent(target)  # its card fits it
    assert small.card["int8_agreement"] == pytest.approx(share)
    assert int8.agreement(OnnxAgent(agent), small, lived) == share
    assert small.card["upstream"]["agent"] == OnnxAgent(agent).card["sha256"]
    assert b"MatMulInteger" in target.read_bytes() or b"DynamicQuantize" in target.read_bytes()
