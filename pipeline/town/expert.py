"""The plan of a scripted player: what each place is worth to it now, and the step that follows.

For every place an agent could use, the plan foresees the walk, the wait for opening, the ticks it
can stay and pay, and what its meters will then be. It goes where the gain in value per tick is
largest, or rests, or explores. All tensors are agent-major: [F, N, B] by place, [N, B] by agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hamlet.frontier import where_to_look
from hamlet.town.counter import counter_uniform
from hamlet.town.observe import legal
from hamlet.town.schema import BASE_ACTIONS, DOWN, INTERACT, LEFT, RIGHT, UP, WAIT
from hamlet.town.tables import ALWAYS, Column, opening
from hamlet.town.town import Town
from hamlet.town.vectors import holds

STREAM_WANDER, STREAM_VISIT = 8192, 12288
STRETCH = 16  # ticks for which a wandering mood lasts
VISIT = 32  # ticks for which an interest in a place lasts
NEEDS, WELL = ("energy", "satiation", "health"), 0.3  # that much of each: time for a visit
NEVER = -1e9  # what cannot be had is worth
STRONG = 0.35  # that much energy: strength to wander

Fields = dict[str, Tensor]


class Mind(NamedTuple):
    """What everybody plans by."""

    p: dict[str, Tensor]
    """f32 [N, B] each: the parameters of the agents' characters."""
    phase: Tensor
    """int64 [1 or N, B] the phase of the schedule they believe in."""
    seen: Tensor | None
    """bool [N, B, cells] what they have seen of the map; None where all know all of it."""
    needs_sight: Tensor
    """bool [N, B] who uses only what it has seen."""


class Ways(NamedTuple):
    """How everybody could come to every place, [F, N, B]."""

    dx: Tensor
    """int64 cells to the right."""
    dy: Tensor
    walk: Tensor
    """int64 steps."""
    wait: Tensor
    """int64 ticks until it opens after the walk."""
    open_left: Tensor
    """int64 ticks it then stays open."""
    engaged: Tensor
    """bool: in the middle of using it."""
    reach: Tensor
    """f32 ticks until the use can begin, with the wait for those who are in."""
    remaining: Tensor
    """int64 ticks of the use that are left."""
    usable: Tensor
    """bool."""
    hidden: Tensor | None
    """bool: it would be usable, were it known."""
    towards: Tensor
    """bool: what the agent is heading to or doing."""


class Stakes(NamedTuple):
    """What a use may change, [C, N or 1, B or 1] of each meter that a place may change, and what
    that is worth; see `Expert.place_of`."""

    level: Tensor
    """f32 what it is now."""
    drain: Tensor
    """f32 what it loses per tick if nothing is done, cascades aside."""
    per_tick: Tensor
    """f32 what a tick of use adds, its price paid,"""
    completion: Tensor
    """f32 and what a whole use adds at last."""
    value: Tensor
    fear: Tensor
    comfort: Tensor

    def gain(self, before: Tensor, after: Tensor) -> Tensor:
        """How much more levels [C, N, B] are worth after than before; a level is worth
        value * level - fear * shortfall ** 2."""
        short, then_short = ((self.comfort - level).clamp(min=0.0) for level in (before, after))
        less = (short - then_short) * (short + then_short)
        return self.value * (after - before) + self.fear * less


class Expert:
    """The planning of all agents of a town.

    Args:
        town: the town they live in.
        keys: names of the parameters.
        table: f32 [P, len(keys)] the parameters of the characters that may occur; what none of them
            does (wander, foresee, visit, search) is not computed.
    """

    def __init__(self, town: Town, keys: Sequence[str], table: Tensor) -> None:
        def some(name: str) -> bool:
            return bool((table[:, list(keys).index(name)] > 0).any())

        self.town = town
        self.wanders, self.foresees, self.visits = some("wander"), some("foresight"), some("visit")
        self.searches = some("search")
        self.strays = bool((table[:, list(keys).index("search")] <= 0).any())
        self.cells = town.width * town.height
        until, left = opening(town.pack)
        self.until, self.left = until.flatten().to(town.device), left.flatten().to(town.device)
        self.each = torch.arange(town.num_affordances, device=town.device)[:, None, None]
        limits = [a.distance_limit for a in town.pack.affordances]
        self.limit = self.each.new_tensor(limits)[:, None, None]
        pack = town.pack
        move_price, interact_price = (
            torch.tensor([prices.get(name, 0.0) for name in pack.meter_names])
            for prices in (pack.move_price, pack.interact_price)
        )
        # Most places change few meters: place by place, the meters that its use may change.
        priced = (move_price != 0) | (interact_price != 0)
        places, meters = self._changes(priced)
        self.place_of, self.meter_of = places.to(town.device), meters.to(town.device)
        self.move_price, self.interact_price = (
            prices[meters, None, None].to(town.device) for prices in (move_price, interact_price)
        )
        counts = places.bincount(minlength=town.num_affordances)
        first = counts.cumsum(0) - counts
        self.nth = [  # of every place its first such change, its second, ...; or one too many
            torch.where(n < counts, first + n, len(places)).to(town.device)
            for n in range(int(counts.max()))
        ]
        needs = [*NEEDS, *(pack.meter_names[vital] for vital in pack.vital_meters)]
        index = town.meter_index
        self.needs = sorted({index[name] for name in needs if name in index})
        self.strength = [index["energy"]] if "energy" in index else list(pack.vital_meters)
        self.moving_costs = any(pack.move_price.values())

    def _changes(self, everywhere: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [C] each: places, and the meters that a use of each may change, in this order.

        Args:
            everywhere: bool [M] what any use or way may change.
        """
        town, f = self.town, self.town.num_affordances
        found = everywhere[:, None].repeat(1, f)
        for columns in (town.effects_per_tick, town.prices, town.effects_on_completion):
            for meter, column in enumerate(columns):
                if column is not None:
                    found[meter] |= (column.table[:, :f] != 0).any(0).cpu()
        places, meters = found.t().nonzero(as_tuple=True)
        return places, meters

    def plan(self, s: Fields, mind: Mind) -> tuple[Tensor, Tensor, Tensor]:
        """Actions and goals, int64 [N, B], of everybody; and what each goal is worth to it.

        The worth is float32 [G, N, B], in value per tick; NEVER where a goal cannot be had. A mood
        (`wander`, `visit`) does not ask what is worth most.
        """
        f = self.town.num_affordances
        ways, stakes = self.ways(s, mind), self.stakes(s, mind)
        rate, ticks = self.weigh(
            s, mind, ways, stakes, ways.reach, ways.walk, ways.open_left, ways.usable
        )
        rest_rate, rest_action = self.rest(mind, list(s["meters"].unbind(0)))
        if self.foresees:
            delay = self.delay(s, mind, ways, rate, rest_rate, ticks)
            later = ways.reach + torch.where(ways.engaged, 0.0, delay * mind.p["foresight"])
            use = later, ways.walk, ways.open_left, ways.usable
            rate, _ = self.weigh(s, mind, ways, stakes, *use)
        best_rate, best = rate.max(0)
        goal = torch.where(best_rate > rest_rate, best, f)
        action = torch.where(goal == f, rest_action, self.go(ways, best[None], rest_action))
        look_rate = torch.full_like(rest_rate, NEVER)
        if mind.seen is not None:
            best_rate = torch.maximum(best_rate, rest_rate)
            look_rate, step = self.explore(s, mind, ways, stakes)
            explores = look_rate > best_rate
            action, goal = torch.where(explores, step, action), torch.where(explores, f + 1, goal)
        if self.wanders:
            wanders, step = self.wander(s, mind)
            action, goal = torch.where(wanders, step, action), torch.where(wanders, f + 1, goal)
        if self.visits:
            visits, place, step = self.visit(s, mind, ways, rate, rest_action)
            action, goal = torch.where(visits, step, action), torch.where(visits, place, goal)
        return action, goal, torch.cat([rate, rest_rate[None], look_rate[None]])

    # ------------------------------------------------------------------ what each place is worth

    def column(self, column: Column, phase: Tensor) -> Tensor:
        """[F, 1 or N, B or 1] values of a column in the phase that the agent believes in."""
        f = self.town.num_affordances
        if len(column.phases) == 1:
            return column.table[0, :f, None, None]
        return column.table[phase, :f].permute(2, 0, 1)

    def opened(self, s: Fields, phase: Tensor, walk: Tensor) -> tuple[Tensor, Tensor]:
        """Ticks to wait after a walk of so many ticks, and ticks it is open then: [F, N, B]."""
        slot, f = phase * 24, self.town.num_affordances
        arrival = (s["hour"] + walk) % 24
        wait = self.until[(slot + arrival) * f + self.each]
        return wait, self.left[(slot + (arrival + wait) % 24) * f + self.each]

    def ways(self, s: Fields, mind: Mind) -> Ways:
        """When can each place be reached, and for how many ticks used?"""
        town, pack = self.town, self.town.pack
        x, y = s["position"].long().unbind(0)
        place, last = s["place"], s["last_affordance"]
        target = town.affordance_cells[s["layout"]].t()[:, None]  # [F, 1, B]
        to_x, to_y = target % town.width - x, target // town.width - y
        walk = (to_x.abs() + to_y.abs() - self.limit).clamp(min=0)
        here = place == self.each
        walk = torch.where(here, 0, walk)
        wait, open_left = self.opened(s, mind.phase, walk)
        engaged = here & (s["progress"] > 0) & (last == self.each)
        reach = (walk + wait).float()
        if town.num_agents > 1:
            inside = torch.where(s["alive"], place, -1)
            at = (inside == self.each).int()
            crowd = at.sum(1, keepdim=True) - at
            if mind.seen is not None:
                near = apart(x, y) <= pack.cue_distance  # [rival, N, B]
                noticed = (at.unsqueeze(2) * near).sum(1) - at
                crowd = torch.where(mind.needs_sight, noticed, crowd)
            reach = reach + torch.where(engaged, 0.0, crowd * mind.p["occupied_wait"])
        duration = (
            self.column(town.durations, mind.phase) if pack.temporal else torch.ones_like(self.each)
        )
        done = torch.where((last == self.each) & (s["progress"] > 0), s["progress"], 0)
        usable, hidden = wait < ALWAYS, None
        meters = list(s["meters"].unbind(0))
        for number, a in enumerate(pack.affordances):
            for test in a.preconditions:
                usable = usable & ((self.each != number) | holds(test, meters, town.meter_index))
        if mind.seen is not None:
            cells = target[:, 0].t()[None].expand(len(x), -1, -1)
            known = mind.seen.gather(2, cells).permute(2, 0, 1)
            hidden = usable & ~known
            usable = usable & (known | ~mind.needs_sight)
        towards = headed(s["last_action"], to_x, to_y) | (here & (done > 0))
        remaining = duration - done
        return Ways(
            to_x, to_y, walk, wait, open_left, engaged, reach, remaining, usable, hidden, towards
        )

    def stakes(self, s: Fields, mind: Mind) -> Stakes:
        town, names = self.town, self.town.pack.meter_names
        meters = list(s["meters"].unbind(0))
        nothing = torch.zeros((), device=town.device)

        def of_use(those: Sequence[Column | None]) -> Tensor:
            each = [nothing if c is None else self.column(c, mind.phase) for c in those]
            everywhere = nothing.expand(town.num_affordances, 1, 1)
            table = torch.stack(torch.broadcast_tensors(*each, everywhere)[:-1])
            return table[self.meter_of, self.place_of]

        def of_meter(those: Sequence[Tensor]) -> Tensor:
            return torch.stack(torch.broadcast_tensors(*those, meters[0])[:-1])[self.meter_of]

        def character(key: str) -> Tensor:
            return of_meter([mind.p[f"{key}.{name}"] for name in names])

        drains = [nothing + self.drain(name, meters, mind.phase) for name in names]
        return Stakes(
            of_meter(meters),
            of_meter(drains),
            of_use(town.effects_per_tick) - of_use(town.prices) - self.interact_price,
            of_use(town.effects_on_completion),
            character("value"),
            character("fear"),
            character("comfort"),
        )

    def weigh(
        self,
        s: Fields,
        mind: Mind,
        ways: Ways,
        stakes: Stakes,
        reach: Tensor,
        walk: Tensor,
        open_left: Tensor,
        usable: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Gain in value per tick of each use begun in `reach` ticks, and its ticks: f32 [F, N, B].

        What cannot be used is worth NEVER.
        """
        town, pack, p = self.town, self.town.pack, mind.p
        meters = list(s["meters"].unbind(0))
        stay = torch.minimum(ways.remaining, open_left)
        for index, price in enumerate(town.prices):
            if price is not None:
                pays = self.column(price, mind.phase)
                funds = meters[index] - pack.meters[index].depletion * reach
                ticks = ((funds + 1e-6) / pays.clamp(min=1e-6)).floor().clamp(max=ALWAYS)
                stay = torch.minimum(stay, torch.where(pays > 0, ticks, ALWAYS).long())
        possible = usable & (stay >= 1)
        completes = stay == ways.remaining
        ticks = stay.clamp(min=1).float()
        total = reach + ticks

        # What would the meters be then, with and without it?
        change = stakes.per_tick * ticks[self.place_of]
        change = change + torch.where(completes[self.place_of], stakes.completion, 0.0)
        if self.moving_costs:
            change = change - self.move_price * walk[self.place_of]
        idle = (stakes.level - stakes.drain * total[self.place_of]).clamp(0.0, 1.0)
        then = (idle + change).clamp(0.0, 1.0)
        gains = F.pad(stakes.gain(idle, then), (0, 0, 0, 0, 0, 1))
        gain = torch.zeros_like(total)
        # One by one: the sum of a dimension may be added up in another order on another device.
        for each in self.nth:
            gain = gain + gains[each]
        rate = gain / (total + p["overhead"])
        rate = rate + torch.where(ways.towards, p["persistence"] * rate.abs(), 0.0)
        return torch.where(possible, rate, NEVER), ticks

    def drain(self, name: str, meters: list[Tensor], phase: Tensor) -> Tensor | float:
        """What a meter loses per tick if nothing is done, cascades aside."""
        town = self.town
        index = town.meter_index[name]
        drain = town.by_phase([values[index] for values in town.depletions], phase)
        for m in town.pack.modulations:
            if m.target == name:
                source = meters[town.meter_index[m.source]]
                drain = drain + m.rate * (m.base + m.range * (1.0 - source))
        return drain

    def delay(
        self, s: Fields, mind: Mind, ways: Ways, rate: Tensor, rest_rate: Tensor, ticks: Tensor
    ) -> Tensor:
        """Ticks to wait at each place for those who want it most of all and get there first.

        Who would arrive together goes by who gains more. Agents that act on their own sightings
        foresee only those they see.

        Args:
            rate: f32 [F, N, B] what each place is worth to each agent, if nobody were under way.
            rest_rate: f32 [N, B] what resting is worth.
            ticks: f32 [F, N, B] how long an agent would stay.
        """
        arrives = torch.where(ways.engaged, -0.5, (ways.walk + ways.wait).float())
        near = apart(*s["position"].unbind(0)) <= self.town.pack.cue_distance
        best_rate, best = rate.max(0)
        wants = s["alive"] & (best_rate > rest_rate)
        goal = best.unsqueeze(1).expand(-1, len(best), -1)  # [rival, N, B]
        mine, worth = arrives.gather(0, goal), rate.gather(0, goal)
        theirs, theirs_worth, stay = (
            x.gather(0, best[None])[0].unsqueeze(1) for x in (arrives, rate, ticks)
        )  # [rival, 1, B]
        first = (theirs < mine) | ((theirs == mine) & (theirs_worth > worth))
        first = first & wants.unsqueeze(1) & (~mind.needs_sight | near)
        wait = torch.where(first, (theirs.clamp(min=0.0) + stay - mine).clamp(min=0.0), 0.0)
        return torch.zeros_like(arrives).scatter_add_(0, goal, wait)

    # ------------------------------------------------------------------ what to do

    def go(self, ways: Ways, place: Tensor, rest_action: Tensor) -> Tensor:
        """The next action towards and in a place, int64 [1, N, B] -> [N, B]; rest while closed."""
        dx, dy = ways.dx.gather(0, place)[0], ways.dy.gather(0, place)[0]
        walks = ways.walk.gather(0, place)[0] > 0
        opens = ways.wait.gather(0, place)[0] == 0
        return torch.where(walks, step_towards(dx, dy), torch.where(opens, INTERACT, rest_action))

    def rest(self, mind: Mind, meters: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Best value per tick of the actions that need no place, and that action: [N, B]."""
        pack, p = self.town.pack, mind.p
        best = p["rest_bonus"] * 1.0
        action = torch.full(best.shape, WAIT, device=best.device)
        for number, custom in enumerate(pack.actions, start=len(BASE_ACTIONS)):
            rate = p["rest_bonus"] * 1.0
            for name, amount in custom.effects.items():
                index = self.town.meter_index[name]
                idle = (meters[index] - self.drain(name, meters, mind.phase)).clamp(0.0, 1.0)
                rate = rate + value(p, name, (idle + amount).clamp(0.0, 1.0))
                rate = rate - value(p, name, idle)
            action = torch.where(rate > best, number, action)
            best = torch.maximum(best, rate)
        return best, action

    def legal_or_rest(self, s: Fields, mind: Mind, actions: Tensor) -> Tensor:
        """The actions, where INTERACT is not legal those of resting: int64 [N, B]."""
        rest = self.rest(mind, list(s["meters"].unbind(0)))[1]
        usable = (legal(self.town, s) >> INTERACT) & 1
        return torch.where((actions == INTERACT) & (usable == 0), rest, actions)

    def explore(self, s: Fields, mind: Mind, ways: Ways, stakes: Stakes) -> tuple[Tensor, Tensor]:
        """What it is worth to look at unseen cells, f32 [N, B], and the step, int64 [N, B]."""
        town, seen, p = self.town, mind.seen, mind.p
        assert seen is not None
        assert ways.hidden is not None
        x, y = s["position"].long().unbind(0)
        hides = (~seen).float()
        unseen = (hides.amax(-1) > 0) & mind.needs_sight
        worth = p["explore_rate"]
        if self.strays:  # to the nearest cell that it has not seen
            away = self.cells * 4
            cell = torch.arange(self.cells, device=x.device)
            cx, cy = cell % town.width - x[..., None], cell // town.width - y[..., None]
            nearest = (cx.abs() + cy.abs() + torch.where(seen, away, 0)).argmin(-1, True)
            look_x, look_y = cx.gather(-1, nearest)[..., 0], cy.gather(-1, nearest)[..., 0]
        if self.searches:
            # What is hidden, as if it were to be used after a search that is not in vain.
            cells = hides.unflatten(-1, (town.height, town.width))
            there = where_to_look(cells, torch.stack([x, y], -1), town.vision)
            there_x, there_y = there % town.width - x, there // town.width - y
            far = there_x.abs() + there_y.abs() + p["search"].long()
            far = far.expand(town.num_affordances, *far.shape)
            wait, open_left = self.opened(s, mind.phase, far)
            hidden = ways.hidden & (wait < ALWAYS)
            use = (far + wait).float(), far, open_left, hidden
            found, _ = self.weigh(s, mind, ways, stakes, *use)
            searches = p["search"] > 0
            look_x = torch.where(searches, there_x, look_x) if self.strays else there_x
            look_y = torch.where(searches, there_y, look_y) if self.strays else there_y
            worth = torch.where(searches, found.amax(0), worth)
        return torch.where(unseen, worth, NEVER), step_towards(look_x, look_y)

    def wander(self, s: Fields, mind: Mind) -> tuple[Tensor, Tensor]:
        """Who wanders in this stretch of ticks, bool [N, B], and its step, int64 [N, B]."""
        town, (x, y) = self.town, s["position"].long().unbind(0)
        agent = torch.arange(len(x), device=x.device)[:, None]
        block = (s["tick"] // STRETCH).long()
        mood = draw(s, STREAM_WANDER + agent, block) < mind.p["wander"]
        spot = draw(s, STREAM_WANDER + 64 + agent, block) * self.cells
        wx, wy = spot.long() % town.width - x, spot.long() // town.width - y
        strong = least(s["meters"], self.strength) > STRONG
        wanders = mood & strong & ((wx != 0) | (wy != 0)) & (s["progress"] == 0)
        return wanders, step_towards(wx, wy)

    def visit(
        self, s: Fields, mind: Mind, ways: Ways, rate: Tensor, rest_action: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Who tries some place out in this stretch, bool [N, B]; the place and the step, int64.

        To one that is open by then and can be paid, and there until the use is whole.
        """
        town = self.town
        agent = torch.arange(town.num_agents, device=rate.device)[:, None]
        block = (s["tick"] // VISIT).long()
        mood = draw(s, STREAM_VISIT + agent, block) < mind.p["visit"]
        place = (draw(s, STREAM_VISIT + 64 + agent, block) * town.num_affordances).long()
        place = torch.where(s["progress"] > 0, s["last_affordance"], place).clamp(min=0)[None]
        place = place.long()
        well = least(s["meters"], self.needs) > WELL
        visits = mood & well & (rate.gather(0, place)[0] > -1e8)
        return visits, place[0], self.go(ways, place, rest_action)


def draw(s: Fields, stream: Tensor | int, tick: Tensor | None = None) -> Tensor:
    """One uniform number of the counter hash per world and stream; of this tick, or the given."""
    tick = s["tick"].long() if tick is None else tick
    return counter_uniform(s["seed"], s["world"], s["episode"], tick, stream)


def apart(x: Tensor, y: Tensor) -> Tensor:
    """Cells between any two agents, the larger of both ways: [N, N, B]."""
    return torch.maximum((x.unsqueeze(1) - x).abs(), (y.unsqueeze(1) - y).abs())


def least(meters: Tensor, which: Sequence[int]) -> Tensor:
    """The lowest of some meters [M, N, B]: [N, B]; full where there are none."""
    if not which:
        return torch.ones_like(meters[0])
    return torch.stack([meters[index] for index in which]).amin(0)


def value(p: dict[str, Tensor], name: str, level: Tensor) -> Tensor:
    """What a level of a meter is worth to each agent: value * level - fear * shortfall ** 2."""
    short = (p[f"comfort.{name}"] - level).clamp(min=0.0)
    return p[f"value.{name}"] * level - p[f"fear.{name}"] * short * short


def step_towards(dx: Tensor, dy: Tensor) -> Tensor:
    """The move towards a cell so far to the right and down, the longer way first; int64."""
    sideways = torch.where(dx > 0, RIGHT, LEFT)
    upright = torch.where(dy > 0, DOWN, UP)
    step = torch.where(dx.abs() >= dy.abs(), sideways, upright)
    return torch.where((dx == 0) & (dy == 0), WAIT, step)


def headed(last_action: Tensor, dx: Tensor, dy: Tensor) -> Tensor:
    """Whether the last action was a step towards (dx, dy) as seen from here; bool [F, N, B]."""
    return (
        ((last_action == RIGHT) & (dx >= 0))
        | ((last_action == LEFT) & (dx <= 0))
        | ((last_action == DOWN) & (dy >= 0))
        | ((last_action == UP) & (dy <= 0))
    )
