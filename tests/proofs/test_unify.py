"""The library proves what follows, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hamlet.proofs.closure import close
from hamlet.proofs.data import Triple, build_graph, parse_atom
from hamlet.proofs.knowledge import find
from hamlet.proofs.knowledge_base import Budget, build_knowledge_base, canonical, state_hash
from hamlet.proofs.unify import compact, expand, select_goal
from tests.proofs.helpers import consequences, graph_of, ids_of, rule, search

ENTITIES = ("a", "b", "c")
PREDICATES = ("p", "q", "s")
MODES = {"resolution": Budget(10, 12, 0), "lemmas": Budget(10, 12, 12)}

atoms = st.builds(
    Triple, st.sampled_from(PREDICATES), st.sampled_from(ENTITIES), st.sampled_from(ENTITIES)
)
arguments = st.sampled_from(["X", "Y", "Z", "X", "Y", "Z", "'a'", "'b'"])  # variables, entities
patterns = st.builds(Triple, st.sampled_from(PREDICATES), arguments, arguments)


@st.composite
def knowledge_bases(draw):
    facts = draw(st.lists(atoms, min_size=1, max_size=6, unique=True))
    rules = []
    for number in range(draw(st.integers(1, 3))):
        body = draw(st.lists(patterns, min_size=1, max_size=3, unique=True))
        bound = sorted({v for a in body for v in a[1:]} | {"'a'"})
        head = Triple(
            draw(st.sampled_from(PREDICATES)),
            draw(st.sampled_from(bound)),
            draw(st.sampled_from(bound)),
        )
        if head not in body:
            rules.append(rule(f"{', '.join(map(str, body))} -> {head}", f"r{number}"))
    padding = [Triple(p, e, e) for p in PREDICATES for e in ENTITIES]
    return build_graph("random", {"train": facts, "test": padding}, rules), facts, tuple(rules)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60)
@given(knowledge_bases(), st.data())
def test_provable_queries_equal_a_forward_chaining_oracle(mode, knowledge, data):
    graph, facts, rules = knowledge
    kb = build_knowledge_base(graph, close(graph), MODES[mode])
    query = data.draw(atoms)
    others = set(facts) - {query}
    try:
        proven = search(kb, graph, ids_of(graph, query), depth=14)
    except OverflowError:
        assume(False)
    if proven:
        assert query in consequences(others, rules, ENTITIES, 20)
    elif query not in others:
        assert query not in consequences(others, rules, ENTITIES, 2)


@settings(max_examples=60)
@given(knowledge_bases())
def test_closure_equals_the_oracle_round_by_round(knowledge):
    graph, facts, rules = knowledge
    closure = close(graph)
    before = set(facts)
    for number in range(1, 6):
        after = consequences(set(facts), rules, ENTITIES, number)
        mine = {
            Triple(*graph.text(t).replace("(", " ").replace(",", "").replace(")", "").split())
            for t in _triples(closure.keys[(closure.round == number) & ~closure.is_fact], graph)
        }
        assert mine == after - before
        before = after
    for fact in facts:
        alone = consequences(set(facts) - {fact}, rules, ENTITIES, 1)
        place, found = find(closure.keys, graph.key(ids_of(graph, fact))[None])
        assert bool(found)
        assert (int(closure.round[place]) == 1) == (fact in alone)


def _triples(keys, graph):
    size = graph.num_entities
    return torch.stack([keys // size**2, keys // size % size, keys % size], -1)


def _ids(graph, text):
    return ids_of(graph, parse_atom(text))


@pytest.mark.parametrize("mode", MODES)
def test_a_goal_dropped_in_front_leaves_no_hole(mode):
    graph = graph_of(
        ["p(a,b)", "s(a,b)"], ["p(X,Y), q(X,Y) -> r(X,Y)", "s(X,Y) -> q(X,Y)"], test=["r(a,b)"]
    )
    kb = build_knowledge_base(graph, close(graph), MODES[mode])
    assert search(kb, graph, _ids(graph, "r(a,b)"), depth=4)
    after = expand(kb, kb.start(_ids(graph, "r(a,b)")[None]), torch.tensor([-1]))
    goals = compact(after).goals[0, 0]
    assert goals[0] == kb.pack(_ids(graph, "q(a,b)"))
    assert bool((goals[1:] < 0).all())


@pytest.mark.parametrize("mode", MODES)
def test_the_query_itself_is_never_a_fact(mode):
    graph = graph_of(["p(a,b)"], ["p(X,Y) -> q(Y,X)", "q(X,Y) -> p(Y,X)"])
    kb = build_knowledge_base(graph, close(graph), MODES[mode])
    assert not search(kb, graph, _ids(graph, "p(a,b)"), depth=8)
    graph = graph_of(["p(a,b)", "q(b,a)"], ["p(X,Y) -> q(Y,X)", "q(X,Y) -> p(Y,X)"])
    kb = build_knowledge_base(graph, close(graph), MODES[mode])
    assert search(kb, graph, _ids(graph, "p(a,b)"), depth=8)


@pytest.mark.parametrize("mode", MODES)
def test_entities_in_rules_match_themselves_only(mode):
    graph = graph_of(
        ["p(a,b)", "p(b,c)"],
        ["p(X,'b') -> q(X,'c')", "p('a',X), p(X,Y) -> r(Y,'a')"],
        test=["q(a,c)", "r(c,a)"],
    )
    kb = build_knowledge_base(graph, close(graph), MODES[mode])
    for text in ("q(a,c)", "r(c,a)"):
        assert search(kb, graph, _ids(graph, text), depth=8)
    for text in ("q(b,c)", "q(a,b)", "r(c,b)", "r(b,a)"):
        assert not search(kb, graph, _ids(graph, text), depth=8)


def test_more_rules_than_the_budget_holds_are_counted_and_the_deriving_ones_stay():
    facts = ["p(a,b)", *(f"n{i}(b,a)" for i in range(9))]
    rules = [f"n{i}(X,Y) -> r(X,Y)" for i in range(9)] + ["p(X,Y) -> r(X,Y)"]
    graph = graph_of(facts, rules, test=["r(a,b)"])
    query = _ids(graph, "r(a,b)")
    for budget, dropped in ((Budget(5, 4, 4, rules=3), 0), (Budget(5, 4, 0, rules=3), 7)):
        kb = build_knowledge_base(graph, close(graph), budget)
        assert kb.width <= 8
        found = expand(kb, kb.start(query[None]), torch.tensor([-1]))
        assert int(found.dropped) == dropped
        if budget.lemmas:
            assert search(kb, graph, query, depth=4)


def test_no_successor_is_lost_when_the_slots_are_exactly_full():
    facts = [f"p(a,x{i})" for i in range(4)] + ["q(x3,b)"]
    graph = graph_of(facts, ["p(X,Z), q(Z,Y) -> r(X,Y)"], test=["r(a,b)"])
    closure = close(graph)
    variable = graph.num_entities + 1
    query = torch.tensor([[graph.predicates.index("p"), graph.entities.index("a"), variable]])
    kb = build_knowledge_base(graph, closure, Budget(5, 4, 0))
    exact = expand(kb, kb.start(query), torch.tensor([-1]))
    assert int(exact.legal.sum()) == 4
    assert int(exact.dropped) == 0
    kb = build_knowledge_base(graph, closure, Budget(5, 3, 0))
    tight = expand(kb, kb.start(query), torch.tensor([-1]))
    assert int(tight.legal.sum()) == 3
    assert int(tight.dropped) == 1


def test_goals_beyond_the_budget_are_counted_not_truncated():
    graph = graph_of(
        ["p(a,b)"],
        ["s(X,Y), s(Y,X), q(X,Y) -> r(X,Y)", "r(X,Y), s(X,Y), s(Y,X) -> q(X,Y)"],
        test=["r(a,b)"],
    )
    kb = build_knowledge_base(graph, close(graph), Budget(3, 4, 0))
    found = expand(kb, kb.start(_ids(graph, "r(a,b)")[None]), torch.tensor([-1]))
    assert int(found.legal.sum()) == 1
    a, b = (graph.entities.index(e) for e in "ab")
    rows = [[graph.predicates.index("q"), a, b], [graph.predicates.index("s"), a, a]]
    rows += [[graph.predicates.index("s"), b, b]]
    long = kb.pack(torch.tensor(rows))[None]
    again = expand(kb, long, torch.tensor([-1]))
    assert int(again.dropped) == 1
    assert int(again.legal.sum()) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 8), st.integers(0, 8)), max_size=4))
def test_states_that_differ_in_variable_names_are_equal(rows):
    graph = graph_of(["p(a,b)", "q(c,d)", "s(a,a)"], ["p(X,Y), q(Y,Z) -> s(X,Z)"])
    kb = build_knowledge_base(graph, close(graph), Budget(5, 4, 0))
    goals = torch.full((5, 3), -1)
    for i, row in enumerate(rows):
        goals[i] = torch.tensor(row)
    arguments = torch.where(goals[:, 1:] >= 4, 16 - goals[:, 1:], goals[:, 1:])
    renamed = torch.cat([goals[:, :1], arguments], 1)
    one, other = (canonical(kb, kb.pack(g)) for g in (goals, renamed))
    assert torch.equal(one, other)
    assert torch.equal(state_hash(one), state_hash(other))
    assert torch.equal(canonical(kb, one), one)


def test_a_head_with_one_variable_unifies_both_arguments():
    graph = graph_of(["q(a,b)", "q(b,a)"], ["q(X,Y), q(Y,X) -> p(X,X)"], test=["p(a,a)", "p(a,b)"])
    kb = build_knowledge_base(graph, close(graph), MODES["resolution"])
    assert search(kb, graph, _ids(graph, "p(a,a)"), depth=5)
    assert not search(kb, graph, _ids(graph, "p(a,b)"), depth=5)


def test_a_head_with_one_variable_binds_what_the_other_goals_ask():
    """p(a, Z), t(Z, Y): by p(X, X) Z is a, by p(X, Y) it is whatever is asked next."""
    graph = graph_of(
        ["q(a,c)", "q(c,a)", "u(a,d)", "t(a,b)", "t(c,e)", "t(d,f)"],
        ["q(X,Y), q(Y,X) -> p(X,X)", "u(X,Y) -> p(X,Y)", "p(X,Z), t(Z,Y) -> r(X,Y)"],
        test=["r(a,b)", "r(a,e)", "r(a,f)"],
    )
    kb = build_knowledge_base(graph, close(graph), MODES["resolution"])
    found = [search(kb, graph, _ids(graph, f"r(a,{name})"), depth=9) for name in "bef"]
    assert found == [True, False, True]


def test_closure_beyond_the_budget_is_dropped_and_counted():
    facts = [f"p(x{i},x{i + 1})" for i in range(12)]
    graph = graph_of(facts, ["p(X,Z), p(Z,Y) -> q(X,Y)"])
    assert close(graph).dropped == 0
    small = close(graph, budget=4)
    assert int((small.round > 0).sum()) == 4
    assert small.dropped == 7


def test_the_goal_with_the_fewest_matches_is_taken_first():
    """Ground ones before all; then by how many atoms known to hold fit; the first of equals."""
    facts = ["p(a, b)", "p(a, c)", "p(b, c)", "q(a, b)", "q(c, b)", "r(a, a)"]
    graph = graph_of(facts, ["p(X,Y), q(Z,Y) -> r(X,Z)"])
    size = len(graph.entities)
    kb = build_knowledge_base(graph, close(graph), Budget(6, 4, 0))  # no lemmas: facts alone
    names = {name: number for number, name in enumerate(graph.entities)}
    names |= {"X": size, "Y": size + 1, "Z": size + 2}

    def packed(atoms: str) -> torch.Tensor:
        rows = [parse_atom(atom.strip() + ")") for atom in atoms.split(")") if atom.strip()]
        return kb.pack(
            torch.tensor([[graph.predicates.index(r[0]), names[r[1]], names[r[2]]] for r in rows])
        )

    for goals, expected in (
        ("p(X,Y) q(Y,Z) r(X,Z)", 2),  # three, two and one facts
        ("r(X,Z) q(Y,Z) p(X,Y)", 0),
        ("p(X,Y) q(Y,Z)", 1),
        ("q(X,Y) p(X,Z) q(Y,Z)", 0),  # two, three, two: the first of equals
        ("q(X,b) p(a,X)", 0),  # q(_,b) has two, and so has p(a,_)
        ("p(a,X) p(b,X)", 1),  # p(b,_) has one
        ("p(X,c) q(X,b) p(X,b)", 2),  # p(_,c) has two, q(_,b) has two, p(_,b) has one
        ("r(X,Y) p(a,b)", 1),  # ground
        ("p(a,X) q(b,X)", 1),  # q(b,_) has none
    ):
        row = packed(goals)
        rest = row.new_full((kb.budget.goals - len(row),), -1)
        chosen, others, place = select_goal(kb, torch.cat([row, rest])[None])
        assert place.item() == expected, goals
        assert chosen.item() == row[expected]
        left = [int(x) for i, x in enumerate(row) if i != expected]
        assert others[0].tolist() == left + rest.tolist(), goals


def test_without_rules_a_fact_that_fits_is_certain():
    graph = graph_of(["p(a, b)", "p(a, c)", "q(b, a)"], [])
    closure = close(graph)
    assert closure.evidence.dtype == closure.rule_evidence.dtype == torch.float32
    kb = build_knowledge_base(graph, closure, Budget(4, 4, 0))
    variable = len(graph.entities)
    p, a = graph.predicates.index("p"), graph.entities.index("a")
    goals = kb.pack(torch.tensor([[p, a, variable]]))
    found = expand(kb, torch.cat([goals, goals.new_full((3,), -1)])[None], goals.new_tensor([-1]))
    assert found.evidence[found.legal].tolist() == [0.0, 0.0]


def test_room_is_made_for_what_usually_fits():
    """For nearly all groups of facts that share a predicate and an entity: at least 4, at most 64;
    and for three goals more than the longest body has."""

    def budget(heads: int, tails: int, rules=()):
        facts = [f"p(h{i}, t{j})" for i in range(heads) for j in range(tails)]
        graph = graph_of(facts, list(rules))
        return build_knowledge_base(graph, close(graph)).budget

    assert budget(1, 1) == Budget(4, 4, 4)
    assert budget(2, 6) == Budget(4, 6, 4)
    assert budget(2, 70) == Budget(4, 64, 4)
    assert budget(1, 9).facts == 4  # one large group of ten is not usual
    assert budget(2, 6, ["p(X,Y), p(Z,Y) -> q(X,Z)"]) == Budget(5, 6, 4)
    assert budget(2, 6, ["p(X,Y) -> q(X,Y)"]) == Budget(4, 6, 6)
