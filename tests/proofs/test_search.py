"""What a greedy search misses is found, and what cannot be proven is not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hamlet.learning.train_prover import build_prover, prove_all
from hamlet.proofs.closure import close
from hamlet.proofs.data import Triple
from hamlet.proofs.knowledge_base import Budget, build_knowledge_base
from hamlet.proofs.search import find_proofs, follow, roomy
from hamlet.proofs.trace import ask, prove
from hamlet.proofs.world import ProofWorld, WorldConfig
from tests.proofs.helpers import all_atoms, consequences, graph_of, ids_of
from tests.proofs.test_unify import ENTITIES, PREDICATES, knowledge_bases

ATOMS = all_atoms(PREDICATES, ENTITIES)


def derivable(facts, rules) -> list[bool]:
    """Whether each of ATOMS follows from the facts other than itself, without end."""
    return [a in consequences(set(facts) - {a}, rules, ENTITIES, 30) for a in ATOMS]


def queries(graph) -> torch.Tensor:
    return torch.stack([ids_of(graph, a) for a in ATOMS])


@settings(max_examples=40)
@given(knowledge_bases())
def test_search_with_memory_finds_exactly_what_follows(knowledge):
    graph, facts, rules = knowledge
    kb = build_knowledge_base(graph, close(graph, rounds=30), Budget(5, 12, 12))
    found = find_proofs(kb, queries(graph))
    assert [proof is not None for proof in found] == derivable(facts, rules)


@settings(max_examples=25)
@given(knowledge_bases(), st.sampled_from([0, 1, 4]), st.booleans())
def test_the_prover_proves_exactly_what_follows(knowledge, skips, learnt):
    """Through the world with `Endf`, history and unary skips, untrained or with any weights."""
    graph, facts, rules = knowledge
    config = WorldConfig(unary_skips=skips, max_depth=12)
    world = ProofWorld(graph, close(graph, rounds=30), config, Budget(5, 12, 12))
    prover = build_prover(world)
    if learnt:
        torch.manual_seed(0)
        for parameter in prover.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    found = prove_all(world, prover, queries(graph), slots=8)
    assert found.proven.tolist() == derivable(facts, rules)


def chain(length: int):
    """A proof whose open goals pile up: each rule leaves one goal beside the one it follows."""
    facts = [f"{p}(a,b)" for p in ("base", *(f"side{i}" for i in range(length)))]
    rules = ["base(X,Y) -> top0(X,Y)"]
    for i in range(length):
        rules += [f"side{i}(X,Y) -> left{i}(X,Y)", f"top{i}(X,Y), left{i}(X,Y) -> top{i + 1}(X,Y)"]
    return graph_of(facts, rules, test=[f"top{length}(a,b)"])


def test_conjunctions_beyond_the_greedy_budget_are_proven_with_more_room():
    graph = chain(7)
    world = ProofWorld(graph, close(graph, rounds=30), WorldConfig(max_depth=40), Budget(3, 4, 4))
    query = graph.splits["test"]
    found = prove_all(world, build_prover(world), query, 1)
    assert found.proven.tolist() == [True]
    path = find_proofs(world.kb, query)[0]
    steps = list(follow(world.kb, query[0], path))
    assert len(steps) == len(path)
    assert bool((path[-1] < 0).all())
    assert max(int((goals >= 0).sum()) for goals, _, _ in steps) > 3
    assert roomy(world.kb).budget.goals > 3
    proof = prove(query[0], build_prover(world), world)
    assert len(proof.facts()) == 8


def test_a_dead_end_is_left_again():
    """Of many ways to bind the middle of a chain only one leads on."""
    facts = [f"p(a,m{i})" for i in range(20)] + ["q(m17,n)", "s(n,b)"]
    facts += [f"q(m{i},dead{i})" for i in range(17)]
    graph = graph_of(facts, ["p(X,Y), q(Y,Z), s(Z,W) -> r(X,W)"], test=["r(a,b)", "r(b,a)"])
    kb = build_knowledge_base(graph, close(graph))
    found = find_proofs(kb, graph.splits["test"])
    assert found[0] is not None
    assert found[1] is None


def test_what_is_found_for_a_query_does_not_depend_on_the_others():
    graph = chain(5)
    kb = build_knowledge_base(graph, close(graph, rounds=30), Budget(3, 4, 4))
    every = torch.cat([graph.splits["test"], graph.splits["train"]])
    together = find_proofs(kb, every)
    for query, proof in zip(every, together):
        alone = find_proofs(kb, query[None])[0]
        assert (proof is None) == (alone is None)
        assert proof is None or torch.equal(proof, alone)
    assert together[0] is not None


def test_large_groups_are_looked_at_whole():
    facts = [f"p(a,m{i:03})" for i in range(300)] + [f"q(m{i:03},b{i})" for i in range(300)]
    graph = graph_of(facts, ["p(X,Z), q(Z,Y) -> r(X,Y)"], test=["r(a,b299)", "r(a,a)"])
    kb = build_knowledge_base(graph, close(graph), Budget(4, 8, 8))
    found = find_proofs(kb, graph.splits["test"])
    assert found[0] is not None
    assert found[1] is None


@pytest.mark.parametrize("width", [0, 1])
def test_nothing_to_search(width):
    graph = graph_of(["p(a,b)"], ["p(X,Y) -> q(X,Y)"])
    kb = build_knowledge_base(graph, close(graph))
    assert find_proofs(kb, graph.splits["train"][:width]) == [None] * width


def test_the_first_of_all_atoms_is_a_goal_like_any_other():
    """Predicate 0 of entity 0 with itself is packed as 0. And what an answer looks like."""
    graph = graph_of(
        ["base(a,a)", "base(a,b)"], ["base(X,Y) -> above(X,Y)", "above(X,X) -> top(X,X)"]
    )
    assert ids_of(graph, Triple("above", "a", "a")).tolist() == [0, 0, 0]
    world = ProofWorld(graph, close(graph, rounds=9), WorldConfig(), Budget(4, 4, 0))
    answer, *rest = ask("top(a, X)", build_prover(world), world)
    assert not rest
    assert str(answer).splitlines()[1:] == [
        "  top(a, a)  [by r1: above(X, X) -> top(X, X)]",
        "    above(a, a)  [by r0: base(X, Y) -> above(X, Y)]",
        "      base(a, a)  [fact]",
    ]
