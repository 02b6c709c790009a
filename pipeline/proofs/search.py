"""Search with memory: what a greedy search misses is searched again, many states at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hamlet.proofs.knowledge import find
from hamlet.proofs.knowledge_base import HOPELESS, SPARE, KnowledgeBase, state_hash
from hamlet.proofs.unify import Successors, expand, group_of, select_goal

WIDTHS, DEPTH = (1, 64), 40  # states kept per query, one try after the other; steps of each
CHUNK = 1 << 17  # successors looked at together
NARROW, WIDEST = 64, 1 << 14  # matches of a goal: most have fewer, and no more are looked at


def find_proofs(kb: KnowledgeBase, queries: Tensor) -> list[Tensor | None]:
    """A proof of each atom int64 [Q, 3], or None: the states int64 [n, A] that lead to the end.

    First down the symbolic evidence, which leads to a proof wherever the rules of one derivation
    bind one variable at a time; what that misses breadth-first, keeping the best states of every
    level. Each query is searched alone, whatever the others are. Unlike the steps of the world
    this looks at all matches of a goal, and has room for long conjunctions.
    """
    kb = roomy(kb)
    proofs: list[Tensor | None] = [None] * len(queries)
    for width in WIDTHS:
        missed = [i for i, proof in enumerate(proofs) if proof is None]
        if missed:
            for i, proof in zip(missed, beam_search(kb, queries[missed], width, DEPTH)):
                proofs[i] = proof
    return proofs


def roomy(kb: KnowledgeBase) -> KnowledgeBase:
    """The same knowledge base with room for long conjunctions."""
    longest, rounds = kb.body.shape[1], int(kb.closure.round.max())
    variables = int(kb.rules.num_variables.max()) if kb.rules.count else 2
    goals = min(max(longest + rounds + 1, kb.budget.goals), (SPARE - variables - 4) // 2)
    return replace(kb, budget=kb.budget._replace(goals=goals))


def beam_search(kb: KnowledgeBase, queries: Tensor, width: int, depth: int) -> list[Tensor | None]:
    """Breadth-first search of all queries side by side that keeps `width` states of each level."""
    proofs: list[Tensor | None] = [None] * len(queries)
    goals, codes = kb.start(queries), kb.pack(queries)
    owner = torch.arange(len(queries))
    seen = _name(goals, owner).sort().values
    history: list[tuple[Tensor, Tensor]] = []  # by level: where each state came from, the states
    for _ in range(depth):
        successors, evidence, before = _expand_all(kb, goals, codes[owner], width)
        owner = owner[before]
        history.append((before, successors))
        proven = (successors < 0).all(1)
        for row in proven.nonzero().flatten().tolist():
            case = int(owner[row])
            if proofs[case] is None:
                proofs[case] = _path(history, row)
        name = _name(successors, owner)
        solved = torch.tensor([p is not None for p in proofs], dtype=torch.bool)
        open_ = ~solved[owner] & ~find(seen, name)[1]
        kept = _best(owner, evidence, name, open_, width)
        if len(kept) == 0:
            break
        goals, owner = successors[kept], owner[kept]
        history[-1] = (before[kept], goals)
        seen = torch.cat([seen, name[kept]]).sort().values
    return proofs


def _expand_all(
    kb: KnowledgeBase, goals: Tensor, codes: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Legal successors [n, A], their evidence [n] and the state each came from [n]."""
    parts = [(goals[:0], kb.log_p[:0], codes[:0])]
    for rows, found in _expand_in_parts(kb, goals, codes):
        row, place = found.legal.nonzero().unbind(1)
        successors = found.goals[row, place]
        evidence = found.evidence[row, place] if width == 1 else _prospect(kb, successors)
        parts.append((successors, evidence, rows[row]))
    successors, evidence, before = (torch.cat(p) for p in zip(*parts))
    return successors, evidence, before


def _expand_in_parts(
    kb: KnowledgeBase, goals: Tensor, codes: Tensor
) -> Iterator[tuple[Tensor, Successors]]:
    """`expand` of rows of similar width, with room for all their matches: (rows, successors)."""
    front = select_goal(kb, goals)[0]
    facts = group_of(kb, kb.facts, front)[1]
    lemmas = group_of(kb, kb.lemmas, front)[1] * bool(kb.budget.lemmas)
    most = torch.maximum(facts, lemmas)
    for rows in ((most <= NARROW).nonzero().flatten(), (most > NARROW).nonzero().flatten()):
        if len(rows) == 0:
            continue
        room = [int(x[rows].max().clamp(1, WIDEST)) for x in (facts, lemmas)]
        budget = kb.budget._replace(facts=room[0], lemmas=room[1] if kb.budget.lemmas else 0)
        wider = replace(kb, budget=budget)
        for part in rows.split(max(CHUNK // wider.width, 1)):
            yield part, expand(wider, goals[part], codes[part])


def _prospect(kb: KnowledgeBase, goals: Tensor) -> Tensor:
    """float [n] evidence for all ground goals of states [n, A]; comparable between any states."""
    _, left, right = kb.unpack(goals)
    ground = (goals >= 0) & (left < kb.num_entities) & (right < kb.num_entities)
    place, found = find(kb.keys, goals)
    worth = torch.where(found, kb.log_p[place] - kb.round_cost[place], HOPELESS)
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


def _path(history: list[tuple[Tensor, Tensor]], row: int) -> Tensor:
    states = []
    for before, successors in reversed(history):
        states.append(successors[row])
        row = int(before[row])
    return torch.stack(states[::-1])


def follow(
    kb: KnowledgeBase, query: Tensor, path: Tensor
) -> Iterator[tuple[Tensor, Successors, int]]:
    """Step by step along a proof of `find_proofs`: state [1, A], successors, which one is next."""
    kb = roomy(kb)
    goals, code = kb.start(query[None]), kb.pack(query[None])
    for following in path:
        _, found = next(_expand_in_parts(kb, goals, code))
        same = found.legal[0] & (found.goals[0] == following).all(1)
        yield goals, found, int(same.int().argmax())
        goals = following[None]
