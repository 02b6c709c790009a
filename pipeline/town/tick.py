"""One tick of the town: moving, wanting, getting through, using, living on, ending.

All tensors are agent-major: per agent [N, B], per world [B], meters a list of f32 [N, B]. Nothing
is mutated and nothing branches on a value, so that a tick compiles as one graph.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from hamlet.town.constants import TownConstants
from hamlet.town.counter import tick_hash
from hamlet.town.effects import metabolise_atomic, metabolise_in_order, use_atomic, use_in_order
from hamlet.town.observe import is_held, is_open
from hamlet.town.schema import BASE_ACTIONS, DOWN, INTERACT, LEFT, RIGHT, UP
from hamlet.town.vectors import clamp01, compare, holds, together

Fields = dict[str, Tensor]


class Attempt(NamedTuple):
    """What everybody tries in this tick, int32 [N, B]."""

    action: Tensor
    """-1: does not take part."""
    x: Tensor
    """Column it moves to."""
    y: Tensor
    place: Tensor
    """What can be used from there, -1 for nothing."""
    wanted: Tensor
    """The place it wants to use and may and can pay, else -1."""
    ticket: Tensor
    """The lot that is drawn for it."""
    away: Tensor
    """Cells between it and the place."""


class Use(NamedTuple):
    """What came of it, int32 [N, B]."""

    code: Tensor
    """The place used, -1 for none."""
    finished: Tensor
    """The place whose use is complete, -1 for none."""
    progress: Tensor
    """Ticks of the use under way."""
    last: Tensor
    """The place of the use under way, -1 for none."""


def tick(town: TownConstants, s: Fields, actions: Tensor, gated: bool) -> Fields:
    """The fields after one tick, without what cues show.

    Args:
        town: the pack.
        s: the fields of the state, agent-major.
        actions: int64 [B, N].
        gated: the dead and those of finished worlds do not take part; else, as in the reference
            environment, everybody is stepped for ever.
    """
    pack = town.pack
    phase = town.phase_of(s["tick"])
    meters = list(s["meters"])
    # Agent-major in memory, too: one transposed load would make the whole loop scalar.
    turned = actions.stride(0) == 1
    action = actions.t().int() if turned else torch.stack(actions.int().unbind(1))
    if gated:
        action = torch.where(s["alive"] & ~s["over"], action, -1)  # -1: does not take part
    to_x, to_y = move(town, s, action, meters, phase)
    if pack.mode == "hamlet":
        for index, column in enumerate(town.action_effects):
            if column is not None:
                meters[index] = clamp01(meters[index] + column(action, phase))
    tried = attempt(town, s, action, to_x, to_y, meters, phase)
    accepted = resolve(town, tried, phase)
    moved = (tried.x != s["position"][0]) | (tried.y != s["position"][1])
    use = advance_use(town, s, tried, accepted, moved, phase)
    meters = new_meters(town, s, tried.action, moved, use, meters, phase)
    to_x, to_y, place = teleport(town, s, tried, use.finished)
    if gated:
        act = tried.action >= 0
        meters = [torch.where(act, new, old) for new, old in zip(meters, s["meters"])]
    levels = together(meters)
    end = end_gated if gated else end_reference
    out = dict(s) | end(town, s, tried.action, list(levels))
    out |= {
        "meters": levels,
        "position": together([to_x, to_y]),
        "progress": use.progress,
        "last_affordance": use.last,
        "place": place,
        "used": use.code,
        "blocked": tried.wanted != use.code,
    }
    if pack.families:
        first = len(BASE_ACTIONS) + len(pack.actions)
        out["comm"] = torch.where(tried.action >= first, tried.action - first, s["comm"])
    return out


def move(
    town: TownConstants, s: Fields, action: Tensor, meters: list[Tensor], phase: Tensor
) -> tuple[Tensor, Tensor]:
    """Column and row everybody moves to; a held user stays where it is while it can go on."""
    x, y = s["position"]
    to_x = (x + (action == RIGHT).int() - (action == LEFT).int()).clamp(0, town.width - 1)
    to_y = (y + (action == DOWN).int() - (action == UP).int()).clamp(0, town.height - 1)
    if town.has_held:
        held = is_held(town, s, meters, phase)
        to_x, to_y = torch.where(held, x, to_x), torch.where(held, y, to_y)
    return to_x, to_y


def attempt(
    town: TownConstants,
    s: Fields,
    action: Tensor,
    to_x: Tensor,
    to_y: Tensor,
    meters: list[Tensor],
    phase: Tensor,
) -> Attempt:
    """Who wants what: a use that is open, affordable and allowed by its preconditions."""
    cell = town.row_of(s["layout"], to_y * town.width + to_x)
    place = town.place_at(cell)
    wants = (action == INTERACT) & (place >= 0)
    if town.pack.temporal:
        wants = wants & is_open(town, place, s["hour"], phase)
    for index, column in enumerate(town.prices):
        if column is not None:
            wants = wants & (meters[index] >= column(place, phase))
    for number, affordance in enumerate(town.pack.affordances):
        for test in affordance.preconditions:
            wants = wants & ((place != number) | holds(test, meters, town.meter_index))
    wanted = torch.where(wants, place, -1)
    agent = torch.arange(town.num_agents, device=to_x.device)[:, None]
    ticket = tick_hash(s["key"], s["tick"], agent) ^ -(1 << 31)  # compares as unsigned
    away = town.distance_table[cell] if town.has_distance else torch.zeros_like(place)
    return Attempt(*together([action, to_x, to_y, place, wanted, ticket, away]))


def resolve(town: TownConstants, tried: Attempt, phase: Tensor) -> Tensor:
    """Who gets through where more want in than the capacity: bool [N, B].

    Nearest first, equals by a hash of (seed, world, episode, tick, agent), which is a bijection in
    the agent and so never ties; a reservation lasts this tick only.
    """
    wanted, ticket, away = tried.wanted, tried.ticket, tried.away
    if not town.contended:
        return wanted >= 0
    ahead = torch.zeros_like(wanted)
    for other in range(town.num_agents):
        before = ticket[other] < ticket
        if town.has_distance:
            before = (away[other] < away) | ((away[other] == away) & before)
        ahead = ahead + ((wanted[other] == wanted) & before).int()
    return (wanted >= 0) & (ahead < town.capacities(wanted, phase))


def advance_use(
    town: TownConstants, s: Fields, tried: Attempt, accepted: Tensor, moved: Tensor, phase: Tensor
) -> Use:
    """The uses begun, gone on with, completed and abandoned."""
    progress, last, place = s["progress"], s["last_affordance"], tried.place
    if town.pack.temporal:
        before = torch.where(moved | (last != place), 0, progress)
        complete = accepted & (before + 1 == town.durations(place, phase))
        progress = torch.where(accepted, before + 1, torch.where(moved, 0, progress))
        progress = torch.where(complete, 0, progress)
        ended = complete | (moved & ~accepted)
        last = torch.where(ended, -1, torch.where(accepted, place, last))
    else:
        complete = accepted
    code, finished = torch.where(accepted, place, -1), torch.where(complete, place, -1)
    return Use(*together([code, finished, progress, last]))


def new_meters(
    town: TownConstants,
    s: Fields,
    action: Tensor,
    moved: Tensor,
    use: Use,
    meters: list[Tensor],
    phase: Tensor,
) -> list[Tensor]:
    """The meters after the action's own effects, a refund, the use and the body's course.

    In mode `hamlet` the action's own effects are in `meters` already.
    """
    if town.pack.mode == "hamlet":
        meters = use_in_order(town, meters, use.code, use.finished, phase)
        return metabolise_in_order(town, meters, phase)
    deltas = [[column(action, phase)] if column else [] for column in town.action_effects]
    if town.has_refund:
        for index, column in enumerate(town.refunds):
            if column is not None:
                back = column(s["last_affordance"], phase) * s["progress"]
                deltas[index].append(torch.where(moved & (s["progress"] > 0), back, 0.0))
    use_atomic(town, deltas, use.code, use.finished, phase)
    metabolise_atomic(town, deltas, meters, phase)
    return [
        clamp01(reduce(torch.add, added, meter)) if added else meter
        for meter, added in zip(meters, deltas, strict=True)
    ]


def teleport(
    town: TownConstants, s: Fields, tried: Attempt, finished: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Column, row and usable place after the named effects of completed uses."""
    to_x, to_y, place = tried.x, tried.y, tried.place
    if town.has_teleport:
        target = town.teleport_table[s["layout"] * town.num_affordances + place.clamp(min=0)]
        jumps = (finished >= 0) & (target >= 0)
        there_x, there_y = town.across(target)
        to_x, to_y = torch.where(jumps, there_x, to_x), torch.where(jumps, there_y, to_y)
        there = town.place_at(town.row_of(s["layout"], target.clamp(min=0)))
        place = torch.where(jumps, there, place)
    return to_x, to_y, place


def judged(town: TownConstants, meters: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Who has met a terminal condition, bool [N, B], and the reward of a living tick, f32."""
    pack = town.pack
    ends = [compare(meters[town.meter_index[c.meter]], c.op, c.value) for c in pack.terminal]
    reward = torch.full_like(meters[0], pack.reward.base)
    for name in pack.reward.meters:
        reward = reward * meters[town.meter_index[name]]
    return reduce(torch.logical_or, ends), reward


def next_hour(hour: Tensor) -> Tensor:
    return torch.where(hour == 23, 0, hour + 1)


def end_gated(town: TownConstants, s: Fields, action: Tensor, meters: list[Tensor]) -> Fields:
    """Dying, ageing, retiring and the reward of those who take part; the clock of their worlds."""
    pack, act = town.pack, action >= 0
    terminal, reward = judged(town, meters)
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
    return {
        "alive": alive,
        "tick": tick,
        "hour": hour,
        "reward": reward,
        "died": died,
        "retired": retired,
        "done": ended,
        "over": over,
        "episode_over": over & ~s["over"],
        "last_action": torch.where(act, action.long(), s["last_action"]),
    }


def end_reference(town: TownConstants, s: Fields, action: Tensor, meters: list[Tensor]) -> Fields:
    """The same in the reference environment, where the dead are stepped on and paid at the end."""
    pack = town.pack
    terminal, reward = judged(town, meters)
    tick = s["tick"] + 1
    old_age = tick >= pack.lifespan
    alive = s["alive"] & ~terminal
    ended = s["done"] | terminal
    reward = torch.where(ended, 0.0, reward)
    reward = torch.where(old_age, reward + pack.reward.retirement_bonus, reward)
    ended = ended | old_age
    return {
        "alive": alive,
        "tick": tick,
        "hour": next_hour(s["hour"]),
        "reward": reward,
        "died": terminal,
        "retired": alive & old_age,
        "done": ended,
        "over": s["over"],
        "episode_over": ended.all(0),
        "last_action": action.long(),
    }
