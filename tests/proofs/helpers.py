"""Small knowledge bases and an oracle that shares no code with the library."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from hamlet.proofs.data import Graph, Rule, Triple, build_graph, parse_atom
from hamlet.proofs.knowledge_base import KnowledgeBase
from hamlet.proofs.unify import expand

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "kg"


def shared_graph(name: str) -> Path:
    """Folder of a benchmark data set, or skip."""
    if not (SHARED / name).is_dir():
        pytest.skip(f"the data set {name} is not in {SHARED}")
    return SHARED / name


def rule(text: str, name: str = "r") -> Rule:
    """`p(X,Y), q(Y,Z) -> r(X,Z)`."""
    body, head = text.split("->")
    atoms = [
        parse_atom(a.strip(" ,") + ")") for a in body.strip().strip(",").split(")") if a.strip(" ,")
    ]
    return Rule(name, 1.0, tuple(Triple(*a) for a in atoms), parse_atom(head))


def graph_of(
    facts: list[str], rules: list[str], test: list[str] = (), valid: list[str] = ()
) -> Graph:
    splits = {
        "train": [parse_atom(f) for f in facts],
        "valid": [parse_atom(f) for f in valid],
        "test": [parse_atom(f) for f in test],
    }
    return build_graph("small", splits, [rule(r, f"r{i}") for i, r in enumerate(rules)])


def consequences(facts: set, rules: tuple[Rule, ...], entities, rounds: int) -> set:
    """All atoms that are facts or follow in `rounds` rounds, by trying every assignment."""
    known = set(facts)
    for _ in range(rounds):
        new = set()
        for r in rules:
            arguments = {v for a in (*r.body, r.head) for v in a[1:]}
            variables = sorted(v for v in arguments if v[0] != "'")
            for values in product(entities, repeat=len(variables)):
                at = dict(zip(variables, values)) | {v: v[1:-1] for v in arguments if v[0] == "'"}
                if all(Triple(a[0], at[a[1]], at[a[2]]) in known for a in r.body):
                    new.add(Triple(r.head[0], at[r.head[1]], at[r.head[2]]))
        if new <= known:
            break
        known |= new
    return known


def all_atoms(predicates, entities) -> list[Triple]:
    return [Triple(p, h, t) for p in predicates for h in entities for t in entities]


def ids_of(graph: Graph, atom: Triple) -> torch.Tensor:
    """int64 [3]."""
    return torch.tensor(
        [
            graph.predicates.index(atom[0]),
            graph.entities.index(atom[1]),
            graph.entities.index(atom[2]),
        ]
    )


def search(
    kb: KnowledgeBase, graph: Graph, query: torch.Tensor, depth: int, cap: int = 3000
) -> bool:
    """Breadth-first search over all successors: is there a proof? Raises when cut off by `cap`."""
    goals = kb.start(query[None])
    key = kb.pack(query[None])
    seen = {tuple(goals.flatten().tolist())}
    frontier = goals
    for _ in range(depth):
        found = expand(kb, frontier, key.expand(len(frontier)))
        successors = found.goals[found.legal]
        if bool((successors < 0).all(1).any()):
            return True
        fresh = []
        for state in successors:
            name = tuple(state.flatten().tolist())
            if name not in seen:
                seen.add(name)
                fresh.append(state)
        if not fresh:
            return False
        if len(seen) > cap:
            raise OverflowError
        frontier = torch.stack(fresh)
    return False
