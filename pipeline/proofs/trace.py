"""Questions in text, answers with their proofs."""

from __future__ import annotations

import copy
import difflib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hamlet.artifacts import HamletError
from hamlet.proofs.closure import ROUND_STEP
from hamlet.proofs.data import Triple, parse_atom
from hamlet.proofs.knowledge import find
from hamlet.proofs.policy import Prover
from hamlet.proofs.search import find_proofs, follow
from hamlet.proofs.unify import LEMMA, select_goal
from hamlet.proofs.world import ProofWorld


@dataclass(frozen=True)
class Proof:
    """One atom and why it holds: a fact, or a rule whose body atoms hold (children, in order).

    `rule` is its name and text, empty for a fact.
    """

    atom: Triple
    rule: str
    children: tuple[Proof, ...] = ()

    def lines(self, indent: int = 0) -> list[str]:
        """Indented text: the atom, the rule that gives it, then the atoms of the body."""
        why = "fact" if not self.rule else f"by {self.rule}"
        lines = [f"{'  ' * indent}{self.atom}  [{why}]"]
        for child in self.children:
            lines += child.lines(indent + 1)
        return lines

    def facts(self) -> list[Triple]:
        """The facts it rests on."""
        if not self.rule:
            return [self.atom]
        return list(dict.fromkeys(f for child in self.children for f in child.facts()))


@dataclass(frozen=True)
class Answer:
    """An answer: the atom, the probability that the prover gives it, and the proof.

    A known fact has probability 1 and is its own proof.
    """

    atom: Triple
    probability: float
    proof: Proof

    def __str__(self) -> str:
        if not self.proof.rule:
            return f"{self.atom}  1.000\n  known fact"
        lines = "\n".join(self.proof.lines(1))
        return f"{self.atom}  {self.probability:.3f}\n{lines}"


# ------------------------------------------------------------------------------------------------
# Questions


def ask(text: str, prover: Prover, world: ProofWorld, limit: int = 10) -> list[Answer]:
    """Answer `predicate(entity, X)`: known facts first, then what can be proven, best first.

    An argument is an entity if the graph knows it, else a variable if it begins with a capital or
    an underscore; a variable that occurs twice stands for one entity. Each answer prints as text.

    Args:
        limit: at most so many answers.

    Raises:
        HamletError: the text is no atom, or names an unknown predicate or entity; names the
            nearest known one.
    """
    graph, size = world.graph, world.graph.num_entities
    atom = parse_atom(text)
    predicate = _lookup(atom.predicate, graph.predicates, "predicate")
    arguments = [
        None if name not in graph.entities and (name[0].isupper() or name[0] == "_")
        else _lookup(name, graph.entities, "entity")
        for name in (atom.head, atom.tail)
    ]  # fmt: skip
    closure = world.closure
    keys = closure.keys[closure.keys // size**2 == predicate]
    head, tail = keys // size % size, keys % size
    fits = torch.ones_like(keys, dtype=torch.bool)
    for column, wanted in ((head, arguments[0]), (tail, arguments[1])):
        if wanted is not None:
            fits &= column == wanted
    if arguments == [None, None] and atom.head == atom.tail:
        fits &= head == tail
    triples = torch.stack([torch.full_like(head, predicate), head, tail], -1)[fits]
    known = find(world.kb.facts.keys, keys[fits])[1]
    answers = [Answer(_name(world, t), 1.0, Proof(_name(world, t), "")) for t in triples[known]]
    if len(answers) < limit and bool((~known).any()):
        answers += _proven(triples[~known], prover, world, limit - len(answers))
    return answers[:limit]


def _proven(triples: Tensor, prover: Prover, world: ProofWorld, limit: int) -> list[Answer]:
    """Answers for derived atoms, most probable first."""
    with torch.no_grad():
        world.eval(triples)
        score = prover.see(world.observe(world.reset(0, len(triples)))).score
        world.train()
    # Scores keep later rounds below earlier ones; what is shown is the probability itself.
    rounds = world.closure.round[find(world.closure.keys, world.graph.key(triples))[0]]
    shown = score + ROUND_STEP * (rounds - 1)
    found: list[Answer] = []
    for row in score.argsort(descending=True, stable=True).tolist():
        if len(found) == limit:
            break
        proof = prove(triples[row], prover, world)
        if proof is not None:
            found.append(Answer(proof.atom, float(shown[row].sigmoid()), proof))
    return found


def _lookup(name: str, names: tuple[str, ...], what: str) -> int:
    if name in names:
        return names.index(name)
    near = difflib.get_close_matches(name, names, 1, cutoff=0.4)
    fix = f"did you mean {near[0]}?" if near else f"known are for example {', '.join(names[:5])}"
    if what == "entity":
        fix += " (a variable begins with a capital)"
    raise HamletError(f"the {what} {name} is unknown", fix)


def _name(world: ProofWorld, triple: Tensor) -> Triple:
    predicate, head, tail = triple.tolist()
    graph = world.graph
    return Triple(graph.predicates[predicate], graph.entities[head], graph.entities[tail])


# ------------------------------------------------------------------------------------------------
# Proofs


def prove(triple: Tensor, prover: Prover, world: ProofWorld) -> Proof | None:
    """The prover's greedy proof of one atom int64 [3]; else what `find_proofs` finds, or None."""
    proof = _greedy(triple, prover, world)
    if proof is None and prover.use_prior:
        path = find_proofs(world.kb, triple[None])[0]
        if path is not None:
            replay = _Replay(world, triple)
            for goals, found, place in follow(world.kb, triple, path):
                replay.step(goals, found.goals, found.kind, found.atom, place)
            proof = replay.proof()
    return proof


@torch.no_grad()
def _greedy(triple: Tensor, prover: Prover, world: ProofWorld) -> Proof | None:
    world = copy.copy(world)
    world.config = replace(world.config, unary_skips=0)  # every step is part of the proof
    world.eval(triple[None])
    state = world.reset(0, 1)
    replay = _Replay(world, triple)
    while not bool(state["done"]):
        logits = prover.see(world.observe(state)).logits
        action = logits.masked_fill(~state["action_mask"], -math.inf).argmax(-1)
        if int(action) == world.kb.width:
            return None
        replay.step(state["goals"], state["successors"], state["kind"], state["atom"], int(action))
        state = world.step_core(state, action)
    return replay.proof() if bool(state["success"]) else None


class _Replay:
    """Follows the search's steps with terms whose variables become bound, to get the proof tree.

    A term is an entity id or a `_Variable`.
    """

    def __init__(self, world: ProofWorld, triple: Tensor) -> None:
        self.world = world
        predicate, head, tail = triple.tolist()
        self.query = (predicate, head, tail)
        self.root = _Node(predicate, (head, tail))
        self.open = [self.root]

    def value(self, term: int | _Variable) -> int | _Variable:
        while isinstance(term, _Variable) and term.value is not None:
            term = term.value
        return term

    def step(
        self, goals: Tensor, successors: Tensor, kinds: Tensor, atoms: Tensor, action: int
    ) -> None:
        """One resolution step from `goals` [1, A], by one of its `successors` [1, S, A]."""
        kb, graph = self.world.kb, self.world.graph
        kind = int(kinds[0, action])
        left_over = int((successors[0, action] >= 0).sum())
        node = self.open.pop(int(select_goal(kb, goals)[2]))
        if kind >= 2:
            rule = kb.rules
            number = kind - 2
            variables: dict[int, int | _Variable] = {}
            for pattern, term in zip(rule.head[number, 1:].tolist(), node.terms):
                if pattern in variables:
                    self._unify(variables[pattern], term)
                variables.setdefault(pattern, term)
            children = []
            for atom in rule.body[number, : int(rule.lengths[number])].tolist():
                terms = tuple(variables.setdefault(v, _Variable()) for v in atom[1:])
                children.append(_Node(atom[0], terms))
            node.rule = f"{graph.rules[number].name}: {graph.rules[number]}"
            node.children = children
            self.open = children + self.open
        else:
            _, first, second = (int(x) for x in kb.unpack(atoms[0, action]))
            self._unify(node.terms[0], first)
            self._unify(node.terms[1], second)
            if kind == LEMMA:
                self.open.insert(0, node)
        self._close_facts(left_over)

    def _unify(self, one: int | _Variable, other: int | _Variable) -> None:
        one, other = self.value(one), self.value(other)
        if isinstance(one, _Variable):
            if one is not other:
                one.value = other
        elif isinstance(other, _Variable):
            other.value = one

    def _close_facts(self, left_over: int) -> None:
        """Drop what the resolution dropped: facts, and goals that occur twice."""
        kept: list[_Node] = []
        seen: dict[tuple[object, ...], _Node] = {}
        size, facts = self.world.graph.num_entities, self.world.kb.facts.keys
        for node in self.open:
            terms = tuple(self.value(t) for t in node.terms)
            name = (node.predicate, *(t if isinstance(t, int) else id(t) for t in terms))
            head, tail = terms
            if isinstance(head, int) and isinstance(tail, int) and name != self.query:
                key = torch.tensor([(node.predicate * size + head) * size + tail])
                if bool(find(facts, key)[1]):
                    continue
            if name in seen:
                node.same_as = seen[name]
                continue
            seen[name] = node
            kept.append(node)
        self.open = kept
        if len(kept) != left_over:
            raise AssertionError("the replay lost track of the proof")

    def proof(self) -> Proof:
        graph = self.world.graph

        def build(node: _Node) -> Proof:
            if node.same_as is not None:
                return build(node.same_as)
            head, tail = (self.value(t) for t in node.terms)
            assert isinstance(head, int)
            assert isinstance(tail, int)
            atom = Triple(
                graph.predicates[node.predicate], graph.entities[head], graph.entities[tail]
            )
            return Proof(atom, node.rule, tuple(build(child) for child in node.children))

        return build(self.root)


class _Variable:
    def __init__(self) -> None:
        self.value: int | _Variable | None = None


class _Node:
    def __init__(self, predicate: int, terms: tuple[int | _Variable, ...]) -> None:
        self.predicate, self.terms = predicate, terms
        self.rule = ""
        self.children: list[_Node] = []
        self.same_as: _Node | None = None
