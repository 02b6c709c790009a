"""Work in a process of its own: its result, its end, and what is done where there is one core."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hamlet.artifacts import HamletError
from hamlet.params import load_params
from stages import evaluate
from stages import meanwhile as here
from stages.meanwhile import meanwhile

PARAMS = load_params(Path(__file__).parents[1] / "params.yaml")


def told(params, shown):
    return {"who": os.getpid(), "shown": shown, "seed": torch.tensor([params.seed])}


def ends(params, shown):
    raise SystemExit(7)


def test_it_is_another_process_that_does_it_and_shows_nothing(monkeypatch):
    monkeypatch.setattr(here, "cores", lambda: 2)
    found = meanwhile(told, PARAMS)()
    assert found["who"] != os.getpid()
    assert not found["shown"]
    assert torch.equal(found["seed"], torch.tensor([PARAMS.seed]))


def test_on_one_core_it_is_done_here_when_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(here, "cores", lambda: 1)
    found = meanwhile(told, PARAMS)()
    assert found["who"] == os.getpid()
    assert found["shown"]


def test_one_that_ends_without_a_result_is_told(monkeypatch):
    monkeypatch.setattr(here, "cores", lambda: 2)
    with pytest.raises(HamletError, match="ended with exit code 7"):
        meanwhile(ends, PARAMS)()


def test_few_worlds_are_not_worth_a_process(monkeypatch):
    asked = []
    monkeypatch.setattr(evaluate, "meanwhile", lambda work, params: asked.append(work))
    monkeypatch.setattr(evaluate, "played", lambda params, shown: shown)
    evaluate.scripted_lives(PARAMS)
    assert len(asked) == 1
    few = PARAMS.evaluate.model_copy(update={"worlds": evaluate.APART - 1})
    assert evaluate.scripted_lives(PARAMS.model_copy(update={"evaluate": few}))() is True
    assert len(asked) == 1
