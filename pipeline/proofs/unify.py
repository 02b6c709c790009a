"""Vectorised resolution: all successors of a batch of proof states, in fixed shapes.

A proof state is a conjunction of goals (predicate, argument, argument). An argument below the
number of entities is an entity, above it a variable; a variable is named by the place of its first
use, so equal states are equal tensors. A goal is packed into one int64, PAD fills up. One
resolution step takes the goal with the fewest matching facts and unifies it with every fact of its
predicate and bound argument, and with every rule head of its predicate. Goals that are facts are
dropped; an empty conjunction is a proof. The query itself is never usable as a fact.

With lemmas (atoms that forward chaining derived) an open goal is bound by facts and by lemmas and
rules serve ground goals only: every state is soon ground, and the evidence for it is known. A bound
lemma still has to be proven, so nothing is taken on trust.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hamlet.proofs.knowledge import Index, find
from hamlet.proofs.knowledge_base import (
    HOPELESS,
    NO_EVIDENCE,
    PAD,
    KnowledgeBase,
    canonical,
    is_ground,
    look_up,
)

FACT, LEMMA = 0, 1  # kinds of successor; 2 + r is rule r


class Successors(NamedTuple):
    """Every way to resolve one goal of each state; legal ones first.

    Attributes:
        goals: int64 [B, S, A] the successor states, packed.
        kind: int64 [B, S] FACT, LEMMA or 2 + rule.
        evidence: float [B, S] log-probability of the successor under the symbolic prior.
        ways: float [B, S] ways in which the body of a rule holds; 0 for other kinds.
        atom: int64 [B, S] the fact or lemma, packed; PAD for rules.
        legal: bool [B, S], a prefix.
        dropped: int64 [B] successors that did not fit the budget.
    """

    goals: Tensor
    kind: Tensor
    evidence: Tensor
    ways: Tensor
    atom: Tensor
    legal: Tensor
    dropped: Tensor


def expand(kb: KnowledgeBase, goals: Tensor, query: Tensor) -> Successors:
    """All successors of proof states.

    Args:
        goals: int64 [B, A], packed and canonical.
        query: int64 [B] the packed atom that is being proven; never used as a fact.
    """
    front, rest, _ = select_goal(kb, goals)
    _, left, right = kb.unpack(front)
    left = torch.where(front < 0, 0, left)
    right = torch.where(front < 0, 0, right)
    size = kb.num_entities
    is_open = ((left >= size) | (right >= size)) & (front >= 0)

    # Facts and lemmas that match an open goal bind its variables.
    room = kb.budget
    atom, matched, lost = _matches(kb, kb.facts, kb.fact_codes, front, room.facts)
    is_lemma = torch.zeros(room.facts + room.lemmas, dtype=torch.bool, device=goals.device)
    if room.lemmas:
        more, also, dropped = _matches(kb, kb.lemmas, kb.lemma_codes, front, room.lemmas)
        atom, matched = torch.cat([atom, more], 1), torch.cat([matched, also], 1)
        lost = lost + dropped
        is_lemma = torch.arange(room.facts + room.lemmas, device=goals.device) >= room.facts
    matched = matched & (atom != query[:, None])
    _, first, second = kb.unpack(atom)
    longest = kb.body.shape[1]
    kept = torch.where(is_lemma & matched, atom, PAD)[..., None]
    remaining = _substitute(kb, rest[:, None], left, right, first, second)
    padding = kept.new_full((1, 1, 1), PAD).expand(*kept.shape[:2], longest - 1)
    bound = torch.cat([kept, padding, remaining], -1)
    kind = is_lemma.long().expand_as(atom)

    # Rules whose head matches.
    by_rule, rule_kind, applies, more = _apply_rules(kb, front, rest)
    lost = lost + more
    if room.lemmas:
        applies = applies & ~is_open[:, None]
        width, either = kb.width, is_open[:, None]
        successors = torch.where(
            either[..., None], _fill(bound, width, PAD), _fill(by_rule, width, PAD)
        )
        kind = torch.where(either, _fill(kind, width, 0), _fill(rule_kind, width, 0))
        legal = torch.where(either, _fill(matched, width, 0), _fill(applies, width, 0))
        atom = torch.where(either, _fill(atom, width, PAD), PAD)
    else:
        successors = torch.cat([bound, by_rule], 1)
        kind = torch.cat([kind, rule_kind], 1)
        legal = torch.cat([matched, applies], 1)
        atom = _fill(atom, kb.width, PAD)

    # Goals that are facts are done; the rest closes up, so that no hole can hide a goal.
    new = torch.cat([rest.new_ones(len(rest), longest), ~is_ground(kb, rest)], 1) > 0
    successors, log_p, too_long = _tidy(kb, successors, query, new[:, None])
    legal, too_long = legal & ~too_long, legal & too_long
    evidence, ways = _rule_evidence(kb, front, kind, log_p)
    return Successors(
        goals=canonical(kb, successors),
        kind=kind,
        evidence=evidence,
        ways=ways,
        atom=atom,
        legal=legal,
        dropped=lost + too_long.sum(1),
    )


def compact(found: Successors) -> Successors:
    """The same successors with the legal ones first, in order."""
    rank = found.legal.cumsum(1) - 1
    width = found.legal.shape[1]
    place = torch.where(found.legal, rank, width)

    def move(x: Tensor, blank: float) -> Tensor:
        out = x.new_full((x.shape[0], width + 1, *x.shape[2:]), blank)
        index = place if x.ndim == 2 else place[..., None].expand_as(x)
        return out.scatter(1, index, x)[:, :width]

    counts = found.legal.sum(1, keepdim=True)
    return Successors(
        goals=move(found.goals, PAD),
        kind=move(found.kind, 0),
        evidence=move(found.evidence, HOPELESS),
        ways=move(found.ways, 0.0),
        atom=move(found.atom, PAD),
        legal=torch.arange(width, device=place.device) < counts,
        dropped=found.dropped,
    )


def select_goal(kb: KnowledgeBase, goals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The goal with the fewest matches [B], the others in order [B, A - 1], its place [B].

    Ground goals come first. SLD resolution is complete under
    any choice (Lloyd 1987, theorem 10.3).
    """
    size = kb.num_entities
    predicate, left, right = kb.unpack(goals)
    predicate = predicate.clamp(min=0)
    indexes = [kb.facts, kb.lemmas] if kb.budget.lemmas else [kb.facts]
    cost = torch.zeros_like(goals)
    for side, (bound, free) in enumerate(((left, right), (right, left))):
        group = predicate * size + bound.clamp(max=size - 1)
        matches = sum(i.starts[side][group + 1] - i.starts[side][group] for i in indexes)
        cost = torch.where((bound < size) & (free >= size), 1 + matches, cost)
    group = predicate * size
    matches = sum(i.starts[0][group + size] - i.starts[0][group] for i in indexes)
    cost = torch.where((left >= size) & (right >= size), 1 + matches, cost)
    cost = torch.where(goals < 0, 1 << 40, cost)
    chosen = cost.argmin(1, keepdim=True)
    place = torch.arange(goals.shape[1] - 1, device=goals.device)
    others = goals.gather(1, place + (place >= chosen))
    return goals.gather(1, chosen).squeeze(1), others, chosen.squeeze(1)


def group_of(kb: KnowledgeBase, index: Index, front: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where an index lists the atoms that match goals [B]: (start, length, by head) [B].

    Ground goals and PAD have length 0.
    """
    size = kb.num_entities
    predicate, left, right = kb.unpack(front)
    predicate = predicate.clamp(min=0)
    left_free, right_free = left >= size, right >= size
    both = left_free & right_free
    bound = torch.where(left_free, right, left).clamp(max=size - 1)
    group = predicate * size + torch.where(both, 0, bound)
    after = torch.where(both, (predicate + 1) * size, group + 1)
    by_head = ~left_free | both
    start = torch.where(by_head, index.starts[0][group], index.starts[1][group])
    end = torch.where(by_head, index.starts[0][after], index.starts[1][after])
    is_open = (left_free | right_free) & (front >= 0)
    return start, torch.where(is_open, end - start, 0), by_head


def _matches(
    kb: KnowledgeBase, index: Index, codes: Tensor, front: Tensor, room: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Atoms of an index that match open goals [B]: packed [B, room], legal, dropped [B]."""
    start, length, by_head = group_of(kb, index, front)
    step = torch.arange(room, device=front.device)
    legal = step < length[:, None]
    if codes.shape[1] == 0:
        return (step + PAD - step).expand_as(legal), legal & False, torch.zeros_like(length)
    row = (start[:, None] + step).clamp(max=codes.shape[1] - 1)
    atom = codes.flatten()[row + (~by_head).long()[:, None] * codes.shape[1]]
    _, left, right = kb.unpack(front)
    _, first, second = kb.unpack(atom)
    legal = legal & ((left != right)[:, None] | (first == second))
    return atom, legal, (length - room).clamp(min=0)


def _substitute(
    kb: KnowledgeBase, goals: Tensor, left: Tensor, right: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """Goals [B, 1, G] with variables left, right [B] replaced by first, second [B, S]."""
    size = kb.num_entities
    predicate, one, other = kb.unpack(goals)
    left = torch.where(left >= size, left, -1)[:, None, None]
    right = torch.where(right >= size, right, -1)[:, None, None]
    first, second = first[..., None], second[..., None]

    def value(argument: Tensor) -> Tensor:
        return torch.where(
            argument == left, first, torch.where(argument == right, second, argument)
        )

    packed = (((predicate << kb.bits) | value(one)) << kb.bits) | value(other)
    return torch.where(goals < 0, PAD, packed)


def _rules_for(kb: KnowledgeBase, front: Tensor) -> tuple[Tensor, Tensor]:
    """Rules to resolve goals [B] with: int64 [B, W], -1 = none; how many are left out [B]."""
    room = kb.budget.rules
    of = kb.rules.of_predicate[kb.unpack(front)[0].clamp(min=0)]
    of = torch.where((front >= 0)[:, None], of, -1)
    if of.shape[1] <= room:
        return of, torch.zeros_like(front)
    if not kb.budget.lemmas or kb.by_rule.shape[0] == 0:
        return of[:, :room], (of[:, room:] >= 0).sum(1)
    place, found, _ = look_up(kb, front)
    start = kb.by_rule_start[place]
    length = torch.where(found, kb.by_rule_start[place + 1] - start, 0)
    step = torch.arange(room, device=front.device)
    row = (start[:, None] + step).clamp(max=kb.by_rule.shape[0] - 1)
    of = torch.where(step < length[:, None], kb.by_rule[row], -1)
    return of, (length - room).clamp(min=0)


def _apply_rules(
    kb: KnowledgeBase, front: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Successors by rules: goals [B, W, L + A - 1], kind, legal [B, W]; dropped [B]."""
    size, rules = kb.num_entities, kb.rules
    _, left, right = kb.unpack(front)
    of, dropped = _rules_for(kb, front)
    legal = of >= 0
    rule = of.clamp(min=0)
    if rules.count == 0:
        nothing = rest.new_full((1, 1, 1), PAD)
        goals = nothing.expand(*of.shape, kb.body.shape[1] + rest.shape[1])
        return goals, rule + 2, legal, dropped
    left, right = left[:, None], right[:, None]
    first, second = left.expand_as(rule), right.expand_as(rule)
    others = rest[:, None].expand(-1, of.shape[1], -1)
    if kb.has_diagonal:
        # A head p(X, X) makes the goal's arguments one: an entity wins over a variable.
        diagonal = kb.diagonal[rule]
        merged, larger = torch.minimum(left, right), torch.maximum(left, right)
        legal = legal & ~(diagonal & (larger < size) & (left != right))
        first = torch.where(diagonal, merged, first)
        replaced = torch.where(diagonal, merged, larger)
        front_free = larger.squeeze(1)
        others = _substitute(kb, rest[:, None], front_free, front_free, replaced, replaced)
    body = kb.body[rule]
    arguments = body[..., 1:]
    unused = size + 2 * kb.budget.goals  # above every canonical variable
    value = torch.where(
        arguments == -1,
        first[..., None, None],
        torch.where(arguments == -2, second[..., None, None], unused - 2 - arguments),
    )
    packed = (((body[..., 0] << kb.bits) | value[..., 0]) << kb.bits) | value[..., 1]
    packed = torch.where(body[..., 0] < 0, PAD, packed)
    return torch.cat([packed, others], -1), rule + 2, legal, dropped


def _tidy(
    kb: KnowledgeBase, goals: Tensor, query: Tensor, new: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Drop facts and duplicates of [B, S, n] goals, close up to A.

    Returns:
        goals [B, S, A]; the evidence for those ground goals that are `new` (bool [B, 1, n]) and
        stay [B, S]; whether more than A stayed, bool [B, S].
    """
    count, room = goals.shape[-1], kb.budget.goals
    place, found, ground = look_up(kb, goals)
    is_fact = found & kb.closure.is_fact[place] & (goals != query[:, None, None])
    stays = (goals >= 0) & ~is_fact
    twice = [torch.zeros_like(stays[..., 0])]
    for j in range(1, count):  # a goal that occurs twice is one
        same = goals[..., :j] == goals[..., j : j + 1]
        twice.append(same.any(-1))
    stays = stays & ~torch.stack(twice, -1)
    counts = stays & ground & new
    log_p = torch.where(counts, torch.where(found, kb.log_p[place], HOPELESS), 0.0).sum(-1)
    log_p = log_p - torch.where(counts & found, kb.round_cost[place], 0.0).amax(-1)
    rank = stays.long().cumsum(-1)
    slot = torch.where(stays, rank - 1, count)
    closed = goals.new_full((*goals.shape[:-1], count + 1), PAD)
    closed = closed.scatter(-1, slot, torch.where(stays, goals, PAD))
    return closed[..., :room], log_p, rank[..., -1] > room


def _rule_evidence(
    kb: KnowledgeBase, front: Tensor, kind: Tensor, log_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Evidence [B, S] of successors, and the count of ways for rules on a ground goal.

    For a rule on a derived ground goal it is what the rule contributes there. For anything else it
    is that of the new ground goals, least rounds first: whoever goes down the evidence replaces
    a goal by goals of earlier rounds, and so ends in a proof.
    """
    closure = kb.closure
    place, found, ground = look_up(kb, front)
    by_rule = (kind >= 2) & ground[:, None]
    if closure.rule_keys.shape[0] == 0:
        return torch.where(by_rule, HOPELESS, log_p), torch.zeros_like(log_p)
    wanted = torch.where(by_rule, place[:, None] * max(kb.rules.count, 1) + kind - 2, -1)
    row, has = find(closure.rule_keys, wanted)
    has = has & found[:, None] & by_rule
    strength = torch.log(-torch.expm1(-closure.rule_evidence[row])).clamp(min=NO_EVIDENCE)
    return (
        torch.where(by_rule, torch.where(has, strength, HOPELESS), log_p),
        torch.where(has, closure.rule_count[row], 0.0),
    )


def _fill(x: Tensor, width: int, value: int) -> Tensor:
    """Pad dimension 1 to a width."""
    missing = width - x.shape[1]
    if missing == 0:
        return x
    blank = x.new_full((1, 1, *[1] * (x.ndim - 2)), value)
    return torch.cat([x, blank.expand(x.shape[0], missing, *x.shape[2:])], 1)
