"""Filtered ranking of test triples among corruptions (Bordes et al. 2013), ties at expected rank.

Only atoms that the rules derive can be proven, so only those need a score; every other candidate
shares the lowest place. Two protocols, named as such: `all` entities, and `100` sampled negatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.proofs.closure import Closure
from pipeline.proofs.data import Graph
from pipeline.proofs.knowledge import build_index, find

UNPROVEN = -1e9  # score of a candidate without a proof, below every proven one


@dataclass(frozen=True)
class Questions:
    """Ranking questions, two per test triple (one on typed graphs), and their candidates.

    Attributes:
        triples: int64 [Q, 3] the true triple of each question.
        side: int64 [Q] the argument that is corrupted: 1 = head, 2 = tail.
        answers: int64 [Q] keys of the true triples.
        pool_size: int64 [Q] candidates that stay after filtering, without the true one.
        candidate_question: int64 [C] question of each derivable candidate that is no known fact.
        candidate_key: int64 [C] its key.
    """

    triples: Tensor
    side: Tensor
    answers: Tensor
    pool_size: Tensor
    candidate_question: Tensor
    candidate_key: Tensor

    def keys(self) -> Tensor:
        """Distinct keys that need a score: the true triples and all derivable candidates."""
        return torch.cat([self.answers, self.candidate_key]).unique()


def pose(graph: Graph, closure: Closure, split: str = "test") -> Questions:
    """The questions of a split: corrupt head and tail, filtered by all known triples.

    Where entities have several types only the tail is corrupted, by entities of the type that the
    predicate's known tails share (the protocol of Countries).
    """
    triples = graph.splits[split]
    typed = tail_domains(graph)
    count = len(triples)
    if typed is None:
        triples = triples.repeat_interleave(2, 0)
        side = torch.tensor([1, 2]).repeat(count)
    else:
        side = torch.full((count,), 2)
    known = torch.cat([graph.splits[s] for s in graph.splits])
    answers = graph.key(triples)
    allowed = _allowed(graph, typed)

    def partners(atoms: Tensor) -> tuple[Tensor, Tensor]:
        """(question, key) of every atom that differs from a question in its open argument only."""
        index = build_index(atoms, graph.num_predicates, graph.num_entities)
        bound_side = 2 - side  # index 0 looks up by head (tail open), 1 by tail (head open)
        row = torch.arange(len(side))
        bound = triples[row, 3 - side]
        group = triples[:, 0] * graph.num_entities + bound
        which = torch.where(bound_side == 0, 0, 1)
        start = index.starts[which, group]
        length = index.starts[which, group + 1] - start
        question = row.repeat_interleave(length)
        inside = torch.arange(len(question)) - (length.cumsum(0) - length)[question]
        place = start[question] + inside
        keys = index.keys[index.atoms[which[question], place]]
        fits = allowed[triples[question, 0], index.partners[which[question], place]]
        return question[fits], keys[fits]

    known_keys = graph.key(known).unique()
    known_question, known_key = partners(_triples(known_keys, graph.num_entities))
    others = known_key != answers[known_question]
    blocked = torch.bincount(known_question[others], minlength=len(side))
    derived = _triples(closure.keys[closure.round > 0], graph.num_entities)
    question, key = partners(derived)
    fresh = ~find(known_keys, key)[1]
    return Questions(
        triples=triples,
        side=side,
        answers=answers,
        pool_size=allowed[triples[:, 0]].sum(-1) - 1 - blocked,
        candidate_question=question[fresh],
        candidate_key=key[fresh],
    )


def tail_domains(graph: Graph) -> list[Tensor | None] | None:
    """The type of each predicate's tails, or None for a graph whose entities have one type."""
    if len(graph.domains) < 2:
        return None
    known = torch.cat([graph.splits[s] for s in graph.splits])
    found: list[Tensor | None] = []
    for predicate in range(graph.num_predicates):
        tails = known[known[:, 0] == predicate, 2]
        fitting = [d for d in graph.domains.values() if bool(torch.isin(tails, d).all())]
        found.append(min(fitting, key=len) if fitting and len(tails) else None)
    return found


def _allowed(graph: Graph, typed: list[Tensor | None] | None) -> Tensor:
    allowed = torch.ones(graph.num_predicates, graph.num_entities, dtype=torch.bool)
    for predicate, domain in enumerate(typed or []):
        if domain is not None:
            allowed[predicate] = False
            allowed[predicate, domain] = True
    return allowed


def _triples(keys: Tensor, entities: int) -> Tensor:
    return torch.stack([keys // entities**2, keys // entities % entities, keys % entities], -1)


# ------------------------------------------------------------------------------------------------
# Ranks


def ranks(questions: Questions, scored_keys: Tensor, scores: Tensor, sample: Tensor | None = None):
    """Expected rank of each question's true triple, float [Q].

    Args:
        scored_keys: int64 [K] ascending keys that have a score; all others have UNPROVEN.
        scores: float [K].
        sample: `sampled_negatives` for the protocol with sampled negatives, None for all.
    """
    place, found = find(scored_keys, questions.answers)
    true = torch.where(found, scores[place], UNPROVEN)
    if sample is None:
        question, key = questions.candidate_question, questions.candidate_key
        pool = questions.pool_size
    else:
        question, key = sample[0], sample[1]
        pool = torch.bincount(question, minlength=len(true))
    place, found = find(scored_keys, key)
    other = torch.where(found, scores[place], UNPROVEN)
    proven = other > UNPROVEN
    question, other = question[proven], other[proven]
    higher = torch.bincount(question[other > true[question]], minlength=len(true))
    equal = torch.bincount(question[other == true[question]], minlength=len(true))
    unproven = pool - torch.bincount(question, minlength=len(true))
    equal = torch.where(true > UNPROVEN, equal, unproven)
    return 1.0 + higher + equal / 2.0


def sampled_negatives(graph: Graph, questions: Questions, count: int, seed: int) -> Tensor:
    """int64 [2, n] (question, key): `count` distinct filtered corruptions of each question.

    Which ones depends on the seed and the question alone. A question with fewer than `count`
    candidates gets all of them.
    """
    known = graph.key(torch.cat([graph.splits[s] for s in graph.splits])).unique()
    allowed = _allowed(graph, tail_domains(graph))
    parts = []
    generator = torch.Generator()
    for row in range(len(questions.side)):
        triple = questions.triples[row]
        generator.manual_seed(
            seed * 1_000_003 + int(questions.answers[row]) * 2 + int(questions.side[row])
        )
        domain = allowed[triple[0]].nonzero().flatten()
        order = domain[torch.randperm(len(domain), generator=generator)[: count + 4096]]
        corrupt = triple.repeat(len(order), 1)
        corrupt[:, questions.side[row]] = order
        keys = graph.key(corrupt)
        keys = keys[~find(known, keys)[1]][:count]
        parts.append(torch.stack([torch.full_like(keys, row), keys]))
    return torch.cat(parts, 1) if parts else torch.zeros(2, 0, dtype=torch.int64)


def ranking_metrics(rank: Tensor) -> dict[str, float]:
    """Mean reciprocal rank and Hits@1, 3, 10 of expected ranks [Q]."""
    if rank.numel() == 0:
        return {"mrr": 0.0, "hits1": 0.0, "hits3": 0.0, "hits10": 0.0}
    return {"mrr": float(rank.double().reciprocal().mean())} | {
        f"hits{k}": float((rank <= k).double().mean()) for k in (1, 3, 10)
    }


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """Area under the precision-recall curve as a sum of steps; equal scores are one step."""
    order = scores.argsort(descending=True)
    scores, labels = scores[order], labels[order].double()
    last = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])
    hits = labels.cumsum(0)[last]
    precision = hits / (torch.arange(len(scores))[last] + 1)
    gained = torch.diff(hits, prepend=torch.zeros(1, dtype=hits.dtype))
    return float((precision * gained).sum() / labels.sum().clamp(min=1))


def evaluate_scores(
    graph: Graph,
    questions: Questions,
    scored_keys: Tensor,
    scores: Tensor,
    negatives: Tensor,
    label: Callable[[str], str] = lambda name: name,
) -> dict[str, float]:
    """All ranking numbers of one scorer: `mrr_all`, `hits1_all`, ..., `mrr_100`, ..., `auc_pr`."""
    result: dict[str, float] = {}
    for protocol, sample in (("all", None), ("100", negatives)):
        found = ranking_metrics(ranks(questions, scored_keys, scores, sample))
        result |= {label(f"{name}_{protocol}"): value for name, value in found.items()}
    if len(graph.domains) > 1:
        everything = torch.cat([questions.answers, negatives[1]])
        place, found_key = find(scored_keys, everything)
        value = torch.where(found_key, scores[place], UNPROVEN)
        labels = torch.arange(len(everything)) < len(questions.answers)
        result[label("auc_pr")] = average_precision(value, labels)
    return result
