"""Two changes of the town that nobody tuned on: needs grow faster, and a place is missing."""

from __future__ import annotations

import torch

from hamlet.town import Town
from hamlet.town.schema import Condition

FASTER, MISSING = 1.2, "HomeMeal"
SHIFTS = {
    "needs_faster": f"needs grow {FASTER - 1:.0%} faster",
    "place_missing": f"there is no {MISSING}",
}


def shifted(town: Town, name: str) -> Town:
    """The town of the same layouts after one of SHIFTS.

    Scripted players know of it: they plan by the rules of the town that they are in. A trained one
    does not, but for what it sees.
    """
    if name == "needs_faster":
        faster = {"depletion_multiplier": FASTER * town.pack.depletion_multiplier}
        return Town(town.pack.model_copy(update=faster), layouts=town.affordance_cells)
    names = [place.name for place in town.pack.affordances]
    gone = names.index(MISSING) if MISSING in names else len(names) - 1
    never = Condition(meter=town.meter_names[0], op=">", value=1.0)
    places = list(town.pack.affordances)
    places[gone] = places[gone].model_copy(update={"preconditions": (never,)})
    changed = town.pack.model_copy(update={"affordances": tuple(places)})
    other = Town(changed, layouts=town.affordance_cells)
    seen = other.view_table.view(torch.uint8)
    other.view_table = torch.where(seen == gone + 1, 0, seen).view(torch.int64)
    other.place_table = torch.where(other.place_table == gone, -1, other.place_table)
    return other
