"""The town: a multi-agent survival world as pure tensor functions over a TensorDict state.

Batch is [B] worlds with N agents each. Logical shapes are [B, N, ...]; underneath every per-agent
tensor is stored agent-major ([N, B], meters [8, N, B]), so that one operation covers all worlds in
contiguous memory. No function mutates its input, none branches on a tensor's value, and all
compile with `fullgraph=True`.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.town.constants import TownConstants
from hamlet.town.counter import below, episode_key, tick_hash
from hamlet.town.observe import legal, legal_mask, observe
from hamlet.town.schema import WAIT, Pack
from hamlet.town.tick import tick
from hamlet.town.vectors import agent_major, batch_major, together

# Streams of the counter hash; contention uses the agent's index, so streams start above it.
STREAM_START, STREAM_LAYOUT = 64, 128


class Town(TownConstants):
    """A pack that can be played: the beginning of a life, one tick, what agents see.

    The arguments are those of `TownConstants`.
    """

    def __init__(
        self,
        pack: Pack,
        num_layouts: int = 4096,
        layout_seed: int = 0,
        device: str | torch.device = "cpu",
        layouts: Tensor | None = None,
    ):
        super().__init__(pack, num_layouts, layout_seed, device, layouts)
        self._cases: int | None = None

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

    def reset(self, seed: int | Tensor, num_worlds: int, first_world: int = 0) -> TensorDict:
        """Fresh worlds; world b depends only on (seed, first_world + b) and on the actions.

        With seeds int64 [num_worlds], each has its own and all are its world `first_world`.

        Returns the state, a TensorDict of batch [num_worlds]; see `_fresh` for the fields.
        """
        world = torch.arange(first_world, first_world + num_worlds, device=self.device)
        zero = torch.zeros_like(world)
        if isinstance(seed, Tensor):
            world = torch.full_like(world, first_world)
            seeds = seed.to(world)
        else:
            seeds = torch.full_like(world, seed)
        fresh = self._fresh(seeds, world, zero, zero == 0)
        blank = self._blank(num_worlds)
        fields = self._with_cues({name: value + fresh[name] for name, value in blank.items()})
        if self._cases is not None:
            fields["next_case"] = torch.full_like(world, num_worlds)
            fields["over"] = world >= self._cases
        return batch_major(fields)

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
            "meters": self.initial_meters,
            "position": together([*self.across(cell)]),
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
            "place": self.place_at(torch.where(which, self.row_of(layout, cell), 0)),
            "used": -1,
            "blocked": False,
            "cue_bits": 0,
        }
        if self.pack.families:
            fields["comm"] = 0
        return fields | dict.fromkeys(self.cue_rules.counters, 0)

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
        shapes |= {
            name: ((rows, n, b), torch.int32) for name, rows in self.cue_rules.counters.items()
        }
        return {
            name: torch.zeros(shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in shapes.items()
        }

    def _with_cues(
        self, fields: dict[str, Tensor], live: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The fields with what everybody shows now; only for `live` worlds, if given."""
        bits, timers = self.cue_rules.update(fields, list(fields["meters"].unbind(0)))
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
        fields = agent_major(state)
        for name, value in changes.items():
            old = fields[name]
            value = value.to(old.device, old.dtype).expand(*reversed(old.shape))
            fields[name] = value.permute(*reversed(range(value.ndim)))
        x, y = fields["position"]
        cell = self.row_of(fields["layout"], y * self.width + x)
        fields["place"] = self.place_at(cell)
        bits, _ = self.cue_rules.update(fields, list(fields["meters"].unbind(0)))
        return batch_major(fields | {"cue_bits": bits})

    # ------------------------------------------------------------------ one tick

    def step_core(self, state: TensorDict, actions: Tensor) -> TensorDict:
        """One tick without reset; worlds whose episode is over stay as they are (reward 0).

        Args:
            state: as returned by `reset` or a step.
            actions: int64 [B, N]. Any action may be tried: a move into a wall costs its energy and
                goes nowhere, INTERACT away from an affordance only costs.
        """
        fields = agent_major(state)
        now = tick(self, fields, actions, gated=True)
        return batch_major(self._with_cues(now, live=~fields["over"]))

    def step_and_reset_core(self, state: TensorDict, actions: Tensor) -> TensorDict:
        """`step_core`, then every world whose episode is over starts its next life.

        reward, done, died, retired and episode_over still describe the tick just finished; all
        other fields are those of the new life (episode + 1, a newly drawn layout), or of the next
        case after `eval`.
        """
        now = tick(self, agent_major(state), actions, gated=True)
        kept = ("reward", "done", "died", "retired", "episode_over")
        if self._cases is None:
            merged = self._renewed(now, now["over"], now["world"], now["episode"] + 1, kept)
        else:
            turn = now["episode_over"].long().cumsum(0)
            world = now["next_case"] + turn - 1
            begins = now["episode_over"] & (world < self._cases)
            now["next_case"] = now["next_case"] + turn[-1]
            merged = self._renewed(now, begins, world, torch.zeros_like(world), kept)
        return batch_major(self._with_cues(merged))

    def renew(self, state: TensorDict, which: Tensor) -> TensorDict:
        """The state with the next life begun in the worlds of the mask `which`, bool [B]."""
        fields = agent_major(state)
        begun = self._renewed(fields, which, fields["world"], fields["episode"] + 1)
        begun = self._with_cues(begun)
        return batch_major(
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
        fields = agent_major(state)
        return batch_major(self._with_cues(tick(self, fields, actions, gated=False)))

    # ------------------------------------------------------------------ what agents may know

    def action_mask(self, state: TensorDict) -> Tensor:
        """Legal actions, bool [B, N, A]: inside the map; INTERACT on a place that is open.

        Being broke does not close a place (trying costs a tick). The dead may only WAIT.
        """
        return legal_mask(self, agent_major(state)).permute(2, 1, 0)

    def legal_bits(self, state: TensorDict) -> Tensor:
        """The action mask in compact form: int32 [B, N], bit a set where action a is legal."""
        return legal(self, agent_major(state)).t()

    def observe(self, state: TensorDict) -> TensorDict:
        """What each agent may see; see `hamlet.town.observe.observe` for the fields."""
        return observe(self, state)
