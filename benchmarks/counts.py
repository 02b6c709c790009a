"""What a tick costs, counted instead of timed: the same on every machine, however loaded.

    python -m benchmarks.counts            # compare with results/counts.json
    python -m benchmarks.counts --write    # take today's counts as the new ones

Everything has the sizes of params.yaml and weights that nobody trained; a count does not depend on
them. Operations are those that PyTorch starts, FLOP those of its matrix products. A test fails when
a count has grown by more than TOLERANCE.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hamlet.learning.learner import Learner, RolloutCarry, first_state
from hamlet.learning.policy_losses import PolicyLosses
from hamlet.learning.train_policy import goal_targets
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import Features, TownShape, observation_from
from hamlet.modules.critic import Critic, privileged_dim
from hamlet.modules.perception import Perception
from hamlet.modules.policy import Policy
from hamlet.modules.social import Social
from hamlet.modules.world_model import WorldModel
from hamlet.params import Params, load_params
from hamlet.town import Scripted, Town, load_pack
from hamlet.town.tables import menu, timetable

RESULTS = Path(__file__).parent / "results" / "counts.json"
TOLERANCE = 0.10
WORLDS = 4


class _Operations(TorchDispatchMode):
    """How many operations start."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], Any], rows: int) -> dict[str, int]:
    """Operations of `work`, and its FLOP for each of `rows`."""
    with _Operations() as operations:
        work()
    with FlopCounterMode(display=False) as flop:
        work()
    return {"operations": operations.count, "flop": round(flop.get_total_flops() / rows)}


def new_mind(params: Params, town: Town) -> Mind:
    """The four modules in the sizes of `params`."""
    shape, sizes = TownShape.of(town), params.policy
    perception = Perception(shape, params.perception.hidden, params.perception.latent)
    perception.cache_odds()
    world_model = WorldModel(
        shape, params.perception.latent, params.world_model.hidden, params.world_model.members
    )
    told = goal_targets(town), timetable(town.pack), menu(town.pack)
    policy = Policy(
        shape, perception.belief_dim, sizes.hidden, *told, sizes.meta_period, sizes.emergency
    )
    social = Social(shape, params.social.hidden)
    for frozen in (perception, world_model, social):
        frozen.requires_grad_(False)
    return Mind(perception, world_model, social, policy, sizes.candidates, sizes.horizon)


class Untrained:
    """The town of `params` and in it a new mind, with an expert beside it, on a device."""

    def __init__(self, params: Params, device: str | torch.device = "cpu") -> None:
        self.params, self.device = params, torch.device(device)
        torch.manual_seed(0)
        self.town = Town(load_pack(params.town.pack), num_layouts=8, device=device)
        self.shape = TownShape.of(self.town)
        self.mind = new_mind(params, self.town)
        perception: Any = self.mind.perceive
        social: Any = self.mind.read_others
        self.dims = perception.recurrent_dim, self.shape.num_others, social.recurrent_dim
        module: Any
        for module in (perception, self.mind.imagine_tick, social, self.mind.policy):
            module.to(device)
        self.critic = Critic(self.shape, params.policy.hidden).to(device)
        self.expert = Scripted(self.town, [params.policy.teacher], 0)
        self.learner = Learner(self.town, self.shape, self.mind, self.critic, self.expert)

    def blank(self, worlds: int, agents: int | None = None) -> AgentState:
        """Blank minds."""
        return first_state(
            worlds, agents or self.shape.num_agents, *self.dims, self.shape.num_meters, self.device
        )

    def start(self, worlds: int, seed: int = 0) -> tuple[TensorDict, RolloutCarry]:
        """Worlds at their first tick, and who plays them."""
        world = self.town.reset(seed, worlds)
        return world, RolloutCarry(self.blank(worlds), self.expert.reset(world))


def measure(params: Params) -> dict[str, dict[str, int]]:
    """The counts of every part, by its name; a tick of WORLDS worlds."""
    new = Untrained(params)
    town, shape, mind, expert = new.town, new.shape, new.mind, new.expert
    world, (state, memory, _) = new.start(WORLDS)
    obs = observation_from(town.observe(world), 2)
    slots = len(state.goal)
    waiting = torch.zeros(WORLDS, shape.num_agents, dtype=torch.int64)
    losses = PolicyLosses(mind.policy, new.critic, params.policy)
    with torch.no_grad():
        belief, _, _, f = mind.sense(obs, state)
        goal = torch.zeros(slots, dtype=torch.int64)
        batch = TensorDict(
            {
                **{f"f_{name}": value for name, value in f._asdict().items()},
                "active": torch.ones(slots, dtype=torch.bool),
                "expert_goal": goal,
                "expert_action": goal,
                "expert_odds": torch.ones(slots, shape.num_goals) / shape.num_goals,
                "returns": torch.zeros(slots),
                "privileged": torch.zeros(slots, privileged_dim(shape)),
            },
            batch_size=slots,
        )
        candidates = mind.policy.prior_logits(f).topk(mind.candidates, -1).indices
        parts: dict[str, Callable[[], Any]] = {
            "town: observe": lambda: town.observe(world),
            "town: step": lambda: town.step_core(world, waiting),
            "expert": lambda: expert.act(world, memory),
            "A and C: sense": lambda: mind.sense(obs, state),
            "B and D: imagine": lambda: mind.imagine(
                belief.log_std, Features(*f), obs.action_mask, candidates
            ),
            "D: goals": lambda: mind.policy.prior_logits(f),
            "D: actions": lambda: mind.policy.action_logits(f, goal),
            "think": lambda: mind(*obs, *state),
        }
        counts = {name: counted(work, slots) for name, work in parts.items()}
    counts["D: loss of imitation"] = counted(lambda: losses.imitate(batch)[0].backward(), slots)
    return counts


def grown(now: dict[str, dict[str, int]], before: dict[str, dict[str, int]]) -> list[str]:
    """A line for every count that is more than TOLERANCE above what it was, or is not known."""
    lines = []
    for part, counts in now.items():
        for kind, count in counts.items():
            was = before.get(part, {}).get(kind)
            if was is None:
                lines.append(f"{part}: {kind} was never counted")
            elif count > was * (1 + TOLERANCE):
                lines.append(f"{part}: {count} {kind} where there were {was}")
    return lines


def default_params() -> Params:
    """params.yaml alone, whatever preset is chosen."""
    with TemporaryDirectory() as folder:
        return load_params(shutil.copy("params.yaml", folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="take today's counts as the new ones")
    now = measure(default_params())
    for part, counts in now.items():
        print(f"{part:24} {counts['operations']:7} operations {counts['flop']:12,} FLOP an agent")
    if parser.parse_args().write:
        RESULTS.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    elif lines := grown(now, json.loads(RESULTS.read_text(encoding="utf-8"))):
        raise SystemExit("\n".join(lines))


if __name__ == "__main__":
    main()
