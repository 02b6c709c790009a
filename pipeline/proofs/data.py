"""Knowledge graphs and rules from text files, and the vocabulary that turns them into integers.

A data set is a folder with `train.txt` (`valid.txt`, `test.txt`), `rules.txt` and, if entities have
types, `domain2constants.txt`. Triples are Prolog atoms `pred(head,tail).` or tab-separated
`head<TAB>pred<TAB>tail`; rules are `name:weight:body, body -> head`, whose arguments are variables
(in either case: `a` and `A` are the same), or entities in single quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hamlet.artifacts import HamletError

SPLITS = ("train", "valid", "test")
_ATOM = re.compile(r"([^\s(),]+)\(\s*([^\s(),]+)\s*,\s*([^\s(),]+)\s*\)")
_RULE = re.compile(r"([^:]*):([^:]*):(.*)->(.*)")


class Triple(NamedTuple):
    """One fact as text."""

    predicate: str
    head: str
    tail: str

    def __str__(self) -> str:
        return f"{self.predicate}({self.head}, {self.tail})"


@dataclass(frozen=True)
class Rule:
    """`body -> head` as text; arguments are variable names, shared ones are the same variable.

    An argument in single quotes is an entity. `build_graph` takes these out.
    """

    name: str
    weight: float
    body: tuple[Triple, ...]
    head: Triple

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.body))} -> {self.head}"


@dataclass(frozen=True)
class Graph:
    """A data set as integers.

    Attributes:
        name: of the folder or generator.
        predicates, entities: names by id.
        splits: int64 [n, 3] rows (predicate, head, tail) of "train", "valid" and "test".
        rules: the rules as text.
        domains: entity ids of each type, sorted; empty when entities have no types.
    """

    name: str
    predicates: tuple[str, ...]
    entities: tuple[str, ...]
    splits: dict[str, Tensor]
    rules: tuple[Rule, ...]
    domains: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_predicates(self) -> int:
        return len(self.predicates)

    @property
    def num_entities(self) -> int:
        return len(self.entities)

    def key(self, triples: Tensor) -> Tensor:
        """int64 [...] one number per triple [..., 3], for sets and look-ups."""
        return atom_key(triples, self.num_entities)

    def known(self) -> Tensor:
        """int64 [n, 3] the triples of all splits."""
        return torch.cat(list(self.splits.values()))

    def text(self, triple: Sequence[int] | Tensor) -> str:
        predicate, head, tail = (int(x) for x in triple)
        return f"{self.predicates[predicate]}({self.entities[head]}, {self.entities[tail]})"


def atom_key(triples: Tensor, num_entities: int) -> Tensor:
    """int64 [...]: (predicate * E + head) * E + tail of triples [..., 3]."""
    triples = triples.long()
    return (triples[..., 0] * num_entities + triples[..., 1]) * num_entities + triples[..., 2]


def load_graph(path: str | Path) -> Graph:
    """Read a data set folder.

    Raises:
        HamletError: a file is missing or a line cannot be read; names the file and the line.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise HamletError(f"{folder} is not a folder", "give a folder that holds train.txt")
    texts: dict[str, list[Triple]] = {}
    for split in SPLITS:
        file = _first(folder, split)
        if file is None and split == "train":
            raise HamletError(f"{folder}/train.txt is missing", "put the known facts there")
        texts[split] = list(dict.fromkeys(read_triples(file))) if file else []
    if not texts["train"]:
        raise HamletError(
            f"{folder}/train.txt holds no facts", "write one `pred(head,tail).` a line"
        )
    rules_file = folder / "rules.txt"
    if not rules_file.exists():
        raise HamletError(
            f"{rules_file} is missing", "write rules there, one `name:weight:body -> head` a line"
        )
    domains_file = folder / "domain2constants.txt"
    domains = read_domains(domains_file) if domains_file.exists() else {}
    return build_graph(folder.resolve().name, texts, read_rules(rules_file), domains)


def build_graph(
    name: str,
    splits: dict[str, list[Triple]],
    rules: Sequence[Rule],
    domains: dict[str, list[str]] | None = None,
) -> Graph:
    """Number the names: predicates and entities in alphabetical order of all splits and rules.

    A triple of `train` is dropped from `test`, one of `train` or `test` from `valid`: what was
    learnt or tuned by heart says nothing, and the test split stays as published.

    An entity `'e'` in a rule becomes a variable that the body binds by `=e(V, V)`, and `=e(e, e)`
    becomes a fact: the engine needs to know variables only.
    """
    rules, same = _without_entities(rules)
    splits = splits | {"train": [*splits.get("train", []), *same]}
    every = [t for split in SPLITS for t in splits.get(split, [])]
    predicates = sorted(
        {t.predicate for t in every} | {a.predicate for r in rules for a in (*r.body, r.head)}
    )
    entities = sorted(
        {e for t in every for e in (t.head, t.tail)}
        | {e for v in (domains or {}).values() for e in v}
    )
    predicate_id = {p: i for i, p in enumerate(predicates)}
    entity_id = {e: i for i, e in enumerate(entities)}
    seen: set[Triple] = set()
    tensors = {}
    for split in ("train", "test", "valid"):
        fresh = [t for t in dict.fromkeys(splits.get(split, [])) if t not in seen]
        seen.update(fresh)
        rows = [(predicate_id[t.predicate], entity_id[t.head], entity_id[t.tail]) for t in fresh]
        tensors[split] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    types = {
        k: torch.tensor(sorted(entity_id[e] for e in set(v)), dtype=torch.int64)
        for k, v in (domains or {}).items()
    }
    return Graph(name, tuple(predicates), tuple(entities), tensors, tuple(rules), types)


def _without_entities(rules: Sequence[Rule]) -> tuple[list[Rule], list[Triple]]:
    """The rules with a variable in place of each entity, and the facts that bind it."""
    plain: list[Rule] = []
    same: dict[Triple, None] = {}
    for rule in rules:
        atoms = (rule.head, *rule.body)
        taken = {v for a in atoms for v in a[1:]}
        variables: dict[str, str] = {}
        for text in sorted(v for v in taken if _is_entity(v)):
            name = f"IS_{text[1:-1].upper()}"
            while name in taken:
                name += "_"
            taken.add(name)
            variables[text] = name
        head, *body = (Triple(a[0], *(variables.get(v, v) for v in a[1:])) for a in atoms)
        tests = [Triple(f"={text[1:-1]}", v, v) for text, v in variables.items()]
        same |= {Triple(f"={text[1:-1]}", text[1:-1], text[1:-1]): None for text in variables}
        plain.append(Rule(rule.name, rule.weight, (*tests, *body), head))
    return plain, list(same)


def _variables_upper(atom: Triple) -> Triple:
    return Triple(atom[0], *(v if _is_entity(v) else v.upper() for v in atom[1:]))


def _is_entity(argument: str) -> bool:
    return len(argument) > 2 and argument[0] == argument[-1] == "'"


def read_triples(path: Path) -> Iterator[Triple]:
    """The triples of a file: Prolog atoms or tab-separated `head, predicate, tail`.

    Raises:
        HamletError: a line is neither; names the file and the line.
    """
    for number, line in _lines(path):
        if "\t" in line:
            parts = [p.strip() for p in line.split("\t")]
            if len(parts) != 3 or not all(parts):
                raise HamletError(
                    f"{path}:{number}: {len(parts)} tab-separated fields in {_quote(line)}",
                    "write head, predicate and tail, separated by tabs",
                )
            yield Triple(parts[1], parts[0], parts[2])
        else:
            yield parse_atom(line, f"{path}:{number}")


def parse_atom(text: str, where: str = "query") -> Triple:
    """`pred(head, tail)`, with or without a final dot.

    Raises:
        HamletError: it is not one.
    """
    match = _ATOM.fullmatch(text.strip().rstrip(".").strip())
    if match is None:
        raise HamletError(f"{where}: {_quote(text)} is not a fact", "write `predicate(head,tail)`")
    return Triple(*match.groups())


def read_rules(path: Path) -> list[Rule]:
    """The rules of a file, `name:weight:body, body -> head` a line.

    Raises:
        HamletError: a line cannot be read, a weight is no number, a rule has no body, or its head
            names a variable that its body does not bind; names the file and the line.
    """
    rules: list[Rule] = []
    seen: set[tuple] = set()
    for number, line in _lines(path):
        where = f"{path}:{number}"
        match = _RULE.fullmatch(line.rstrip("."))
        if match is None:
            raise HamletError(
                f"{where}: {_quote(line)} is not a rule", "write `name:weight:body, body -> head`"
            )
        name, weight, body_text, head_text = (part.strip() for part in match.groups())
        try:
            value = float(weight)
        except ValueError:
            raise HamletError(
                f"{where}: the weight {_quote(weight)} is not a number", "write for example 0.9"
            ) from None
        body = tuple(parse_atom(a, where) for a in _split_atoms(body_text, where))
        body = tuple(_variables_upper(a) for a in body)
        head = _variables_upper(parse_atom(head_text, where))
        rule = Rule(name or f"r{len(rules)}", value, body, head)
        loose = {v for v in rule.head[1:] if not _is_entity(v)} - {v for a in body for v in a[1:]}
        if loose:
            raise HamletError(
                f"{where}: the head's variable {min(loose)} is not in the body",
                "use it in the body, or it would stand for every entity",
            )
        if (rule.head, frozenset(body)) not in seen and rule.head not in body:
            seen.add((rule.head, frozenset(body)))
            rules.append(rule)
    return rules


def read_domains(path: Path) -> dict[str, list[str]]:
    """Entity names by type: `domain entity entity ...` a line."""
    domains: dict[str, list[str]] = {}
    for number, line in _lines(path):
        name, *members = line.split()
        if not members:
            raise HamletError(f"{path}:{number}: the domain {name} has no entities", "list them")
        domains.setdefault(name, []).extend(members)
    return domains


def write_graph(graph: Graph, folder: str | Path) -> None:
    """Write a data set in the format that `load_graph` reads."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in graph.splits.items():
        text = "".join(f"{graph.text(row).replace(' ', '')}.\n" for row in rows)
        (folder / f"{split}.txt").write_text(text, encoding="utf-8")
    rules = "".join(f"{r.name}:{r.weight:g}:{r}\n" for r in graph.rules)
    (folder / "rules.txt").write_text(rules, encoding="utf-8")
    if graph.domains:
        lines = (
            f"{name} {' '.join(graph.entities[i] for i in members.tolist())}\n"
            for name, members in graph.domains.items()
        )
        (folder / "domain2constants.txt").write_text("".join(lines), encoding="utf-8")


def _first(folder: Path, split: str) -> Path | None:
    for suffix in (".txt", ".tsv"):
        if (folder / f"{split}{suffix}").exists():
            return folder / f"{split}{suffix}"
    return None


def _split_atoms(text: str, where: str) -> list[str]:
    atoms = re.findall(r"[^(),\s]+\s*\([^()]*\)", text)
    rest = re.sub(r"[^(),\s]+\s*\([^()]*\)", "", text)
    if not atoms or rest.replace(",", "").strip():
        raise HamletError(
            f"{where}: {_quote(text)} is not a list of atoms", "write `p(X,Y), q(Y,Z)`"
        )
    return atoms


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines that hold something; `#` and `%` start a comment line."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                line = line.strip(" \r\n\ufeff")
                if line.strip() and line[0] not in "#%":
                    yield number, line
    except UnicodeDecodeError as error:
        raise HamletError(
            f"{path} is not UTF-8 text ({error.reason})", "save it as UTF-8"
        ) from None


def _quote(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
