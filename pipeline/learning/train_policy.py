"""Train module D against the frozen A, B and C: imitation of an expert, then PPO.

PPO alone undoes what imitation found (its steps are noisy, and the best policies are narrow), so it
is kickstarted (Schmitt et al. 2018): the expert goes on telling which goal it would choose, and
that likelihood stays, with a small weight, in the loss. And it improves the choice of goals only:
there is little to gain in the controller that imitation leaves (pursuing the expert's goals it had
99 % of the expert's return), and learning from every tick's actions takes as long again. Whether
it would help or harm is not settled: single trainings with it ended at 420 to 457, without at 454
and 457.

Because the upstream modules are frozen, a tick's experience is stored as plain features: the
updates have no recurrence, and the frozen modules run once per step of experience. Values are
learned from every tick, goals from those at which an agent deliberates, one in `meta_period`: what
the same network says in between follows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.artifacts import HamletError
from hamlet.learning import distributed
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.learner import CoPlayers, Learner, RolloutCarry, Teacher, slots_of
from hamlet.learning.log import Log
from hamlet.learning.losses import (
    entropy_of,
    imitation_loss,
    normalise,
    ppo_policy_loss,
    value_loss,
    weighted_mean,
)
from hamlet.learning.precision import Precision, best_precision
from hamlet.learning.returns import gae
from hamlet.learning.rollout import collect, fused_step, learn
from hamlet.learning.update import Update
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.categorical import log_prob_of
from hamlet.modules.contracts import METERS, Features, TownShape
from hamlet.modules.critic import Critic
from hamlet.params import CompileParams, PolicyParams
from hamlet.profiling import region
from hamlet.town import Scripted, Town

REACHED = 0.95
WARM_UP = 10
LED = 0.6
"""The part of imitation in which the expert acts, in fewer and fewer worlds; then it only tells."""
FEATURES = tuple(f"f_{name}" for name in Features._fields)
VALUING = ("active", "privileged", "value", "returns")
"""Of a tick's experience, what PPO's values are learned from."""
THINKING = (*FEATURES, "candidates", "imagined_return", "imagined_confidence", "goal",
            "goal_log_prob", "active", "advantages", "expert_goal")  # fmt: skip
"""And what its goals are learned from, of the agents that deliberate."""


def goal_targets(town: Town) -> Tensor:
    """float32 [G, 8]: the level at which the meter that an affordance restores most is enough."""
    targets = torch.zeros(town.num_goals, METERS)
    for index, place in enumerate(town.pack.affordances):
        gain = dict.fromkeys(town.meter_names, 0.0)
        for meter, amount in place.effects_per_tick.items():
            gain[meter] += amount * place.duration
        for meter, amount in place.effects_on_completion.items():
            gain[meter] += amount
        best = max(gain, key=lambda meter: gain[meter])
        targets[index, town.meter_names.index(best)] = REACHED
    return targets


@torch.no_grad()
def add_advantages(
    buffer: RolloutBuffer, learner: Learner, world: TensorDict, params: PolicyParams
) -> None:
    """Add `advantages` and `returns` to the experience; `world` follows its last row.

    Rewards are scaled by 3 (1 - gamma), so that values are of the order of one.
    """
    data = buffer.data
    assert data is not None
    values, done = data["value"], data["done"]
    following = torch.cat([values[1:], learner.critic(learner.privileged(world)).unsqueeze(0)])
    reward = data["reward"] * (3 * (1 - params.gamma))
    estimate = gae(reward, values, following, done, done, params.gamma, params.lam)
    data["advantages"], data["returns"] = estimate.advantages, estimate.returns


def features_of(batch: TensorDict) -> Features:
    return Features(*(batch[name] for name in FEATURES))


def train_policy(
    town: Town,
    shape: TownShape,
    mind: Mind,
    first: Callable[[int, int], AgentState],
    params: PolicyParams,
    compiling: CompileParams,
    seed: int,
    checkpoint: Path,
    log: Log,
    critic: Critic | None = None,
    co_players: CoPlayers | None = None,
    teacher: Teacher | None = None,
) -> Critic:
    """Train `mind.policy` in place; returns the critic that was trained beside it.

    Args:
        first: blank minds of a number of worlds and of agents in each.
        critic: that of an earlier training, to go on with; else a new one.
        co_players: plays the last agents of every world.
        teacher: who is imitated; else the scripted player that `params` names.
    """
    policy: Any = mind.policy
    worlds = distributed.local_count(params.worlds, "params.yaml: policy.worlds")
    if worlds % params.meta_period:
        whose = "params.yaml: policy.worlds" + " of a rank" * (distributed.ranks() > 1)
        raise HamletError(
            f"{whose} is {worlds}, not a multiple of policy.meta_period ({params.meta_period})",
            "change either, so that the same number of agents deliberates at every tick",
        )
    torch.manual_seed(seed)
    critic = critic or Critic(shape, params.hidden)
    rng = torch.Generator().manual_seed(seed)
    entropy_coef = torch.tensor(params.entropy)

    def imitate(batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        f, weight = features_of(batch), batch["active"].float()
        goal_loss, goal_metrics = imitation_loss(
            policy.learned_logits(f), batch["expert_goal"], weight
        )
        # Without the mask: the policy must know what is illegal when it imagines.
        action_loss, action_metrics = imitation_loss(
            policy.action_logits(f, batch["expert_goal"]), batch["expert_action"], weight
        )
        values = critic(batch["privileged"])
        fit = 0.5 * weighted_mean((values - batch["returns"]).square(), weight)
        return goal_loss + action_loss + fit, {
            "goal_agreement": goal_metrics["agreement"],
            "action_agreement": action_metrics["agreement"],
            "value_loss": fit,
        }

    def fit_critic(batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        weight = batch["active"].float()
        return value_loss(
            critic(batch["privileged"]), batch["value"], batch["returns"], weight, 1e9
        )

    def improve(ticks: TensorDict, thoughts: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        active, deciding = ticks["active"].float(), thoughts["active"].float()
        fit, value_diagnostics = value_loss(
            critic(ticks["privileged"]), ticks["value"], ticks["returns"], active, params.clip
        )
        f = features_of(thoughts)
        learned = policy.learned_logits(f)
        logits = policy.goal_logits(
            learned + policy.low_money_bias(f.known_state),
            thoughts["candidates"],
            thoughts["imagined_return"],
            thoughts["imagined_confidence"],
        ).float()
        surrogate, diagnostics = ppo_policy_loss(
            log_prob_of(logits, thoughts["goal"]),
            thoughts["goal_log_prob"],
            normalise(thoughts["advantages"], deciding),
            deciding,
            params.clip,
        )
        told_loss, told = imitation_loss(learned, thoughts["expert_goal"], deciding)
        entropy = weighted_mean(entropy_of(logits), deciding)
        loss = surrogate + 0.5 * fit + params.kickstart_coef * told_loss - entropy_coef * entropy
        return loss, {
            **diagnostics,
            **value_diagnostics,
            "value_loss": fit,
            "goal_agreement": told["agreement"],
            "goal_entropy": entropy,
        }

    everything = [*policy.parameters(), *critic.parameters()]
    choosing = [p for name, p in policy.named_parameters() if not name.startswith("controller.")]
    wanted = compiling.precision
    precision: Precision = best_precision("cpu") if wanted == "auto" else wanted
    imitation = Update(
        imitate, everything, learning_rate=params.imitation_learning_rate,
        compile=compiling.update, precision=precision,
    )  # fmt: skip
    critic_only = Update(
        fit_critic, critic.parameters(), learning_rate=params.learning_rate, precision=precision
    )
    ppo = Update(
        improve, [*choosing, *critic.parameters()], learning_rate=params.learning_rate,
        max_grad_norm=0.5, compile=compiling.update and compiling.rollout, precision=precision,
    )  # fmt: skip

    expert = teacher or Scripted(town, [params.teacher], seed)
    learner = Learner(town, shape, mind, critic, expert, co_players)
    world = town.reset(seed, worlds, distributed.rank() * worlds)
    # Lives begin at different ages, so that every batch holds all ages and all hours.
    ages = torch.randint(shape.lifespan, (params.worlds,), generator=rng)
    world = town.rearrange(world, tick=distributed.local_shard(ages))
    blank = distributed.local_shard(tuple(first(params.worlds, learner.agents)))
    met = co_players.start(worlds) if co_players else ()
    memory = RolloutCarry(AgentState(*blank), expert.reset(world), met)
    # The ticks of imitation, in which nothing is imagined, are too few to be worth compiling.
    steps = {
        imitating: fused_step(town, learner, compiling.rollout and not imitating, precision)
        for imitating in (True, False)
    }
    score, scores = torch.zeros(worlds, learner.agents), torch.zeros(2)

    saved = Checkpoint(
        checkpoint,
        {
            "policy": policy,
            "critic": critic,
            "imitation": imitation,
            "critic_only": critic_only,
            "ppo": ppo,
            "rng": rng,
        },
    )
    start, extra = saved.load()
    if start:
        world = TensorDict(extra["world"], batch_size=world.batch_size)
        remembered = TensorDict(extra["expert"], batch_size=world.batch_size)
        met = AgentState(*extra["co_players"]) if extra["co_players"] else ()
        memory = RolloutCarry(AgentState(*extra["agent"]), remembered, met)
        score, scores = extra["score"], extra["scores"]

    def deliberating(clock: int) -> Tensor:
        """The worlds whose own clock is at a multiple of the period after `clock` ticks."""
        period = params.meta_period
        return torch.arange(worlds // period) * period + (-clock) % period

    warm = params.imitation_iterations + params.critic_iterations
    buffers = {True: RolloutBuffer(params.rollout), False: RolloutBuffer(params.rollout)}
    for iteration in log.steps(warm + params.ppo_iterations, start):
        imitating = iteration < params.imitation_iterations
        buffer = buffers[imitating]
        share = max(0.0, 1 - iteration / (LED * params.imitation_iterations)) if imitating else 0.0
        driven = distributed.local_shard(torch.arange(params.worlds) < round(share * params.worlds))
        clocks = range(iteration * params.rollout, (iteration + 1) * params.rollout)
        thinking = [deliberating(clock) for clock in clocks]
        contexts = [(None, driven) if imitating else (now, None) for now in thinking]
        if co_players:
            co_players.meet(rng)
        world, memory = collect(steps[imitating], world, memory, buffer, contexts)
        with region("loss"):
            add_advantages(buffer, learner, world, params)
        if imitating:
            update = imitation
            left = 1 - iteration / params.imitation_iterations
            update.set_learning_rate(params.imitation_learning_rate * max(left, 0.02))
        elif iteration < warm:
            update = critic_only
        else:
            update = ppo
            done = iteration - warm
            left = 1 - done / params.ppo_iterations
            # A new optimizer's first steps are long whatever the gradient: it begins slowly.
            warmed = min(1.0, (done + 1) / WARM_UP)
            update.set_learning_rate(params.learning_rate * warmed * max(left, 0.05))
            entropy_coef.fill_(params.entropy * max(left, 0.1))
        epochs, parts = (
            (params.imitation_epochs, params.imitation_minibatches)
            if imitating
            else (params.epochs, params.minibatches)
        )
        experience = [buffer]
        if update is ppo:
            with region("data"):
                deciders = torch.stack([slots_of(now, learner.agents) for now in thinking])
                experience = [buffer.part(VALUING), buffer.part(THINKING, deciders)]
        metrics = learn(update, experience, epochs, parts, rng, params.max_kl)
        with region("data"):
            score, scores = episode_scores(buffer, score, scores)
        log.record(iteration, metrics | {"mean_return": scores[0]})
        saved.save(
            iteration + 1,
            {"scores": scores},
            {
                "world": dict(world.items()),
                "expert": dict(memory.expert.items()),
                "agent": tuple(memory.agent),
                "co_players": tuple(memory.co_players),
                "score": score,
            },
        )
    return critic


def episode_scores(buffer: RolloutBuffer, score: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Follow every slot's return; `scores` = (mean return of the lives last finished, weight).

    No host synchronisation: everything stays in tensors.
    """
    data = buffer.data
    assert data is not None
    flat = score.flatten()
    finished, counts = [], []
    for t in range(buffer.ticks):
        flat = flat + data["reward"][t]
        ended = data["done"][t] & data["active"][t]
        finished.append((flat * ended).sum())
        counts.append(ended.sum().float())
        flat = torch.where(data["done"][t], 0.0, flat)
    for total, count in zip(
        *distributed.all_reduce_sum(torch.stack(finished), torch.stack(counts))
    ):
        mean = total / count.clamp_min(1)
        weight = torch.minimum(count / 256, torch.ones(()))
        first = torch.where(scores[1] == 0, torch.ones(()), weight)
        rate = torch.where(count > 0, first, torch.zeros(()))
        scores = torch.stack([scores[0] + rate * (mean - scores[0]), scores[1] + count])
    return flat.view_as(score), scores
