"""What a proof may use: facts, rules and evidence as tensors, and the sizes of a proof state.

An atom or a goal (predicate, argument, argument) is packed into one int64. An argument below the
number of entities is an entity, above it a variable; PAD fills up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hamlet.artifacts import HamletError
from hamlet.proofs.closure import Closure
from hamlet.proofs.data import Graph
from hamlet.proofs.knowledge import Index, Rules, build_index, encode_rules, find

PAD = -1
NO_EVIDENCE = -12.0  # least log-probability of what something derives
HOPELESS = -1e5  # evidence of a goal that nothing derives
MAX_ROUND_COST = 60  # rounds beyond count as this one
SPARE = 64  # ids above the entities that are kept for variables
MAX_MATCHES = 64


class Budget(NamedTuple):
    """Fixed sizes of the resolution. What exceeds one of them is dropped and counted.

    Attributes:
        goals: A, goals of one state.
        facts: facts that one open goal is matched with.
        lemmas: lemmas that one open goal is matched with; 0 turns lemmas off.
        rules: rules that one goal is resolved with. Where its predicate has more, these are the
            ones that derive a ground goal (with lemmas), else the most reliable ones.
    """

    goals: int = 6
    facts: int = 32
    lemmas: int = 0
    rules: int = MAX_MATCHES


@dataclass(frozen=True)
class KnowledgeBase:
    """Facts, rules and evidence as tensors, and the budget. Build it with `build_knowledge_base`.

    Attributes:
        bits: of one argument in a packed goal.
        fact_codes, lemma_codes: int64 [2, F] packed atoms by argument position and row, as the
            indexes list them.
        keys: int64 [M] packed atoms of the closure, in its order.
        log_p: float [M] log-probability of each by its evidence; HOPELESS where nothing derives it.
        round_cost: float [M] what an atom's round counts for against all evidence together.
        body: int64 [R, L, 3] as `Rules.body`, but variable -2 is always the head's second one.
        diagonal: bool [R] the head has one variable twice.
        by_rule: int64 [G] the rules that derive each atom of `keys` in its round, the strongest
            first; those of atom i are by_rule[by_rule_start[i] : by_rule_start[i + 1]].
    """

    num_entities: int
    num_predicates: int
    bits: int
    budget: Budget
    facts: Index
    lemmas: Index
    fact_codes: Tensor
    lemma_codes: Tensor
    rules: Rules
    body: Tensor
    diagonal: Tensor
    has_diagonal: bool
    closure: Closure
    keys: Tensor
    log_p: Tensor
    round_cost: Tensor
    by_rule: Tensor
    by_rule_start: Tensor

    @property
    def width(self) -> int:
        """S: successors of one state."""
        open_goal = self.budget.facts + self.budget.lemmas
        rules = min(self.rules.of_predicate.shape[1], self.budget.rules)
        return max(open_goal, rules) if self.budget.lemmas else open_goal + rules

    @property
    def num_kinds(self) -> int:
        return 2 + max(self.rules.count, 1)

    def pack(self, atoms: Tensor) -> Tensor:
        """int64 [...] of atoms or goals [..., 3]; a negative predicate is PAD."""
        predicate, left, right = atoms.long().unbind(-1)
        packed = (((predicate << self.bits) | left) << self.bits) | right
        return torch.where(predicate < 0, PAD, packed)

    def unpack(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(predicate, left, right) of packed goals; the predicate of PAD is negative."""
        mask = (1 << self.bits) - 1
        return packed >> (2 * self.bits), (packed >> self.bits) & mask, packed & mask

    def start(self, queries: Tensor) -> Tensor:
        """int64 [B, A] the states that ask for the atoms int64 [B, 3]."""
        rest = queries.new_full((len(queries), self.budget.goals - 1), PAD)
        return torch.cat([self.pack(queries)[:, None], rest], 1)


def build_knowledge_base(
    graph: Graph, closure: Closure, budget: Budget | None = None
) -> KnowledgeBase:
    """The knowledge base of the training facts of a graph.

    Args:
        closure: evidence, and lemmas if the budget has room for them.
        budget: sizes; by default wide enough for all but the largest hubs.

    Raises:
        HamletError: a rule's body does not fit the budget, or the graph does not fit an integer.
    """
    rules = encode_rules(graph, closure.confidence)
    size, predicates = graph.num_entities, graph.num_predicates
    longest = int(rules.lengths.max()) if rules.count else 1
    facts = build_index(graph.splits["train"], predicates, size)
    derived = ~closure.is_fact
    every = torch.stack(
        [closure.keys // size**2, closure.keys // size % size, closure.keys % size], -1
    )
    cost = (closure.round.float() - torch.sigmoid(closure.evidence))[derived]
    lemmas = build_index(every[derived], predicates, size, cost)
    if budget is None:
        budget = Budget(longest + 3, _usual_matches(facts), _usual_matches(lemmas))
    if longest > budget.goals:
        raise HamletError(
            f"a rule body of {longest} atoms exceeds the {budget.goals} goals of the budget",
            "raise them",
        )
    variables = int(rules.num_variables.max()) if rules.count else 2
    if 2 * budget.goals + variables + 4 > SPARE:
        raise HamletError(
            f"{budget.goals} goals and {variables} variables of a rule are too many",
            "shorten the longest rule",
        )
    bits = (size + SPARE).bit_length()
    if predicates.bit_length() + 2 * bits > 62:
        raise HamletError(f"{size} entities and {predicates} predicates are too many", "split them")
    diagonal = rules.head[:, 1] == rules.head[:, 2]
    body = rules.body.clone()
    arguments = body[..., 1:]
    arguments[(arguments < -1) & diagonal[:, None, None] & (body[..., :1] >= 0)] -= 1

    log_p = torch.log(-torch.expm1(-closure.evidence)).clamp(min=NO_EVIDENCE)
    log_p = torch.where(closure.evidence > 0, log_p, HOPELESS)
    round_cost = -2 * NO_EVIDENCE * budget.goals * closure.round.clamp(max=MAX_ROUND_COST).float()
    atom = closure.rule_keys // max(rules.count, 1)
    strongest = closure.rule_evidence.argsort(descending=True)
    strongest = strongest[atom[strongest].argsort(stable=True)]
    ends = torch.bincount(atom, minlength=len(closure.keys)).cumsum(0)
    kb = KnowledgeBase(
        size, predicates, bits, budget, facts, lemmas, facts.keys, lemmas.keys, rules, body,
        diagonal, bool(diagonal.any()), closure, every, log_p, round_cost,
        closure.rule_keys[strongest] % max(rules.count, 1), torch.cat([ends[:1] * 0, ends]),
    )  # fmt: skip
    packed = kb.pack(every)
    return KnowledgeBase(
        **{
            **kb.__dict__,
            "keys": packed,
            "fact_codes": packed[closure.is_fact][facts.atoms],
            "lemma_codes": packed[derived][lemmas.atoms],
        }
    )


def _usual_matches(index: Index) -> int:
    """Room for 99.5 % of the groups, at least 4 and at most MAX_MATCHES."""
    sizes = torch.cat([side.diff() for side in index.starts])
    sizes = sizes[sizes > 0].sort().values
    if len(sizes) == 0:
        return 4
    return min(max(int(sizes[int(0.995 * (len(sizes) - 1))]), 4), MAX_MATCHES)


def is_ground(kb: KnowledgeBase, goals: Tensor) -> Tensor:
    """Whether packed goals [...] are atoms without variables; False for PAD."""
    _, left, right = kb.unpack(goals)
    return (left < kb.num_entities) & (right < kb.num_entities) & (goals >= 0)


def look_up(kb: KnowledgeBase, goals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(position in the closure, found, ground) of packed goals [...]."""
    ground = is_ground(kb, goals)
    place, found = find(kb.keys, goals)
    return place, found & ground, ground


def canonical(kb: KnowledgeBase, goals: Tensor) -> Tensor:
    """Packed goals [..., A] whose variables are named by the place of their first use."""
    size = kb.num_entities
    predicate, left, right = kb.unpack(goals)
    columns = [x for pair in zip(left.unbind(-1), right.unbind(-1)) for x in pair]
    named = []
    for place, column in enumerate(columns):
        first_use = torch.full_like(column, place)
        for earlier in range(place - 1, -1, -1):
            first_use = torch.where(columns[earlier] == column, earlier, first_use)
        named.append(torch.where(column >= size, size + first_use, column))
    left, right = torch.stack(named[0::2], -1), torch.stack(named[1::2], -1)
    packed = (((predicate << kb.bits) | left) << kb.bits) | right
    return torch.where(goals < 0, PAD, packed)


def state_hash(goals: Tensor) -> Tensor:
    """int64 [...] of canonical goals [..., A]; equal states collide, others with 2**-63."""
    total = torch.zeros_like(goals[..., 0])
    for column in goals.unbind(-1):
        total = (total ^ column) * 0x2545F4914F6CDD1D
        total = total ^ ((total >> 29) & 0x7FFFFFFFF)
    return total
