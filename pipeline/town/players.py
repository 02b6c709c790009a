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

from hamlet.moving import one_hot
from hamlet.town import personalities
from hamlet.town.counter import counter_uniform
from hamlet.town.expert import Expert, Mind, apart, draw
from hamlet.town.observe import legal_mask
from hamlet.town.schema import WAIT
from hamlet.town.town import Town
from hamlet.town.vectors import agent_major

UNIT = 0.25
"""Of what all meters drain in a tick: by so much more worth per tick a goal is e times likelier.

In one training each, half and twice as much taught module D less: 181.6 and 178.4 of return, not
182.4."""
STREAM_CHARACTER, STREAM_RANDOM = 4096, 4224
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
        self._expert = Expert(town, self._keys, self._table.cpu())
        self._unit = UNIT * max(sum(abs(meter.depletion) for meter in town.pack.meters), 1e-9)
        self._cells = town.width * town.height
        # Of an agent in each row the cells in the rows that it sees, and so of the columns.
        rows, columns = (
            (torch.arange(n)[:, None] - torch.arange(n)).abs() <= town.vision
            for n in (town.height, town.width)
        )
        self._rows_in_view = rows.repeat_interleave(town.width, 1).to(town.device)
        self._columns_in_view = columns.repeat(1, town.height).to(town.device)
        self._places = torch.arange(town.num_affordances, device=town.device)

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
        actions, goals, _, memory = self._decide(state, memory)
        return actions, goals, memory

    def tell(self, state: TensorDict, memory: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        """What `act` says, and how much each goal is like the one that it wants.

        Returns:
            actions int64 [B, N], goals int64 [B, N], and odds float32 [B, N, G] that sum to one:
            two goals worth the same per tick have the same, and one that is worth UNIT of what all
            meters drain in a tick more than another has e times its odds. Who acts on a mood or as
            a baseline is sure of its goal.
        """
        actions, goals, worth, _ = self._decide(state, memory)
        odds = (worth / self._unit).softmax(-1)
        moody = worth.gather(-1, goals.unsqueeze(-1)) < worth.amax(-1, keepdim=True)
        if self._any_baseline:
            moody = moody | (self._kinds[memory["character"]] > 0).unsqueeze(-1)
        wanted = one_hot(goals, self.town.num_goals, odds.dtype)
        return actions, goals, torch.where(moody, wanted, odds)

    def _decide(
        self, state: TensorDict, memory: TensorDict
    ) -> tuple[Tensor, Tensor, Tensor, TensorDict]:
        """What `act` returns, with the worth of each goal, float32 [B, N, G], before the memory."""
        s = agent_major(state)
        character = self._characters(state).t()
        row = self._table[character].permute(2, 0, 1)
        p = dict(zip(self._keys, row.unbind(0), strict=True))
        updated = {"character": character.t()}
        seen = None
        if self._any_sightings:
            seen = self._look(s, memory["seen"], self._watching[character])
            updated["seen"] = seen.transpose(0, 1)
        phase = self.town.phase_of(s["tick"]).long()[None]  # [1 or N, B]
        if self._any_yesterday:
            phase = (phase - self._yesterday[character].long()).clamp(min=0)
        mind = Mind(p, phase, seen, self._sightings[character])
        actions, goals, worth = self._expert.plan(s, mind)
        if self._any_yesterday:
            actions = self._expert.legal_or_rest(s, mind, actions)
        if self._any_baseline:
            actions, goals = self._baselines(state, s, character, actions, goals)
        actions = torch.where(s["alive"], actions, WAIT)
        after = TensorDict(updated, batch_size=state.batch_size)
        return actions.t(), goals.t(), worth.permute(2, 1, 0), after

    def watch(self, state: TensorDict, memory: TensorDict) -> TensorDict:
        """The memory after a tick in which nobody is asked to act."""
        if not self._any_sightings:
            return memory
        watching = self._watching[memory["character"].t()]
        seen = self._look(agent_major(state), memory["seen"], watching)
        updated = {**memory, "seen": seen.transpose(0, 1)}
        return TensorDict(updated, batch_size=memory.batch_size)

    # ------------------------------------------------------------------ parts

    def _characters(self, state: TensorDict) -> Tensor:
        """Row of the parameter table per agent: int64 [B, N], fixed through a life."""
        n, count = self.town.num_agents, len(self._table)
        if self.seed is None:
            row = torch.arange(state.batch_size[0], device=self.town.device) % count
            return row[:, None].expand(-1, n)
        agent = torch.arange(n, device=self.town.device)[:, None]
        zero = torch.zeros_like(state["world"])
        seed = state["seed"] * 1_000_003 + self.seed
        chance = counter_uniform(
            seed, state["world"], state["episode"], zero, STREAM_CHARACTER + agent
        )
        return (chance * count).long().clamp(max=count - 1).t()

    def _look(self, s: dict[str, Tensor], before: Tensor, watching: Tensor) -> Tensor:
        """Cells known so far in this life, bool [N, B, cells]; forgotten when a life begins.

        They are those seen and, where `watching` bool [N, B], the places that somebody was seen to
        use, which may be as far away as cues are readable.
        """
        town = self.town
        x, y = s["position"].unbind(0)
        # Partly in numbers: where one bool stands for many, PyTorch takes ten times as long.
        now = self._rows_in_view[y.long()] & self._columns_in_view[x.long()]
        if self._any_watching:
            near = (apart(x, y) <= town.pack.cue_distance) & watching  # [rival, N, B]
            used = s["used"].unsqueeze(-1) == self._places
            shown = near.to(torch.uint8).unsqueeze(-1) * used.to(torch.uint8).unsqueeze(1)
            told = shown.amax(0).bool()  # [N, B, F]
            target = town.affordance_cells[s["layout"]].expand_as(told)
            now = now.scatter(2, target, told | now.gather(2, target))
        goes_on = (s["tick"] > 0).to(torch.uint8)[:, None]
        return now | (before.transpose(0, 1).view(torch.uint8) * goes_on).view(torch.bool)

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
        chance = torch.where(legal_mask(town, s), draw(s, streams), -1.0)
        rest = town.action_names.index("REST") if "REST" in town.action_names else WAIT
        actions = torch.where(kind == 1, chance.argmax(0), torch.where(kind == 2, rest, actions))
        goal = torch.where(kind == 1, town.num_goals - 1, town.num_goals - 2)
        return actions, torch.where(kind == 0, goals, goal)
