"""The simplest strong rival: one recurrent network from observation to action, end to end.

Encoders, a GRU, an actor and a critic, trained by backpropagation through a rollout's ticks:
imitation of the expert that module D imitates, in the same schedule, then PPO, with the expert
still telling (Schmitt et al. 2018). As module D it is told the odds of the expert's goals too:
naming them is an auxiliary task (Jaderberg et al. 2017). The study (`benchmarks.study`) trains and
plays it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.learner import ACTION_STREAM, Teacher, gumbel
from hamlet.learning.log import Log
from hamlet.learning.losses import (
    entropy_of,
    imitation_loss,
    normalise,
    ppo_policy_loss,
    told_loss,
    value_loss,
    weighted_mean,
)
from hamlet.learning.returns import gae
from hamlet.learning.rollout import Record, collect, fused_step
from hamlet.learning.train_policy import LED, WARM_UP
from hamlet.learning.update import Update
from hamlet.modules.categorical import log_prob_of, masked_logits
from hamlet.modules.contracts import RawObservation, TownShape, observation_from
from hamlet.modules.policy import mlp
from hamlet.params import PolicyParams
from hamlet.town import Town
from stages.evaluate import life_of

OTHERS_WIDTH = 64
OBSERVED = ("view", "occupancy", "self_state", "cues", "visible", "others_offset", "others_action")


class Monolith(nn.Module):
    """Observation and hidden state to action logits, value and hidden state.

    Args:
        shape: sizes of the town.
        width: of the encoder and of the GRU.
    """

    def __init__(self, shape: TownShape, width: int) -> None:
        super().__init__()
        self.shape, self.width = shape, width
        senses = 25 * shape.num_cell_codes + 25 + shape.self_dim + OTHERS_WIDTH
        self.others = nn.Linear(shape.num_cues + 3 + shape.num_actions + 1, OTHERS_WIDTH)
        self.encoder = nn.Sequential(
            nn.Linear(senses, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.gru = nn.GRUCell(width, width)
        self.actor = mlp(2 * width, width, shape.num_actions)
        self.critic = mlp(2 * width, width, 1)
        self.intention = mlp(2 * width, width, shape.num_goals)

    def encode(self, o: TensorDict) -> Tensor:
        """float32 [., width] of observations [., ...]."""
        view = F.one_hot(o["view"].long(), self.shape.num_cell_codes).flatten(-3)
        acted = F.one_hot(o["others_action"], self.shape.num_actions + 1)
        each = [o["cues"], o["visible"].unsqueeze(-1), o["others_offset"], acted]
        others = self.others(torch.cat([x.float() for x in each], -1)).relu().sum(-2)
        senses = [view.float(), o["occupancy"].flatten(-2).float(), o["self_state"], others]
        return self.encoder(torch.cat(senses, -1))

    def decide(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Action logits [., A] before the mask and value [.], of what is encoded and remembered."""
        return self.actor(both), self.critic(both).squeeze(-1)

    def unroll(self, batch: TensorDict) -> Tensor:
        """float32 [S, T, 2 * width] what is encoded and remembered at each tick of sequences
        [S, T], from their first hidden state."""
        encoded, hidden = self.encode(batch), batch["hidden"][:, 0]
        hiddens = []
        for tick in range(encoded.shape[1]):
            hidden = self.gru(encoded[:, tick], hidden)
            hiddens.append(hidden)
            hidden = hidden * ~batch["done"][:, tick].unsqueeze(-1)
        return torch.cat([encoded, torch.stack(hiddens, 1)], -1)


class Playing(NamedTuple):
    """What the learning player carries from tick to tick."""

    hidden: Tensor
    expert: Any
    """None where nobody tells."""


class MonolithPlayer:
    """The monolith in every place, as a `Player`."""

    def __init__(
        self, town: Town, shape: TownShape, model: Monolith, teacher: Teacher | None = None
    ) -> None:
        self.town, self.shape, self.model, self.teacher = town, shape, model, teacher

    def start(self, world: TensorDict) -> Playing:
        slots = len(world) * self.shape.num_agents
        told = self.teacher.reset(world) if self.teacher else None
        return Playing(torch.zeros(slots, self.model.width), told)

    def act(
        self, world: TensorDict, seen: TensorDict, memory: Playing, driven: Tensor | None = None
    ) -> tuple[Tensor, Playing, Record]:
        n = self.shape.num_agents
        obs: RawObservation = observation_from(seen, 2)
        fields = {name: getattr(obs, name) for name in OBSERVED}
        encoded = self.model.encode(TensorDict(fields, batch_size=[len(memory.hidden)]))
        hidden = self.model.gru(encoded, memory.hidden)
        logits, value = self.model.decide(torch.cat([encoded, hidden], -1))
        legal = masked_logits(logits, obs.action_mask)
        noise = gumbel(world, n, self.shape.num_actions, ACTION_STREAM)
        action, expert = (legal + noise).argmax(-1), memory.expert
        record = {
            **fields,
            "mask": obs.action_mask,
            "hidden": memory.hidden,
            "action": action,
            "log_prob": log_prob_of(legal, action),
            "value": value,
        }
        acted = action.unflatten(0, (-1, n))
        if self.teacher is not None:
            told, _, odds = self.teacher.tell(world, expert)
            expert = self.teacher.watch(world, expert)
            record["expert_action"] = told.flatten()
            record["expert_odds"] = odds.flatten(0, 1)
            if driven is not None:
                acted = torch.where(driven.unsqueeze(-1), told, acted)
        return acted, Playing(hidden, expert), record

    def outcome(
        self, before: TensorDict, after: TensorDict, memory: Playing
    ) -> tuple[Playing, Record]:
        over = after["episode_over"].repeat_interleave(self.shape.num_agents)
        record = {
            "reward": after["reward"].flatten(),
            "done": after["done"].flatten(),
            "active": before["alive"].flatten(),
        }
        return memory._replace(hidden=memory.hidden * ~over.unsqueeze(-1)), record


class MonolithLives(MonolithPlayer):
    """The same, told about as the study tells of everybody: what each agent got of its life."""

    def act(self, world: TensorDict, seen: TensorDict, memory: Playing, *context: Any) -> Any:
        action, memory, _ = super().act(world, seen, memory)
        return action, memory, {}

    def outcome(
        self, before: TensorDict, after: TensorDict, memory: Playing
    ) -> tuple[Playing, Record]:
        return super().outcome(before, after, memory)[0], life_of(before, after)


def learning_rate(params: PolicyParams, iteration: int) -> float:
    """That of an iteration: imitation's falls to nothing, then PPO's rises and falls."""
    if iteration < params.imitation_iterations:
        left = 1 - iteration / params.imitation_iterations
        return params.imitation_learning_rate * max(left, 0.02)
    so_far = iteration - params.imitation_iterations
    afterwards = params.critic_iterations + params.ppo_iterations
    left = min(1.0, (so_far + 1) / WARM_UP) * max(1 - so_far / afterwards, 0.05)
    return params.learning_rate * left


def train_monolith(
    town: Town,
    shape: TownShape,
    teacher: Teacher,
    params: PolicyParams,
    seed: int,
    checkpoint: Path,
    log: Log,
) -> Monolith:
    """As many ticks, in as many worlds, of imitation and of PPO as module D has by `params`."""
    torch.manual_seed(seed)
    model = Monolith(shape, params.hidden)
    rng = torch.Generator().manual_seed(seed)

    def imitate(batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        both, weight = model.unroll(batch), batch["active"].float()
        logits, values = model.decide(both)
        told, metrics = imitation_loss(logits, batch["expert_action"], weight)
        named, _ = told_loss(model.intention(both), batch["expert_odds"], weight)
        fit = 0.5 * weighted_mean((values - batch["returns"]).square(), weight)
        return told + named + fit, metrics

    def improve(batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        raw, values = model.decide(model.unroll(batch))
        logits, weight = masked_logits(raw, batch["mask"]), batch["active"].float()
        surrogate, metrics = ppo_policy_loss(
            log_prob_of(logits, batch["action"]), batch["log_prob"],
            normalise(batch["advantages"], weight), weight, params.clip,
        )  # fmt: skip
        fit, _ = value_loss(values, batch["value"], batch["returns"], weight, params.clip)
        told, _ = imitation_loss(raw, batch["expert_action"], weight)
        entropy = weighted_mean(entropy_of(logits), weight)
        return (
            surrogate + 0.5 * fit + params.kickstart_coef * told - params.entropy * entropy,
            metrics,
        )

    imitation = Update(imitate, model.parameters(), learning_rate=params.imitation_learning_rate)
    ppo = Update(improve, model.parameters(), learning_rate=params.learning_rate, max_grad_norm=0.5)
    player = MonolithPlayer(town, shape, model, teacher)
    step, buffer = fused_step(town, player), RolloutBuffer(params.rollout)
    ages = torch.randint(shape.lifespan, (params.worlds,), generator=rng)
    world = town.rearrange(town.reset(seed, params.worlds), tick=ages)
    memory = player.start(world)
    afterwards = params.critic_iterations + params.ppo_iterations
    saved = Checkpoint(checkpoint, {"model": model, "imitation": imitation, "ppo": ppo, "rng": rng})
    start, extra = saved.load()
    if start:
        world = TensorDict(extra["world"], batch_size=world.batch_size)
        told = TensorDict(extra["expert"], batch_size=world.batch_size)
        memory = Playing(extra["hidden"], told)
    for iteration in log.steps(params.imitation_iterations + afterwards, start):
        imitating = iteration < params.imitation_iterations
        share = max(0.0, 1 - iteration / (LED * params.imitation_iterations)) if imitating else 0.0
        driven = torch.arange(params.worlds) < round(share * params.worlds)
        world, memory = collect(step, world, memory, buffer, [(driven,)] * params.rollout)
        data = buffer.data
        assert data is not None
        with torch.no_grad():
            following = player.act(world, town.observe(world), memory)[2]["value"]
        reward, done = data["reward"] * (3 * (1 - params.gamma)), data["done"]
        values = torch.cat([data["value"], following.unsqueeze(0)])
        estimate = gae(reward, values[:-1], values[1:], done, done, params.gamma, params.lam)
        data["advantages"], data["returns"] = estimate
        (imitation if imitating else ppo).set_learning_rate(learning_rate(params, iteration))
        sequences = data.transpose(0, 1)
        epochs, parts = (
            (params.imitation_epochs, params.imitation_minibatches)
            if imitating
            else (params.epochs, params.minibatches)
        )
        for _ in range(epochs):
            for rows in torch.randperm(len(sequences), generator=rng).chunk(parts):
                metrics = (imitation if imitating else ppo)(sequences[rows])
        log.record(iteration, metrics)
        carried = {"world": dict(world.items()), "expert": dict(memory.expert.items())}
        saved.save(iteration + 1, rows={**carried, "hidden": memory.hidden})
    return model
