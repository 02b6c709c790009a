"""The town: a multi-agent survival world as pure tensor functions over a TensorDict state.

Batch is [B] worlds with N agents each. Logical shapes are [B, N, ...]; underneath every per-agent
tensor is stored agent-major ([N, B], meters [8, N, B]), so that one operation covers all worlds in
contiguous memory. No function mutates its input, none branches on a tensor's value, and all
compile with `fullgraph=True`.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.town import tables
from hamlet.town.config import BASE_ACTIONS, Condition, Pack
from hamlet.town.counter import below, episode_key, tick_hash
from hamlet.town.cues import CueRules, telling_cues
from hamlet.town.tables import Column

UP, DOWN, LEFT, RIGHT, INTERACT, WAIT = range(6)
# Streams of the counter hash; contention uses the agent's index, so streams start above it.
STREAM_START, STREAM_LAYOUT, STREAM_CUES = 64, 128, 256


def compare(value: Tensor, op: str, bound: float) -> Tensor:
    """Elementwise comparison named by its operator."""
    if op == "<":
        return value < bound
    if op == "<=":
        return value <= bound
    return value > bound if op == ">" else value >= bound


def clamp01(value: Tensor) -> Tensor:
    return value.clamp(0.0, 1.0)


def next_hour(hour: Tensor) -> Tensor:
    return torch.where(hour == 23, 0, hour + 1)


def together(parts: list[Tensor]) -> Tensor:
    """Tensors of one shape and type side by side in one piece of memory: [len(parts), ...].

    A compiled loop over all agents ends where something is written to memory, and what is not
    written is computed anew by every later loop that needs it. This writes: integers and floats,
    never bools, whose loads do not vectorise.
    """
    return torch.cat(parts).view(len(parts), *parts[0].shape)


class Town:
    """The constants of one pack and the pure functions that play it.

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
        self.goal_names = (*pack.affordance_names, "rest", "explore")
        self.num_goals = len(self.goal_names)
        self.num_cell_codes = self.num_affordances + 2
        self.meter_names, self.num_meters = pack.meter_names, len(pack.meters)
        self.cue_names, self.num_cues = tuple(c.name for c in pack.cues), len(pack.cues)
        self.telling_cues = telling_cues(pack.cues)
        self.self_names = (
            *pack.meter_names, "x", "y", "sin_hour", "cos_hour", "progress", "age", "blocked",
        )  # fmt: skip
        self.self_dim = len(self.self_names)
        self.vision = pack.vision

        if layouts is None:
            layouts = tables.draw_layouts(pack, num_layouts, layout_seed)
        self.affordance_cells = layouts.to(self.device)
        self.num_layouts = len(layouts)
        code, distance = tables.nearest_usable(pack, self.affordance_cells)
        small = torch.int8 if self.num_affordances < 128 else torch.int16  # to stay in the cache
        self._place_table, self._distance_table = code.flatten().to(small), distance.flatten()
        self._has_distance = any(a.distance_limit for a in pack.affordances)
        self._teleport_table = tables.teleport_targets(pack, self.affordance_cells).flatten()
        self._has_teleport = any(a.on_completion for a in pack.affordances)
        self._view_table = tables.view_rows(pack, self.affordance_cells)
        # Constants of the observation: who is in each slot [M, N], kin there [M, N, 1], and the
        # numbers of the cues, actions and cells in view, as columns.
        agent = torch.arange(self.num_agents, device=self.device)
        slot = agent[:-1, None]
        self._others = slot + (slot >= agent)
        kin_size = pack.families.size if pack.families else 1
        self._kin = (self._others // kin_size == agent // kin_size)[..., None]
        self._each_cue = torch.arange(self.num_cues, device=self.device).int()[:, None, None, None]
        self._each_action = torch.arange(self.num_actions, device=self.device).int()[:, None, None]
        spots = torch.arange((2 * pack.vision + 1) ** 2, device=self.device)
        self._each_spot = spots.int()[:, None, None]
        self._build_columns()
        self._cues = CueRules(pack, self.device)
        self._meter_index = {name: i for i, name in enumerate(pack.meter_names)}
        initial = torch.tensor([m.initial for m in pack.meters], dtype=torch.float32)
        self._initial = initial.to(self.device)[:, None, None]
        self._cases: int | None = None

    # ------------------------------------------------------------------ constants

    def _build_columns(self) -> None:
        pack, dev = self.pack, str(self.device)
        phases = tables.phase_packs(pack)
        self._phase_ticks = [change.tick for change in sorted(pack.schedule, key=lambda c: c.tick)]
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
        self._price = amounts(
            lambda a, m: (a.price_per_tick if pack.temporal else a.price).get(m, 0.0)
        )
        self._taken = self._action_columns()
        self._per_tick = amounts(
            lambda a, m: a.effects_per_tick.get(m, 0.0) * (scale or a.duration) * a.quality
        )
        self._on_completion = amounts(lambda a, m: a.effects_on_completion.get(m, 0.0) * a.quality)
        self._refund = amounts(lambda a, m: a.refund * a.price_per_tick.get(m, 0.0))
        self._has_refund = any(self._refund) and pack.temporal
        self._duration = numbers(lambda a: a.duration, default=1)
        self._open_bits = numbers(tables.open_bits)
        limits = [
            float(a.capacity or (1 if a.exclusive else pack.agents)) for a in pack.affordances
        ]
        self._capacity = Column([limits], pack.agents, torch.int32, dev)
        self._contended = min(limits, default=pack.agents) < pack.agents
        self._held = numbers(lambda a: int(not a.interruptible))
        self._has_held = any(not a.interruptible for a in pack.affordances) and pack.temporal

        multiplier = pack.depletion_multiplier
        depletion = torch.tensor(
            [[m.depletion for m in phase.meters] for phase in phases], dtype=torch.float32
        )
        self._depletion = (depletion * multiplier).tolist()  # exact float32 values
        self._strength = [[c.strength for c in phase.cascades] for phase in phases]

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

    def _phase(self, tick: Tensor) -> Tensor:
        """Index of the schedule's phase: int32 [B]."""
        phase = torch.zeros_like(tick)
        for start in self._phase_ticks:
            phase = phase + (tick >= start)
        return phase

    def _by_phase(self, values: list[float], phase: Tensor) -> Tensor | float:
        if all(value == values[0] for value in values):
            return values[0]
        chosen = torch.full(phase.shape, values[0], dtype=torch.float32, device=phase.device)
        for index, value in enumerate(values[1:], start=1):
            chosen = torch.where(phase >= index, value, chosen)
        return chosen

    # ------------------------------------------------------------------ beginning of a life

    def train(self) -> None:
        """Every world lives life after life, for ever."""
        self._cases = None

    def eval(self, cases: int) -> None:
        """Play the first life of the worlds 0 to `cases` - 1, once each.

        A slot whose life is over takes the next world; the state then has a field `next_case`.
        """
        self._cases = cases

    def playing(self, state: TensorDict) -> tuple[Tensor, Tensor]:
        """The case int64 [B] of every slot, and whether it is still being played, bool [B]."""
        return state["world"], ~state["over"]

    def reset(self, seed: int, num_worlds: int, first_world: int = 0) -> TensorDict:
        """Fresh worlds; world b depends only on (seed, first_world + b) and on the actions.

        Returns the state, a TensorDict of batch [num_worlds]; see `_fresh` for the fields.
        """
        world = torch.arange(first_world, first_world + num_worlds, device=self.device)
        zero = torch.zeros_like(world)
        fresh = self._fresh(torch.full_like(world, seed), world, zero, zero == 0)
        blank = self._blank(num_worlds)
        fields = self._with_cues({name: value + fresh[name] for name, value in blank.items()})
        if self._cases is not None:
            fields["next_case"] = torch.full_like(world, num_worlds)
            fields["over"] = world >= self._cases
        return self._pack_state(fields)

    def _fresh(
        self, seed: Tensor, world: Tensor, episode: Tensor, which: Tensor
    ) -> dict[str, Tensor | float | int | bool]:
        """Every field of the state at the first tick of a life, agent-major or one for all.

        Only the worlds of `which`, bool [B], are right: the others do not look up their place.
        """
        key = episode_key(seed, world, episode)
        zero = torch.zeros_like(key)
        layout = below(tick_hash(key, zero, STREAM_LAYOUT), self.num_layouts)
        agent = torch.arange(self.num_agents, device=world.device)[:, None]
        cell = below(tick_hash(key, zero, STREAM_START + agent), self.width * self.height).int()
        fields: dict[str, Tensor | float | int | bool] = {
            "meters": self._initial,
            "position": together([*self._across(cell)]),
            "alive": True,
            "tick": 0,
            "hour": self.pack.start_hour,
            "layout": layout,
            "seed": seed,
            "world": world,
            "episode": episode,
            "key": key,
            "reward": 0.0,
            "died": False,
            "retired": False,
            "done": False,
            "over": False,
            "episode_over": False,
            "last_action": WAIT,
            "progress": 0,
            "last_affordance": -1,
            "place": self._place(torch.where(which, self._cell(layout, cell), 0)),
            "used": -1,
            "blocked": False,
            "cue_bits": 0,
        }
        if self.pack.families:
            fields["comm"] = 0
        return fields | dict.fromkeys(self._cues.counters, 0)

    def _blank(self, num_worlds: int) -> dict[str, Tensor]:
        """Zeros of the shape and type of every field, agent-major."""
        n, b, long = self.num_agents, num_worlds, torch.int64
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "meters": ((self.num_meters, n, b), torch.float32),
            "position": ((2, n, b), torch.int32),
            "reward": ((n, b), torch.float32),
            "last_action": ((n, b), long),
        }
        shapes |= dict.fromkeys(("tick", "hour", "key"), ((b,), torch.int32))
        shapes |= dict.fromkeys(("layout", "seed", "world", "episode"), ((b,), long))
        shapes |= dict.fromkeys(("over", "episode_over"), ((b,), torch.bool))
        shapes |= dict.fromkeys(
            ("alive", "died", "retired", "done", "blocked"), ((n, b), torch.bool)
        )
        integers = ["progress", "last_affordance", "place", "used", "cue_bits"]
        integers += ["comm"] if self.pack.families else []
        shapes |= dict.fromkeys(integers, ((n, b), torch.int32))
        shapes |= {name: ((rows, n, b), torch.int32) for name, rows in self._cues.counters.items()}
        return {
            name: torch.zeros(shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in shapes.items()
        }

    def _across(self, cell: Tensor) -> tuple[Tensor, Tensor]:
        """x, y of an int32 cell; a product in float32 (exact here), as no vector unit divides."""
        y = ((cell.float() + 0.5) * (1.0 / self.width)).int()
        return cell - y * self.width, y

    def _place(self, cell: Tensor) -> Tensor:
        """What can be used from a row of the tables: int32, -1 for nothing."""
        return self._place_table[cell].int()

    def _cell(self, layout: Tensor, cell: Tensor) -> Tensor:
        """Row of the tables by layout and cell: int32."""
        return layout.int() * (self.width * self.height) + cell

    def _with_cues(
        self, fields: dict[str, Tensor], live: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The fields with what everybody shows now; only for `live` worlds, if given."""
        bits, timers = self._cues.update(fields, list(fields["meters"].unbind(0)))
        found = {"cue_bits": bits} | timers
        if live is not None:
            found = {name: torch.where(live, new, fields[name]) for name, new in found.items()}
        return fields | found

    def rearrange(self, state: TensorDict, **changes: Tensor) -> TensorDict:
        """The state with public fields replaced (`meters`, `position`, `layout`, `hour`, ...).

        What follows from them (the place under the agent, the cues) is computed anew.
        """
        unknown = set(changes) - set(state.keys())
        if unknown:
            raise KeyError(f"state has no field {min(unknown)!r}")
        fields = self._unpack_state(state)
        for name, value in changes.items():
            old = fields[name]
            value = value.to(old.device, old.dtype).expand(*reversed(old.shape))
            fields[name] = value.permute(*reversed(range(value.ndim)))
        x, y = fields["position"]
        cell = self._cell(fields["layout"], y * self.width + x)
        fields["place"] = self._place(cell)
        bits, _ = self._cues.update(fields, list(fields["meters"].unbind(0)))
        return self._pack_state(fields | {"cue_bits": bits})

    # per-agent fields are stored [..., N, B] and shown [B, N, ...]
    def _pack_state(self, fields: dict[str, Tensor]) -> TensorDict:
        shown = {
            name: value.permute(*reversed(range(value.ndim))) for name, value in fields.items()
        }
        return TensorDict(shown, batch_size=[fields["tick"].shape[0]])

    def _unpack_state(self, state: TensorDict) -> dict[str, Tensor]:
        return {name: value.permute(*reversed(range(value.ndim))) for name, value in state.items()}

    # ------------------------------------------------------------------ one tick

    def step_core(self, state: TensorDict, actions: Tensor) -> TensorDict:
        """One tick without reset; worlds whose episode is over stay as they are (reward 0).

        Args:
            state: as returned by `reset` or a step.
            actions: int64 [B, N]. Any action may be tried: a move into a wall costs its energy and
                goes nowhere, INTERACT away from an affordance only costs.
        """
        fields = self._unpack_state(state)
        now = self._tick(fields, actions, gated=True)
        return self._pack_state(self._with_cues(now, live=~fields["over"]))

    def step_and_reset_core(self, state: TensorDict, actions: Tensor) -> TensorDict:
        """`step_core`, then every world whose episode is over starts its next life.

        reward, done, died, retired and episode_over still describe the tick just finished; all
        other fields are those of the new life (episode + 1, a newly drawn layout), or of the next
        case after `eval`.
        """
        now = self._tick(self._unpack_state(state), actions, gated=True)
        kept = ("reward", "done", "died", "retired", "episode_over")
        if self._cases is None:
            merged = self._renewed(now, now["over"], now["world"], now["episode"] + 1, kept)
        else:
            turn = now["episode_over"].long().cumsum(0)
            world = now["next_case"] + turn - 1
            begins = now["episode_over"] & (world < self._cases)
            now["next_case"] = now["next_case"] + turn[-1]
            merged = self._renewed(now, begins, world, torch.zeros_like(world), kept)
        return self._pack_state(self._with_cues(merged))

    def renew(self, state: TensorDict, which: Tensor) -> TensorDict:
        """The state with the next life begun in the worlds of the mask `which`, bool [B]."""
        fields = self._unpack_state(state)
        begun = self._renewed(fields, which, fields["world"], fields["episode"] + 1)
        begun = self._with_cues(begun)
        return self._pack_state(
            {name: torch.where(which, begun[name], value) for name, value in fields.items()}
        )

    def _renewed(
        self,
        fields: dict[str, Tensor],
        which: Tensor,
        world: Tensor,
        episode: Tensor,
        kept: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:
        """The fields with another life begun where `which`, except those `kept`; no cues yet."""
        fresh = self._fresh(fields["seed"], world, episode, which)
        fresh = {name: value for name, value in fresh.items() if name not in kept}
        return fields | {
            name: torch.where(which, value, fields[name])
            for name, value in fresh.items()
            if value is not fields[name]
        }

    def step_reference(self, state: TensorDict, actions: Tensor) -> TensorDict:
        """One tick as the reference environment takes it: nobody is gated by death or age."""
        fields = self._unpack_state(state)
        return self._pack_state(self._with_cues(self._tick(fields, actions, gated=False)))

    def _tick(self, s: dict[str, Tensor], actions: Tensor, gated: bool) -> dict[str, Tensor]:
        pack = self.pack
        phase = self._phase(s["tick"])
        meters = list(s["meters"])
        hamlet = pack.mode == "hamlet"
        # Agent-major in memory, too: one transposed load would make the whole loop scalar.
        turned = actions.stride(0) == 1
        action = actions.t().int() if turned else torch.stack(actions.int().unbind(1))
        if gated:
            action = torch.where(s["alive"] & ~s["over"], action, -1)  # -1: does not take part

        # Moving: a held user stays where it is while it can go on.
        x, y = s["position"]
        to_x = (x + (action == RIGHT).int() - (action == LEFT).int()).clamp(0, self.width - 1)
        to_y = (y + (action == DOWN).int() - (action == UP).int()).clamp(0, self.height - 1)
        if self._has_held:
            held = self._is_held(s, meters, phase)
            to_x, to_y = torch.where(held, x, to_x), torch.where(held, y, to_y)
        cell = self._cell(s["layout"], to_y * self.width + to_x)
        place = self._place(cell)

        # In hamlet mode every effect is applied and clamped in turn, in atomic mode all are added
        # to the meters at the start of the tick and clamped once.
        if hamlet:
            for index, column in enumerate(self._taken):
                if column is not None:
                    meters[index] = clamp01(meters[index] + column(action, phase))

        # Interacting: legal and affordable, then the conflict over capacity.
        wants = (action == INTERACT) & (place >= 0)
        if pack.temporal:
            wants = wants & self._is_open(place, s["hour"], phase)
        for index, column in enumerate(self._price):
            if column is not None:
                wants = wants & (meters[index] >= column(place, phase))
        for number, affordance in enumerate(pack.affordances):
            for test in affordance.preconditions:
                wants = wants & ((place != number) | self._holds(test, meters))
        wanted = torch.where(wants, place, -1)
        agent = torch.arange(self.num_agents, device=x.device)[:, None]
        ticket = tick_hash(s["key"], s["tick"], agent) ^ -(1 << 31)  # compares as unsigned
        away = self._distance_table[cell] if self._has_distance else torch.zeros_like(place)
        action, to_x, to_y, place, wanted, ticket, away = together(
            [action, to_x, to_y, place, wanted, ticket, away]
        )
        accepted = self._resolve(wanted, ticket, away, phase)

        deltas = [[column(action, phase)] if column else [] for column in self._taken]
        progress, last = s["progress"], s["last_affordance"]
        moved = (to_x != x) | (to_y != y)
        if self._has_refund:
            for index, column in enumerate(self._refund):
                if column is not None:
                    back = column(last, phase) * progress
                    deltas[index].append(torch.where(moved & (progress > 0), back, 0.0))
        if pack.temporal:
            before = torch.where(moved | (last != place), 0, progress)
            complete = accepted & (before + 1 == self._duration(place, phase))
            progress = torch.where(accepted, before + 1, torch.where(moved, 0, progress))
            progress = torch.where(complete, 0, progress)
            ended = complete | (moved & ~accepted)
            last = torch.where(ended, -1, torch.where(accepted, place, last))
        else:
            complete = accepted
        code, finished, progress, last = together(
            [torch.where(accepted, place, -1), torch.where(complete, place, -1), progress, last]
        )
        if hamlet:
            meters = self._use_in_order(meters, code, finished, phase)
            meters = self._metabolise_in_order(meters, phase)
        else:
            self._use_atomic(deltas, code, finished, phase)
            self._metabolise_atomic(deltas, meters, phase)
            meters = [
                clamp01(reduce(torch.add, added, meter)) if added else meter
                for meter, added in zip(meters, deltas, strict=True)
            ]
        if self._has_teleport:
            target = self._teleport_table[s["layout"] * self.num_affordances + place.clamp(min=0)]
            jumps = (finished >= 0) & (target >= 0)
            there_x, there_y = self._across(target)
            to_x, to_y = torch.where(jumps, there_x, to_x), torch.where(jumps, there_y, to_y)
            there = self._place(self._cell(s["layout"], target.clamp(min=0)))
            place = torch.where(jumps, there, place)

        # Dying, ageing, retiring, reward.
        if gated:
            act = action >= 0
            meters = [torch.where(act, new, old) for new, old in zip(meters, s["meters"])]
        new_meters = together(meters)
        meters = list(new_meters)
        ends = [compare(meters[self._meter_index[c.meter]], c.op, c.value) for c in pack.terminal]
        terminal = reduce(torch.logical_or, ends)
        reward = torch.full_like(meters[0], pack.reward.base)
        for name in pack.reward.meters:
            reward = reward * meters[self._meter_index[name]]
        if gated:
            tick = torch.where(s["over"], s["tick"], s["tick"] + 1)
            old_age = tick >= pack.lifespan
            died = act & terminal
            retired = act & ~terminal & old_age
            reward = torch.where(act & ~terminal, reward, 0.0)
            reward = torch.where(retired, reward + pack.reward.retirement_bonus, reward)
            ended, alive = together([(~act | terminal | old_age).int(), (s["alive"] & ~died).int()])
            everyone = reduce(torch.minimum, ended)
            hour = torch.where(s["over"], s["hour"], next_hour(s["hour"]))
            tick, hour, over = together([tick, hour, s["over"].int() | everyone])
            ended, alive, over = ended > 0, alive > 0, over > 0
            episode_over = over & ~s["over"]
            last_action = torch.where(act, action.long(), s["last_action"])
        else:
            tick = s["tick"] + 1
            old_age = tick >= pack.lifespan
            died, alive = terminal, s["alive"] & ~terminal
            retired = alive & old_age
            ended = s["done"] | terminal
            reward = torch.where(ended, 0.0, reward)
            reward = torch.where(old_age, reward + pack.reward.retirement_bonus, reward)
            ended = ended | old_age
            episode_over, over = ended.all(0), s["over"]
            hour, last_action = next_hour(s["hour"]), action.long()

        out = dict(s)
        out |= {
            "meters": new_meters,
            "position": together([to_x, to_y]),
            "alive": alive,
            "tick": tick,
            "hour": hour,
            "reward": reward,
            "died": died,
            "retired": retired,
            "done": ended,
            "over": over,
            "episode_over": episode_over,
            "last_action": last_action,
            "progress": progress,
            "last_affordance": last,
            "place": place,
            "used": code,
            "blocked": wanted != code,
        }
        if pack.families:
            first = len(BASE_ACTIONS) + len(pack.actions)
            out["comm"] = torch.where(action >= first, action - first, s["comm"])
        return out

    def _holds(self, test: Condition, meters: list[Tensor]) -> Tensor:
        return compare(meters[self._meter_index[test.meter]], test.op, test.value)

    def _is_open(self, place: Tensor, hour: Tensor, phase: Tensor) -> Tensor:
        return ((self._open_bits(place, phase) >> hour) & 1).bool()

    def _is_held(self, s: dict[str, Tensor], meters: list[Tensor], phase: Tensor) -> Tensor:
        """Who is in the middle of an uninterruptible use and able to continue: bool [N, B]."""
        last = s["last_affordance"]
        held = (s["progress"] > 0) & (self._held(last, phase) > 0)
        held = held & self._is_open(last, s["hour"], phase)
        for index, column in enumerate(self._price):
            if column is not None:
                held = held & (meters[index] >= column(last, phase))
        return held

    def _resolve(self, wanted: Tensor, ticket: Tensor, away: Tensor, phase: Tensor) -> Tensor:
        """Who gets through where more want in than the capacity: bool [N, B].

        Nearest first, equals by a hash of (seed, world, episode, tick, agent), which is a
        bijection in the agent and so never ties; a reservation lasts this tick only.

        Args:
            wanted: int32 [N, B] place, -1 for those who want none.
            ticket: int32 [N, B] the hash.
            away: int32 [N, B] distance to the place.
            phase: int32 [B].
        """
        if not self._contended:
            return wanted >= 0
        ahead = torch.zeros_like(wanted)
        for other in range(self.num_agents):
            before = ticket[other] < ticket
            if self._has_distance:
                before = (away[other] < away) | ((away[other] == away) & before)
            ahead = ahead + ((wanted[other] == wanted) & before).int()
        return (wanted >= 0) & (ahead < self._capacity(wanted, phase))

    def _use_in_order(
        self, meters: list[Tensor], code: Tensor, finished: Tensor, phase: Tensor
    ) -> list[Tensor]:
        out = []
        temporal = self.pack.temporal
        columns = zip(self._price, self._per_tick, self._on_completion, strict=True)
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

    def _metabolise_in_order(self, meters: list[Tensor], phase: Tensor) -> list[Tensor]:
        meters = list(meters)
        for index, meter in enumerate(meters):
            depletion = self._by_phase([values[index] for values in self._depletion], phase)
            meters[index] = clamp01(meter - depletion)
        for m in self.pack.modulations:
            source, target = self._meter_index[m.source], self._meter_index[m.target]
            loss = m.rate * (m.base + m.range * (1.0 - meters[source]))
            meters[target] = clamp01(meters[target] - loss)
        for number, c in enumerate(self.pack.cascades):
            source, target = self._meter_index[c.source], self._meter_index[c.target]
            strength = self._by_phase([values[number] for values in self._strength], phase)
            loss = strength * ((c.threshold - meters[source]) / c.threshold)
            lower = clamp01(meters[target] - loss)
            meters[target] = torch.where(meters[source] < c.threshold, lower, meters[target])
        return meters

    def _use_atomic(
        self, deltas: list[list[Tensor]], code: Tensor, finished: Tensor, phase: Tensor
    ) -> None:
        for index, added in enumerate(deltas):
            price, per_tick = self._price[index], self._per_tick[index]
            completion = self._on_completion[index]
            if price is not None:
                added.append(-price(code, phase))
            if per_tick is not None:
                added.append(per_tick(code, phase))
            if completion is not None:
                added.append(completion(finished, phase))

    def _metabolise_atomic(
        self, deltas: list[list[Tensor]], meters: list[Tensor], phase: Tensor
    ) -> None:
        for index, meter in enumerate(meters):
            depletion = self._by_phase([values[index] for values in self._depletion], phase)
            if isinstance(depletion, Tensor) or depletion:
                deltas[index].append(torch.zeros_like(meter) - depletion)
        for m in self.pack.modulations:
            source, target = self._meter_index[m.source], self._meter_index[m.target]
            deltas[target].append(-(m.rate * (m.base + m.range * (1.0 - meters[source]))))
        for number, c in enumerate(self.pack.cascades):
            source, target = self._meter_index[c.source], self._meter_index[c.target]
            strength = self._by_phase([values[number] for values in self._strength], phase)
            deficit = ((c.threshold - meters[source]) / c.threshold).clamp(min=0.0)
            deltas[target].append(-(strength * deficit))

    # ------------------------------------------------------------------ what agents may know

    def action_mask(self, state: TensorDict) -> Tensor:
        """Legal actions, bool [B, N, A]: inside the map; INTERACT on a place that is open.

        Being broke does not close a place (trying costs a tick). The dead may only WAIT.
        """
        return self._mask(self._unpack_state(state)).permute(2, 1, 0)

    def legal_bits(self, state: TensorDict) -> Tensor:
        """The action mask in compact form: int32 [B, N], bit a set where action a is legal."""
        return self._legal(self._unpack_state(state)).t()

    def _mask(self, s: dict[str, Tensor]) -> Tensor:
        """bool [A, N, B]."""
        return self._unfold(self._legal(s), self._each_action).bool()

    @staticmethod
    def _unfold(bits: Tensor, each: Tensor) -> Tensor:
        """int32 [len(each), ...]: the bits of `bits` one by one."""
        return (bits >> each) & 1

    def _legal(self, s: dict[str, Tensor]) -> Tensor:
        x, y = s["position"]
        phase = self._phase(s["tick"])
        usable = s["place"] >= 0
        if self.pack.temporal:
            usable = usable & self._is_open(s["place"], s["hour"], phase)
        free = s["alive"]
        if self._has_held:
            free = free & ~self._is_held(s, list(s["meters"]), phase)
        bits = torch.full_like(x, sum(1 << a for a in range(WAIT, self.num_actions)))
        bits = torch.add(bits, usable, alpha=1 << INTERACT)
        bits = torch.where(s["alive"], bits, 1 << WAIT)
        inside = ((y > 0), (y < self.height - 1), (x > 0), (x < self.width - 1))
        for move, possible in enumerate(inside):
            bits = torch.add(bits, free & possible, alpha=1 << move)
        return bits

    def observe(self, state: TensorDict) -> TensorDict:
        """What each agent may see: a TensorDict of batch [B] with fields [B, N, ...].

        view uint8 [B,N,S,S] cell codes around the agent (S = 2 * vision + 1, first index dy);
        occupancy uint8 [B,N,S,S] other living agents in the cell; self_state f32 [B,N,K] named by
        `self_names`; of the M = N-1 others in slot order: visible bool [B,N,M], cues f32 [B,N,M,C],
        others_offset f32 [B,N,M,2] (cells / 4), others_action int64 [B,N,M] (A when not visible),
        comm int64 [B,N,M] (kin only, else 0); action_mask bool [B,N,A].
        """
        s = self._unpack_state(state)
        reach, side = self.vision, 2 * self.vision + 1
        x, y = s["position"]
        cell = self._cell(s["layout"], y * self.width + x)
        view = self._view_table[cell].view(torch.uint8)[..., : side * side]

        # Of the others, [M, N, B] by slot: the agents before one, then those after it.
        acted = torch.where(s["alive"], s["last_action"].int(), -1)
        told = s["comm"] if self.pack.families else torch.zeros_like(x)
        public = together([x, y, acted, s["cue_bits"], told, self._legal(s)])
        other_x, other_y, acted, bits, told = public[:5, self._others]
        dx, dy = other_x - x, other_y - y
        apart = torch.maximum(dx.abs(), dy.abs())
        near = (acted >= 0) & (apart <= reach)
        visible = (acted >= 0) & (apart <= self.pack.cue_distance)
        others = together(
            [
                torch.where(near, (dy + reach) * side + dx + reach, -1),
                torch.where(visible, dx, 0),
                torch.where(visible, dy, 0),
                torch.where(visible, acted, self.num_actions),
                torch.where(visible, bits & self._cues.allowed(apart, self._kin), 0),
                torch.where(self._kin & (acted >= 0), told, 0),
            ]
        )
        spots, _, _, acts, bits, told = others
        crowd = torch.zeros((side * side, *x.shape), dtype=torch.uint8, device=x.device)
        for spot in spots:
            crowd = crowd + (spot == self._each_spot)

        angle = s["hour"].float() * (2.0 * math.pi / 24.0)
        known = [
            s["meters"].flatten(0, 1),
            x.float() * (1.0 / (self.width - 1)),
            y.float() * (1.0 / (self.height - 1)),
            angle.sin().expand(x.shape),
            angle.cos().expand(x.shape),
            s["progress"].float() * 0.1,
            (s["tick"].float() * (1.0 / self.lifespan)).expand(x.shape),
            s["blocked"].float(),
        ]
        return TensorDict(
            {
                "view": view.transpose(0, 1).unflatten(2, (side, side)),
                "occupancy": crowd.unflatten(0, (side, side)).permute(3, 2, 0, 1),
                "self_state": torch.cat(known).unflatten(0, (-1, len(x))).permute(2, 1, 0),
                "cues": self._unfold(bits, self._each_cue).float().permute(3, 2, 1, 0),
                "visible": (acts < self.num_actions).permute(2, 1, 0),
                "others_offset": (others[1:3] * 0.25).permute(3, 2, 1, 0),
                "others_action": acts.long().permute(2, 1, 0),
                "comm": told.long().permute(2, 1, 0),
                "action_mask": self._unfold(public[5], self._each_action).bool().permute(2, 1, 0),
            },
            batch_size=[x.shape[1]],
        )
