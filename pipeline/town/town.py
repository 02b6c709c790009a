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

from pipeline.town import tables
from pipeline.town.config import BASE_ACTIONS, Condition, Pack
from pipeline.town.counter import below, episode_key, tick_hash
from pipeline.town.cues import CueRules
from pipeline.town.tables import Column

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
        self._place_table, self._distance_table = code.flatten(), distance.flatten()
        self._has_distance = any(a.distance_limit for a in pack.affordances)
        self._teleport_table = tables.teleport_targets(pack, self.affordance_cells).flatten()
        self._has_teleport = any(a.on_completion for a in pack.affordances)
        self._view_table = tables.view_rows(pack, self.affordance_cells)
        self._build_columns()
        self._cues = CueRules(pack, self.device)
        self._meter_index = {name: i for i, name in enumerate(pack.meter_names)}
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
        full = torch.full_like(world, seed)
        fields = self._with_cues(self._fresh(full, world, torch.zeros_like(world)))
        if self._cases is not None:
            fields["next_case"] = torch.full_like(world, num_worlds)
            fields["over"] = world >= self._cases
        return self._pack_state(fields)

    def _fresh(self, seed: Tensor, world: Tensor, episode: Tensor) -> dict[str, Tensor]:
        """Every field of the state at the first tick of a life, agent-major."""
        n, b = self.num_agents, world.shape[0]
        key = episode_key(seed, world, episode)
        zero = torch.zeros_like(world)
        layout = below(tick_hash(key, zero, STREAM_LAYOUT), self.num_layouts)
        agent = torch.arange(n, device=world.device)[:, None]
        cell = below(tick_hash(key, zero, STREAM_START + agent), self.width * self.height)
        meters = [
            torch.full((n, b), m.initial, dtype=torch.float32, device=world.device)
            for m in self.pack.meters
        ]
        integer = torch.zeros((n, b), dtype=torch.int32, device=world.device)
        false = torch.zeros((n, b), dtype=torch.bool, device=world.device)
        none = integer - 1
        place = self._place_table[layout * (self.width * self.height) + cell]
        fields = {
            "meters": torch.stack(meters),
            "position": torch.stack([cell % self.width, cell // self.width]).int(),
            "alive": ~false,
            "tick": zero.int(),
            "hour": zero.int() + self.pack.start_hour,
            "layout": layout,
            "seed": seed,
            "world": world,
            "episode": episode,
            "key": key,
            "reward": torch.zeros((n, b), dtype=torch.float32, device=world.device),
            "died": false,
            "retired": false,
            "done": false,
            "over": zero.bool(),
            "episode_over": zero.bool(),
            "last_action": torch.full_like(integer, WAIT).long(),
            "progress": integer,
            "last_affordance": none,
            "place": place,
            "used": none,
            "blocked": false,
        }
        if self.pack.families:
            fields["comm"] = integer
        return fields | {"cue_bits": integer} | self._cues.initial(n, b, world.device)

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
        x, y = fields["position"].long().unbind(0)
        cell = fields["layout"] * (self.width * self.height) + y * self.width + x
        fields["place"] = self._place_table[cell]
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
        now = self._tick(fields, actions.t(), gated=True)
        return self._pack_state(self._with_cues(now, live=~fields["over"]))

    def step_and_reset_core(self, state: TensorDict, actions: Tensor) -> TensorDict:
        """`step_core`, then every world whose episode is over starts its next life.

        reward, done, died, retired and episode_over still describe the tick just finished; all
        other fields are those of the new life (episode + 1, a newly drawn layout), or of the next
        case after `eval`.
        """
        now = self._tick(self._unpack_state(state), actions.t(), gated=True)
        begins, world, episode = now["over"], now["world"], now["episode"] + 1
        kept = ["reward", "done", "died", "retired", "episode_over"]
        if self._cases is not None:
            turn = now["episode_over"].long().cumsum(0)
            world, episode = now["next_case"] + turn - 1, torch.zeros_like(episode)
            begins = now["episode_over"] & (world < self._cases)
            now["next_case"] = now["next_case"] + turn[-1]
            kept.append("next_case")
        fresh = self._fresh(now["seed"], world, episode)
        merged = {
            name: value if name in kept else torch.where(begins, fresh[name], value)
            for name, value in now.items()
        }
        return self._pack_state(self._with_cues(merged))

    def renew(self, state: TensorDict, which: Tensor) -> TensorDict:
        """The state with the next life begun in the worlds of the mask `which`, bool [B]."""
        fields = self._unpack_state(state)
        fresh = self._with_cues(self._fresh(fields["seed"], fields["world"], fields["episode"] + 1))
        return self._pack_state(
            {name: torch.where(which, fresh[name], value) for name, value in fields.items()}
        )

    def step_reference(self, state: TensorDict, actions: Tensor) -> TensorDict:
        """One tick as the reference environment takes it: nobody is gated by death or age."""
        fields = self._unpack_state(state)
        return self._pack_state(self._with_cues(self._tick(fields, actions.t(), gated=False)))

    def _tick(self, s: dict[str, Tensor], actions: Tensor, gated: bool) -> dict[str, Tensor]:
        pack = self.pack
        live = ~s["over"] if gated else torch.ones_like(s["over"])
        act = (s["alive"] & live) if gated else torch.ones_like(s["alive"])
        action = torch.where(act, actions, WAIT).to(torch.int32)
        phase = self._phase(s["tick"])
        meters = list(s["meters"].unbind(0))
        hamlet = pack.mode == "hamlet"

        # Moving: a held user stays where it is while it can go on.
        x, y = s["position"].unbind(0)
        to_x = x + (action == RIGHT).int() - (action == LEFT).int()
        to_y = y + (action == DOWN).int() - (action == UP).int()
        to_x, to_y = to_x.clamp(0, self.width - 1), to_y.clamp(0, self.height - 1)
        if self._has_held:
            held = self._is_held(s, meters, phase)
            to_x, to_y = torch.where(held, x, to_x), torch.where(held, y, to_y)
        moved = (to_x != x) | (to_y != y)
        base = s["layout"] * (self.width * self.height)
        cell = base + to_y * self.width + to_x
        place = self._place_table[cell]

        progress, last = s["progress"], s["last_affordance"]
        # In hamlet mode every effect is applied and clamped in turn, in atomic mode all are added
        # to the meters at the start of the tick and clamped once.
        deltas: list[list[Tensor]] = [[] for _ in meters]
        for index, amount, taken in self._action_amounts(action):
            if hamlet:
                meters[index] = torch.where(taken, clamp01(meters[index] + amount), meters[index])
            else:
                deltas[index].append(torch.where(taken, amount, 0.0))
        if self._has_refund:
            for index, column in enumerate(self._refund):
                if column is not None:
                    deltas[index].append(
                        torch.where(moved & (progress > 0), column(last, phase) * progress, 0.0)
                    )
        if pack.temporal:
            progress = torch.where(moved, 0, progress)
            last = torch.where(moved, -1, last)

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
        accepted = self._resolve(s, wants, place, cell, phase) if self._contended else wants

        if pack.temporal:
            progress = torch.where(accepted, torch.where(last == place, progress + 1, 1), progress)
            complete = accepted & (progress == self._duration(place, phase))
            progress = torch.where(complete, 0, progress)
            last = torch.where(complete, -1, torch.where(accepted, place, last))
        else:
            complete = accepted
        code = torch.where(accepted, place, -1)
        finished = torch.where(complete, place, -1)
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
            jumps = complete & (target >= 0)
            to_x = torch.where(jumps, target % self.width, to_x)
            to_y = torch.where(jumps, target // self.width, to_y)
            place = torch.where(jumps, self._place_table[base + target.clamp(min=0)], place)

        # Dying, ageing, retiring, reward.
        meters = [torch.where(act, new, old) for new, old in zip(meters, s["meters"].unbind(0))]
        ends = [compare(meters[self._meter_index[c.meter]], c.op, c.value) for c in pack.terminal]
        terminal = reduce(torch.logical_or, ends)
        tick = s["tick"] + live.int()
        old_age = tick >= pack.lifespan
        died = act & terminal if gated else terminal
        alive = s["alive"] & ~died
        finished_before = ~s["alive"] if gated else s["done"]
        retired = act & alive & old_age
        done = finished_before | died
        reward = torch.full_like(meters[0], pack.reward.base)
        for name in pack.reward.meters:
            reward = reward * meters[self._meter_index[name]]
        reward = torch.where(done, 0.0, reward)
        if gated:
            reward = torch.where(retired, reward + pack.reward.retirement_bonus, reward)
            reward = torch.where(act, reward, 0.0)
            done = torch.where(live, done | retired, s["done"])
        else:
            reward = torch.where(old_age, reward + pack.reward.retirement_bonus, reward)
            done = done | old_age
        episode_over = live & done.all(0)

        out = dict(s)
        out |= {
            "meters": torch.stack(meters),
            "position": torch.stack([to_x, to_y]),
            "alive": alive,
            "tick": tick,
            "hour": torch.where(live, (s["hour"] + 1) % 24, s["hour"]),
            "reward": reward,
            "died": died,
            "retired": retired,
            "done": done,
            "over": (s["over"] | episode_over) if gated else s["over"],
            "episode_over": episode_over,
            "last_action": torch.where(act, actions, s["last_action"]),
            "progress": progress,
            "last_affordance": last,
            "place": place,
            "used": code,
            "blocked": wants & ~accepted,
        }
        if pack.families:
            first = len(BASE_ACTIONS) + len(pack.actions)
            out["comm"] = torch.where(action >= first, action - first, s["comm"])
        return out

    def _action_amounts(self, action: Tensor) -> list[tuple[int, float, Tensor]]:
        """(meter index, amount, who) in the order they apply: custom, moving, interacting."""
        pack, amounts = self.pack, []
        for number, custom in enumerate(pack.actions, start=len(BASE_ACTIONS)):
            for name, amount in custom.effects.items():
                amounts.append((name, amount, action == number))
        amounts += [(name, -price, action <= RIGHT) for name, price in pack.move_price.items()]
        amounts += [(name, -v, action == INTERACT) for name, v in pack.interact_price.items()]
        return [(self._meter_index[name], amount, who) for name, amount, who in amounts]

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

    def _resolve(
        self, s: dict[str, Tensor], wants: Tensor, place: Tensor, cell: Tensor, phase: Tensor
    ) -> Tensor:
        """Who gets through where more want in than the capacity: bool [N, B].

        Nearest first, equals by a hash of (seed, world, episode, tick, agent), which is a
        bijection in the agent and so never ties; a reservation lasts this tick only.
        """
        n = self.num_agents
        agent = torch.arange(n, device=wants.device)[:, None]
        order = (tick_hash(s["key"], s["tick"].long(), agent) - (1 << 31)).to(torch.int32)
        wanted = torch.where(wants, place, -1)
        away = self._distance_table[cell] if self._has_distance else None
        ahead = torch.zeros_like(place)
        for other in range(n):
            before = order[other] < order
            if away is not None:
                before = (away[other] < away) | ((away[other] == away) & before)
            ahead = ahead + ((wanted[other] == place) & before).int()
        return wants & (ahead < self._capacity(place, phase))

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
        s = self._unpack_state(state)
        return self._mask(s).permute(2, 1, 0)

    def _mask(self, s: dict[str, Tensor]) -> Tensor:
        x, y = s["position"].unbind(0)
        phase = self._phase(s["tick"])
        usable = s["place"] >= 0
        if self.pack.temporal:
            usable = usable & self._is_open(s["place"], s["hour"], phase)
        free = s["alive"]
        if self._has_held:
            free = free & ~self._is_held(s, list(s["meters"].unbind(0)), phase)
        rows = [
            free & (y > 0),
            free & (y < self.height - 1),
            free & (x > 0),
            free & (x < self.width - 1),
            s["alive"] & usable,
            torch.ones_like(usable),
        ]
        rows += [s["alive"]] * (self.num_actions - len(rows))
        return torch.stack(rows)

    def observe(self, state: TensorDict) -> TensorDict:
        """What each agent may see: a TensorDict of batch [B] with fields [B, N, ...].

        view uint8 [B,N,S,S] cell codes around the agent (S = 2 * vision + 1, first index dy);
        occupancy uint8 [B,N,S,S] other living agents in the cell; self_state f32 [B,N,K] named by
        `self_names`; of the M = N-1 others in slot order: visible bool [B,N,M], cues f32 [B,N,M,C],
        others_offset f32 [B,N,M,2] (cells / 4), others_action int64 [B,N,M] (A when not visible),
        comm int64 [B,N,M] (kin only, else 0); action_mask bool [B,N,A].
        """
        s = self._unpack_state(state)
        n, reach = self.num_agents, self.vision
        side = 2 * reach + 1
        x, y = s["position"].unbind(0)
        b = x.shape[1]
        cell = s["layout"] * (self.width * self.height) + y * self.width + x
        view = self._view_table[cell].view(torch.uint8)[..., : side * side]

        # Everything is computed per slot as [N, B] and stacked in front, so that every loop runs
        # over contiguous worlds; the logical order of dimensions is made at the end.
        agent = torch.arange(n, dtype=torch.int32, device=x.device)[:, None]
        kin_size = self.pack.families.size if self.pack.families else 1
        spots, visible, cues, offsets, acts, comm = [], [], [], [], [], []
        for slot in range(n - 1):

            def of_other(value: Tensor, slot: int = slot) -> Tensor:
                """[N, B] of the agent in this slot: slot, or slot + 1 for those up to it."""
                return torch.where(agent <= slot, value[slot + 1], value[slot])

            lives = of_other(s["alive"])
            dx, dy = of_other(x) - x, of_other(y) - y
            apart = torch.maximum(dx.abs(), dy.abs())
            seen = lives & (apart <= self.pack.cue_distance)
            inside = lives & (apart <= reach)
            spots.append(torch.where(inside, (dy + reach) * side + dx + reach, -1))
            visible.append(seen)
            other = slot + (agent <= slot).int()
            kin = (other // kin_size == agent // kin_size).expand(x.shape)
            bits = torch.where(seen, of_other(s["cue_bits"]) & self._cues.allowed(apart, kin), 0)
            cues += [((bits >> c) & 1).float() for c in range(self.num_cues)]
            offsets += [torch.where(seen, d.float() * 0.25, 0.0) for d in (dx, dy)]
            acts.append(torch.where(seen, of_other(s["last_action"]), self.num_actions))
            if self.pack.families:
                comm.append(torch.where(kin & lives, of_other(s["comm"]), 0).long())
        crowd = [
            reduce(torch.add, [(spot == place).to(torch.uint8) for spot in spots])
            if spots
            else torch.zeros_like(x, dtype=torch.uint8)
            for place in range(side * side)
        ]

        def shown(parts: list[Tensor], *tail: int, dtype: torch.dtype) -> Tensor:
            """Stacked [N, B] parts as [B, N, *tail]."""
            if not parts:
                return torch.zeros((b, n, *tail), dtype=dtype, device=x.device)
            return torch.stack(parts).view(*tail, n, b).permute(-1, -2, *range(len(tail)))

        angle = s["hour"].float() * (2.0 * math.pi / 24.0)
        known = [
            *s["meters"].unbind(0),
            x.float() * (1.0 / (self.width - 1)),
            y.float() * (1.0 / (self.height - 1)),
            angle.sin().expand(x.shape),
            angle.cos().expand(x.shape),
            s["progress"].float() * 0.1,
            (s["tick"].float() * (1.0 / self.lifespan)).expand(x.shape),
            s["blocked"].float(),
        ]
        m = n - 1
        return TensorDict(
            {
                "view": view.transpose(0, 1).unflatten(2, (side, side)),
                "occupancy": shown(crowd, side, side, dtype=torch.uint8),
                "self_state": shown(known, len(known), dtype=torch.float32),
                "cues": shown(cues, m, self.num_cues, dtype=torch.float32),
                "visible": shown(visible, m, dtype=torch.bool),
                "others_offset": shown(offsets, m, 2, dtype=torch.float32),
                "others_action": shown(acts, m, dtype=torch.int64),
                "comm": shown(comm, m, dtype=torch.int64),
                "action_mask": self._mask(s).permute(2, 1, 0),
            },
            batch_size=[b],
        )
