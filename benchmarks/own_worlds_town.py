"""The town learned by the plain modules only: what is the knowledge in the town's modules worth?

    python -m benchmarks.own_worlds_town [--seed 0] [--ticks 592000]

The town of params.yaml becomes a world like anybody's: its fields are the contract's fields, all
its worlds are stepped together. A (`plain.perception`, of random play) and D (PPO on A's belief)
learn as `hamlet own` lets them; there is no map memory, no rules of meters, no menu, no teacher.
Then D plays the held-out worlds of the stage `evaluate`. The default is as many ticks of the town
as its own agent was given. The row is kept in benchmarks/results/own_worlds.json; B and C touch no
action and are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.own_worlds import RESULTS, kept, write_page
from hamlet.artifacts import read_json, write_json
from hamlet.learning.rollout import Record
from hamlet.modules.categorical import masked_logits
from hamlet.own.data import Recorder
from hamlet.own.params import PerceptionParams, PolicyParams
from hamlet.own.train_perception import judge_perception, train_perception
from hamlet.own.train_policy import train_policy
from hamlet.params import load_params
from hamlet.plain.perception import Perception
from hamlet.plain.policy import Policy
from hamlet.town import Town
from hamlet.worlds.contract import Field, WorldShape
from hamlet.worlds.lanes import Now, Row, legal_at_random
from stages import paths
from stages.collect import make_town
from stages.evaluate import EVALUATION_SEED, life_of, live

TICKS = 592_000  # of the town's own agent: 51 200 collected, 540 672 of imitation and PPO
RANDOM_TICKS, RANDOM_LANES, LANES = 4096, 8, 32
GAMMA = 0.995  # as in the town's own params
TOLD_SECONDS = 30.0


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


class Told:
    """A `Log` that says now and then how far it is."""

    def __init__(self, what: str) -> None:
        self.what, self.told = what, time.monotonic()

    def steps(self, total: int, start: int) -> Iterator[int]:
        self.total = total
        yield from range(start, total)

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        if time.monotonic() - self.told > TOLD_SECONDS:
            self.told = time.monotonic()
            trailing = float(metrics.get("trailing_return", torch.tensor(float("nan"))))
            print(f"{self.what}: {step + 1} of {self.total}, return {trailing:.4g}", flush=True)


class PlainPlayers:
    """A and D in every place of the town's worlds, as a `hamlet.learning.rollout.Player`."""

    def __init__(self, shape: WorldShape, perception: nn.Module, policy: Policy, seed: int) -> None:
        self.shape, self.perception, self.policy = shape, perception, policy
        self.generator = torch.Generator().manual_seed(seed)

    def start(self, slots: int, hidden: int) -> dict[str, Tensor]:
        """Memory of worlds whose life begins."""
        agents = slots * self.shape.num_agents
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


def learn(
    town: Town, ticks: int, seed: int, folder: Path
) -> tuple[Perception, Policy, dict[str, Any]]:
    """Train A and D in so many ticks of the town; what was measured beside. Checkpoints lie in
    `folder`."""
    random: Any = TownLanes(town, RANDOM_LANES, seed)
    recorder, rng = Recorder(), np.random.default_rng(seed)
    for _ in range(RANDOM_TICKS // RANDOM_LANES):
        recorder.step(random, legal_at_random(random.now.mask, rng))
    data, params = recorder.data(), PerceptionParams()
    file = folder / "perception.pt"
    perception, heads = train_perception(random.shape, data, params, seed, file, Told("perception"))
    judged = judge_perception(random.shape, data, perception, heads)
    lanes: Any = TownLanes(town, LANES, seed + 1)
    chosen = PolicyParams(
        ticks=ticks - RANDOM_TICKS, lanes=LANES, minibatch=1024, epochs=4, learning_rate=5e-4,
        gamma=GAMMA, kept_ticks=64,
    )  # fmt: skip

    @torch.no_grad()
    def perceive(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return perception(*inputs)

    sizes = (perception.senses.width, perception.hidden)
    learned = train_policy(
        lanes, perceive, sizes, chosen, seed, folder / "policy.pt", Told("policy")
    )
    told = {k: learned.numbers[k] for k in ("trailing_return", "updates", "episodes")}
    taken = RANDOM_TICKS + int(learned.numbers["ticks"])
    return perception, learned.policy, {"ticks": taken, "perception": judged, **told}


def run(ticks: int, seed: int) -> dict[str, Any]:
    """Learn in the town of params.yaml and play its held-out worlds."""
    params = load_params(Path("params.yaml"))
    torch.set_num_threads(1)
    began, wall = time.process_time(), time.monotonic()
    with TemporaryDirectory() as folder:
        perception, policy, numbers = learn(make_town(params), ticks, seed, Path(folder))
    numbers |= {"cpu_seconds": time.process_time() - began, "seconds": time.monotonic() - wall}
    town, worlds = make_town(params, held_out=True), params.evaluate.worlds
    town.eval(worlds)
    player = PlainPlayers(shape_of(town), perception, policy, seed)
    memory = player.start(worlds, perception.hidden)
    with torch.no_grad():
        lives = live(town, player, memory, worlds, params.seed + EVALUATION_SEED, "plain")
    score, own = lives["returns"].mean().item(), read_json(paths.metrics("evaluate"))["scores"]
    span = own["expert"]["mean_return"] - own["rest"]["mean_return"]
    return numbers | {
        "seed": seed, "pack": params.town.pack, "agents": town.num_agents, "mean_return": score,
        "survival": lives["ticks"].mean().item(),
        "retired_fraction": lives["retired"].mean().item(),
        "normalised_score": (score - own["rest"]["mean_return"]) / span,
        "beside": {
            name: {k: own[name][k] for k in ("mean_return", "survival", "retired_fraction")}
            for name in ("agent", "expert", "rest", "random")
        },
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ticks", type=int, default=TICKS)
    given = parser.parse_args(arguments)
    made = run(given.ticks, given.seed)
    path = RESULTS / "own_worlds.json"
    found = kept(path)
    found.setdefault("town", {})[f"{made['ticks']}/{given.seed}"] = made
    write_json(path, found)
    print({k: v for k, v in made.items() if not isinstance(v, dict)})
    write_page(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
