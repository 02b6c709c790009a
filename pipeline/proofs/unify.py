"""Vectorised resolution: all successors of a batch of proof states, in fixed shapes.

A proof state is a conjunction of goals, int64 [A, 3] rows (predicate, argument, argument), padded
by predicate -1. An argument below the number of entities is an entity, above it a variable;
variables are numbered in order of first use, so equal states are equal tensors. One resolution
step takes the goal with the fewest matching facts and unifies it with every fact of its predicate
and bound argument, and with every rule head of its predicate. Goals that are facts are dropped; an
empty conjunction is a proof. The query itself is never usable as a fact.

With lemmas (atoms that forward chaining derived) an open goal is bound by facts and by lemmas and
rules serve ground goals only: every state is soon ground, and the evidence for it is known. A bound
lemma still has to be proven, so nothing is taken on trust.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.files import HamletError
from pipeline.proofs.closure import Closure
from pipeline.proofs.data import Graph
from pipeline.proofs.knowledge import Index, Rules, build_index, encode_rules, find

PAD = -1
NO_EVIDENCE = -12.0  # log-probability of what nothing derives
HOPELESS = -1e5  # evidence of a goal that nothing derives
FACT, LEMMA = 0, 1  # kinds of successor; 2 + r is rule r
MAX_MATCHES = 64


class Budget(NamedTuple):
    """Fixed sizes of the engine. What exceeds one of them is dropped and counted.

    Attributes:
        goals: A, goals of one state.
        facts: facts that one open goal is matched with.
        lemmas: lemmas that one open goal is matched with; 0 turns lemmas off.
    """

    goals: int = 6
    facts: int = 32
    lemmas: int = 0


class Successors(NamedTuple):
    """Every way to resolve one goal of each state; legal ones first.

    Attributes:
        goals: int32 [B, S, A, 3] the successor states.
        kind: int16 [B, S] FACT, LEMMA or 2 + rule.
        evidence: float [B, S] log-probability of the successor under the symbolic prior.
        count: float [B, S] ways in which the body of a rule holds; 0 for other kinds.
        legal: bool [B, S], a prefix.
        dropped: int64 [B] successors that did not fit the budget.
        bindings: int64 [B, S, 2] arguments of the fact or lemma of each successor; None unless
            asked for.
    """

    goals: Tensor
    kind: Tensor
    evidence: Tensor
    count: Tensor
    legal: Tensor
    dropped: Tensor
    bindings: Tensor | None = None


@dataclass(frozen=True)
class Engine:
    """Facts, rules and evidence as tensors, and the budget. Build it with `build_engine`."""

    num_entities: int
    num_predicates: int
    budget: Budget
    facts: Index
    lemmas: Index
    rules: Rules
    closure: Closure
    log_p: Tensor

    @property
    def width(self) -> int:
        """S: successors of one state."""
        open_goal = self.budget.facts + self.budget.lemmas
        rules = self.rules.of_predicate.shape[1]
        return max(open_goal, rules) if self.budget.lemmas else open_goal + rules

    @property
    def num_kinds(self) -> int:
        return 2 + max(self.rules.count, 1)

    def start(self, queries: Tensor) -> Tensor:
        """int64 [B, A, 3] the states that ask for the atoms int64 [B, 3]."""
        goals = torch.full((len(queries), self.budget.goals, 3), PAD, dtype=torch.int64)
        goals = goals.to(queries.device)
        goals[:, 0] = queries
        return canonical(goals, self.num_entities)


def build_engine(graph: Graph, closure: Closure, budget: Budget | None = None) -> Engine:
    """An engine over the training facts of a graph.

    Args:
        closure: evidence, and lemmas if the budget has room for them.
        budget: sizes; by default wide enough for all but the largest hubs.

    Raises:
        HamletError: a rule's body does not fit the budget.
    """
    rules = encode_rules(graph)
    triples = graph.splits["train"]
    derived = closure.keys[~closure.is_fact]
    size = graph.num_entities
    lemma_triples = torch.stack([derived // size**2, derived // size % size, derived % size], -1)
    facts = build_index(triples, graph.num_predicates, size)
    cost = (closure.round.float() - torch.sigmoid(closure.evidence))[~closure.is_fact]
    lemmas = build_index(lemma_triples, graph.num_predicates, size, cost)
    if budget is None:
        longest = int(rules.lengths.max()) if rules.count else 1
        budget = Budget(longest + 3, _usual_matches(facts), _usual_matches(lemmas))
    if rules.count and int(rules.lengths.max()) > budget.goals:
        raise HamletError(
            f"a rule body of {int(rules.lengths.max())} atoms exceeds the {budget.goals} goals",
            "raise the goals of the budget",
        )
    log_p = torch.log(-torch.expm1(-closure.evidence)).clamp(min=NO_EVIDENCE)
    # An atom costs more than all that a rule of an earlier round can put in its place together, so
    # that going down the evidence always ends in a proof.
    growth = 1.0 + (int(rules.lengths.max()) if rules.count else 1)
    log_p = log_p - growth ** closure.round.clamp(max=30).double()
    log_p = torch.where(closure.evidence > 0, log_p, HOPELESS).clamp(min=HOPELESS).float()
    return Engine(
        size, graph.num_predicates, budget, facts, lemmas, rules, closure, log_p
    )


def _usual_matches(index: Index) -> int:
    """Room for 99.5 % of the groups, at least 4 and at most MAX_MATCHES."""
    sizes = torch.cat([side.diff() for side in index.starts])
    sizes = sizes[sizes > 0].double()
    if len(sizes) == 0:
        return 4
    return int(min(max(float(sizes.quantile(0.995)) if len(sizes) < 2**23 else 64, 4), MAX_MATCHES))


# ------------------------------------------------------------------------------------------------
# One resolution step


def expand(
    engine: Engine, goals: Tensor, query_key: Tensor, bindings: bool = False
) -> Successors:
    """All successors of proof states.

    Args:
        goals: int64 [B, A, 3], canonical.
        query_key: int64 [B] key of the atom that is being proven; never used as a fact.
        bindings: also return what each fact or lemma binds, for traces.
    """
    size, (room, num_facts, num_lemmas) = engine.num_entities, engine.budget
    goals = goals.long()
    ground_bound = engine.budget.lemmas > 0
    front, rest = select_goal(engine, goals)
    predicate, left, right = front.unbind(-1)
    left_free, right_free = left >= size, right >= size
    is_open = left_free | right_free

    # Facts and lemmas that match an open goal bind its variables.
    found_facts = _matches(engine, engine.facts, front, num_facts)
    kinds, first, second, legal = [FACT] * num_facts, *found_facts[:3]
    lost = found_facts[3]
    keep_goal = [False] * num_facts
    if num_lemmas:
        found = _matches(engine, engine.lemmas, front, num_lemmas)
        first, second = torch.cat([first, found[0]], 1), torch.cat([second, found[1]], 1)
        legal, lost = torch.cat([legal, found[2]], 1), lost + found[3]
        kinds, keep_goal = kinds + [LEMMA] * num_lemmas, keep_goal + [True] * num_lemmas
    keys = (predicate[:, None] * size + first) * size + second
    legal = legal & (keys != query_key[:, None])
    bound = torch.stack([predicate[:, None].expand_as(first), first, second], -1)
    bound = torch.where(
        torch.tensor(keep_goal, device=goals.device)[:, None] & legal[..., None], bound, PAD
    )
    remaining = _substitute(rest[:, None], left[:, None], first)
    remaining = _substitute(remaining, right[:, None], second)
    longest = engine.rules.body.shape[1]
    padding = torch.full_like(bound, PAD)[:, :, None].expand(-1, -1, longest - 1, 3)
    by_binding = torch.cat([bound[:, :, None], padding, remaining], 2)
    kind_binding = torch.tensor(kinds, device=goals.device).expand(len(goals), -1)

    # Rules whose head matches.
    by_rule, kind_rule, legal_rule = _apply_rules(engine, front, rest)
    if ground_bound:
        legal_rule = legal_rule & ~is_open[:, None]
        wide = engine.width
        by_binding, by_rule = _fill(by_binding, wide, PAD), _fill(by_rule, wide, PAD)
        kind_binding, kind_rule = _fill(kind_binding, wide, 0), _fill(kind_rule, wide, 0)
        legal, legal_rule = _fill(legal, wide, 0), _fill(legal_rule, wide, 0)
        either = is_open[:, None]
        successors = torch.where(either[..., None, None], by_binding, by_rule)
        kind = torch.where(either, kind_binding, kind_rule)
        legal = torch.where(either, legal, legal_rule)
    else:
        successors = torch.cat([by_binding, by_rule], 1)
        kind = torch.cat([kind_binding, kind_rule], 1)
        legal = torch.cat([legal, legal_rule], 1)

    # Goals that are facts are done; the rest closes up, so that no hole can hide a goal.
    successors, log_p, too_long = _tidy(engine, successors, query_key)
    legal, too_long = legal & ~too_long, legal & too_long
    evidence, count = _rule_evidence(engine, front, kind, log_p, rest, query_key)
    lost = lost + too_long.sum(1)
    successors = canonical(successors, size)

    order = (~legal).to(torch.int8).argsort(dim=1, stable=True)
    gathered = successors.gather(1, order[..., None, None].expand_as(successors))
    legal = legal.gather(1, order)
    bound_to = None
    if bindings:
        bound_to = _fill(torch.stack([first, second], -1), engine.width, -1)
        bound_to = bound_to.gather(1, order[..., None].expand_as(bound_to))
    return Successors(
        bindings=bound_to,
        goals=torch.where(legal[..., None, None], gathered, PAD).int(),
        kind=torch.where(legal, kind.gather(1, order), 0).to(torch.int16),
        evidence=torch.where(legal, evidence.gather(1, order), HOPELESS),
        count=torch.where(legal, count.gather(1, order), 0.0),
        legal=legal,
        dropped=lost,
    )


def select_goal(engine: Engine, goals: Tensor) -> tuple[Tensor, Tensor]:
    """The goal with the fewest matching facts [B, 3], and the others in order [B, A, 3].

    Ground goals come first, then those with a bound argument. SLD resolution is complete under
    any choice (Lloyd 1987, theorem 10.3).
    """
    size, many = engine.num_entities, 1 << 40
    predicate, left, right = goals.unbind(-1)
    cost = torch.zeros_like(predicate)
    for side, (bound, free) in enumerate(((left, right), (right, left))):
        group = predicate.clamp(min=0) * size + bound.clamp(0, size - 1)
        matches = engine.facts.starts[side][group + 1] - engine.facts.starts[side][group]
        if engine.budget.lemmas:
            matches = matches + engine.lemmas.starts[side][group + 1]
            matches = matches - engine.lemmas.starts[side][group]
        cost = torch.where((bound < size) & (free >= size), 1 + matches, cost)
    cost = torch.where((left >= size) & (right >= size), many, cost)
    cost = torch.where(predicate < 0, 2 * many, cost)
    chosen = cost.argmin(1, keepdim=True)
    front = goals.gather(1, chosen[..., None].expand(-1, -1, 3)).squeeze(1)
    place = torch.arange(goals.shape[1], device=goals.device)
    return front, torch.where((place == chosen)[..., None], PAD, goals)


def _matches(
    engine: Engine, index: Index, front: Tensor, room: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Atoms of an index that match open goals: arguments [B, room] twice, legal, dropped [B]."""
    size = engine.num_entities
    predicate, left, right = front.unbind(-1)
    predicate = predicate.clamp(min=0)
    left_free, right_free = left >= size, right >= size
    both = left_free & right_free
    last = index.starts.shape[1] - 1
    low = torch.where(left_free, right, left).clamp(0, size - 1)
    group = predicate * size + torch.where(both, 0, low)
    after = torch.where(both, (predicate + 1) * size, group + 1).clamp(max=last)
    by_head = ~left_free | both
    start = torch.where(by_head, index.starts[0][group], index.starts[1][group])
    end = torch.where(by_head, index.starts[0][after], index.starts[1][after])
    is_open = (left_free | right_free) & (front[:, 0] >= 0)
    length = torch.where(is_open, end - start, 0)
    step = torch.arange(room, device=front.device)
    legal = step < length[:, None]
    rows = max(index.keys.shape[0] - 1, 0)
    place = (start[:, None] + step).clamp(max=rows)
    if index.keys.shape[0] == 0:
        nothing = torch.zeros_like(place)
        return nothing, nothing, torch.zeros_like(legal), torch.zeros_like(length)
    atom = torch.where(by_head[:, None], index.atoms[0][place], index.atoms[1][place])
    key = index.keys[atom]
    first, second = key // size % size, key % size
    legal = legal & ((left != right)[:, None] | (first == second))
    return first, second, legal, (length - room).clamp(min=0)


def _substitute(goals: Tensor, variable: Tensor, value: Tensor) -> Tensor:
    """Goals [B, 1|S, A, 3] with a variable [B, 1] replaced by values [B, S]; entities stay."""
    arguments = goals[..., 1:]
    hit = arguments == variable[..., None, None]
    arguments = torch.where(hit, value[..., None, None], arguments)
    predicate = goals[..., :1].expand(*arguments.shape[:-1], 1)
    return torch.cat([predicate, arguments], -1)


def _apply_rules(engine: Engine, front: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Successors by rules: goals [B, W, L + A, 3], kind [B, W], legal [B, W]."""
    size, rules = engine.num_entities, engine.rules
    predicate, left, right = front.unbind(-1)
    of = rules.of_predicate[predicate.clamp(min=0)]
    legal = (of >= 0) & (predicate >= 0)[:, None]
    rule = of.clamp(min=0)
    if rules.count == 0:
        body = torch.full((*of.shape, rules.body.shape[1], 3), PAD, device=front.device)
        same_head = torch.zeros_like(legal)
    else:
        body = rules.body[rule]
        same_head = rules.head[rule][..., 1] == rules.head[rule][..., 2]
    # Rule variable -1 is the head's first argument and -2 its second, unless they are one.
    # Rule heads p(X, X) unify the goal's arguments: an entity wins over a variable.
    left, right = left[:, None], right[:, None]
    merged = torch.minimum(left, right)
    clash = same_head & (left < size) & (right < size) & (left != right)
    legal = legal & ~clash
    first = torch.where(same_head, merged, left)
    second = torch.where(same_head, merged, right)
    free = size + 2 * rest.shape[1] + 2  # above every canonical variable
    arguments = body[..., 1:]
    value = torch.where(
        arguments == -1,
        first[..., None, None],
        torch.where(
            (arguments == -2) & ~same_head[..., None, None],
            second[..., None, None],
            free - arguments,
        ),
    )
    body = torch.where(body[..., :1] >= 0, torch.cat([body[..., :1], value], -1), PAD)
    others = rest[:, None].expand(-1, of.shape[1], -1, -1)
    larger = torch.maximum(left, right)
    to = torch.where(same_head, merged, larger)
    others = _substitute(others, larger, to)
    return torch.cat([body, others], 2), rule + 2, legal


def _tidy(engine: Engine, goals: Tensor, query_key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Drop facts and duplicates, close up to A goals.

    Returns:
        goals [B, S, A, 3]; the log-evidence of the ground goals that stay [B, S]; whether more
        than A stayed, bool [B, S].
    """
    size, room = engine.num_entities, engine.budget.goals
    ground = (goals[..., 1] < size) & (goals[..., 2] < size) & (goals[..., 0] >= 0)
    key = (goals[..., 0] * size + goals[..., 1]) * size + goals[..., 2]
    place, found = find(engine.closure.keys, torch.where(ground, key, -1))
    is_fact = found & engine.closure.is_fact[place] & (key != query_key[:, None, None])
    stays = (goals[..., 0] >= 0) & ~is_fact
    # Two equal goals are one.
    span = 2 * size  # variables are above the entities
    whole = torch.where(stays, (goals[..., 0] * span + goals[..., 1]) * span + goals[..., 2], -1)
    same = whole[..., :, None] == whole[..., None, :]
    earlier = torch.ones(goals.shape[2], goals.shape[2], dtype=torch.bool, device=goals.device)
    stays = stays & ~(same & earlier.tril(-1)).any(-1)
    log_p = torch.where(found, engine.log_p[place], HOPELESS)
    log_p = torch.where(stays & ground, log_p, 0.0).sum(-1)
    order = (~stays).to(torch.int8).argsort(dim=2, stable=True)[..., :room]
    kept = goals.gather(2, order[..., None].expand(*order.shape, 3))
    kept = torch.where(stays.gather(2, order)[..., None], kept, PAD)
    return kept, log_p, stays.sum(-1) > room


def _rule_evidence(
    engine: Engine, front: Tensor, kind: Tensor, log_p: Tensor, rest: Tensor, query_key: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-evidence [B, S] of successors, and the count of ways for rules on a ground goal.

    For a rule on a derived ground goal it is what the rule contributes there, plus the other
    goals; for anything else the log-probability of the goals that are left.
    """
    closure, size = engine.closure, engine.num_entities
    key = (front[:, 0] * size + front[:, 1]) * size + front[:, 2]
    is_ground = (front[:, 1] < size) & (front[:, 2] < size)
    place, found = find(closure.keys, torch.where(is_ground, key, -1))
    by_rule = (kind >= 2) & is_ground[:, None]
    wanted = place[:, None] * max(engine.rules.count, 1) + kind - 2
    row, has = find(closure.rule_keys, wanted)
    has = has & found[:, None] & by_rule
    if closure.rule_keys.shape[0] == 0:
        return torch.where(by_rule, HOPELESS, log_p), torch.zeros_like(log_p)
    strength = torch.log(-torch.expm1(-closure.rule_evidence[row])).clamp(min=NO_EVIDENCE)
    others = _ground_evidence(engine, rest, query_key)
    return (
        torch.where(by_rule, torch.where(has, strength, HOPELESS) + others[:, None], log_p),
        torch.where(has, closure.rule_count[row], 0.0),
    )


def _ground_evidence(engine: Engine, goals: Tensor, query_key: Tensor) -> Tensor:
    """float [B] log-evidence of the ground goals among [B, A, 3]."""
    size = engine.num_entities
    ground = (goals[..., 1] < size) & (goals[..., 2] < size) & (goals[..., 0] >= 0)
    key = (goals[..., 0] * size + goals[..., 1]) * size + goals[..., 2]
    place, found = find(engine.closure.keys, torch.where(ground, key, -1))
    log_p = torch.where(found, engine.log_p[place], HOPELESS)
    log_p = torch.where(
        found & engine.closure.is_fact[place] & (key != query_key[:, None]), 0.0, log_p
    )
    return torch.where(ground, log_p, 0.0).sum(-1)


def _fill(x: Tensor, width: int, value: int) -> Tensor:
    """Pad dimension 1 to at least a width."""
    missing = width - x.shape[1]
    if missing <= 0:
        return x
    return torch.cat([x, torch.full_like(x[:, :1], value).expand(-1, missing, *x.shape[2:])], 1)


# ------------------------------------------------------------------------------------------------
# Equal states are equal tensors


def canonical(goals: Tensor, num_entities: int) -> Tensor:
    """Goals [..., A, 3] with variables renumbered in order of first use."""
    arguments = goals[..., 1:].flatten(-2)
    count = arguments.shape[-1]
    variable = arguments >= num_entities
    same = arguments[..., :, None] == arguments[..., None, :]
    first_use = same.to(torch.int8).argmax(-1)  # position of the first equal argument
    place = torch.arange(count, device=goals.device)
    is_first = variable & (first_use == place)
    number = is_first.cumsum(-1) - 1
    renamed = torch.where(variable, num_entities + number.gather(-1, first_use), arguments)
    return torch.cat([goals[..., :1], renamed.unflatten(-1, (-1, 2))], -1)


def state_hash(goals: Tensor) -> Tensor:
    """int64 [...] of canonical goals [..., A, 3]; equal states collide, others with 2**-63."""
    flat = goals.long().flatten(-2) + 2
    total = torch.zeros_like(flat[..., 0])
    for column in range(flat.shape[-1]):
        total = (total ^ flat[..., column]) * 0x2545F4914F6CDD1D
        total = total ^ ((total >> 29) & 0x7FFFFFFFF)
    return total


def log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p <= 0, finite."""
    log_p = log_p.clamp(max=-math.exp(-15))
    return log_p - torch.log(-torch.expm1(log_p))
