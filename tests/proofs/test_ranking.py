"""Questions, rivals and what is made of them, counted by hand on graphs of a few entities."""

from __future__ import annotations

import pytest
import torch

from hamlet.proofs.closure import close
from hamlet.proofs.data import build_graph, parse_atom
from hamlet.proofs.ranking import average_precision, evaluate_scores, pose, sampled_negatives
from tests.proofs.helpers import graph_of, ids_of, rule

PLACES = {"city": ["rome", "oslo"], "land": ["italy", "norway", "chad", "peru"]}
FACTS = ["in(rome, italy)", "in(oslo, chad)", "near(chad, italy)", "near(italy, norway)"]
FACTS += ["near(peru, peru)"]


def places():
    """Cities lie in lands: only tails are corrupted, by lands."""
    splits = {
        "train": [parse_atom(f) for f in FACTS],
        "valid": [],
        "test": [parse_atom("in(oslo, norway)")],
    }
    rules = [rule("in(X,Y), near(Y,Z) -> in(X,Z)", "r0")]
    return build_graph("places", splits, rules, PLACES)


def named(graph, keys) -> set[str]:
    size = graph.num_entities
    triples = torch.stack([keys // size**2, keys // size % size, keys % size], -1)
    return {graph.text(t) for t in triples}


def test_average_precision_counts_equal_scores_as_one_step():
    scores = torch.tensor([0.9, 0.7, 0.7, 0.7, 0.1])
    labels = torch.tensor([True, True, False, False, True])
    # Of the first one all are right; after the three equal ones 2 of 4; after all 3 of 5.
    expected = (1.0 * 1 + 2 / 4 * 1 + 3 / 5 * 1) / 3
    assert average_precision(scores, labels) == pytest.approx(expected)
    assert average_precision(scores, torch.zeros(5, dtype=torch.bool)) == 0.0
    assert average_precision(torch.arange(5), labels) == pytest.approx((1 + 2 / 4 + 3 / 5) / 3)


def test_where_entities_have_types_only_tails_of_the_type_are_rivals():
    graph = places()
    closure = close(graph, 4)
    questions = pose(graph, closure, graph.splits["test"], graph.known())
    assert named(graph, questions.answers) == {"in(oslo, norway)"}
    assert len(questions.answers) == 1  # the head is not corrupted
    negatives = sampled_negatives(graph, questions, 50, 0)
    drawn = named(graph, negatives[1])
    assert drawn == {"in(oslo, italy)", "in(oslo, peru)"}


def test_the_area_under_the_curve_is_of_the_answers_among_their_negatives():
    graph = places()
    closure = close(graph, 4)
    questions = pose(graph, closure, graph.splits["test"], graph.known())
    negatives = sampled_negatives(graph, questions, 8, 0)
    atoms = ["in(oslo, norway)", "in(oslo, italy)", "in(oslo, peru)"]
    keys = graph.key(torch.stack([ids_of(graph, parse_atom(atom)) for atom in atoms]))
    order = keys.argsort()

    def area(*scores: float) -> dict[str, float]:
        given = torch.tensor(scores, dtype=torch.float64)[order]
        return evaluate_scores(graph, questions, keys[order], given, negatives)

    assert area(2.0, 1.0, 0.0)["auc_pr"] == 1.0
    right = area(2.0, 1.0, 0.0)
    assert (right["mrr_all"], right["hits1_all"]) == (1.0, 1.0)
    between = int((negatives[1] == keys[1]).sum())  # so many times the better negative is drawn
    assert area(1.0, 2.0, 0.0)["auc_pr"] == pytest.approx(1 / (1 + between))
    assert area(1.0, 2.0, 0.0)["mrr_all"] == 0.5
    assert area(0.0, 2.0, 1.0)["auc_pr"] == pytest.approx(1 / (1 + len(negatives[1])))
    assert "auc_pr" not in evaluate_scores(
        *untyped(), label=lambda name: name
    )  # what has no types has no negatives that are surely false


def untyped():
    graph = graph_of(["p(a, b)", "p(b, c)"], ["p(X,Y), p(Y,Z) -> q(X,Z)"], ["q(a, c)"])
    closure = close(graph, 2)
    questions = pose(graph, closure, graph.splits["test"], graph.known())
    keys = closure.keys[closure.round > 0]
    scores = closure.log_odds(keys).double()
    return graph, questions, keys, scores, sampled_negatives(graph, questions, 4, 0)
