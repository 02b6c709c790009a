"""A kinship graph of the town's families, made from a seed: the embedded data set.

Families found the town, their children marry and have children, generation after generation. From
the parents, marriages and sexes all other relations follow, so the truth of every rule is known:
its weight is the exact share of its conclusions that hold in the complete graph. The rules that
define a relation have weight 1; plausible ones (a sibling's parent is mostly one's own) have less.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from hamlet.proofs.data import Graph, Rule, Triple, build_graph, parse_atom

RULES = (
    "father(X,Y) -> parent(X,Y)",
    "mother(X,Y) -> parent(X,Y)",
    "husband(X,Y) -> wife(Y,X)",
    "wife(X,Y) -> husband(Y,X)",
    "husband(X,Z), mother(Z,Y) -> father(X,Y)",
    "wife(X,Z), father(Z,Y) -> mother(X,Y)",
    "father(X,Z), mother(Y,Z) -> husband(X,Y)",
    "parent(X,Z), parent(Z,Y) -> grandparent(X,Y)",
    "brother(X,Z), parent(Z,Y) -> uncle(X,Y)",
    "sister(X,Z), parent(Z,Y) -> aunt(X,Y)",
    "husband(X,Z), aunt(Z,Y) -> uncle(X,Y)",
    "wife(X,Z), uncle(Z,Y) -> aunt(X,Y)",
    "parent(Z,X), uncle(Y,X) -> sibling(Z,Y)",
    "parent(Z,X), aunt(Y,X) -> sibling(Z,Y)",
    "brother(X,Y) -> sibling(X,Y)",
    "sister(X,Y) -> sibling(X,Y)",
    "sibling(X,Y) -> sibling(Y,X)",
    "parent(Z,X), parent(Z,Y) -> sibling(X,Y)",
    "parent(X,Z), sibling(Z,Y) -> parent(X,Y)",
    "father(X,Z), sibling(Z,Y) -> father(X,Y)",
    "mother(X,Z), sibling(Z,Y) -> mother(X,Y)",
    "sibling(X,Y) -> brother(X,Y)",
    "sibling(X,Y) -> sister(X,Y)",
    "brother(X,Z), sibling(Z,Y) -> brother(X,Y)",
    "sister(X,Z), sibling(Z,Y) -> sister(X,Y)",
    "grandparent(X,Z), sibling(Z,Y) -> grandparent(X,Y)",
    "grandparent(X,Z), parent(Y,Z) -> parent(X,Y)",
    "parent(X,Y) -> father(X,Y)",
    "parent(X,Y) -> mother(X,Y)",
    "uncle(X,Z), sibling(Z,Y) -> uncle(X,Y)",
    "aunt(X,Z), sibling(Z,Y) -> aunt(X,Y)",
)


@dataclass(frozen=True)
class Person:
    """One inhabitant; `family_id`, `parent_ids` and `generation` mean what they do in AgentDNA."""

    id: int
    family_id: int
    parent_ids: tuple[int, ...]
    generation: int
    woman: bool
    partner: int = -1


def found_families(families: int, generations: int, seed: int) -> list[Person]:
    """A town's people: a founding couple for each family, then marriages between families.

    Every couple has one to four children; partners are never siblings.
    """
    chance = random.Random(seed)
    people: list[Person] = []
    couples: list[tuple[int, int]] = []
    for family in range(families):
        man, woman = len(people), len(people) + 1
        people.append(Person(man, family, (), 0, False, woman))
        people.append(Person(woman, family, (), 0, True, man))
        couples.append((man, woman))
    for generation in range(1, generations):
        born = []
        for man, woman in couples:
            for _ in range(chance.randint(1, 4) if generation > 1 else chance.randint(2, 4)):
                child = len(people)
                family = people[man].family_id
                people.append(
                    Person(child, family, (man, woman), generation, chance.random() < 0.5)
                )
                born.append(child)
        couples = []
        chance.shuffle(born)
        single_women = [p for p in born if people[p].woman]
        for man in (p for p in born if not people[p].woman):
            for woman in single_women:
                if people[woman].parent_ids != people[man].parent_ids:
                    single_women.remove(woman)
                    couples.append((man, woman))
                    for one, other in ((man, woman), (woman, man)):
                        people[one] = Person(**{**people[one].__dict__, "partner": other})
                    break
    return people


def relations(people: list[Person]) -> Iterator[Triple]:
    """All that is true of these people, as facts over their names."""
    parents = {p.id: set(p.parent_ids) for p in people}
    siblings = {
        p.id: {
            q.id for q in people if q.id != p.id and p.parent_ids and q.parent_ids == p.parent_ids
        }
        for p in people
    }

    def fact(predicate: str, one: int, other: int) -> Triple:
        return Triple(predicate, person_name(one), person_name(other))

    for p in people:
        if p.partner >= 0:
            yield fact("wife" if p.woman else "husband", p.id, p.partner)
        for sibling in sorted(siblings[p.id]):
            yield fact("sibling", p.id, sibling)
            yield fact("sister" if p.woman else "brother", p.id, sibling)
        aunts_uncles = set()
        for parent in sorted(parents[p.id]):
            yield fact("parent", parent, p.id)
            yield fact("mother" if people[parent].woman else "father", parent, p.id)
            for grandparent in sorted(parents[parent]):
                yield fact("grandparent", grandparent, p.id)
            aunts_uncles |= siblings[parent]
        aunts_uncles |= {people[q].partner for q in aunts_uncles if people[q].partner >= 0}
        for other in sorted(aunts_uncles):
            yield fact("aunt" if people[other].woman else "uncle", other, p.id)


def person_name(number: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    name = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        name = chr(ord("a") + letter) + name
    return name


def kinship_graph(
    families: int = 8,
    generations: int = 4,
    held_out: float = 0.25,
    seed: int = 0,
) -> Graph:
    """The kinship graph: rules with their true weights, and held-out facts.

    Args:
        held_out: share of the facts kept from training: two thirds test, one third valid.
    """
    truth = list(dict.fromkeys(relations(found_families(families, generations, seed))))
    chance = random.Random(seed + 1)
    shuffled = truth.copy()
    chance.shuffle(shuffled)
    cut = int(len(shuffled) * held_out)
    valid = cut // 3
    splits = {
        "valid": shuffled[:valid],
        "test": shuffled[valid:cut],
        "train": shuffled[cut:],
    }
    rules = [true_rule(f"k{i}", text, truth) for i, text in enumerate(RULES)]
    return build_graph("kinship", splits, rules)


def true_rule(name: str, text: str, truth: list[Triple]) -> Rule:
    """A rule whose weight is the share of its conclusions that are true."""
    body_text, head_text = text.split("->")
    body = tuple(parse_atom(part + ")") for part in body_text.strip().rstrip(")").split("), "))
    head = parse_atom(head_text)
    derived = conclusions(body, head, truth)
    facts = set(truth)
    right = sum(atom in facts for atom in derived)
    return Rule(name, right / max(len(derived), 1), body, head)


def conclusions(body: tuple[Triple, ...], head: Triple, truth: list[Triple]) -> set[Triple]:
    """What a rule of one or two atoms concludes from the facts, about two different people."""
    by_predicate: dict[str, list[Triple]] = {}
    for fact in truth:
        by_predicate.setdefault(fact.predicate, []).append(fact)
    tables = [
        [dict(zip(atom[1:], fact[1:])) for fact in by_predicate.get(atom.predicate, [])]
        for atom in body
    ]
    shared = set(body[0][1:]).intersection(*(a[1:] for a in body[1:])) if len(body) > 1 else set()
    groups: dict[tuple, list[list[dict]]] = {}
    for number, table in enumerate(tables):
        for row in table:
            key = tuple(row[v] for v in sorted(shared))
            groups.setdefault(key, [[] for _ in tables])[number].append(row)
    found = set()
    for parts in groups.values():
        for rows in product(*parts):
            at = {k: v for row in rows for k, v in row.items()}
            one, other = at[head.head], at[head.tail]
            if one != other:
                found.add(Triple(head.predicate, one, other))
    return found
