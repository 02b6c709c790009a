"""What rules derive: in parts as in one, within a budget, and how strongly."""

from __future__ import annotations

import math

import pytest
import torch

from hamlet.proofs import closure
from hamlet.proofs.data import parse_atom
from hamlet.proofs.kinship import kinship_graph
from tests.proofs.helpers import graph_of, ids_of


def test_joins_cut_into_parts_find_the_same(monkeypatch):
    graph = kinship_graph(3, 3)
    whole = closure.close(graph, 4)
    monkeypatch.setattr(closure, "CHUNK", 7)
    parts = closure.close(graph, 4)
    assert torch.equal(parts.keys, whole.keys)
    assert torch.equal(parts.round, whole.round)
    torch.testing.assert_close(parts.log_odds(parts.keys), whole.log_odds(whole.keys))
    assert parts.dropped == whole.dropped == 0


def test_beyond_the_budget_the_most_certain_stay_and_the_rest_is_counted():
    graph = kinship_graph(3, 3)
    whole = closure.close(graph, 1)
    new = whole.keys[~whole.is_fact]
    room = len(new) // 2
    small = closure.close(graph, 1, budget=room)
    stays = torch.isin(new, small.keys)
    assert int(stays.sum()) == room
    assert small.dropped == len(new) - room
    odds = whole.log_odds(new)
    assert odds[~stays].max() <= odds[stays].min()
    assert torch.isin(whole.keys[whole.is_fact], small.keys).all()


def test_evidence_is_counted_from_the_rules_confidence_and_the_ways():
    """Two of three heads of the rule are facts; what is derived in two ways is surer than in one,
    and what rests on something derived comes a round later and is less sure."""
    facts = ["p(a, b)", "p(a, c)", "q(b, d)", "q(c, d)", "q(b, e)", "q(c, f)"]
    facts += ["r(a, e)", "r(a, f)", "s(d, z)"]
    graph = graph_of(facts, ["p(X,Y), q(Y,Z) -> r(X,Z)", "r(X,Y), s(Y,Z) -> t(X,Z)"])
    found = closure.close(graph, 4)

    def key(atom: str) -> torch.Tensor:
        return graph.key(ids_of(graph, parse_atom(atom))[None])

    confidence = (2 + 0.5) / (3 + 1)
    assert found.confidence[0].item() == pytest.approx(confidence)
    one = -math.log(1 - confidence)
    two = one * 2**closure.WAYS_POWER
    for atom, evidence in (("r(a, e)", one), ("r(a, d)", two)):
        assert found.probability(key(atom)).item() == pytest.approx(1 - math.exp(-evidence))
        odds = evidence + math.log(1 - math.exp(-evidence))
        assert found.log_odds(key(atom)).item() == pytest.approx(odds, rel=1e-5)
    assert found.round[torch.searchsorted(found.keys, key("t(a, z)"))].item() == 2
    second = (0 + 0.5) / (0 + 1)  # its body held nowhere among the facts
    evidence = -math.log(1 - second * (1 - math.exp(-two)))
    odds = evidence + math.log(1 - math.exp(-evidence)) - closure.ROUND_STEP
    assert found.log_odds(key("t(a, z)")).item() == pytest.approx(odds, rel=1e-5)
    assert found.log_odds(key("t(b, z)")).item() == -100 * closure.ROUND_STEP
    assert found.probability(key("t(b, z)")).item() == 0.0
