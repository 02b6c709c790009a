"""Generations of scripted characters: who fares well has children, who resemble their parents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hamlet.town.personalities import DNA, TRAIN, AgentDNA

GENES = ("neuroticism", "greed", "agreeableness", "curiosity")
MUTATION = 0.1
"""Standard deviation of a gene's mutation."""


def founders() -> list[AgentDNA]:
    """The characters known in training, each of a family of its own."""
    genes = [{gene: getattr(DNA[name], gene) for gene in GENES} for name in TRAIN]
    return [AgentDNA(**g, family_id=number) for number, g in enumerate(genes)]


def next_generation(
    people: Sequence[AgentDNA], fitness: Tensor, rng: torch.Generator
) -> list[AgentDNA]:
    """As many people as before: the better half lives on, the rest are its children.

    A child takes each gene from one of two parents, and it mutates; it is of the first one's
    family (a genetic algorithm with truncation selection and uniform crossover, Syswerda 1989).

    Args:
        fitness: float [len(people)] how each fared.
    """
    living = fitness.argsort(descending=True, stable=True)[: (len(people) + 1) // 2].tolist()
    children = []
    for _ in range(len(people) - len(living)):
        pick = torch.randint(len(living), (2,), generator=rng).tolist()
        one, other = (living[k] for k in pick)
        from_one = torch.rand(len(GENES), generator=rng) < 0.5
        change = MUTATION * torch.randn(len(GENES), generator=rng)
        genes = {}
        for gene, mine, by in zip(GENES, from_one.tolist(), change.tolist(), strict=True):
            inherited = getattr(people[one] if mine else people[other], gene)
            genes[gene] = min(1.0, max(0.0, inherited + by))
        generation = max(people[one].generation, people[other].generation) + 1
        children.append(
            AgentDNA(
                **genes,
                family_id=people[one].family_id,
                parent_ids=(one, other),
                generation=generation,
            )
        )
    return [people[k] for k in living] + children
