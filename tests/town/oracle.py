"""The rules of the town once more, in plain Python: one world and one agent at a time.

Written from the rules and not from the tensor code, so that the two check each other. Agents are
visited in an order given by the caller, which must not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hamlet.town import Pack

f32 = np.float32
M32 = 0xFFFFFFFF


def mix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
    x = ((x ^ (x >> 15)) * 0x31848BAB) & M32
    return x ^ (x >> 16)


def draw_bits(seed: int, world: int, episode: int, tick: int, stream: int) -> int:
    key = mix((seed & M32) ^ 0x5851F42D)
    for counter in ((seed >> 32) & M32, world & M32, episode & M32):
        key = mix(key ^ counter)
    return mix((mix(key ^ (tick & M32)) + stream * 0x1E3779B9) & M32)


def draw(*counters: int) -> np.float32:
    return f32(draw_bits(*counters) >> 8) / f32(1 << 24)


def clamp(x):
    return min(max(f32(x), f32(0.0)), f32(1.0))


def holds(test, meters: dict[str, np.float32]) -> bool:
    value, bound = meters[test.meter], f32(test.value)
    return {"<": value < bound, "<=": value <= bound, ">": value > bound, ">=": value >= bound}[
        test.op
    ]


@dataclass
class Agent:
    meters: dict[str, np.float32]
    x: int
    y: int
    alive: bool = True
    progress: int = 0
    last: str | None = None
    comm: int = 0
    streak: dict[str, int] = field(default_factory=dict)
    hold: dict[str, int] = field(default_factory=dict)
    # what happened in the last tick
    used: str | None = None
    blocked: bool = False
    died: bool = False
    retired: bool = False
    reward: float = 0.0
    cues: set[str] = field(default_factory=set)


class Rules:
    """The pack as it reads at one tick of a life."""

    def __init__(self, pack: Pack, tick: int):
        self.pack = pack
        self.places = {a.name: a for a in pack.affordances}
        self.hours = {a.name: a.hours for a in pack.affordances}
        self.factor = dict.fromkeys(self.places, 1.0)
        self.quality = {a.name: a.quality for a in pack.affordances}
        self.depletion = {m.name: m.depletion for m in pack.meters}
        self.cascade = 1.0
        for change in sorted(pack.schedule, key=lambda c: c.tick):
            if tick >= change.tick:
                self.hours |= change.hours
                for name, factor in change.price_factor.items():
                    self.factor[name] *= factor
                self.quality |= change.quality
                self.depletion |= change.depletion
                self.cascade *= change.cascade_factor if change.cascade_factor is not None else 1.0

    def is_open(self, name: str, hour: int) -> bool:
        if not self.pack.temporal:
            return True
        start, end = (h % 24 for h in self.hours[name])
        if start == end:
            return True
        return start <= hour < end if start < end else (hour >= start or hour < end)

    def price(self, name: str) -> dict[str, float]:
        a = self.places[name]
        prices = a.price_per_tick if self.pack.temporal else a.price
        return {meter: value * self.factor[name] for meter, value in prices.items()}

    def affordable(self, name: str, meters) -> bool:
        return all(meters[m] >= f32(v) for m, v in self.price(name).items())


def usable(pack: Pack, cells: dict[str, tuple[int, int]], x: int, y: int) -> tuple[str | None, int]:
    """The nearest affordance within its own limit (the first in the file if equal)."""
    best, best_distance = None, 0
    for a in pack.affordances:
        ax, ay = cells[a.name]
        distance = abs(ax - x) + abs(ay - y)
        if distance <= a.distance_limit and (best is None or distance < best_distance):
            best, best_distance = a.name, distance
    return best, best_distance


def tick_world(
    pack: Pack,
    cells: dict[str, tuple[int, int]],
    agents: list[Agent],
    actions: list[int],
    clock: dict[str, int],
    order: list[int],
) -> None:
    """Advance one living world by a tick, in place. clock: seed, world, episode, tick, hour."""
    rules = Rules(pack, clock["tick"])
    names = pack.action_names
    where = (clock["seed"], clock["world"], clock["episode"])
    atomic = pack.mode == "atomic"
    start = {i: dict(agents[i].meters) for i in order}
    delta = {i: {m: [] for m in pack.meter_names} for i in order}
    wants: dict[str, list[tuple[int, int, int]]] = {}
    acts = {i: agents[i].alive for i in order}

    for i in order:
        agent = agents[i]
        agent.used, agent.blocked, agent.died, agent.retired = None, False, False, False
        if not acts[i]:
            continue
        action = names[actions[i]]
        held = False
        if pack.temporal and agent.progress > 0 and not rules.places[agent.last].interruptible:
            held = rules.is_open(agent.last, clock["hour"]) and rules.affordable(
                agent.last, agent.meters
            )
        amounts: dict[str, float] = {}
        for custom in pack.actions:
            if custom.name == action:
                amounts = dict(custom.effects)
        if action in ("UP", "DOWN", "LEFT", "RIGHT"):
            amounts = {m: -v for m, v in pack.move_price.items()}
        if action == "INTERACT":
            amounts = {m: -v for m, v in pack.interact_price.items()}
        for meter, amount in amounts.items():
            if atomic:
                delta[i][meter].append(f32(amount))
            else:
                agent.meters[meter] = clamp(agent.meters[meter] + f32(amount))
        dx, dy = {"UP": (0, -1), "DOWN": (0, 1), "LEFT": (-1, 0), "RIGHT": (1, 0)}.get(
            action, (0, 0)
        )
        if not held:
            x = min(max(agent.x + dx, 0), pack.width - 1)
            y = min(max(agent.y + dy, 0), pack.height - 1)
            if (x, y) != (agent.x, agent.y) and pack.temporal:
                if agent.progress:
                    a = rules.places[agent.last]
                    for meter, value in a.price_per_tick.items():
                        back = f32(a.refund * value * rules.factor[a.name]) * f32(agent.progress)
                        if atomic:
                            delta[i][meter].append(back)
                agent.progress, agent.last = 0, None
            agent.x, agent.y = x, y
        if action.startswith("SET_COMM_"):
            agent.comm = int(action.removeprefix("SET_COMM_"))
        if action == "INTERACT":
            name, distance = usable(pack, cells, agent.x, agent.y)
            if (
                name is not None
                and rules.is_open(name, clock["hour"])
                and rules.affordable(name, agent.meters)
                and all(holds(t, agent.meters) for t in rules.places[name].preconditions)
            ):
                ticket = draw_bits(*where, clock["tick"], i)
                wants.setdefault(name, []).append((distance, ticket, i))

    for name, queue in wants.items():
        a = rules.places[name]
        capacity = a.capacity or (1 if a.exclusive else len(agents))
        for rank, (_, _, i) in enumerate(sorted(queue)):
            agent = agents[i]
            if rank >= capacity:
                agent.blocked = True
                continue
            agent.used = name
            finishes = True
            if pack.temporal:
                agent.progress = agent.progress + 1 if agent.last == name else 1
                agent.last = name
                finishes = agent.progress == a.duration
            steps: list[tuple[str, str, float]] = []
            ticks = 1 if pack.temporal else a.duration
            if pack.temporal or atomic:
                steps += [("price", m, -v) for m, v in rules.price(name).items()]
            steps += [
                ("per_tick", m, v * ticks * rules.quality[name])
                for m, v in a.effects_per_tick.items()
            ]
            if finishes:
                steps += [
                    ("completion", m, v * rules.quality[name])
                    for m, v in a.effects_on_completion.items()
                ]
            for _, meter, amount in steps:
                if atomic:
                    delta[i][meter].append(f32(amount))
                else:
                    agent.meters[meter] = agent.meters[meter] + f32(amount)
                    if not pack.temporal:
                        agent.meters[meter] = clamp(agent.meters[meter])
            if not atomic:
                for meter in pack.meter_names:
                    if pack.temporal:
                        agent.meters[meter] = clamp(agent.meters[meter])
                    elif meter in rules.price(name):
                        agent.meters[meter] -= f32(rules.price(name)[meter])
            if finishes:
                if pack.temporal:
                    agent.progress, agent.last = 0, None
                for named in a.on_completion:
                    spots = [
                        (abs(cells[o.name][0] - cells[name][0])
                         + abs(cells[o.name][1] - cells[name][1]), k, o.name)
                        for k, o in enumerate(pack.affordances)
                        if named.tag in o.tags and o.name != name
                    ]  # fmt: skip
                    agent.x, agent.y = cells[min(spots)[2]]

    for i in order:
        agent = agents[i]
        if acts[i]:
            metabolise(pack, rules, agent, start[i], delta[i], atomic)
            agent.died = any(holds(test, agent.meters) for test in pack.terminal)
            agent.alive = not agent.died
            agent.retired = agent.alive and clock["tick"] + 1 >= pack.lifespan
            reward = f32(pack.reward.base)
            for meter in pack.reward.meters:
                reward = reward * agent.meters[meter]
            reward = f32(0.0) if agent.died else reward
            agent.reward = reward + f32(pack.reward.retirement_bonus if agent.retired else 0.0)
        else:
            agent.reward = 0.0


def metabolise(pack, rules, agent, start, delta, atomic) -> None:
    multiplier = f32(pack.depletion_multiplier)
    if atomic:
        base = start
        for meter, rate in rules.depletion.items():
            delta[meter].append(-(f32(rate) * multiplier))
        for m in pack.modulations:
            loss = f32(m.rate) * (f32(m.base) + f32(m.range) * (f32(1.0) - base[m.source]))
            delta[m.target].append(-loss)
        for c in pack.cascades:
            if base[c.source] < f32(c.threshold):
                deficit = (f32(c.threshold) - base[c.source]) / f32(c.threshold)
                delta[c.target].append(-f32(c.strength * rules.cascade) * deficit)
        for meter, parts in delta.items():
            agent.meters[meter] = clamp(sum(parts, base[meter]))
        return
    for meter, rate in rules.depletion.items():
        agent.meters[meter] = clamp(agent.meters[meter] - f32(rate) * multiplier)
    for m in pack.modulations:
        loss = f32(m.rate) * (f32(m.base) + f32(m.range) * (f32(1.0) - agent.meters[m.source]))
        agent.meters[m.target] = clamp(agent.meters[m.target] - loss)
    for c in pack.cascades:
        if agent.meters[c.source] < f32(c.threshold):
            deficit = (f32(c.threshold) - agent.meters[c.source]) / f32(c.threshold)
            loss = f32(c.strength * rules.cascade) * deficit
            agent.meters[c.target] = clamp(agent.meters[c.target] - loss)


def show_cues(
    pack: Pack, cells: dict[str, tuple[int, int]], agents: list[Agent], actions: list[int],
    clock: dict[str, int],
) -> None:  # fmt: skip
    """Update what every agent shows, after a tick (clock already advanced)."""
    where = (clock["seed"], clock["world"], clock["episode"], clock["tick"])
    for i, agent in enumerate(agents):
        here, _ = usable(pack, cells, agent.x, agent.y)
        shown: list[tuple[int, int, str]] = []
        for number, cue in enumerate(pack.cues):

            def passes(test, agent=agent, here=here, i=i) -> bool:
                if test.meter is not None:
                    level = agent.meters[test.meter]
                    if test.below is not None:
                        return bool(level < f32(test.below))
                    return bool(level > f32(test.above))
                if test.using is not None:
                    return agent.used in test.using
                if test.at is not None:
                    return here in test.at
                return pack.action_names[actions[i]] in test.action

            raised = all(map(passes, cue.all_of)) if cue.all_of else any(map(passes, cue.any_of))
            agent.streak[cue.name] = agent.streak.get(cue.name, 0) + 1 if raised else 0
            raised = agent.streak[cue.name] >= cue.streak
            left = agent.hold.get(cue.name, 0)
            agent.hold[cue.name] = cue.decay if raised else max(left - 1, 0)
            raised = raised or left > 0
            if cue.reliability < 1.0 or cue.false_positive > 0.0:
                chance = draw(*where, 256 + number * len(agents) + i)
                raised = chance < f32(cue.reliability if raised else cue.false_positive)
            if raised:
                shown.append((-cue.priority, number, cue.name))
        agent.cues = {name for _, _, name in sorted(shown)[: pack.cues_broadcast]}
