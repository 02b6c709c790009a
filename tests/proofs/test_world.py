"""The world's contract: pools, negatives, ends, independence of slots and order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hamlet.artifacts import HamletError
from hamlet.learning.train_prover import build_prover, expert_action, prove_all
from hamlet.proofs import ProofWorld, WorldConfig, build_world, load_graph
from hamlet.proofs.closure import close
from hamlet.proofs.kinship import kinship_graph
from hamlet.proofs.knowledge import encode_rules, find
from hamlet.proofs.knowledge_base import Budget
from tests.proofs.helpers import graph_of, shared_graph

DATA = ("kinship", "family", "nations", "countries_s1", "countries_s2", "countries_s3")


@pytest.fixture(scope="module")
def world() -> ProofWorld:
    return build_world(kinship_graph(3, 3), rounds=4)


@pytest.fixture(scope="module")
def prover(world):
    torch.manual_seed(0)
    made = build_prover(world)
    for parameter in made.parameters():  # as after training, so that nothing is zero by chance
        torch.nn.init.normal_(parameter, std=0.1)
    return made


def play(world, state, ticks, choose):
    for _ in range(ticks):
        state = world.step_and_reset_core(state, choose(state))
        yield state


def a_random_legal_action(state):
    weights = state["action_mask"].float()
    return torch.multinomial(weights, 1).squeeze(1)


def test_a_rule_has_as_many_variables_as_it_names(world):
    named = [
        len({name for atom in (rule.head, *rule.body) for name in atom[1:]})
        for rule in world.graph.rules
    ]
    assert encode_rules(world.graph).num_variables.tolist() == named
    assert len(set(named)) > 1


@pytest.mark.parametrize("name", DATA)
def test_no_test_triple_is_in_the_training_pool(name):
    graph = kinship_graph() if name == "kinship" else load_graph(shared_graph(name))
    world = build_world(graph, rounds=1)
    world.train()
    pool = set(graph.key(world.train_pool()).tolist())
    held_out = graph.key(torch.cat([graph.splits["test"], graph.splits["valid"]])).tolist()
    assert len(graph.splits["test"]) > 0
    assert not pool & set(held_out)
    assert pool
    state = world.reset(0, 64)
    for after in play(world, state, 20, expert_action):
        asked = graph.key(after["query"])[after["label"]]
        assert set(asked.tolist()) <= pool


def test_the_training_stream_knows_nothing_of_the_other_splits(world):
    """Not even by leaving their triples out of the negatives: that would tell which are true."""
    graph = world.graph
    nothing = torch.zeros(0, 3, dtype=torch.int64)
    blind = replace(
        graph, splits={"train": graph.splits["train"], "valid": nothing, "test": nothing}
    )
    other = build_world(blind, rounds=4)
    world.train()
    one, two = world.reset(3, 128), other.reset(3, 128)
    held_out = graph.key(torch.cat([graph.splits["valid"], graph.splits["test"]]))
    as_negatives = 0
    for _ in range(30):
        assert all(torch.equal(one[k], two[k]) for k in one.keys())  # noqa: SIM118
        one = world.step_and_reset_core(one, expert_action(one))
        two = other.step_and_reset_core(two, expert_action(two))
        as_negatives += int(torch.isin(graph.key(one["query"][~one["label"]]), held_out).sum())
    assert as_negatives > 0


def test_a_fact_and_its_corruption_are_asked_with_the_same_fact_hidden(world):
    world.train()
    state = world.reset(3, 1)
    positive, seen = state["query"][0], set()
    for after in play(world, state, 60, expert_action):
        if bool(after["label"][0]):
            positive = after["query"][0]
        if int(after["depth"][0]) == 0:
            shares = (after["query"][0, 1:] == positive[1:]).tolist()
            assert after["hidden"][0].tolist() == shares
            seen.add(tuple(shares))
    assert seen == {(True, True), (True, False), (False, True)}
    world.eval(torch.stack([world.graph.splits["train"][0], world.graph.splits["test"][0]]))
    assert world.reset(0, 2)["hidden"].tolist() == [[True, True], [False, False]]


def test_negatives_are_no_training_facts_and_head_and_tail_alternate(world):
    graph = world.graph
    known = graph.key(graph.splits["train"]).unique()
    world.train()
    state = world.reset(3, 128)
    sides = {1: 0, 2: 0}
    for after in play(world, state, 40, expert_action):
        negative = ~after["label"]
        assert not find(known, graph.key(after["query"][negative]))[1].any()
        assert after["query"][negative].max() < graph.num_entities
    state = world.reset(3, 1)
    positive = state["query"][0]
    for after in play(world, state, 60, expert_action):
        if bool(after["label"][0]):
            positive = after["query"][0]
        elif bool(after["depth"][0] == 0):
            changed = (after["query"][0] != positive).nonzero().flatten().tolist()
            assert len(changed) == 1
            sides[changed[0]] += 1
    assert sides[1] > 0
    assert sides[2] > 0


def test_a_slot_without_a_possible_negative_asks_a_positive_query():
    graph = graph_of(
        ["p(a,a)", "q(a,a)", "p(a,b)", "p(b,a)", "p(b,b)", "q(a,b)", "q(b,a)", "q(b,b)"],
        ["p(X,Y) -> q(X,Y)"],
    )
    world = build_world(graph, rounds=2)
    state = world.reset(0, 4)
    for after in play(world, state, 12, expert_action):
        assert after["label"].all()


def test_rewards_follow_the_table_and_come_at_the_end_only(world):
    table = ((0.5, -2.0), (-0.25, 3.0))
    own = ProofWorld(world.graph, world.closure, WorldConfig(rewards=table))
    state = own.reset(1, 64)
    seen = set()
    torch.manual_seed(0)
    for _ in range(60):
        label = state["label"]
        after = own.step_and_reset_core(state, a_random_legal_action(state))
        assert (after["reward"][~after["done"]] == 0).all()
        ended = after["done"] & ~after["truncated"]
        for i in ended.nonzero().flatten().tolist():
            expected = table[int(label[i])][int(after["success"][i])]
            assert float(after["reward"][i]) == expected
            seen.add((bool(label[i]), bool(after["success"][i])))
        state = after
    assert len(seen) == 4


def test_the_depth_limit_truncates_and_shows_the_last_state_for_one_tick(world):
    own = ProofWorld(world.graph, world.closure, WorldConfig(max_depth=1))
    state = own.reset(1, 64)
    cut = 0
    for _ in range(5):
        after = own.step_and_reset_core(state, expert_action(state))
        truncated = after["truncated"]
        cut += int(truncated.sum())
        assert torch.equal(after["query"][truncated], state["query"][truncated])
        assert not own.observe(after)["active"][truncated].any()
        assert (after["done"] | ~truncated).all()
        following = own.step_and_reset_core(after, expert_action(after))
        assert (following["depth"][truncated] == 0).all()
        assert not following["done"][truncated].any()
        state = following
    assert cut > 0


def test_a_step_does_not_change_its_input_and_finished_slots_are_frozen(world):
    world.eval(world.graph.splits["test"])
    state = world.reset(0, 8)
    kept = state.clone()
    world.step_core(state, expert_action(state))
    assert all(torch.equal(state[k], kept[k]) for k in state.keys())  # noqa: SIM118
    for _ in range(25):
        state = world.step_core(state, expert_action(state))
    assert state["done"].all()
    again = world.step_core(state, expert_action(state))
    assert all(torch.equal(state[k], again[k]) for k in state.keys())  # noqa: SIM118


def test_visited_states_are_pruned_under_any_variable_names():
    graph = graph_of(["p(a,b)"], ["q(Y,X) -> q(X,Y)", "q(X,Z), q(Z,Y) -> q(X,Y)"], test=["q(a,b)"])
    world = ProofWorld(graph, close(graph), budget=Budget(6, 4, 0))
    world.eval(graph.splits["test"])
    state = world.reset(0, 1)
    visited = set()
    torch.manual_seed(0)
    while not bool(state["done"]):
        name = tuple(state["goals"].flatten().tolist())
        assert name not in visited
        visited.add(name)
        state = world.step_core(state, a_random_legal_action(state))
    assert len(visited) > 2


def test_unary_skipping_saves_steps_and_changes_no_outcome():
    graph = graph_of(
        ["q(a,b)", "t(b,c)", "u(b,c)"],
        ["q(X,Z), s(Z,Y) -> r(X,Y)", "t(X,Y), v(X,Y) -> s(X,Y)", "u(X,Y) -> v(X,Y)"],
        test=["r(a,c)", "r(c,a)"],
    )
    closure = close(graph)
    results = []
    for skips in (0, 1, 5):
        world = ProofWorld(graph, closure, WorldConfig(unary_skips=skips))
        found = prove_all(world, build_prover(world), graph.splits["test"], 2)
        assert found.proven.tolist() == [True, False]
        results.append(found.transitions)
    assert results[0] > results[1] > results[2]


def test_results_do_not_depend_on_slots_or_order_and_every_case_finishes_once(world, prover):
    queries = torch.cat([world.graph.splits["test"], world.graph.splits["valid"]])
    base = prove_all(world, prover, queries, 16)
    assert int(base.proven.sum()) > 0
    for slots in (1, 7, len(queries), len(queries) + 9):
        other = prove_all(world, prover, queries, slots)
        assert torch.equal(base.proven, other.proven)
        assert torch.allclose(base.score, other.score, atol=1e-5)
        assert base.transitions == other.transitions
    order = torch.randperm(len(queries), generator=torch.Generator().manual_seed(0))
    shuffled = prove_all(world, prover, queries[order], 16)
    assert torch.equal(base.proven[order], shuffled.proven)
    assert torch.allclose(base.score[order], shuffled.score, atol=1e-5)


def test_the_training_stream_of_a_slot_does_not_depend_on_the_batch(world):
    world.train()
    small, large = world.reset(5, 3), world.reset(5, 50)
    for _ in range(12):
        small = world.step_and_reset_core(small, expert_action(small))
        large = world.step_and_reset_core(large, expert_action(large))
        assert torch.equal(small["query"], large["query"][:3])
        assert torch.equal(small["goals"], large["goals"][:3])


def test_clear_errors(world):
    with pytest.raises(HamletError, match="no query"):
        world.eval(torch.zeros(0, 3, dtype=torch.int64))
    with pytest.raises(HamletError, match="unknown predicate or entity"):
        world.eval(torch.tensor([[0, 0, 10_000]]))
    useless = build_world(graph_of(["p(a,b)"], ["q(X,Y) -> s(X,Y)"]), rounds=2)
    with pytest.raises(HamletError, match="no training fact is derivable"):
        useless.reset(0, 2)
    world.train()


def test_slots_beyond_the_cases_are_idle_and_in_training_none_is(world):
    queries = world.graph.splits["test"][:3]
    world.eval(queries)
    state = world.reset(0, 6)
    assert state["idle"].tolist() == [False] * 3 + [True] * 3
    assert torch.equal(state["query"][:3], queries)
    world.train()
    assert not world.reset(0, 6)["idle"].any()
