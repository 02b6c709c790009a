"""Search with memory: what a greedy search misses is searched again, many states at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pipeline.proofs.knowledge import find
from pipeline.proofs.unify import HOPELESS, SPARE, Engine, Successors, expand, state_hash

WIDTHS, DEPTH = (1, 64), 40  # states kept per query, one try after the other; steps of each
CHUNK = 2048  # states expanded at a time
MORE_ROOM = 4  # times the facts and lemmas of the budget


def find_proofs(engine: Engine, queries: Tensor) -> list[list[int] | None]:
    """A proof of each atom int64 [Q, 3], or None: which successor to take from state to state.

    First down the symbolic evidence, which leads to a proof wherever the rules of one derivation
    bind one variable at a time; what that misses breadth-first, keeping the best states of every
    level. Each query is searched alone, whatever the others are. The successors are those of
    `roomy(engine)`.
    """
    engine = roomy(engine)
    proofs: list[list[int] | None] = [None] * len(queries)
    for width in WIDTHS:
        missed = [i for i, proof in enumerate(proofs) if proof is None]
        if missed:
            for i, proof in zip(missed, beam_search(engine, queries[missed], width, DEPTH)):
                proofs[i] = proof
    return proofs


def roomy(engine: Engine) -> Engine:
    """The same engine with a budget for what is rare: long conjunctions and large groups."""
    longest, rounds = engine.body.shape[1], int(engine.closure.round.max())
    variables = int(engine.rules.num_variables.max()) if engine.rules.count else 2
    goals = min(max(longest + rounds + 1, engine.budget.goals), (SPARE - variables - 4) // 2)
    facts, lemmas = engine.budget.facts * MORE_ROOM, engine.budget.lemmas * MORE_ROOM
    return replace(engine, budget=engine.budget._replace(goals=goals, facts=facts, lemmas=lemmas))


def beam_search(engine: Engine, queries: Tensor, width: int, depth: int) -> list[list[int] | None]:
    """Breadth-first search of all queries side by side that keeps `width` states of each level."""
    proofs: list[list[int] | None] = [None] * len(queries)
    goals, codes = engine.start(queries), engine.pack(queries)
    owner = torch.arange(len(queries))
    seen = _name(goals, owner).sort().values
    history: list[tuple[Tensor, Tensor]] = []  # by level: the state before, and the successor taken
    for _ in range(depth):
        successors, evidence, before, taken = _expand_all(engine, goals, codes[owner], width)
        owner = owner[before]
        history.append((before, taken))
        proven = (successors < 0).all(1)
        for row in proven.nonzero().flatten().tolist():
            case = int(owner[row])
            if proofs[case] is None:
                proofs[case] = _path(history, row)
        name = _name(successors, owner)
        solved = torch.tensor([p is not None for p in proofs])
        open_ = ~solved[owner] & ~find(seen, name)[1]
        kept = _best(owner, evidence, name, open_, width)
        if len(kept) == 0:
            break
        goals, owner = successors[kept], owner[kept]
        history[-1] = (before[kept], taken[kept])
        seen = torch.cat([seen, name[kept]]).sort().values
    return proofs


def _expand_all(
    engine: Engine, goals: Tensor, codes: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Legal successors [n, A], their evidence [n], the state each came from [n], its place [n]."""
    parts = []
    for start in range(0, len(goals), CHUNK):
        found = expand(engine, goals[start : start + CHUNK], codes[start : start + CHUNK])
        row, place = found.legal.nonzero().unbind(1)
        successors = found.goals[row, place]
        evidence = found.evidence[row, place] if width == 1 else _prospect(engine, successors)
        parts.append((successors, evidence, row + start, place))
    successors, evidence, before, taken = (torch.cat(p) for p in zip(*parts))
    return successors, evidence, before, taken


def _prospect(engine: Engine, goals: Tensor) -> Tensor:
    """float [n] evidence for all ground goals of states [n, A]; comparable between any states."""
    _, left, right = engine.unpack(goals)
    ground = (goals >= 0) & (left < engine.num_entities) & (right < engine.num_entities)
    place, found = find(engine.keys, goals)
    worth = torch.where(found, engine.log_p[place] - engine.round_cost[place], HOPELESS)
    return torch.where(ground, worth, 0.0).sum(-1)


def _name(goals: Tensor, owner: Tensor) -> Tensor:
    """int64 [n] of states [n, A] of queries [n]; equal where both are."""
    return state_hash(torch.cat([goals, owner[:, None]], 1))


def _best(owner: Tensor, evidence: Tensor, name: Tensor, open_: Tensor, width: int) -> Tensor:
    """Rows of the `width` best distinct open states of each owner; of equals the earlier one."""
    order = open_.nonzero().flatten()
    order = order[evidence[order].argsort(descending=True, stable=True)]
    _, group = name[order].unique(return_inverse=True)
    place = torch.arange(len(order))
    first = torch.full_like(place, len(order)).scatter_reduce(0, group, place, "amin")
    order = order[first[group] == place]
    order = order[owner[order].argsort(stable=True)]
    mine = owner[order]
    rank = torch.arange(len(order)) - torch.searchsorted(mine, mine)
    return order[rank < width]


def _path(history: list[tuple[Tensor, Tensor]], row: int) -> list[int]:
    path = []
    for before, taken in reversed(history):
        path.append(int(taken[row]))
        row = int(before[row])
    return path[::-1]


def follow(engine: Engine, query: Tensor, path: list[int]) -> list[tuple[Tensor, Successors]]:
    """The states [1, A] on the way of a proof of `find_proofs`, with the successors of each."""
    engine = roomy(engine)
    goals, code, steps = engine.start(query[None]), engine.pack(query[None]), []
    for place in path:
        found = expand(engine, goals, code)
        steps.append((goals, found))
        goals = found.goals[:, place]
    return steps
