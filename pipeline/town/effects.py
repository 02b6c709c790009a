"""What a tick does to the meters: uses of places and the body's own course, in either mode.

In mode `hamlet` every effect is applied and clamped in turn, in mode `atomic` all of them are added
to the meters at the start of the tick and clamped once. Meters are lists of f32 [N, B], one per
meter; codes of places int32 [N, B], -1 for none; the phase of the schedule int32 [B].
"""

from __future__ import annotations

import torch
from torch import Tensor

from hamlet.town.constants import TownConstants
from hamlet.town.vectors import clamp01

Deltas = list[list[Tensor]]  # per meter: what is added to it


def use_in_order(
    town: TownConstants, meters: list[Tensor], code: Tensor, finished: Tensor, phase: Tensor
) -> list[Tensor]:
    """The meters after the uses of this tick, clamped as the public Hamlet does.

    code: the place used; finished: that whose use is complete.
    """
    out = []
    temporal = town.pack.temporal
    columns = zip(town.prices, town.effects_per_tick, town.effects_on_completion, strict=True)
    for meter, (price, per_tick, completion) in zip(meters, columns, strict=True):
        value = meter
        if temporal and price is not None:
            value = value - price(code, phase)
        for column, who in ((per_tick, code), (completion, finished)):
            if column is not None:
                value = value + column(who, phase)
                value = value if temporal else clamp01(value)
        value = clamp01(value) if temporal else value
        if not temporal and price is not None:
            value = value - price(code, phase)
        out.append(torch.where(code >= 0, value, meter))
    return out


def metabolise_in_order(town: TownConstants, meters: list[Tensor], phase: Tensor) -> list[Tensor]:
    """The meters after depletion, modulations and cascades, each seeing the one before."""
    meters = list(meters)
    for index, meter in enumerate(meters):
        depletion = town.by_phase([values[index] for values in town.depletions], phase)
        meters[index] = clamp01(meter - depletion)
    for m in town.pack.modulations:
        source, target = town.meter_index[m.source], town.meter_index[m.target]
        loss = m.rate * (m.base + m.range * (1.0 - meters[source]))
        meters[target] = clamp01(meters[target] - loss)
    for number, c in enumerate(town.pack.cascades):
        source, target = town.meter_index[c.source], town.meter_index[c.target]
        strength = town.by_phase([values[number] for values in town.strengths], phase)
        loss = strength * ((c.threshold - meters[source]) / c.threshold)
        lower = clamp01(meters[target] - loss)
        meters[target] = torch.where(meters[source] < c.threshold, lower, meters[target])
    return meters


def use_atomic(
    town: TownConstants, deltas: Deltas, code: Tensor, finished: Tensor, phase: Tensor
) -> None:
    """Add what the uses of this tick take and give."""
    for index, added in enumerate(deltas):
        price, per_tick = town.prices[index], town.effects_per_tick[index]
        completion = town.effects_on_completion[index]
        if price is not None:
            added.append(-price(code, phase))
        if per_tick is not None:
            added.append(per_tick(code, phase))
        if completion is not None:
            added.append(completion(finished, phase))


def metabolise_atomic(
    town: TownConstants, deltas: Deltas, meters: list[Tensor], phase: Tensor
) -> None:
    """Add what depletion, modulations and cascades take, all of `meters`."""
    for index, meter in enumerate(meters):
        depletion = town.by_phase([values[index] for values in town.depletions], phase)
        if isinstance(depletion, Tensor) or depletion:
            deltas[index].append(torch.zeros_like(meter) - depletion)
    for m in town.pack.modulations:
        source, target = town.meter_index[m.source], town.meter_index[m.target]
        deltas[target].append(-(m.rate * (m.base + m.range * (1.0 - meters[source]))))
    for number, c in enumerate(town.pack.cascades):
        source, target = town.meter_index[c.source], town.meter_index[c.target]
        strength = town.by_phase([values[number] for values in town.strengths], phase)
        deficit = ((c.threshold - meters[source]) / c.threshold).clamp(min=0.0)
        deltas[target].append(-(strength * deficit))
