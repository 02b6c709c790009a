"""Forward chaining with evidence: what the rules derive, in which round, and how surely.

The confidence of each rule is estimated on the training facts; the evidence for an atom is the
noisy-or of all rules that derive it in the first round in which any does. A rule counts about once
however many ways its body holds, for these are far from independent. That is the plain symbolic
baseline, and the prior from which the prover starts to learn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hamlet.proofs.data import Graph, atom_key
from hamlet.proofs.knowledge import Index, Rules, build_index, encode_rules, find

CHUNK = 2_000_000  # rows of one intermediate join
ROWS_PER_ATOM = 10
WAYS_POWER = 0.1  # 1 would count each way as independent, 0 not at all; by the valid splits
MAX_EVIDENCE = 60.0  # -log(1 - p)
ROUND_STEP = 100.0  # log-odds between evidence of one round and of the next


@dataclass(frozen=True)
class Closure:
    """Everything that the rules derive from the facts, and the evidence for it.

    Attributes:
        keys: int64 [M] keys of the facts and of all derived atoms, ascending.
        is_fact: bool [M].
        round: int64 [M] first round that derives the atom from facts other than itself; 0 = none.
        evidence: float [M] -log(1 - p) of the noisy-or in that round; 0 = none.
        rule_keys: int64 [G] atom position in `keys` times the number of rules plus the rule,
            ascending: one row for each atom and rule that derives it in its round.
        rule_evidence: float [G] the part of the evidence that the rule gives.
        rule_count: float [G] number of ways in which the rule's body holds.
        confidence: float [R] of each rule.
        dropped: atoms and join rows beyond the budget, which is 0 for a complete closure.
    """

    keys: Tensor
    is_fact: Tensor
    round: Tensor
    evidence: Tensor
    rule_keys: Tensor
    rule_evidence: Tensor
    rule_count: Tensor
    confidence: Tensor
    dropped: int

    def probability(self, keys: Tensor) -> Tensor:
        """float [...] noisy-or of atoms given by key; 0 where nothing derives them."""
        place, found = find(self.keys, keys)
        return torch.where(found, -torch.expm1(-self.evidence[place]), 0.0)

    def log_odds(self, keys: Tensor) -> Tensor:
        """float [...] log-odds that the symbolic baseline gives atoms; lower for each later round.

        It orders atoms by round, then by noisy-or. Nothing derives it: the least.
        """
        place, found = find(self.keys, keys)
        evidence = self.evidence[place].clamp(min=1e-4)
        odds = evidence + torch.log(-torch.expm1(-evidence))
        rounds = self.round[place]
        derived = found & (rounds > 0)
        return torch.where(derived, odds - ROUND_STEP * (rounds - 1), -ROUND_STEP * 100)


@dataclass
class _Known:
    """Atoms usable in a body: an index of them, with evidence and round by position."""

    index: Index
    log_p: Tensor
    round: Tensor


def close(graph: Graph, rounds: int = 8, budget: int = 1_500_000) -> Closure:
    """Forward-chain the rules of a graph over its training facts.

    Args:
        rounds: at most so many; it stops earlier when nothing new is derived.
        budget: largest number of derived atoms; the most certain ones of a round stay. The joins
            of one rule in one round make at most ROWS_PER_ATOM times as many rows. What is beyond
            is dropped and counted.
    """
    rules = encode_rules(graph)
    facts = graph.splits["train"]
    entities, predicates = graph.num_entities, graph.num_predicates
    fact_keys = atom_key(facts, entities).sort().values
    known = _known(
        fact_keys, torch.zeros(len(facts)), torch.zeros_like(fact_keys), predicates, entities
    )
    scored: list[dict[str, Tensor]] = []
    scored_keys = fact_keys[:0]
    confidence = torch.zeros(rules.count)
    dropped = 0
    for number in range(1, rounds + 1):
        parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for rule in range(rules.count):
            (keys, log_p), lost = _apply(
                rules, rule, known, entities, number, scored_keys, budget * ROWS_PER_ATOM
            )
            dropped += lost
            keys, inverse, count = keys.unique(return_inverse=True, return_counts=True)
            if number == 1:
                hits = find(fact_keys, keys)[1].sum()
                confidence[rule] = (hits + 0.5) / (len(keys) + 1.0)
            strength = -torch.log1p(-(confidence[rule] * log_p.exp()).clamp(max=1 - 1e-6))
            total = torch.zeros(len(keys)).index_add_(0, inverse, strength)
            total = total / count * count**WAYS_POWER
            parts.append((keys, torch.full_like(keys, rule), total, count.float()))
        if sum(len(p[0]) for p in parts) == 0:
            break
        keys, rule_ids, strength, ways = (torch.cat(p) for p in zip(*parts))
        atoms, inverse = keys.unique(return_inverse=True)
        evidence = torch.zeros(len(atoms)).index_add_(0, inverse, strength).clamp(max=MAX_EVIDENCE)
        new = ~find(fact_keys, atoms)[1]
        room = budget - (len(known.index.keys) - len(fact_keys))
        if int(new.sum()) > room:  # the most certain ones stay
            order = evidence.masked_fill(~new, -1.0).argsort(descending=True, stable=True)
            stays = (~new).index_fill(0, order[: max(room, 0)], True)
            dropped += int((~stays).sum())
            kept = stays[inverse]
            keys, rule_ids, strength, ways = (x[kept] for x in (keys, rule_ids, strength, ways))
            atoms, evidence, new = atoms[stays], evidence[stays], new[stays]
        scored.append(
            {"atom": atoms, "evidence": evidence, "round": torch.full_like(atoms, number)}
            | {"key": keys, "rule": rule_ids, "strength": strength, "count": ways}
        )
        scored_keys = torch.cat([scored_keys, atoms]).sort().values
        if not new.any():
            break
        log_p = torch.log(-torch.expm1(-evidence[new]))
        known = _known(
            torch.cat([known.index.keys, atoms[new]]),
            torch.cat([known.log_p, log_p]),
            torch.cat([known.round, torch.full_like(atoms[new], number)]),
            predicates,
            entities,
        )
    return _collect(fact_keys, scored, confidence, rules.count, dropped)


def _known(keys: Tensor, log_p: Tensor, rounds: Tensor, predicates: int, entities: int) -> _Known:
    order = keys.argsort()
    keys = keys[order]
    triples = torch.stack(
        [keys // entities**2, keys // entities % entities, keys % entities], dim=-1
    )
    return _Known(build_index(triples, predicates, entities), log_p[order], rounds[order])


def _collect(
    fact_keys: Tensor,
    scored: list[dict[str, Tensor]],
    confidence: Tensor,
    num_rules: int,
    dropped: int,
) -> Closure:
    def column(name: str, empty: Tensor) -> Tensor:
        return torch.cat([s[name] for s in scored]) if scored else empty

    empty = fact_keys[:0]
    atom = column("atom", empty)
    keys = torch.cat([fact_keys, atom]).unique()
    evidence, rounds = torch.zeros(len(keys)), torch.zeros_like(keys)
    place = find(keys, atom)[0]
    evidence[place] = column("evidence", empty.float())
    rounds[place] = column("round", empty)
    rule_keys = find(keys, column("key", empty))[0] * max(num_rules, 1) + column("rule", empty)
    order = rule_keys.argsort()
    return Closure(
        keys=keys,
        is_fact=find(fact_keys, keys)[1],
        round=rounds,
        evidence=evidence,
        rule_keys=rule_keys[order],
        rule_evidence=column("strength", empty.float())[order],
        rule_count=column("count", empty.float())[order],
        confidence=confidence,
        dropped=dropped,
    )


# ------------------------------------------------------------------------------------------------
# Joins


def _apply(
    rules: Rules,
    rule: int,
    known: _Known,
    entities: int,
    number: int,
    scored_keys: Tensor,
    budget: int,
) -> tuple[tuple[Tensor, Tensor], int]:
    """Heads of one rule that round `number` derives first: (keys, log-evidence of body), dropped.

    Semi-naive: a body must hold an atom of the round before, so position i takes those, earlier
    positions only older atoms. One row for each way in which the body holds.
    """
    heads, weights = [torch.empty(0, dtype=torch.int64)], [torch.empty(0)]
    length, lost, made = int(rules.lengths[rule]), 0, 0
    for delta in range(length):
        if number == 1 and delta > 0:
            break  # in the first round every atom is new
        for rows, log_p in _bindings(rules, rule, delta, known, number, entities):
            made += len(log_p)
            if made > budget:
                lost += len(log_p)
                break
            head = rules.head[rule]
            columns = [rows[-1 - int(v)] for v in head[1:]]
            keys = (head[0] * entities + columns[0]) * entities + columns[1]
            body = rules.body[rule, :length]
            itself = torch.zeros_like(keys, dtype=torch.bool)
            for predicate, *arguments in body.tolist():
                if predicate == int(head[0]):
                    left, right = (rows[-1 - v] for v in arguments)
                    itself |= (left == columns[0]) & (right == columns[1])
            fresh = ~itself & ~find(scored_keys, keys)[1]
            heads.append(keys[fresh])
            weights.append(log_p[fresh])
    return (torch.cat(heads), torch.cat(weights)), lost


def _bindings(
    rules: Rules, rule: int, delta: int, known: _Known, number: int, entities: int
) -> Iterator[tuple[dict[int, Tensor], Tensor]]:
    """Tables of variable bindings under which the body holds, by variable, with log-evidence."""
    body = rules.body[rule, : int(rules.lengths[rule])].tolist()
    order = [delta]
    bound = set(body[delta][1:])
    while len(order) < len(body):
        rest = [j for j in range(len(body)) if j not in order]
        best = max(rest, key=lambda j: (sum(v in bound for v in body[j][1:]), -j))
        order.append(best)
        bound |= set(body[best][1:])

    def newest(position: int) -> tuple[int, int]:
        """Rounds that atoms at a body position may come from."""
        if position == delta:
            return number - 1, number - 1
        return 0, number - 2 if position < delta else number - 1

    def extend(
        table: dict[int, Tensor], log_p: Tensor, step: int
    ) -> Iterator[tuple[dict[int, Tensor], Tensor]]:
        if step == len(order):
            yield {-1 - v: column for v, column in table.items()}, log_p
            return
        atom = body[order[step]]
        low, high = newest(order[step])
        for part, weight in _split(
            table, log_p, _fan_out(known.index, atom, part_of=table, entities=entities)
        ):
            table_next, atoms, source = _match(known.index, atom, part, entities)
            fits = (known.round[atoms] >= low) & (known.round[atoms] <= high)
            table_next = {v: c[fits] for v, c in table_next.items()}
            yield from extend(table_next, (weight[source] + known.log_p[atoms])[fits], step + 1)

    yield from extend({}, torch.zeros(1), 0)


def _fan_out(
    index: Index, atom: list[int], part_of: dict[int, Tensor], entities: int
) -> Tensor | None:
    """int64 [n] matches of an atom for each row of a table; None when it is at most one."""
    predicate, left, right = atom
    known_left, known_right = left in part_of, right in part_of
    if known_left and known_right:
        return None
    if known_left or known_right:
        side = 0 if known_left else 1
        group = predicate * entities + part_of[left if known_left else right]
        return index.starts[side, group + 1] - index.starts[side, group]
    rows = len(next(iter(part_of.values()))) if part_of else 1
    size = index.starts[0, (predicate + 1) * entities] - index.starts[0, predicate * entities]
    return size.expand(rows)


def _split(
    table: dict[int, Tensor], log_p: Tensor, counts: Tensor | None
) -> Iterator[tuple[dict[int, Tensor], Tensor]]:
    """Cut a table into parts whose next join has at most about CHUNK rows."""
    if counts is None or int(counts.sum()) <= CHUNK:
        yield table, log_p
        return
    part = counts.cumsum(0) // CHUNK
    for number in part.unique():
        rows = part == number
        yield {v: c[rows] for v, c in table.items()}, log_p[rows]


def _match(
    index: Index, atom: list[int], table: dict[int, Tensor], entities: int
) -> tuple[dict[int, Tensor], Tensor, Tensor]:
    """Join a table with an atom: (new table, position of the matched atom, row it came from)."""
    predicate, left, right = atom
    rows = len(next(iter(table.values()))) if table else 1
    source = torch.arange(rows)
    if left in table and right in table:
        keys = (predicate * entities + table[left]) * entities + table[right]
        place, found = find(index.keys, keys)
        source = source[found]
        return {v: c[found] for v, c in table.items()}, place[found], source
    if left in table or right in table:
        side = 0 if left in table else 1
        group = predicate * entities + table[left if side == 0 else right]
        start = index.starts[side, group]
        count = index.starts[side, group + 1] - start
    else:
        side = 0
        first, last = (
            index.starts[0, predicate * entities],
            index.starts[0, (predicate + 1) * entities],
        )
        start, count = first.expand(rows), (last - first).expand(rows)
    source = source.repeat_interleave(count)
    inside = torch.arange(len(source)) - (count.cumsum(0) - count)[source]
    place = start[source] + inside
    atoms = index.atoms[side, place]
    joined = {v: c[source] for v, c in table.items()}
    if left in table or right in table:
        joined[right if side == 0 else left] = index.partners[side, place]
    else:
        keys = index.keys[atoms]
        joined[left], other = keys // entities % entities, keys % entities
        if left == right:
            same = joined[left] == other
            return {v: c[same] for v, c in joined.items()}, atoms[same], source[same]
        joined[right] = other
    return joined, atoms, source
