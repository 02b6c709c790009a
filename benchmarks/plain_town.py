"""The town learned by the plain modules only: what is the knowledge in the town's modules worth?

The town becomes a world like anybody's: its fields are the contract's fields, all its worlds are
stepped together. A (`plain.perception`, of random play) and D (PPO on A's belief) learn as
`hamlet own` lets them; there is no map memory, no rules of meters, no menu, no teacher. B and C
touch no action and are left out. `benchmarks.study` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.learning.log import Log
from hamlet.learning.rollout import Record
from hamlet.modules.categorical import masked_logits
from hamlet.own.data import Recorder
from hamlet.own.params import PerceptionParams, PolicyParams
from hamlet.own.train_perception import train_perception
from hamlet.own.train_policy import train_policy
from hamlet.plain.perception import Perception
from hamlet.plain.policy import Policy
from hamlet.town import Town
from hamlet.worlds.contract import Field, WorldShape
from hamlet.worlds.lanes import Now, Row, legal_at_random
from stages.evaluate import life_of

RANDOM_TICKS, RANDOM_LANES, LANES = 4096, 8, 32
GAMMA = 0.995  # as in the town's own params


def shape_of(town: Town) -> WorldShape:
    """The town as data: codes where it has codes, else vectors."""
    seen, fields = town.observe(town.reset(0, 2)), []
    codes = {"view": town.num_cell_codes, "others_action": town.num_actions + 1}
    for name, x in seen.items():
        if name == "action_mask":
            continue
        own = tuple(x.shape[2:])
        count = codes.get(name)
        if count:
            fields.append(Field(name, "codes", own, "int64", 0, count - 1, count))
        else:
            fields.append(Field(name, "vector", (int(np.prod(own)),), "float32"))
    return WorldShape(
        town.pack.name, tuple(fields), tuple(f"agent_{i}" for i in range(town.num_agents)),
        tuple(town.action_names), (town.num_actions,) * town.num_agents, True,
    )  # fmt: skip


def fields_in(shape: WorldShape, seen: TensorDict) -> dict[str, Tensor]:
    """What all agents of all worlds see [B * N, ...], as the shape says."""
    found = {}
    for field in shape.fields:
        x = seen[field.name].flatten(0, 1)
        found[field.name] = x.long() if field.kind == "codes" else x.flatten(1).float()
    return found


class TownLanes:
    """Worlds of the town as `hamlet.worlds.lanes.Lanes`, all stepped as one batch.

    Dying and reaching the lifespan both terminate: nothing comes after.
    """

    def __init__(self, town: Town, count: int, seed: int) -> None:
        self.town, self.shape, self.worlds = town, shape_of(town), range(count)
        town.train()
        self.world = town.reset(seed, count)
        self.returns: list[np.ndarray] = []
        self.lengths: list[int] = []
        self._sums = torch.zeros(count, town.num_agents)
        self._seen = town.observe(self.world)
        self.now = self._now()

    def step(self, actions: np.ndarray) -> Row:
        """See `Lanes`."""
        acted = self.world["alive"]
        chosen = torch.from_numpy(actions).view(len(self.worlds), -1)
        after = self.town.step_core(self.world, chosen)
        over = after["episode_over"]
        reward = torch.where(acted, after["reward"], 0.0)
        ended = acted & (after["died"] | after["retired"])
        self._sums += reward
        last = self.town.observe(after)
        if over.any():
            for lane in over.nonzero().flatten().tolist():
                self.returns.append(self._sums[lane].numpy().copy())
                self.lengths.append(int(after["tick"][lane]))
            self._sums[over] = 0.0
            self.world = self.town.renew(after, over)
            self._seen = self.town.observe(self.world)
        else:
            self.world, self._seen = after, last
        self.now = self._now()
        return Row(
            {k: x.numpy() for k, x in fields_in(self.shape, last).items()},
            reward.flatten().numpy(), ended.flatten().numpy(),
            np.zeros(ended.numel(), bool), acted.flatten().numpy(), over.numpy(),
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """See `Lanes`. Nobody goes on from it: the checkpoint lies in a temporary folder."""
        returns = [one.tolist() for one in self.returns]
        return {"returns": returns, "lengths": self.lengths, "begun": len(self.returns)}

    def _now(self) -> Now:
        alive = self.world["alive"]
        first = (self.world["tick"] == 0).unsqueeze(-1) & alive
        return Now(
            {k: x.numpy() for k, x in fields_in(self.shape, self._seen).items()},
            self._seen["action_mask"].flatten(0, 1).numpy(), alive.flatten().numpy(),
            first.flatten().numpy(),
        )  # fmt: skip


class PlainPlayers:
    """A and D in every place of the town's worlds, as a `hamlet.learning.rollout.Player`."""

    def __init__(
        self, shape: WorldShape, perception: Perception, policy: Policy, seed: int
    ) -> None:
        self.shape, self.perception, self.policy = shape, perception, policy
        self.generator = torch.Generator().manual_seed(seed)

    def start(self, worlds: int) -> dict[str, Tensor]:
        """Memory of worlds whose life begins."""
        agents, hidden = worlds * self.shape.num_agents, self.perception.hidden
        return {
            "belief": torch.zeros(agents, hidden), "acted": torch.zeros(agents, dtype=torch.int64)
        }  # fmt: skip

    def act(
        self, world: TensorDict, seen: TensorDict, memory: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], Record]:
        fields = fields_in(self.shape, seen)
        features, belief = self.perception(*fields.values(), memory["acted"], memory["belief"])
        mask = seen["action_mask"].flatten(0, 1) | ~world["alive"].flatten().unsqueeze(-1)
        odds = masked_logits(self.policy(features, belief)[0], mask).softmax(-1)
        action = torch.multinomial(odds, 1, generator=self.generator).squeeze(-1)
        memory = {"belief": belief, "acted": action + 1}
        return action.view(world["alive"].shape), memory, {}

    def outcome(
        self, before: TensorDict, after: TensorDict, memory: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], Record]:
        begun = (after["episode_over"] & ~after["over"]).repeat_interleave(self.shape.num_agents)
        kept_on = {
            "belief": torch.where(begun.unsqueeze(-1), 0.0, memory["belief"]),
            "acted": torch.where(begun, 0, memory["acted"]),
        }
        return kept_on, life_of(before, after)


def train_plain(
    town: Town, ticks: int, seed: int, log: Callable[[str], Log]
) -> tuple[Perception, Policy, int]:
    """A and D, trained in so many ticks of the town, and the ticks that it took.

    Args:
        log: a log of what is trained, by its name.
    """
    random: Any = TownLanes(town, RANDOM_LANES, seed)
    recorder, rng = Recorder(), np.random.default_rng(seed)
    for _ in range(RANDOM_TICKS // RANDOM_LANES):
        recorder.step(random, legal_at_random(random.now.mask, rng))
    data, params = recorder.data(), PerceptionParams()
    lanes: Any = TownLanes(town, LANES, seed + 1)
    chosen = PolicyParams(
        ticks=ticks - RANDOM_TICKS, lanes=LANES, minibatch=1024, epochs=4, learning_rate=5e-4,
        gamma=GAMMA, kept_ticks=64,
    )  # fmt: skip
    with TemporaryDirectory() as name:
        folder = Path(name)
        perception, _ = train_perception(
            random.shape, data, params, seed, folder / "perception.pt", log("perception")
        )

        @torch.no_grad()
        def perceive(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            return perception(*inputs)

        sizes = (perception.senses.width, perception.hidden)
        learned = train_policy(
            lanes, perceive, sizes, chosen, seed, folder / "policy.pt", log("policy")
        )
    return perception, learned.policy, RANDOM_TICKS + int(learned.numbers["ticks"])
