"""A pack as constants: every number of its rules as a column by place, a table by cell or a list.

Per-agent tensors are agent-major ([N, B]); a column belongs to one meter and is None where it is
all zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hamlet.town import tables
from hamlet.town.cues import CueRules, telling_cues
from hamlet.town.schema import GOALS, SENSED, Pack
from hamlet.town.tables import Column


class TownConstants:
    """One pack as tensors: what every tick looks up and nothing ever changes.

    Args:
        pack: the validated pack.
        num_layouts: how many random placements of the affordances exist; each life draws one.
        layout_seed: seed of these placements (training and evaluation use different ones).
        device: torch device of all constants and states.
        layouts: int64 [L, F] cells (y * width + x) to use instead of drawing any.
    """

    def __init__(
        self,
        pack: Pack,
        num_layouts: int = 4096,
        layout_seed: int = 0,
        device: str | torch.device = "cpu",
        layouts: Tensor | None = None,
    ):
        self.pack, self.device = pack, torch.device(device)
        self.num_agents, self.lifespan = pack.agents, pack.lifespan
        self.width, self.height = pack.width, pack.height
        self.grid = (pack.width, pack.height)
        self.action_names, self.num_actions = pack.action_names, len(pack.action_names)
        self.affordance_names = pack.affordance_names
        self.num_affordances = len(pack.affordances)
        self.goal_names = (*pack.affordance_names, *GOALS)
        self.num_goals = len(self.goal_names)
        self.num_cell_codes = self.num_affordances + 2
        self.meter_names, self.num_meters = pack.meter_names, len(pack.meters)
        self.cue_names, self.num_cues = tuple(c.name for c in pack.cues), len(pack.cues)
        self.telling_cues = telling_cues(pack.cues)
        self.self_names = (*pack.meter_names, *SENSED)
        self.self_dim = len(self.self_names)
        self.vision = pack.vision
        self.vital_meters, self.paid_in = pack.vital_meters, pack.paid_in

        if layouts is None:
            layouts = tables.draw_layouts(pack, num_layouts, layout_seed)
        self.affordance_cells = layouts.to(self.device)
        self.num_layouts = len(layouts)
        code, distance = tables.nearest_usable(pack, self.affordance_cells)
        small = torch.int8 if self.num_affordances < 128 else torch.int16  # to stay in the cache
        self.place_table, self.distance_table = code.flatten().to(small), distance.flatten()
        self.has_distance = any(a.distance_limit for a in pack.affordances)
        self.teleport_table = tables.teleport_targets(pack, self.affordance_cells).flatten()
        self.has_teleport = any(a.on_completion for a in pack.affordances)
        self.view_table = tables.view_rows(pack, self.affordance_cells)
        # Constants of the observation: who is in each slot [M, N], kin there [M, N, 1], and the
        # numbers of the cues, actions and cells in view, as columns.
        agent = torch.arange(self.num_agents, device=self.device)
        slot = agent[:-1, None]
        self.others = slot + (slot >= agent)
        kin_size = pack.families.size if pack.families else 1
        self.kin = (self.others // kin_size == agent // kin_size)[..., None]
        self.each_cue = torch.arange(self.num_cues, device=self.device).int()
        self.each_action = torch.arange(self.num_actions, device=self.device).int()[:, None, None]
        spots = torch.arange((2 * pack.vision + 1) ** 2, device=self.device)
        self.each_spot = spots.int()[:, None, None]
        self._place_columns()
        self._rate_tables()
        self.cue_rules = CueRules(pack, self.device)
        self.meter_index = {name: i for i, name in enumerate(pack.meter_names)}
        initial = torch.tensor([m.initial for m in pack.meters], dtype=torch.float32)
        self.initial_meters = initial.to(self.device)[:, None, None]

    def _place_columns(self) -> None:
        pack, dev = self.pack, str(self.device)
        phases = tables.phase_packs(pack)
        self.phase_ticks = [change.tick for change in sorted(pack.schedule, key=lambda c: c.tick)]
        of = [phase.affordances for phase in phases]

        def amounts(read) -> list[Column | None]:
            """One column per meter of `read(affordance, meter)`; None where it is all zero."""
            columns = []
            for name in pack.meter_names:
                values = [[read(a, name) for a in affordances] for affordances in of]
                column = Column(values, 0.0, torch.float32, dev)
                columns.append(None if column.is_default else column)
            return columns

        def numbers(read, default: int = 0) -> Column:
            values = [[float(read(a)) for a in affordances] for affordances in of]
            return Column(values, default, torch.int32, dev)

        scale = 1 if pack.temporal else None
        self.prices = amounts(
            lambda a, m: (a.price_per_tick if pack.temporal else a.price).get(m, 0.0)
        )
        self.action_effects = self._action_columns()
        self.effects_per_tick = amounts(
            lambda a, m: a.effects_per_tick.get(m, 0.0) * (scale or a.duration) * a.quality
        )
        self.effects_on_completion = amounts(
            lambda a, m: a.effects_on_completion.get(m, 0.0) * a.quality
        )
        self.refunds = amounts(lambda a, m: a.refund * a.price_per_tick.get(m, 0.0))
        self.has_refund = any(self.refunds) and pack.temporal
        self.durations = numbers(lambda a: a.duration, default=1)
        self.open_bits = numbers(tables.open_bits)
        limits = [
            float(a.capacity or (1 if a.exclusive else pack.agents)) for a in pack.affordances
        ]
        self.capacities = Column([limits], pack.agents, torch.int32, dev)
        self.contended = min(limits, default=pack.agents) < pack.agents
        self.uninterruptible = numbers(lambda a: int(not a.interruptible))
        self.has_held = any(not a.interruptible for a in pack.affordances) and pack.temporal

    def _rate_tables(self) -> None:
        pack, phases = self.pack, tables.phase_packs(self.pack)
        multiplier = pack.depletion_multiplier
        depletion = torch.tensor(
            [[m.depletion for m in phase.meters] for phase in phases], dtype=torch.float32
        )
        self.depletions = (depletion * multiplier).tolist()  # exact float32 values
        self.strengths = [[c.strength for c in phase.cascades] for phase in phases]

    def _action_columns(self) -> list[Column | None]:
        """What each action itself does to each meter, by the action's number; -1: nothing."""
        rows = [dict(action.effects) for action in self.pack.actions]
        moving = {name: -price for name, price in self.pack.move_price.items()}
        using = {name: -price for name, price in self.pack.interact_price.items()}
        rows = [moving] * 4 + [using, {}] + rows + [{}] * (self.num_actions - 6 - len(rows))
        columns = [
            Column([[row.get(name, 0.0) for row in rows]], 0.0, torch.float32, str(self.device))
            for name in self.meter_names
        ]
        return [None if column.is_default else column for column in columns]

    # ------------------------------------------------------------------ look-ups

    def phase_of(self, tick: Tensor) -> Tensor:
        """Index of the schedule's phase: int32 [B]."""
        phase = torch.zeros_like(tick)
        for start in self.phase_ticks:
            phase = phase + (tick >= start)
        return phase

    def by_phase(self, values: list[float], phase: Tensor) -> Tensor | float:
        if all(value == values[0] for value in values):
            return values[0]
        chosen = torch.full(phase.shape, values[0], dtype=torch.float32, device=phase.device)
        for index, value in enumerate(values[1:], start=1):
            chosen = torch.where(phase >= index, value, chosen)
        return chosen

    def across(self, cell: Tensor) -> tuple[Tensor, Tensor]:
        """x, y of an int32 cell; a product in float32 (exact here), as no vector unit divides."""
        y = ((cell.float() + 0.5) * (1.0 / self.width)).int()
        return cell - y * self.width, y

    def place_at(self, cell: Tensor) -> Tensor:
        """What can be used from a row of the tables: int32, -1 for nothing."""
        return self.place_table[cell].int()

    def row_of(self, layout: Tensor, cell: Tensor) -> Tensor:
        """Row of the tables by layout and cell: int32."""
        return layout.int() * (self.width * self.height) + cell
