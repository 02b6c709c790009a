"""Facts and rules as tensors: look-ups by (predicate, bound argument) and membership by key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hamlet.artifacts import HamletError
from hamlet.proofs.data import Graph, Rule, atom_key

MAX_TABLE = 1 << 28  # entries of one (predicate, entity) offset table


@dataclass(frozen=True)
class Index:
    """Atoms grouped by predicate and one bound argument.

    Attributes:
        starts: int64 [2, P*E + 1] row of the first partner of (argument position, predicate,
            entity) in `partners`; the next entry is the end.
        partners: int64 [2, F] the other argument, ascending within a group.
        atoms: int64 [2, F] position in `keys` of the atom of each row of `partners`.
        keys: int64 [F] every atom's key, ascending.
    """

    starts: Tensor
    partners: Tensor
    atoms: Tensor
    keys: Tensor


def build_index(
    triples: Tensor, num_predicates: int, num_entities: int, cost: Tensor | None = None
) -> Index:
    """Index distinct triples int64 [F, 3].

    Args:
        cost: float [F]; a group lists its cheapest atoms first. By default partners ascend.

    Raises:
        HamletError: predicates times entities do not fit a table.
    """
    size = num_predicates * num_entities
    if size > MAX_TABLE or size * num_entities > 2**62:
        raise HamletError(
            f"{num_predicates} predicates times {num_entities} entities are too many to index",
            "split the graph",
        )
    by_key = atom_key(triples, num_entities).argsort()
    triples = triples[by_key]
    by_cost = None if cost is None else cost[by_key].argsort(stable=True)
    starts, partners, atoms = [], [], []
    for bound, other in ((1, 2), (2, 1)):
        group = triples[:, 0] * num_entities + triples[:, bound]
        order = triples[:, other].argsort() if by_cost is None else by_cost
        order = order[group[order].argsort(stable=True)]
        counts = torch.bincount(group, minlength=size)
        starts.append(torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
        partners.append(triples[order, other])
        atoms.append(order)
    keys = atom_key(triples, num_entities)
    return Index(torch.stack(starts), torch.stack(partners), torch.stack(atoms), keys)


def find(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where each of `wanted` [...] is in ascending `keys` [F]: (int64 position, bool found)."""
    if keys.numel() == 0:
        return torch.zeros_like(wanted), torch.zeros_like(wanted, dtype=torch.bool)
    place = torch.searchsorted(keys, wanted).clamp(max=keys.numel() - 1)
    return place, keys[place] == wanted


@dataclass(frozen=True)
class Rules:
    """Rules as integers. A variable v of a rule is written -1 - v; the head's come first.

    Attributes:
        head: int64 [R, 3]; body: int64 [R, L, 3], rows of predicate -1 are padding.
        lengths: int64 [R] atoms in the body.
        num_variables: int64 [R].
        of_predicate: int64 [P, W] ids of the rules whose head has the predicate, -1 = none.
    """

    head: Tensor
    body: Tensor
    lengths: Tensor
    num_variables: Tensor
    of_predicate: Tensor

    @property
    def count(self) -> int:
        return self.head.shape[0]


def encode_rules(graph: Graph, confidence: Tensor | None = None) -> Rules:
    """The rules of a graph as tensors; each body is reordered so that its atoms join up.

    Args:
        confidence: float [R]; `of_predicate` lists the surest rules first. By default as given.
    """
    ids = {p: i for i, p in enumerate(graph.predicates)}
    longest = max((len(r.body) for r in graph.rules), default=1)
    count = len(graph.rules)
    head = torch.full((count, 3), -1, dtype=torch.int64)
    body = torch.full((count, longest, 3), -1, dtype=torch.int64)
    num_variables = torch.zeros(count, dtype=torch.int64)
    for i, rule in enumerate(graph.rules):
        names: dict[str, int] = {}
        for atom in (rule.head, *rule.body):
            for variable in atom[1:]:
                names.setdefault(variable, -1 - len(names))
        head[i] = torch.tensor([ids[rule.head[0]], *(names[v] for v in rule.head[1:])])
        for j, atom in enumerate(_joined_order(rule)):
            body[i, j] = torch.tensor([ids[atom[0]], *(names[v] for v in atom[1:])])
        num_variables[i] = len(names)
    order = torch.arange(count)
    if confidence is not None:
        order = confidence.argsort(descending=True, stable=True)
    groups = [order[head[order, 0] == p] for p in range(graph.num_predicates)]
    width = max((len(g) for g in groups), default=0)
    of_predicate = torch.full((graph.num_predicates, max(width, 1)), -1, dtype=torch.int64)
    for p, group in enumerate(groups):
        of_predicate[p, : len(group)] = group
    return Rules(head, body, (body[:, :, 0] >= 0).sum(-1), num_variables, of_predicate)


def _joined_order(rule: Rule) -> list:
    """Body atoms, each sharing a variable with the head or an earlier one where possible."""
    known, rest, order = set(rule.head[1:]), list(rule.body), []
    while rest:
        best = max(rest, key=lambda a: (sum(v in known for v in a[1:]), -rest.index(a)))
        rest.remove(best)
        order.append(best)
        known.update(best[1:])
    return order
