"""Module D without one of the things that it is given by hand (`docs/explanation/written.md`)."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from hamlet.modules.contracts import LOOK, Features
from hamlet.modules.policy import Policy

RULE, EMERGENCY, TARGETS, PROSPECTS, TIMETABLE, LOOKING = (
    "no_rule", "no_emergency", "no_targets", "no_prospects", "no_timetable", "no_look",
)  # fmt: skip
RULES, KNOWLEDGE = (RULE, EMERGENCY, TARGETS), (PROSPECTS, TIMETABLE, LOOKING)
"""What says what to do, and what helps to find it out."""
NO_RULES, NOTHING = "no_rules", "nothing_given"
GIVEN = (*RULES, NO_RULES, *KNOWLEDGE, NOTHING)
UNKNOWN_HOURS = (0.0, 24.0, 0.0)
"""Where the timetable is not known: open now, for a day, and free."""


class Ungiven(Policy):
    """Learns as `Policy`, without what `lacking` names."""

    lacking: tuple[str, ...] = ()

    def __init__(self, *given) -> None:
        super().__init__(*given)
        if TARGETS in self.lacking:
            self.reached_at.fill_(math.inf)
        if EMERGENCY in self.lacking:
            self.urgent_under.fill_(-math.inf)

    def low_money_bias(self, known_state: Tensor) -> Tensor:
        found = super().low_money_bias(known_state)
        return torch.zeros_like(found) if RULE in self.lacking else found

    def posted_now(self, f: Features) -> list[Tensor]:
        found = super().posted_now(f)
        if TIMETABLE not in self.lacking:
            return found
        return [torch.full_like(x, value) for x, value in zip(found, UNKNOWN_HOURS, strict=True)]

    def place_facts(self, f: Features) -> Tensor:
        facts = super().place_facts(f)
        if PROSPECTS not in self.lacking:
            return facts
        return torch.cat([facts[:-2], torch.zeros_like(facts[-2:])])


@cache
def policy_without(variant: str) -> type[Policy]:
    """The class of module D of one of GIVEN."""
    lacking = {NO_RULES: RULES, NOTHING: (*RULES, *KNOWLEDGE)}.get(variant, (variant,))
    return type(f"Ungiven_{variant}", (Ungiven,), {"lacking": lacking})


def not_looking(f: Features, places: int) -> Features:
    """The features without the way to where most can be newly seen.

    Args:
        places: numbers of the belief that say where the places are; the way follows them.
    """
    mean = f.mean.clone()
    mean[..., places : places + LOOK - 1] = 0.0
    return f._replace(mean=mean)
