"""Questions with variables: every answer has a proof that holds, and no answer is missing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hamlet.learning.train_prover import build_prover
from hamlet.proofs.closure import close
from hamlet.proofs.data import Triple
from hamlet.proofs.knowledge_base import Budget, build_knowledge_base
from hamlet.proofs.ranking import average_precision, ranking_metrics
from hamlet.proofs.trace import Proof, ask
from hamlet.proofs.unify import compact, expand
from hamlet.proofs.world import ProofWorld, WorldConfig
from tests.proofs.helpers import consequences, graph_of, ids_of
from tests.proofs.test_unify import ENTITIES, PREDICATES, knowledge_bases

arguments = st.sampled_from(["X", "Y", *ENTITIES])


def matches(pattern: Triple, atom: Triple) -> bool:
    at: dict[str, str] = {}
    if pattern.predicate != atom.predicate:
        return False
    return all(
        wanted == found if wanted in ENTITIES else at.setdefault(wanted, found) == found
        for wanted, found in zip(pattern[1:], atom[1:], strict=True)
    )


def holds(proof: Proof, facts: set[Triple], rules: dict, above: frozenset = frozenset()) -> bool:
    """Whether a proof can be checked line by line, and rests on no atom that it proves."""
    if proof.atom in above:
        return False
    if not proof.rule:
        return proof.atom in facts and not proof.children
    rule = rules[proof.rule.split(":")[0]]
    below = above | {proof.atom}
    at: dict[str, str] = {}

    def same(pattern: Triple, atom: Triple) -> bool:
        return pattern.predicate == atom.predicate and all(
            at.setdefault(v, e) == e for v, e in zip(pattern[1:], atom[1:], strict=True)
        )

    if not same(rule.head, proof.atom) or len(proof.children) > len(rule.body):
        return False

    def body(patterns: list, bound: dict) -> bool:
        """Some child stands for each atom of the body: one may stand for two that are equal."""
        if not patterns:
            return True
        for child in proof.children:
            at.clear()
            at.update(bound)
            if same(patterns[0], child.atom) and body(patterns[1:], dict(at)):
                return True
        return False

    return body(list(rule.body), dict(at)) and all(
        holds(child, facts - {proof.atom}, rules, below) for child in proof.children
    )


@settings(max_examples=25)
@given(knowledge_bases(), st.builds(Triple, st.sampled_from(PREDICATES), arguments, arguments))
def test_the_answers_to_an_open_question_are_all_that_follows_each_with_its_proof(
    knowledge, pattern
):
    graph, facts, rules = knowledge
    config = WorldConfig(unary_skips=1, max_depth=12)
    world = ProofWorld(graph, close(graph, rounds=30), config, Budget(5, 12, 12))
    answers = ask(str(pattern), build_prover(world), world, limit=100)
    # An entity X in a rule is a variable of which the fact =X(X, X) holds.
    named = {rule.name: rule for rule in graph.rules}
    given_facts = {*facts, *(Triple(f"={e}", e, e) for e in ENTITIES)}
    follows = {a for a in consequences(set(facts), rules, ENTITIES, 30) if matches(pattern, a)}
    assert [a.atom for a in answers] == list(dict.fromkeys(a.atom for a in answers))
    assert {a.atom for a in answers} == follows
    for answer in answers:
        assert answer.proof.atom == answer.atom
        assert holds(answer.proof, given_facts, named), str(answer)
        assert (answer.proof.rule == "") == (answer.atom in facts)
        assert (answer.probability == 1.0) or answer.atom not in facts


def test_a_false_proof_does_not_hold():
    """The checker itself: a wrong leaf, a wrong binding and a circle are seen."""
    graph = graph_of(["p(a,b)", "q(b,c)"], ["p(X,Y), q(Y,Z) -> s(X,Z)", "s(X,Y) -> s(Y,X)"])
    named = {rule.name: rule for rule in graph.rules}
    facts = {Triple("p", "a", "b"), Triple("q", "b", "c")}
    leaves = tuple(Proof(fact, "") for fact in sorted(facts))
    assert holds(Proof(Triple("s", "a", "c"), "r0: ", leaves), facts, named)
    assert not holds(Proof(Triple("s", "a", "b"), "r0: ", leaves), facts, named)
    assert not holds(Proof(Triple("s", "a", "c"), "r0: ", leaves[:1]), facts, named)
    assert not holds(Proof(Triple("p", "a", "c"), ""), facts, named)
    one, other = Triple("s", "a", "c"), Triple("s", "c", "a")
    circle = Proof(one, "r1: ", (Proof(other, "r1: ", (Proof(one, "", ()),)),))
    assert not holds(circle, facts | {one}, named)


@pytest.mark.parametrize("lemmas", [0, 12])
@settings(max_examples=40)
@given(knowledge_bases(), st.data())
def test_an_open_goal_is_bound_by_every_atom_that_matches_and_by_no_other(lemmas, knowledge, data):
    """One resolution step of p(X, a), p(a, X), p(X, Y) or p(X, X)."""
    graph, facts, rules = knowledge
    closure = close(graph, rounds=30)
    kb = build_knowledge_base(graph, closure, Budget(10, 12, lemmas))
    pattern = data.draw(st.builds(Triple, st.sampled_from(PREDICATES), arguments, arguments))
    free = {"X": graph.num_entities, "Y": graph.num_entities + 1}
    places = [free.get(x) if x in free else graph.entities.index(x) for x in pattern[1:]]
    if not any(x in free for x in pattern[1:]):
        return
    query = torch.tensor([[graph.predicates.index(pattern.predicate), *places]])
    excluded = data.draw(st.sampled_from(facts))
    key = kb.pack(ids_of(graph, excluded)[None])
    found = compact(expand(kb, kb.start(query), key))
    known = set(facts) if not lemmas else consequences(set(facts), rules, ENTITIES, 30)
    expected = {str(a) for a in known if matches(pattern, a) and a != excluded}
    used = found.atom[0][found.legal[0] & (found.kind[0] < 2)]
    told = {graph.text(torch.stack(kb.unpack(atom))) for atom in used}
    assert told == {x.replace(" ", "") for x in expected} or told == expected
    assert int(found.dropped) == 0


def test_ranks_are_those_of_a_sorted_list():
    """Ties stand at their expected place; or at a random one, on average."""
    higher, equal = torch.tensor([0, 2, 9, 10]), torch.tensor([0, 1, 2, 0])
    got = ranking_metrics(higher, equal)
    ranks = [1.0, 3.5, 11.0, 11.0]
    assert got["mrr"] == pytest.approx(sum(1 / r for r in ranks) / 4)
    assert [got["hits1"], got["hits3"], got["hits10"]] == [0.25, 0.25, 0.5]
    ties = [1.0, (1 / 3 + 1 / 4) / 2, (1 / 10 + 1 / 11 + 1 / 12) / 3, 1 / 11]
    assert got["mrr_random_ties"] == pytest.approx(sum(ties) / 4)


def test_average_precision_is_the_area_under_its_steps():
    scores = torch.tensor([0.9, 0.8, 0.8, 0.5, 0.1])
    labels = torch.tensor([True, False, True, False, True])
    # recall 1/3 at precision 1, 2/3 at 2/3, 1 at 3/5
    assert average_precision(scores, labels) == pytest.approx((1 + 2 / 3 + 3 / 5) / 3)
    assert average_precision(-scores, ~labels) == pytest.approx((1 / 2 + 2 / 4) / 2)
