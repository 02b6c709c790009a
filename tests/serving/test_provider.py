"""`hamlet serve --provider`: CUDA must work and say what the CPU says; else a line tells."""

from __future__ import annotations

import pytest
from policies import hand_made_gru

from hamlet.artifacts import HamletError
from hamlet.driver import has_gpu
from hamlet.ort import open_unchecked
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.provider import Placed, check_parity, first_batch
from hamlet.serving.source import open_source


@pytest.fixture
def agent(tmp_path):
    """A small policy made elsewhere, without a card."""
    return hand_made_gru(tmp_path).path


without_gpu = pytest.mark.skipif(has_gpu(), reason="there is a GPU to be had")


def test_what_nobody_asked_for_runs_on_the_cpu(agent):
    assert OnnxAgent(agent).session.get_providers() == ["CPUExecutionProvider"]


@without_gpu
def test_auto_serves_on_the_cpu_and_says_why(agent, capsys):
    found, _ = Placed(open_source(str(agent)), "auto").fetch()
    assert found.session.get_providers() == ["CPUExecutionProvider"]
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "is served on the CPU" in told


@without_gpu
def test_cuda_that_does_not_run_is_one_line(agent):
    with pytest.raises(HamletError, match="serve with --provider cpu"):
        Placed(open_source(str(agent)), "cuda").fetch()


def test_another_answer_to_the_first_batch_is_refused(agent):
    one = OnnxAgent(agent)
    same = open_unchecked(agent.as_posix())
    check_parity(one, same, "a")

    class Off:
        def run(self, names, inputs):
            return [x + 0.01 if x.dtype.kind == "f" else x for x in same.run(names, inputs)]

    with pytest.raises(HamletError, match=r"a: '\w+' on CUDA differs from the CPU's by"):
        check_parity(one, Off(), "a")


def test_the_first_batch_fits_the_graph(agent):
    one = OnnxAgent(agent)
    assert {name: len(x) for name, x in first_batch(one, 3).items()} == dict.fromkeys(one.inputs, 3)
