"""Filtered ranking of test triples among corruptions (Bordes et al. 2013), ties at expected rank.

Only atoms that the rules derive can be proven, so only those need a score; every other candidate
shares the lowest place. Two protocols, named as such: `all` entities, and `100` sampled negatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hamlet.proofs.closure import Closure
from hamlet.proofs.data import Graph
from hamlet.proofs.knowledge import build_index, find

UNPROVEN = -1e9  # score of a candidate without a proof, below every proven one


@dataclass(frozen=True)
class Questions:
    """Ranking questions, two per test triple (one on typed graphs), and their candidates.

    Attributes:
        triples: int64 [Q, 3] the true triple of each question.
        side: int64 [Q] the argument that is corrupted: 1 = head, 2 = tail.
        answers: int64 [Q] keys of the true triples.
        known: int64 [K] keys of all triples that are no corruption, ascending.
        pool_size: int64 [Q] candidates that stay after filtering, without the true one.
        candidate_question: int64 [C] question of each derivable candidate that is no known fact.
        candidate_key: int64 [C] its key.
    """

    triples: Tensor
    side: Tensor
    answers: Tensor
    known: Tensor
    pool_size: Tensor
    candidate_question: Tensor
    candidate_key: Tensor

    def keys(self) -> Tensor:
        """Distinct keys that need a score: the true triples and all derivable candidates."""
        return torch.cat([self.answers, self.candidate_key]).unique()


def pose(graph: Graph, closure: Closure, triples: Tensor, known: Tensor) -> Questions:
    """The questions about triples int64 [n, 3]: corrupt head and tail, filtered by what is `known`.

    Where entities have several types only the tail is corrupted, by entities of the type that the
    predicate's known tails share (the protocol of Countries).

    Args:
        known: int64 [m, 3] triples that are no corruption. The published protocol takes all three
            splits; who chooses by questions leaves the test split out.
    """
    typed = tail_domains(graph)
    count = len(triples)
    if typed is None:
        triples = triples.repeat_interleave(2, 0)
        side = torch.tensor([1, 2]).repeat(count)
    else:
        side = torch.full((count,), 2)
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
        known=known_keys,
        pool_size=allowed[triples[:, 0]].sum(-1) - 1 - blocked,
        candidate_question=question[fresh],
        candidate_key=key[fresh],
    )


def tail_domains(graph: Graph) -> list[Tensor | None] | None:
    """The type of each predicate's tails, or None for a graph whose entities have one type."""
    if len(graph.domains) < 2:
        return None
    known = graph.known()
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


def rivals(
    questions: Questions, scored_keys: Tensor, scores: Tensor, sample: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """How many candidates score higher than each question's true triple, and how many the same.

    Args:
        scored_keys: int64 [K] ascending keys that have a score; all others have UNPROVEN.
        scores: float [K].
        sample: `sampled_negatives` for the protocol with sampled negatives, None for all.

    Returns:
        int64 [Q], int64 [Q].
    """
    place, found = find(scored_keys, questions.answers)
    true = torch.where(found, scores[place], UNPROVEN)
    question, other, pool = _proven_rivals(questions, scored_keys, scores, sample)
    higher = torch.bincount(question[other > true[question]], minlength=len(true))
    equal = torch.bincount(question[other == true[question]], minlength=len(true))
    unproven = pool - torch.bincount(question, minlength=len(true))
    return higher, torch.where(true > UNPROVEN, equal, unproven)


def _proven_rivals(
    questions: Questions, scored_keys: Tensor, scores: Tensor, sample: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(question, score) of every proven candidate, and the number of all candidates [Q]."""
    if sample is None:
        question, key = questions.candidate_question, questions.candidate_key
        pool = questions.pool_size
    else:
        question, key = sample[0], sample[1]
        pool = torch.bincount(question, minlength=len(questions.side))
    place, found = find(scored_keys, key)
    score = torch.where(found, scores[place], UNPROVEN)
    proven = score > UNPROVEN
    return question[proven], score[proven], pool


def surprise(questions: Questions, scored_keys: Tensor, scores: Tensor) -> float:
    """Mean -log p, in nats, of the true triples that are proven, p a softmax over the candidates.

    It still tells scorers apart where the ranks are all the same.
    """
    place, found = find(scored_keys, questions.answers)
    true = torch.where(found, scores[place], UNPROVEN).double()
    question, other, _ = _proven_rivals(questions, scored_keys, scores, None)
    gap = (other - true[question]).clamp(max=30.0).exp()
    total = torch.ones_like(true).index_add_(0, question, gap).log()
    proven = true > UNPROVEN
    return float(total[proven].mean()) if bool(proven.any()) else 0.0


def sampled_negatives(graph: Graph, questions: Questions, count: int, seed: int) -> Tensor:
    """int64 [2, n] (question, key): `count` distinct filtered corruptions of each question.

    Which ones depends on the seed and the question alone. A question with fewer than `count`
    candidates gets all of them.
    """
    known, allowed = questions.known, _allowed(graph, tail_domains(graph))
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


def ranking_metrics(higher: Tensor, equal: Tensor) -> dict[str, float]:
    """Mean reciprocal rank and Hits@1, 3, 10 from `rivals`, ties at their expected rank.

    `mrr_random_ties` is the expected reciprocal rank instead, which is what breaking ties at random
    gives on average: never less, and what some publications report.
    """
    if higher.numel() == 0:
        return dict.fromkeys(("mrr", "hits1", "hits3", "hits10", "mrr_random_ties"), 0.0)
    rank = 1.0 + higher.double() + equal.double() / 2.0
    # The mean of 1 / r over r = higher + 1 .. higher + equal + 1.
    best, worst = higher.double() + 1.0, higher.double() + equal.double() + 1.0
    expected = (torch.digamma(worst + 1.0) - torch.digamma(best)) / (equal.double() + 1.0)
    return (
        {"mrr": float(rank.reciprocal().mean())}
        | {f"hits{k}": float((rank <= k).double().mean()) for k in (1, 3, 10)}
        | {"mrr_random_ties": float(expected.mean())}
    )


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
        found = ranking_metrics(*rivals(questions, scored_keys, scores, sample))
        result |= {label(f"{name}_{protocol}"): value for name, value in found.items()}
    if len(graph.domains) > 1:
        everything = torch.cat([questions.answers, negatives[1]])
        place, found_key = find(scored_keys, everything)
        value = torch.where(found_key, scores[place], UNPROVEN)
        labels = torch.arange(len(everything)) < len(questions.answers)
        result[label("auc_pr")] = average_precision(value, labels)
    return result
