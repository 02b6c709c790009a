"""Untrained it is the symbolic baseline; training only improves it; proofs hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from hamlet.artifacts import HamletError, read_json
from hamlet.export.onnx import export_onnx
from hamlet.learning import train_prover as learning
from hamlet.learning.rollout import fused_step
from hamlet.learning.train_prover import (
    Choice,
    Student,
    TrainConfig,
    build_prover,
    prove_all,
    rank,
    train_prover,
)
from hamlet.learning.update import Update
from hamlet.proofs import ask, build_world, load_prover, save_prover
from hamlet.proofs.closure import ROUND_STEP
from hamlet.proofs.data import Triple
from hamlet.proofs.kinship import found_families, kinship_graph, relations
from hamlet.proofs.knowledge import find
from hamlet.proofs.picture import DERIVED, FACT, draw_proof
from hamlet.proofs.ranking import evaluate_scores, pose, sampled_negatives
from hamlet.proofs.saved import example_inputs
from hamlet.proofs.trace import Proof, prove
from tests.proofs.helpers import consequences, graph_of

TINY = TrainConfig(
    slots=64, ticks=8, imitation_steps=12, ppo_steps=3, minibatches=2, learning_rate=3e-3
)


@pytest.fixture(scope="module")
def world():
    return build_world(kinship_graph(3, 3), rounds=4)


@pytest.fixture(scope="module")
def questions(world):
    asked = pose(world.graph, world.closure, world.graph.splits["test"], world.graph.known())
    return asked, sampled_negatives(world.graph, asked, 100, 0)


def symbolic(world, questions):
    keys = world.closure.keys[world.closure.round > 0]
    scores = world.closure.log_odds(keys).double()
    return evaluate_scores(world.graph, questions[0], keys, scores, questions[1])


def test_who_ranks_or_proves_leaves_the_world_in_training(world, questions):
    prover = build_prover(world, hidden=16)
    world.train()
    rank(world, prover, *questions, 64)
    assert world.training
    prove_all(world, prover, world.graph.splits["test"][:8], 8)
    assert world.training


def test_untrained_it_ranks_exactly_as_the_symbolic_baseline(world, questions):
    prover = build_prover(world)
    found = rank(world, prover, *questions, 64)
    for name, value in symbolic(world, questions).items():
        assert found.metrics[name] == pytest.approx(value, abs=1e-9)
    assert bool(found.proven.proven.all())


def test_training_does_not_fall_below_the_baseline_on_the_validation_split(world):
    prover = build_prover(world)
    result = train_prover(world, prover, TINY, seed=0)
    asked = pose(world.graph, world.closure, world.graph.splits["valid"], world.graph.known())
    questions = asked, sampled_negatives(world.graph, asked, 100, 1)
    found = rank(world, prover, *questions, 64).metrics
    assert found["mrr_all"] >= symbolic(world, questions)["mrr_all"] - 1e-6
    assert result["training_seconds"] > 0


def test_the_choice_goes_by_the_validation_split_and_never_below_the_baseline(world):
    """Corrections that rank against the truth are not trusted, and those that rank with it are."""
    graph = world.graph
    held_out = graph.key(graph.splits["valid"])
    outcome = {}
    for name, sign in (("against", -4.0), ("with", 4.0), ("nothing", 0.0)):
        choice = Choice(world, build_prover(world))
        choice.consider(phase=0.0, step=0.0)
        assert choice.best[0] == choice.label["trust"] == 0.0
        truth = torch.isin(choice.keys, held_out).double()
        choice.weigh(sign * truth + 1e-3, phase=0.0, step=5.0)
        outcome[name] = (choice.best[0], choice.label["trust"])
    assert outcome["with"][0] > 0
    assert outcome["with"][1] > 0.1
    assert outcome["nothing"] == (0.0, 0.01)  # no gain: it may order what is tied, no more
    assert outcome["against"] == (0.0, 0.0)
    kept = choice.state_dict()
    resumed = Choice(world, build_prover(world))
    resumed.load_state_dict(kept)
    assert (resumed.best, resumed.label) == (choice.best, choice.label) != ((-1.0, 0.0, 0.0), {})
    assert resumed.weights is kept["weights"]


@pytest.mark.parametrize("rules", [["p(X,Y) -> q(Y,X)"], ["p(X,Y) -> q(Y,X)", "q(X,Y) -> p(Y,X)"]])
def test_without_a_validation_split_and_with_few_rules_it_works(rules):
    facts = [f"p(a{i},b{i % 5})" for i in range(20)] + [
        f"q(b{i % 5},a{i})" for i in range(0, 20, 2)
    ]
    graph = graph_of(facts, rules, test=["q(b1,a1)", "q(b3,a3)"])
    world = build_world(graph, rounds=2)
    prover = build_prover(world)
    result = train_prover(world, prover, TINY, seed=0)
    assert result["chosen_trust"] == pytest.approx(0.01)
    asked = pose(graph, world.closure, graph.splits["test"], graph.known())
    found = rank(world, prover, asked, sampled_negatives(graph, asked, 100, 0), 8)
    assert found.metrics["proved_fraction"] == 1.0


def test_training_is_repeatable(world):
    weights = []
    for _ in range(2):
        prover = build_prover(world)
        prover.load_state_dict(
            {k: torch.full_like(v, 0.05) for k, v in prover.state_dict().items()}
            | {"signature": prover.signature}
        )
        train_prover(world, prover, TINY, seed=3)
        weights.append(prover.state_dict())
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])


def test_rl_only_sees_no_symbolic_evidence(world):
    prover = build_prover(world, use_prior=False)
    world.train()
    seen = world.observe(world.reset(0, 16))
    other = seen.clone()
    other["evidence"], other["prior"] = other["evidence"] - 3.0, other["prior"] + 2.0
    other["ways"] = other["ways"] * 2
    for parameter in prover.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    one, two = prover.see(seen), prover.see(other)
    assert all(torch.equal(a, b) for a, b in zip(one, two))


def test_the_policy_is_a_distribution_over_legal_actions(world):
    prover = build_prover(world)
    world.train()
    state = world.reset(0, 64)
    seen = world.observe(state)
    with torch.no_grad():
        logits = prover.see(seen).logits.masked_fill(~seen["action_mask"], -torch.inf)
    total = logits.logsumexp(-1)
    some = seen["action_mask"][:, :-1].any(-1)
    assert torch.allclose(total[some], torch.zeros_like(total[some]), atol=1e-4)


def test_proofs_rest_on_training_facts_and_apply_real_rules(world):
    prover, graph = build_prover(world), world.graph
    facts = {graph.text(t) for t in graph.splits["train"]}
    rules = {f"{r.name}: {r}": r for r in graph.rules}

    def check(proof):
        if not proof.rule:
            assert str(proof.atom) in facts
            return
        rule = rules[proof.rule]
        at: dict[str, str] = {}
        for pattern, atom in zip(
            (rule.head, *rule.body), (proof.atom, *(c.atom for c in _by(rule, proof)))
        ):
            assert pattern.predicate == atom.predicate
            for variable, entity in zip(pattern[1:], atom[1:]):
                assert at.setdefault(variable, entity) == entity
        for child in proof.children:
            check(child)

    proven = 0
    for triple in graph.splits["test"]:
        proof = prove(triple, prover, world)
        if proof is not None:
            check(proof)
            assert str(proof.atom) == graph.text(triple)
            proven += 1
    assert proven > 0.9 * len(graph.splits["test"])


def test_a_proof_is_text_with_what_it_rests_on_further_right():
    facts = [Proof(Triple("parent", a, b), "") for a, b in (("a", "b"), ("b", "c"))]
    proof = Proof(Triple("grandparent", "a", "c"), "k7: some rule", tuple(facts))
    assert proof.lines() == [
        f"{proof.atom}  [by k7: some rule]",
        f"  {facts[0].atom}  [fact]",
        f"  {facts[1].atom}  [fact]",
    ]


def test_the_picture_shows_a_box_for_every_atom():
    facts = [Proof(Triple("parent", a, b), "") for a, b in (("a", "b"), ("b", "c"))]
    rule = "k7: parent(X, Z), parent(Z, Y) -> grandparent(X, Y)"
    small = np.asarray(draw_proof(facts[0]))
    image = np.asarray(draw_proof(Proof(Triple("grandparent", "a", "c"), rule, tuple(facts))))
    assert image.shape[0] > 2 * small.shape[0]

    def rows_of(colour) -> np.ndarray:
        return np.flatnonzero((image == np.array(colour)).all(-1).any(1))

    def boxes_in_row(colour, row) -> int:
        here = (image[row] == np.array(colour)).all(-1)
        return int((np.diff(here.astype(int)) == 1).sum())

    assert rows_of(DERIVED).max() < rows_of(FACT).min()  # what follows is above what it rests on
    assert boxes_in_row(FACT, rows_of(FACT).min() + 4) == 2
    assert boxes_in_row(DERIVED, rows_of(DERIVED).min() + 4) == 1


def _by(rule, proof):
    """The children in the order of the rule's body (the engine may reorder it)."""
    rest = list(proof.children)
    ordered = []
    at = dict(zip(rule.head[1:], proof.atom[1:]))
    for pattern in rule.body:
        fitting = [
            c
            for c in rest
            if c.atom.predicate == pattern.predicate
            and all(at.get(v, e) == e for v, e in zip(pattern[1:], c.atom[1:]))
        ]
        ordered.append(fitting[0])
        rest.remove(fitting[0])
        at |= dict(zip(pattern[1:], fitting[0].atom[1:]))
    return ordered


def test_ask_answers_with_proofs_and_says_what_is_wrong(world):
    prover = build_prover(world)
    answers = ask("grandparent(a, X)", prover, world, limit=6)
    assert answers
    assert all(a.atom.predicate == "grandparent" and a.atom.head == "a" for a in answers)
    assert all(0.0 <= a.probability <= 1.0 for a in answers)
    derived = ask("aunt(X, Y)", prover, world, limit=200)
    derived = [a for a in derived if a.proof.rule]
    assert derived
    # What is shown is what the prover says of the atom, without its place among the rounds.
    graph = world.graph
    atoms = torch.tensor([
        [graph.predicates.index(a.atom.predicate), graph.entities.index(a.atom.head),
         graph.entities.index(a.atom.tail)] for a in derived
    ])  # fmt: skip
    world.eval(atoms)
    score = prover.see(world.observe(world.reset(0, len(atoms)))).score.detach()
    world.train()
    first = find(world.closure.keys, graph.key(atoms))[0]
    odds = (score + ROUND_STEP * (world.closure.round[first] - 1)).exp()
    expected = (odds / (1 + odds)).tolist()
    assert [a.probability for a in derived] == pytest.approx(expected, rel=1e-4)
    assert score.tolist() == sorted(score.tolist(), reverse=True)
    assert "by k" in str(derived[0])
    assert "[fact]" in str(derived[0])
    with pytest.raises(HamletError, match="did you mean grandparent"):
        ask("granparent(a, X)", prover, world)
    with pytest.raises(HamletError, match="entity qqq is unknown"):
        ask("parent(qqq, X)", prover, world)
    with pytest.raises(HamletError, match="is not a fact"):
        ask("parent(a", prover, world)


def test_saved_and_loaded_it_scores_the_same(world, tmp_path):
    torch.manual_seed(0)
    prover = build_prover(world)
    for parameter in prover.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save_prover(tmp_path / "prover", prover, world, rounds=4)
    loaded, again = load_prover(str(tmp_path / "prover"))
    queries = world.graph.splits["test"]
    one = prove_all(world, prover, queries, 16)
    two = prove_all(again, loaded, queries, 16)
    assert torch.equal(one.score, two.score)
    (tmp_path / "prover" / "weights.pt").write_bytes(b"broken")
    with pytest.raises(HamletError, match="does not match its card"):
        load_prover(tmp_path / "prover")


def test_the_exported_scorer_equals_the_module(world, tmp_path):
    torch.manual_seed(1)
    prover = build_prover(world).eval()
    for parameter in prover.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    names = ("logits", "value", "score")
    onnx.save(export_onnx(prover, example_inputs(world), names), tmp_path / "prover.onnx")
    session = ort.InferenceSession(tmp_path / "prover.onnx", providers=["CPUExecutionProvider"])
    for batch in (1, 7, 64):
        inputs = example_inputs(world, batch)
        with torch.no_grad():
            expected = prover(*inputs.values())
        found = session.run(None, {k: v.numpy() for k, v in inputs.items()})
        for one, other in zip(found, expected):
            np.testing.assert_allclose(one, other.numpy(), atol=1e-4)


def test_an_interrupted_training_resumes_exactly(world, tmp_path):
    whole = build_prover(world)
    start = {k: v.clone() for k, v in whole.state_dict().items()}
    train_prover(world, whole, TINY, seed=2)

    class Interrupt(Exception):
        pass

    def stop(phase, step, total, numbers):
        if (phase, step) == ("imitation", 7):
            raise Interrupt

    other = build_prover(world)
    other.load_state_dict(start)
    file = tmp_path / "checkpoint.pt"
    with pytest.raises(Interrupt):
        train_prover(world, other, TINY, 2, stop, file, save_every=0.0)
    resumed = build_prover(world)
    seen = []
    train_prover(world, resumed, TINY, 2, lambda *a: seen.append(a[:2]), file, save_every=0.0)
    assert seen[0] == ("imitation", 7)
    assert all(torch.equal(v, resumed.state_dict()[k]) for k, v in whole.state_dict().items())


def test_kinship_truth_is_closed_under_its_true_rules():
    graph = kinship_graph(2, 3, seed=4)
    truth = set(relations(found_families(2, 3, 4)))
    true_rules = tuple(r for r in graph.rules if r.weight == 1.0)
    assert len(true_rules) > 15
    people = sorted({e for t in truth for e in t[1:]})
    derived = {t for t in consequences(truth, true_rules, people, 1) if t.head != t.tail}
    assert derived == truth
    assert {graph.text(t) for s in graph.splits.values() for t in s} == {str(t) for t in truth}


def test_ranks_are_filtered_and_ties_count_half():
    graph = graph_of(
        ["p(a,b)", "p(a,c)", "p(a,d)", "q(a,d)"], ["p(X,Y) -> q(X,Y)"], test=["q(a,b)"]
    )
    world = build_world(graph, rounds=2)
    asked = pose(graph, world.closure, graph.splits["test"], graph.known())
    negatives = sampled_negatives(graph, asked, 100, 0)
    metrics = symbolic(world, (asked, negatives))
    # Tail: q(a,d) is known, q(a,c) ties: rank 1.5. Head: nothing else is proven: rank 1.
    assert metrics["mrr_all"] == pytest.approx((1 / 1.5 + 1.0) / 2)
    assert metrics["hits1_all"] == pytest.approx(0.5)
    assert metrics["mrr_100"] == metrics["mrr_all"]


@pytest.mark.slow
def test_a_graph_of_wordnets_size_fits_into_four_gigabytes(tmp_path):
    """Training and search over 87,000 facts and 40,000 entities, in a process of its own."""
    file = tmp_path / "numbers.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.proofs", "synthetic"),
            *("--seeds", "0", "--queries", "1000", "--seconds", "0.1", "--threads", "1"),
            *("--json", str(file)),
        ],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
    )
    numbers = read_json(file)["synthetic"]["speed"]
    assert numbers["facts"] == 87_000
    assert numbers["entities"] >= 40_000
    assert numbers["closure_dropped"] > 0  # what did not fit was counted
    assert numbers["proved_fraction_of_candidates"] > 0.99
    assert 0.1 < numbers["peak_memory_gb"] < 4.0


@pytest.mark.slow
def test_the_rollout_step_is_one_graph_and_equals_eager():
    world = build_world(kinship_graph(2, 3), rounds=3)
    torch.manual_seed(0)
    step = fused_step(world, Student(build_prover(world), imitate=False))
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    traced = torch.compile(step, fullgraph=True, backend=count)
    world.train()
    one = two = world.reset(0, 16)
    for _ in range(6):
        one, _, a = step(one, None)
        two, _, b = traced(two, None)
        assert torch.equal(a["action"], b["action"])
        assert torch.equal(one["goals"], two["goals"])
        np.testing.assert_allclose(a["log_prob"], b["log_prob"], atol=1e-5)
    assert len(graphs) == 1


def test_each_phase_learns_at_its_own_falling_rate(world, monkeypatch):
    """Imitation at one rate, with weight decay; PPO at another, clipped harder, without."""
    made, rates = [], []

    class Watched(Update):
        def __init__(self, *args, **options) -> None:
            made.append(options)
            super().__init__(*args, **options)

        def set_learning_rate(self, rate: float) -> None:
            rates.append(rate)
            super().set_learning_rate(rate)

    monkeypatch.setattr(learning, "Update", Watched)
    config = TrainConfig(
        slots=16, ticks=4, imitation_steps=4, ppo_steps=2, minibatches=1, learning_rate=4e-3,
        ppo_learning_rate=2e-4, weight_decay=3e-4,
    )  # fmt: skip
    train_prover(world, build_prover(world, hidden=16), config, 0)
    assert [(o["learning_rate"], o["weight_decay"], o["max_grad_norm"]) for o in made] == [
        (4e-3, 3e-4, 1.0), (2e-4, 0.0, 0.5)
    ]  # fmt: skip
    assert rates == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3, 2e-4, 1e-4])


@pytest.mark.parametrize("rates", [(5.0, 0.0), (0.0, 5.0)])
def test_each_phase_begins_with_the_best_weights_so_far_and_the_best_stay(world, rates):
    """Imitation that ruins the prover leaves nothing to PPO, nor to who uses it; nor does PPO."""
    torch.manual_seed(0)
    prover = build_prover(world, hidden=16)
    start = {name: value.clone() for name, value in prover.state_dict().items()}
    seen = {}

    def look(phase: str, *_: object) -> None:
        seen[phase] = {name: value.clone() for name, value in prover.state_dict().items()}

    config = TrainConfig(
        slots=16, ticks=4, imitation_steps=3, ppo_steps=3, minibatches=1, learning_rate=rates[0],
        ppo_learning_rate=rates[1],
    )  # fmt: skip
    told = train_prover(world, prover, config, 0, look)
    ruined, other = ("imitation", "ppo") if rates[0] else ("ppo", "imitation")
    learned = [name for name, _ in prover.named_parameters()]
    assert any(not torch.equal(seen[ruined][name], start[name]) for name in learned)
    assert told["chosen_phase"] == 0  # what was there before is the best
    for weights in (seen[other], prover.state_dict()):
        assert all(torch.equal(weights[name], start[name]) for name in learned)
