"""Scripted players: a utility-rate planner, vectorised like the town.

For every place an agent could use, the planner foresees the walk, the wait for opening, the ticks
it can stay and pay, and what its meters will then be; it goes where the gain in value per tick is
largest, or rests, or explores. With `foresight` it plans again once it knows where the others want
to go. All players are this planner with other parameters, apart from two baselines; an
`expert_sightings` uses only places it has seen and counts only on whom it sees, an
`expert_searching` knows no more but weighs what it may find against what it has found, an
`expert_watching` also learns where a place is from whomever it sees using it, an
`expert_yesterday` believes the prices, hours, effects and drains of the phase before this one, and
whose parameter `visit` is not zero takes an interest in some place now and then, and uses it.
Nothing is remembered but what the agent has seen, and that only where a player does not know the
map: a started use and a chosen way are read from the state, so that a player can label states that
somebody else brought about.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.frontier import where_to_look
from hamlet.town import personalities
from hamlet.town.config import BASE_ACTIONS
from hamlet.town.counter import counter_uniform
from hamlet.town.tables import ALWAYS, opening
from hamlet.town.town import DOWN, INTERACT, LEFT, RIGHT, UP, WAIT, Town

STREAM_CHARACTER, STREAM_RANDOM, STREAM_WANDER, STREAM_VISIT = 4096, 4224, 8192, 12288
STRETCH = 16  # ticks for which a wandering mood lasts
VISIT = 32  # ticks for which an interest in a place lasts
NEEDS, WELL = ("energy", "satiation", "health"), 0.3  # that much of each: time for a visit
SEEKERS = ("expert_sightings", "expert_searching", "expert_watching")  # know what they have seen


class Scripted:
    """Scripted players for every agent of every world of a town.

    Args:
        town: the town they live in.
        names: characters (see `personalities.NAMES`), or the DNA of any; each (world, episode,
            agent) is given one of them by a counter hash. None means all training personalities.
        seed: of that assignment.

    Raises:
        ValueError: for a name that does not exist.
    """

    def __init__(
        self,
        town: Town,
        names: Sequence[str | personalities.AgentDNA] | None = None,
        seed: int = 0,
    ) -> None:
        names = tuple(personalities.TRAIN if names is None else names)
        # Someone of whom only the DNA is known has a character, and no expert's or baseline's name.
        known = [name if isinstance(name, str) else personalities.TRAIN[0] for name in names]
        unknown = [name for name in known if name not in personalities.NAMES]
        if unknown or not names:
            raise ValueError(
                f"names: unknown character {unknown[:1] or '(none)'}; use some of "
                f"{', '.join(personalities.NAMES)}"
            )
        rows = [personalities.parameters(town.pack, name) for name in names]
        self.names = names
        self.seed: int | None = seed
        self._setup(
            town,
            torch.tensor(
                [[row[key] for key in personalities.parameter_names(town.pack)] for row in rows],
                dtype=torch.float32,
            ),
            sightings=[name.startswith(SEEKERS) for name in known],
            watching=[name == "expert_watching" for name in known],
            yesterday=[name == "expert_yesterday" for name in known],
            kinds=[
                personalities.BASELINES.index(n) + 1 if n in personalities.BASELINES else 0
                for n in known
            ],
        )

    @classmethod
    def from_parameters(cls, town: Town, table: Tensor, name: str = "expert") -> Scripted:
        """One player per row of `table` f32 [P, K]; the b-th of B worlds by row b % P (tuning).

        `name` is the expert whose knowledge all of them have.
        """
        player = cls.__new__(cls)
        player.names, player.seed = (), None
        rows = len(table)
        sightings, watching = name.startswith(SEEKERS), name == "expert_watching"
        yesterday = name == "expert_yesterday"
        player._setup(
            town, table, [sightings] * rows, [watching] * rows, [yesterday] * rows, [0] * rows
        )
        return player

    def _setup(
        self,
        town: Town,
        table: Tensor,
        sightings: list[bool],
        watching: list[bool],
        yesterday: list[bool],
        kinds: list[int],
    ) -> None:
        self.town = town
        self._keys = personalities.parameter_names(town.pack)
        self._table = table.to(town.device)
        self._sightings = torch.tensor(sightings, device=town.device)
        self._any_sightings = any(sightings)
        self._watching = torch.tensor(watching, device=town.device)
        self._any_watching = any(watching)
        self._yesterday = torch.tensor(yesterday, device=town.device)
        self._any_yesterday = any(yesterday)
        self._kinds = torch.tensor(kinds, device=town.device)
        self._any_baseline = any(kinds)
        self._wanders = bool((table[:, self._keys.index("wander")] > 0).any())
        self._foresees = bool((table[:, self._keys.index("foresight")] > 0).any())
        self._visits = bool((table[:, self._keys.index("visit")] > 0).any())
        searches = (table[:, self._keys.index("search")] > 0).cpu()
        self._searches = bool(searches.any())
        self._strays = bool((~searches).any())
        self._cells = town.width * town.height
        until, left = opening(town.pack)
        self._until, self._left = until.flatten().to(town.device), left.flatten().to(town.device)

    # ------------------------------------------------------------------ interface

    def reset(self, state: TensorDict) -> TensorDict:
        """Memory for fresh worlds: TensorDict of batch [B]."""
        b, n = state.batch_size[0], self.town.num_agents
        memory = {"character": self._characters(state)}
        if self._any_sightings:
            memory["seen"] = torch.zeros(
                (b, n, self._cells), dtype=torch.bool, device=self.town.device
            )
        return TensorDict(memory, batch_size=[b])

    def act(self, state: TensorDict, memory: TensorDict) -> tuple[Tensor, Tensor, TensorDict]:
        """What each agent does and what for.

        Returns:
            actions int64 [B, N] (always legal), goals int64 [B, N] (index into
            `town.goal_names`), and the new memory.
        """
        s = self.town._unpack_state(state)
        character = self._characters(state).t()
        row = self._table[character].permute(2, 0, 1)
        p = dict(zip(self._keys, row.unbind(0), strict=True))
        updated = {"character": character.t()}
        seen = None
        if self._any_sightings:
            seen = self._look(s, memory["seen"], self._watching[character])
            updated["seen"] = seen.transpose(0, 1)
        phase = self.town._phase(s["tick"]).long()[None]  # [1 or N, B]
        if self._any_yesterday:
            phase = (phase - self._yesterday[character].long()).clamp(min=0)
        actions, goals = self._plan(s, p, phase, seen, self._sightings[character])
        if self._any_yesterday:
            rest = self._rest(p, list(s["meters"].unbind(0)), phase)[1]
            legal = (self.town._legal(s) >> INTERACT) & 1
            actions = torch.where((actions == INTERACT) & (legal == 0), rest, actions)
        if self._any_baseline:
            actions, goals = self._baselines(state, s, character, actions, goals)
        actions = torch.where(s["alive"], actions, WAIT)
        return actions.t(), goals.t(), TensorDict(updated, batch_size=state.batch_size)

    def watch(self, state: TensorDict, memory: TensorDict) -> TensorDict:
        """The memory after a tick in which nobody is asked to act."""
        if not self._any_sightings:
            return memory
        watching = self._watching[memory["character"].t()]
        seen = self._look(self.town._unpack_state(state), memory["seen"], watching)
        return memory.replace(seen=seen.transpose(0, 1))

    # ------------------------------------------------------------------ parts

    def _counter(self, s, stream: Tensor | int, tick: Tensor | None = None) -> Tensor:
        tick = s["tick"].long() if tick is None else tick
        return counter_uniform(s["seed"], s["world"], s["episode"], tick, stream)

    def _characters(self, state: TensorDict) -> Tensor:
        """Row of the parameter table per agent: int64 [B, N], fixed through a life."""
        n, count = self.town.num_agents, len(self._table)
        if self.seed is None:
            row = torch.arange(state.batch_size[0], device=self.town.device) % count
            return row[:, None].expand(-1, n)
        agent = torch.arange(n, device=self.town.device)[:, None]
        zero = torch.zeros_like(state["world"])
        seed = state["seed"] * 1_000_003 + self.seed
        draw = counter_uniform(
            seed, state["world"], state["episode"], zero, STREAM_CHARACTER + agent
        )
        return (draw * count).long().clamp(max=count - 1).t()

    def _look(self, s: dict[str, Tensor], before: Tensor, watching: Tensor) -> Tensor:
        """Cells known so far in this life, bool [N, B, cells]; forgotten when a life begins.

        They are those seen and, where `watching` bool [N, B], the places that somebody was seen to
        use, which may be as far away as cues are readable.
        """
        town = self.town
        x, y = s["position"].unbind(0)
        near_x, near_y = (
            (torch.arange(size, device=x.device) - at.unsqueeze(-1)).abs() <= town.vision
            for size, at in ((town.width, x), (town.height, y))
        )
        now = (near_y.unsqueeze(-1) & near_x.unsqueeze(-2)).flatten(-2)
        if self._any_watching:
            near = (self._apart(x, y) <= town.pack.cue_distance) & watching  # [rival, N, B]
            used = s["used"].unsqueeze(-1) == torch.arange(town.num_affordances, device=x.device)
            told = (near.unsqueeze(-1) & used.unsqueeze(1)).any(0)  # [N, B, F]
            target = town.affordance_cells[s["layout"]].expand_as(told)
            now = now.scatter(2, target, told | now.gather(2, target))
        return now | (before.transpose(0, 1) & (s["tick"] > 0)[:, None])

    def _plan(
        self,
        s: dict[str, Tensor],
        p: dict[str, Tensor],
        phase: Tensor,
        seen: Tensor | None,
        needs_sight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        town, pack = self.town, self.town.pack
        f = town.num_affordances
        x, y = s["position"].long().unbind(0)
        place, last = s["place"], s["last_affordance"]
        meters = list(s["meters"].unbind(0))
        each = torch.arange(f, device=x.device)[:, None, None]

        def column(c) -> Tensor:
            """[F, 1 or N, B or 1] values of a column in the phase that the agent believes in."""
            if len(c.phases) == 1:
                return c.table[0, :f, None, None]
            return c.table[phase, :f].permute(2, 0, 1)

        # When can each place be reached, and for how many ticks used?
        target = town.affordance_cells[s["layout"]].t()[:, None]  # [F, 1, B]
        to_x, to_y = target % town.width - x, target // town.width - y
        limit = each.new_tensor([a.distance_limit for a in pack.affordances])[:, None, None]
        walk = (to_x.abs() + to_y.abs() - limit).clamp(min=0)
        here = place == each
        walk = torch.where(here, 0, walk)
        slot = phase * 24

        def opened(walk: Tensor) -> tuple[Tensor, Tensor]:
            """Ticks to wait after a walk of so many ticks, and ticks it is open then."""
            arrival = (s["hour"] + walk) % 24
            wait = self._until[(slot + arrival) * f + each]
            return wait, self._left[(slot + (arrival + wait) % 24) * f + each]

        wait, open_left = opened(walk)
        arrives = (walk + wait).float()
        engaged = here & (s["progress"] > 0) & (last == each)
        reach = arrives
        if town.num_agents > 1:
            inside = torch.where(s["alive"], place, -1)
            at = (inside == each).int()
            crowd = at.sum(1, keepdim=True) - at
            if seen is not None:
                near = self._apart(x, y) <= town.pack.cue_distance  # [rival, N, B]
                noticed = (at.unsqueeze(2) * near).sum(1) - at
                crowd = torch.where(needs_sight, noticed, crowd)
            reach = reach + torch.where(engaged, 0.0, crowd * p["occupied_wait"])
        duration = column(town._duration) if pack.temporal else torch.ones_like(each)
        done = torch.where((last == each) & (s["progress"] > 0), s["progress"], 0)
        remaining = duration - done
        usable = wait < ALWAYS
        for number, a in enumerate(pack.affordances):
            for test in a.preconditions:
                usable = usable & ((each != number) | town._holds(test, meters))
        if seen is not None:
            known = seen.gather(2, target[:, 0].t()[None].expand(len(x), -1, -1)).permute(2, 0, 1)
            hidden = usable & ~known
            usable = usable & (known | ~needs_sight)
        towards = self._headed(s["last_action"], to_x, to_y) | (here & (done > 0))

        def weigh(
            reach: Tensor, walk: Tensor, open_left: Tensor, usable: Tensor
        ) -> tuple[Tensor, Tensor]:
            """Gain in value per tick of each use begun in `reach` ticks, and its ticks."""
            stay = torch.minimum(remaining, open_left)
            for index, price in enumerate(town._price):
                if price is not None:
                    pays = column(price)
                    funds = meters[index] - pack.meters[index].depletion * reach
                    ticks = ((funds + 1e-6) / pays.clamp(min=1e-6)).floor().clamp(max=ALWAYS)
                    stay = torch.minimum(stay, torch.where(pays > 0, ticks, ALWAYS).long())
            possible = usable & (stay >= 1)
            completes = stay == remaining
            ticks = stay.clamp(min=1).float()
            total = reach + ticks

            # What would the meters be then, with and without it?
            gain = torch.zeros_like(total)
            for index, name in enumerate(pack.meter_names):
                per_tick, completion = town._per_tick[index], town._on_completion[index]
                price = town._price[index]
                change = torch.zeros_like(total)
                if per_tick is not None:
                    change = change + column(per_tick) * ticks
                if price is not None:
                    change = change - column(price) * ticks
                if completion is not None:
                    change = change + torch.where(completes, column(completion), 0.0)
                change = change - pack.move_price.get(name, 0.0) * walk
                change = change - pack.interact_price.get(name, 0.0) * ticks
                idle = (meters[index] - self._drain(name, meters, phase) * total).clamp(0.0, 1.0)
                gain = gain + self._value(p, name, (idle + change).clamp(0.0, 1.0))
                gain = gain - self._value(p, name, idle)
            rate = gain / (total + p["overhead"])
            rate = rate + torch.where(towards, p["persistence"] * rate.abs(), 0.0)
            return torch.where(possible, rate, -1e9), ticks

        rate, ticks = weigh(reach, walk, open_left, usable)
        rest_rate, rest_action = self._rest(p, meters, phase)
        if self._foresees:
            arrives = torch.where(engaged, -0.5, arrives)
            delay = self._delay(s, rate, rest_rate, arrives, ticks, needs_sight)
            later = reach + torch.where(engaged, 0.0, delay * p["foresight"])
            rate, _ = weigh(later, walk, open_left, usable)
        best_rate, best = rate.max(0)

        # Resting, exploring.
        chosen_x = to_x.gather(0, best[None])[0]
        chosen_y = to_y.gather(0, best[None])[0]
        walks = walk.gather(0, best[None])[0] > 0
        opens = wait.gather(0, best[None])[0] == 0
        goal = torch.where(best_rate > rest_rate, best, f)
        action = torch.where(
            goal == f,
            rest_action,
            torch.where(
                walks,
                self._step_towards(chosen_x, chosen_y),
                torch.where(opens, INTERACT, rest_action),
            ),
        )
        if seen is not None:
            unseen = ~seen.all(-1) & needs_sight
            worth = p["explore_rate"]
            if self._strays:  # to the nearest cell that it has not seen
                away = self._cells * 4
                cell = torch.arange(self._cells, device=x.device)
                cx, cy = cell % town.width - x[..., None], cell // town.width - y[..., None]
                nearest = (cx.abs() + cy.abs() + torch.where(seen, away, 0)).argmin(-1, True)
                look_x, look_y = cx.gather(-1, nearest)[..., 0], cy.gather(-1, nearest)[..., 0]
            if self._searches:
                # What is hidden, as if it were to be used after a search that is not in vain.
                hides = (~seen).float().unflatten(-1, (town.height, town.width))
                there_x, there_y = where_to_look(hides, x, y, town.vision)
                far = there_x.abs() + there_y.abs() + p["search"].long()
                far = far.expand(f, *far.shape)
                wait, open_left = opened(far)
                found, _ = weigh((far + wait).float(), far, open_left, hidden & (wait < ALWAYS))
                searches = p["search"] > 0
                look_x = torch.where(searches, there_x, look_x) if self._strays else there_x
                look_y = torch.where(searches, there_y, look_y) if self._strays else there_y
                worth = torch.where(searches, found.amax(0), worth)
            explores = unseen & (worth > torch.maximum(best_rate, rest_rate))
            step = self._step_towards(look_x, look_y)
            action = torch.where(explores, step, action)
            goal = torch.where(explores, f + 1, goal)
        if self._wanders:
            agent = torch.arange(len(x), device=x.device)[:, None]
            block = (s["tick"] // STRETCH).long()
            mood = self._counter(s, STREAM_WANDER + agent, block) < p["wander"]
            spot = self._counter(s, STREAM_WANDER + 64 + agent, block) * self._cells
            wx, wy = spot.long() % town.width - x, spot.long() // town.width - y
            energy = meters[0]
            wanders = mood & (energy > 0.35) & ((wx != 0) | (wy != 0)) & (s["progress"] == 0)
            action = torch.where(wanders, self._step_towards(wx, wy), action)
            goal = torch.where(wanders, f + 1, goal)
        if self._visits:
            # To some place that is open by then and can be paid, and there until the use is whole.
            agent = torch.arange(len(x), device=x.device)[:, None]
            block = (s["tick"] // VISIT).long()
            mood = self._counter(s, STREAM_VISIT + agent, block) < p["visit"]
            place = (self._counter(s, STREAM_VISIT + 64 + agent, block) * f).long()
            place = torch.where(s["progress"] > 0, last, place).clamp(min=0)[None].long()
            needs = [meters[town._meter_index[m]] for m in NEEDS if m in town._meter_index]
            well = torch.stack(needs).amin(0) > WELL
            visits = mood & well & (rate.gather(0, place)[0] > -1e8)
            there = walk.gather(0, place)[0] == 0
            vx, vy = to_x.gather(0, place)[0], to_y.gather(0, place)[0]
            used = torch.where(wait.gather(0, place)[0] == 0, INTERACT, rest_action)
            step = torch.where(there, used, self._step_towards(vx, vy))
            action = torch.where(visits, step, action)
            goal = torch.where(visits, place[0], goal)
        return action, goal

    def _delay(
        self,
        s: dict[str, Tensor],
        rate: Tensor,
        rest_rate: Tensor,
        arrives: Tensor,
        ticks: Tensor,
        needs_sight: Tensor,
    ) -> Tensor:
        """Ticks to wait at each place for those who want it most of all and get there first.

        Who would arrive together goes by who gains more. Agents that act on their own sightings
        foresee only those they see.

        Args:
            rate: f32 [F, N, B] what each place is worth to each agent, if nobody were under way.
            rest_rate: f32 [N, B] what resting is worth.
            arrives: f32 [F, N, B] ticks until an agent could begin.
            ticks: f32 [F, N, B] how long it would stay.
            needs_sight: bool [N, B].
        """
        near = self._apart(*s["position"].unbind(0)) <= self.town.pack.cue_distance
        best_rate, best = rate.max(0)
        wants = s["alive"] & (best_rate > rest_rate)
        delay = torch.zeros_like(arrives)
        for rival in range(self.town.num_agents):
            goal = best[rival].expand(1, *best.shape)  # [1, N, B]
            mine, worth = arrives.gather(0, goal)[0], rate.gather(0, goal)[0]
            until = mine[rival].clamp(min=0.0) + ticks.gather(0, goal)[0, rival]
            first = (mine[rival] < mine) | ((mine[rival] == mine) & (worth[rival] > worth))
            first = first & wants[rival] & (~needs_sight | near[rival])
            wait = torch.where(first, (until - mine).clamp(min=0.0), 0.0)
            delay.scatter_add_(0, goal, wait[None])
        return delay

    @staticmethod
    def _apart(x: Tensor, y: Tensor) -> Tensor:
        """Cells between any two agents, the larger of both ways: [N, N, B]."""
        return torch.maximum((x.unsqueeze(1) - x).abs(), (y.unsqueeze(1) - y).abs())

    def _drain(self, name: str, meters: list[Tensor], phase: Tensor) -> Tensor | float:
        """What a meter loses per tick if nothing is done, cascades aside."""
        town = self.town
        index = town._meter_index[name]
        drain = town._by_phase([values[index] for values in town._depletion], phase)
        for m in town.pack.modulations:
            if m.target == name:
                source = meters[town._meter_index[m.source]]
                drain = drain + m.rate * (m.base + m.range * (1.0 - source))
        return drain

    @staticmethod
    def _value(p: dict[str, Tensor], name: str, level: Tensor) -> Tensor:
        short = (p[f"comfort.{name}"] - level).clamp(min=0.0)
        return p[f"value.{name}"] * level - p[f"fear.{name}"] * short * short

    def _rest(
        self, p: dict[str, Tensor], meters: list[Tensor], phase: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Best value per tick of the actions that need no place, and that action."""
        pack = self.town.pack
        best = p["rest_bonus"] * 1.0
        action = torch.full(best.shape, WAIT, device=best.device)
        for number, custom in enumerate(pack.actions, start=len(BASE_ACTIONS)):
            rate = p["rest_bonus"] * 1.0
            for name, amount in custom.effects.items():
                index = pack.meter_names.index(name)
                idle = (meters[index] - self._drain(name, meters, phase)).clamp(0.0, 1.0)
                rate = rate + self._value(p, name, (idle + amount).clamp(0.0, 1.0))
                rate = rate - self._value(p, name, idle)
            action = torch.where(rate > best, number, action)
            best = torch.maximum(best, rate)
        return best, action

    @staticmethod
    def _step_towards(dx: Tensor, dy: Tensor) -> Tensor:
        sideways = torch.where(dx > 0, RIGHT, LEFT)
        upright = torch.where(dy > 0, DOWN, UP)
        step = torch.where(dx.abs() >= dy.abs(), sideways, upright)
        return torch.where((dx == 0) & (dy == 0), WAIT, step)

    @staticmethod
    def _headed(last_action: Tensor, to_x: Tensor, to_y: Tensor) -> Tensor:
        """Whether the last action was a step towards (dx, dy) as seen from here; [F, N, B]."""
        return (
            ((last_action == RIGHT) & (to_x >= 0))
            | ((last_action == LEFT) & (to_x <= 0))
            | ((last_action == DOWN) & (to_y >= 0))
            | ((last_action == UP) & (to_y <= 0))
        )

    def _baselines(
        self,
        state: TensorDict,
        s: dict[str, Tensor],
        character: Tensor,
        actions: Tensor,
        goals: Tensor,
    ) -> tuple[Tensor, Tensor]:
        town = self.town
        kind = self._kinds[character]
        options = torch.arange(town.num_actions * town.num_agents, device=town.device)
        streams = STREAM_RANDOM + options.view(town.num_actions, town.num_agents, 1)
        draw = torch.where(town._mask(s), self._counter(s, streams), -1.0)
        rest = town.action_names.index("REST") if "REST" in town.action_names else WAIT
        actions = torch.where(kind == 1, draw.argmax(0), torch.where(kind == 2, rest, actions))
        goal = torch.where(kind == 1, town.num_goals - 1, town.num_goals - 2)
        return actions, torch.where(kind == 0, goals, goal)
