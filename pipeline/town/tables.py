"""A pack turned into constants: per-affordance columns, opening hours, layouts and view rows."""

from __future__ import annotations

import torch
from torch import Tensor

from hamlet.town.counter import mix, tick_hash, to_unit
from hamlet.town.schema import Affordance, Pack

ALWAYS = 1000  # ticks a place that never closes stays open


class Column:
    """One number per affordance code (and per phase of the schedule), looked up by code.

    Eager code indexes a small table; compiled code uses a chain of `where` over the entries that
    differ from the default, which vectorises where a gather would not. Both give the same numbers.
    """

    def __init__(self, phases: list[list[float]], default: float, dtype: torch.dtype, device: str):
        cast = float if dtype.is_floating_point else int
        rows = [[cast(value) for value in values] for values in phases]
        self.phases = rows[:1] if all(row == rows[0] for row in rows) else rows
        self.default, self.dtype = cast(default), dtype
        table = [[*values, default] for values in self.phases]
        self.table = torch.tensor(table, dtype=dtype, device=device)

    @property
    def is_default(self) -> bool:
        return all(value == self.default for values in self.phases for value in values)

    def __call__(self, code: Tensor, phase: Tensor) -> Tensor:
        """code int [N,B] (-1: none, gives the default), phase int [B] -> [N,B]."""
        if not torch.compiler.is_compiling():
            if len(self.phases) == 1:
                return self.table[0][code.long()]
            return self.table[phase.long().expand(code.shape), code.long()]
        chosen = self._chain(code, self.phases[0])
        for index, values in enumerate(self.phases[1:], start=1):
            chosen = torch.where(phase >= index, self._chain(code, values), chosen)
        return chosen

    def _chain(self, code: Tensor, values: list[float]) -> Tensor:
        chosen = torch.full(code.shape, self.default, dtype=self.dtype, device=code.device)
        for index, value in enumerate(values):
            if value != self.default:
                chosen = torch.where(code == index, value, chosen)
        return chosen


def phase_packs(pack: Pack) -> list[Pack]:
    """The pack as it reads in each phase of its schedule (phase 0 first)."""
    phases = [pack]
    for change in sorted(pack.schedule, key=lambda change: change.tick):
        now = phases[-1]

        def changed(a: Affordance, change=change) -> Affordance:
            factor = change.price_factor.get(a.name, 1.0)
            return a.model_copy(
                update={
                    "hours": change.hours.get(a.name, a.hours),
                    "quality": change.quality.get(a.name, a.quality),
                    "price": {m: v * factor for m, v in a.price.items()},
                    "price_per_tick": {m: v * factor for m, v in a.price_per_tick.items()},
                }
            )

        cascade = 1.0 if change.cascade_factor is None else change.cascade_factor
        phases.append(
            now.model_copy(
                update={
                    "affordances": tuple(changed(a) for a in now.affordances),
                    "meters": tuple(
                        m.model_copy(
                            update={"depletion": change.depletion.get(m.name, m.depletion)}
                        )
                        for m in now.meters
                    ),
                    "cascades": tuple(
                        c.model_copy(update={"strength": c.strength * cascade})
                        for c in now.cascades
                    ),
                }
            )
        )
    return phases


def open_bits(affordance: Affordance) -> int:
    """24 bits; bit h set when the affordance is open at hour h."""
    return sum(1 << hour for hour in range(24) if affordance.is_open(hour))


def opening(pack: Pack) -> tuple[Tensor, Tensor]:
    """Ticks until each place opens and ticks it then stays open, both int64 [P, 24, F] by phase of
    the schedule and hour; ALWAYS until a place that never opens does."""
    until, left = [], []
    for phase in phase_packs(pack):
        for hour in range(24):
            for bits in map(open_bits, phase.affordances):
                opens = [bool(bits >> ((hour + k) % 24) & 1) for k in range(48)]
                if not pack.temporal or all(opens):
                    until.append(0)
                    left.append(ALWAYS)
                    continue
                wait = opens.index(True) if any(opens) else ALWAYS
                until.append(wait)
                after = opens[wait:] if wait < ALWAYS else [False]
                left.append(after.index(False) if False in after else ALWAYS)
    size = (-1, 24, len(pack.affordances))
    return torch.tensor(until).view(size), torch.tensor(left).view(size)


def timetable(pack: Pack) -> Tensor:
    """What everybody in the town knows of each place, by tick of a life: float32 [ticks, F, 3].

    The ticks until it opens, the ticks it then stays open (both at most 24), and the money that a
    tick of using it costs (the whole use, where uses take no time).
    """
    until, left = opening(pack)
    cost = torch.tensor(
        [
            [sum((a.price_per_tick if pack.temporal else a.price).values()) for a in p.affordances]
            for p in phase_packs(pack)
        ]
    )
    tick = torch.arange(pack.lifespan + 1)
    phase = sum((tick >= change.tick).long() for change in pack.schedule) + torch.zeros_like(tick)
    hour = (pack.start_hour + tick) % 24
    hours = (until[phase, hour].clamp(max=24).float(), left[phase, hour].clamp(max=24).float())
    return torch.stack([*hours, cost[phase].float()], -1)


def menu(pack: Pack) -> Tensor:
    """What everybody knows a use of each place to give: float32 [F, 2 * meters + 1].

    The change of each meter per tick of use, that on completing it, and the ticks it takes.
    """
    rows = [
        [place.effects_per_tick.get(name, 0.0) for name in pack.meter_names]
        + [place.effects_on_completion.get(name, 0.0) for name in pack.meter_names]
        + [float(place.duration if pack.temporal else 1)]
        for place in pack.affordances
    ]
    return torch.tensor(rows)


def draw_layouts(pack: Pack, num_layouts: int, layout_seed: int) -> Tensor:
    """Distinct random cells for the affordances of each layout: int64 [num_layouts, F]."""
    cells = pack.width * pack.height
    layout = torch.arange(num_layouts, dtype=torch.int32)[:, None]
    key = mix(mix(torch.tensor(layout_seed).to(torch.int32) ^ 0x1A107) ^ layout)
    draw = to_unit(tick_hash(key, torch.zeros_like(key), torch.arange(cells)))
    return draw.argsort(dim=1, stable=True)[:, : len(pack.affordances)].contiguous()


def nearest_usable(pack: Pack, layouts: Tensor) -> tuple[Tensor, Tensor]:
    """Which affordance an agent in each cell can use, and its Manhattan distance.

    Returns int32 [L, cells] code (-1 none) and int32 [L, cells] distance (0 where none). The
    nearest one within its own distance limit; of equally near ones the first in the file.
    """
    width, cells = pack.width, pack.width * pack.height
    cell = torch.arange(cells, device=layouts.device)
    code = torch.full((len(layouts), cells), -1, dtype=torch.int32, device=layouts.device)
    best = torch.full_like(code, 10_000)
    for index, affordance in enumerate(pack.affordances):
        place = layouts[:, index, None]
        distance = (cell % width - place % width).abs() + (cell // width - place // width).abs()
        better = (distance <= affordance.distance_limit) & (distance < best)
        best = torch.where(better, distance.int(), best)
        code = torch.where(better, index, code)
    return code, torch.where(code >= 0, best, 0)


def teleport_targets(pack: Pack, layouts: Tensor) -> Tensor:
    """Cell an agent lands on after completing affordance f: int32 [L, F], -1 where it stays."""
    width = pack.width
    target = torch.full(layouts.shape, -1, dtype=torch.int32, device=layouts.device)
    for index, affordance in enumerate(pack.affordances):
        for named in affordance.on_completion:
            tagged = [
                i for i, a in enumerate(pack.affordances) if named.tag in a.tags and i != index
            ]
            place, other = layouts[:, index, None], layouts[:, tagged]
            distance = (place % width - other % width).abs() + (
                place // width - other // width
            ).abs()
            target[:, index] = other.gather(1, distance.argmin(1, keepdim=True))[:, 0].int()
    return target


def view_rows(pack: Pack, layouts: Tensor) -> Tensor:
    """What is seen from each cell of each layout, packed eight codes to an int64.

    Returns int64 [L * cells, ceil(side**2 / 8)]; viewed as uint8 the first side**2 entries of a
    row are the codes, row-major from the upper left: 0 empty, f + 1 affordance, F + 1 outside.
    """
    width, height, reach = pack.width, pack.height, pack.vision
    side = 2 * reach + 1
    padded = torch.full(
        (len(layouts), height + 2 * reach, width + 2 * reach),
        len(pack.affordances) + 1,
        dtype=torch.uint8,
        device=layouts.device,
    )
    inner = torch.zeros((len(layouts), height * width), dtype=torch.uint8, device=layouts.device)
    codes = torch.arange(1, layouts.shape[1] + 1, dtype=torch.uint8, device=layouts.device)
    inner.scatter_(1, layouts, codes.expand(layouts.shape))
    padded[:, reach : reach + height, reach : reach + width] = inner.view(-1, height, width)
    words = -(-side * side // 8)
    rows = torch.zeros(
        (len(layouts), height, width, words * 8), dtype=torch.uint8, device=layouts.device
    )
    for dy in range(side):
        for dx in range(side):
            rows[..., dy * side + dx] = padded[:, dy : dy + height, dx : dx + width]
    return rows.view(-1, words * 8).view(torch.int64)
