"""Train module D against the frozen A, B and C: imitation of an expert, then PPO or IMPALA.

In imitation the learner takes over from the expert world by world (DAgger, Ross et al. 2011): the
expert acts in fewer and fewer of them. It is asked only there, and in the worlds whose
agents deliberate at this tick, one in `meta_period`; these are the ones that are learned from. It
tells the odds of its goals, not one goal: where two are worth the same to it, either will do.

PPO alone undoes what imitation found (`benchmarks/results/study.md`), most of all in rollouts as
short as these: a goal is pursued for longer than eight ticks, and what it brings after them is only
as known as the critic's word. In rollouts of 96 ticks it does a tenth of the harm, and none where
all are rewarded with the mean of their world; it does no good either. So it is kickstarted (Schmitt
et al. 2018): the expert goes on telling which goal it would choose, and that likelihood stays, with
a small weight, in the loss. And it improves the choice of goals only:
there is little to gain in the controller that imitation leaves (pursuing the expert's goals it had
99 % of the expert's return), and learning from every tick's actions takes as long again. Whether
it would help or harm is not settled: single trainings with it ended at 420 to 457, without at 454
and 457.

What the teacher has not comes after it: habits are tried in whole lives (`hamlet.learning.trials`).

IMPALA stands in PPO's place where `params.yaml` says so (see `hamlet.learning.impala`).

Because the upstream modules are frozen, a tick's experience is stored as plain features: the
updates have no recurrence, and the frozen modules run once per step of experience. In PPO values
are learned from every tick, goals from those at which an agent deliberates, one in `meta_period`:
what the same network says in between follows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet import profiling
from hamlet.artifacts import HamletError
from hamlet.learning import distributed
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.captured import Captured
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.impala import Behind, Cast
from hamlet.learning.learner import (
    CoPlayers,
    Learner,
    Led,
    RolloutCarry,
    Teacher,
    led,
    packed,
    slots_of,
    thinking_in,
    unpacked,
    weights_of,
)
from hamlet.learning.log import Log
from hamlet.learning.policy_losses import IMITATING, JUDGING, THINKING, VALUING, PolicyLosses
from hamlet.learning.precision import Precision, best_precision
from hamlet.learning.returns import gae
from hamlet.learning.rollout import Record, Step, collect, fused_step, learn
from hamlet.learning.update import Apart, Update
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import TownShape
from hamlet.modules.critic import Critic
from hamlet.moving import moved, upload, uploaded
from hamlet.params import CompileParams, PolicyParams
from hamlet.profiling import region
from hamlet.town import Scripted, Town

REACHED = 0.95
WARM_UP = 10
LED = 0.6
"""The part of imitation in which the expert acts, in fewer and fewer worlds; then it only tells."""
JUDGED = 0.25
"""The last part of imitation, in which values are learned too: those of who acts then."""
GOLDEN = 0.6180339887498949
"""Fractional parts of its multiples are spread evenly: so are the worlds in which it acts."""


def goal_targets(town: Town) -> Tensor:
    """float32 [G, N]: the level at which the meter that an affordance restores most is enough."""
    targets = torch.zeros(town.num_goals, town.num_meters)
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
    buffer: RolloutBuffer, world: TensorDict, learner: Learner, params: PolicyParams
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


def driven_worlds(worlds: int, share: float) -> Tensor:
    """bool [worlds]: where the expert acts, spread evenly over the ranks and over the clocks.

    A smaller share is a part of a larger one: a world that the learner took over stays its own.
    """
    return torch.arange(worlds, dtype=torch.float64).mul(GOLDEN).frac() < share


class Trained(NamedTuple):
    """What is left beside the policy, which is trained in place.

    Attributes:
        critic: that was trained beside it.
        imitated: the policy's weights at the end of imitation, before reinforcement.
    """

    critic: Critic
    imitated: dict[str, Tensor]


class Updates(NamedTuple):
    """The optimisation of each part of the training."""

    imitation: Apart
    critic_only: Update
    ppo: Update


def policy_precision(options: CompileParams, device: torch.device) -> Precision:
    """What `compile.precision` means on a device."""
    wanted = options.precision
    return best_precision(str(device)) if wanted == "auto" else wanted


def make_updates(
    policy: Any, critic: Critic, losses: PolicyLosses, params: PolicyParams, options: CompileParams
) -> tuple[Updates, Precision]:
    choosing = [p for name, p in policy.named_parameters() if not name.startswith("controller.")]
    acting = [*policy.controller.parameters(), *critic.parameters()]
    precision = policy_precision(options, choosing[0].device)
    parts: list[tuple[Any, list[Any], Any]] = [(losses.imitate, [*choosing, *acting], None)]
    if policy.apart:
        parts = [
            (losses.imitate_goals, choosing, losses.settle_places),
            (losses.imitate_actions, acting, None),
        ]
    imitation = Apart(
        *(
            Update(
                loss, learned, learning_rate=params.imitation_learning_rate,
                compile=options.update, precision=precision, settle=settle,
            )
            for loss, learned, settle in parts
        )
    )  # fmt: skip
    critic_only = Update(
        losses.fit_critic, critic.parameters(), learning_rate=params.learning_rate,
        precision=precision,
    )  # fmt: skip
    ppo = Update(
        losses.improve, [*choosing, *critic.parameters()], learning_rate=params.learning_rate,
        max_grad_norm=0.5, compile=options.update and options.rollout, precision=precision,
    )  # fmt: skip
    return Updates(imitation, critic_only, ppo), precision


class Schedule:
    """What every iteration does: who acts, what is learned from, and how fast."""

    def __init__(self, params: PolicyParams, losses: PolicyLosses, updates: Updates) -> None:
        self.params, self.losses, self.updates = params, losses, updates
        self.warm = params.imitation_iterations + params.critic_iterations
        self.iterations = self.warm + params.ppo_iterations

    def imitates(self, iteration: int) -> bool:
        return iteration < self.params.imitation_iterations

    def judges(self, iteration: int) -> bool:
        """Whether the critic is asked and learns; in imitation only towards its end."""
        return iteration >= (1 - JUDGED) * self.params.imitation_iterations

    def driven_share(self, iteration: int) -> float:
        """Part of the worlds in which the expert acts in an iteration of imitation."""
        return max(0.0, 1 - iteration / (LED * self.params.imitation_iterations))

    def update(self, iteration: int) -> Update | Apart:
        """The update of this iteration, its rate and the entropy bonus set."""
        params = self.params
        if self.imitates(iteration):
            left = 1 - iteration / params.imitation_iterations
            rate = params.imitation_learning_rate * max(left, 0.02)
            self.updates.imitation.set_learning_rate(rate)
            return self.updates.imitation
        if iteration < self.warm:
            return self.updates.critic_only
        done = iteration - self.warm
        left = 1 - done / params.ppo_iterations
        # A new optimizer's first steps are long whatever the gradient: it begins slowly.
        warmed = min(1.0, (done + 1) / WARM_UP)
        self.updates.ppo.set_learning_rate(params.learning_rate * warmed * max(left, 0.05))
        self.losses.entropy_coef.fill_(params.entropy * max(left, 0.1))
        return self.updates.ppo

    def learn(
        self,
        iteration: int,
        buffer: RolloutBuffer,
        thinking: list[Tensor],
        agents: int,
        rng: torch.Generator,
    ) -> Record:
        """One iteration's updates; returns the last diagnostics.

        Args:
            thinking: int64 [.] of each tick, on the CPU, the worlds whose agents deliberate.
            agents: learning agents of a world.
        """
        params, update = self.params, self.update(iteration)
        with region("data"):
            assert buffer.data is not None
            device = buffer.data["active"].device
            deciders = upload(torch.stack([slots_of(now, agents) for now in thinking]), device)
            if update is self.updates.imitation:
                judged = JUDGING if self.judges(iteration) else ()
                experience = [buffer.part((*IMITATING, *judged), deciders)]
            elif update is self.updates.critic_only:
                experience = [buffer]
            else:
                experience = [buffer.part(VALUING), buffer.part(THINKING, deciders)]
        if update is self.updates.imitation:
            return learn(
                update, experience, params.imitation_epochs, params.imitation_minibatches, rng
            )
        return learn(update, experience, params.epochs, params.minibatches, rng, params.max_kl)


class Rollouts:
    """The worlds of one rank as they are played on, and what must be kept to go on with them."""

    def __init__(
        self,
        learner: Learner,
        first: Callable[[int, int], AgentState],
        params: PolicyParams,
        seed: int,
        rng: torch.Generator,
    ) -> None:
        town, expert = learner.town, learner.expert
        assert expert is not None
        self.learner, self.params = learner, params
        self.worlds = distributed.local_count(params.worlds, "params.yaml: policy.worlds")
        world = town.reset(seed, self.worlds, distributed.rank() * self.worlds)
        # Lives begin at different ages, so that every batch holds all ages and all hours.
        ages = torch.randint(learner.shape.lifespan, (params.worlds,), generator=rng)
        self.world = town.rearrange(world, tick=distributed.local_shard(ages))
        blank = distributed.local_shard(tuple(first(params.worlds, learner.agents)))
        met = learner.co_players.start(self.worlds) if learner.co_players else ()
        self.carry = RolloutCarry(AgentState(*blank), expert.reset(self.world), met)
        self.captured: Captured | None = None
        self.score = torch.zeros(self.worlds, learner.agents, device=town.device)
        self.scores = torch.zeros(2, device=town.device)

    def state(self) -> dict[str, Any]:
        """Rows for a checkpoint: what `load` goes on with."""
        return packed(self.world, self.carry) | {"score": self.score}

    def load(self, extra: dict[str, Any]) -> None:
        self.go_on(extra)
        device = self.learner.town.device
        self.score, self.scores = extra["score"].to(device), extra["scores"].to(device)

    def go_on(self, rows: dict[str, Any]) -> None:
        """The worlds were played on elsewhere, until `rows`."""
        self.world, self.carry = unpacked(moved(dict(rows), self.learner.town.device))

    def thinking(self, iteration: int) -> list[Tensor]:
        """int64 [.] of each tick of an iteration, on the CPU: worlds whose agents deliberate."""
        return thinking_in(iteration, self.worlds, self.params)

    def play(
        self,
        step: Step,
        buffer: RolloutBuffer,
        thinking: list[Tensor],
        share: float | None,
        finish: Callable[[RolloutBuffer, TensorDict], None] | None = None,
    ) -> None:
        """Fill the buffer; the expert acts in `share` of the worlds, or nowhere (None).

        In imitation it is asked what it would have done where agents deliberate and it does not
        act: at the end, about all ticks at once, which takes half the time of asking at each.
        On a GPU all ticks in which it acts nowhere, and `finish`, are one CUDA graph.

        Args:
            finish: told the buffer and the worlds when it is full; None: the critic is not asked.
        """
        device = self.learner.town.device
        contexts: list[tuple[Tensor, Led | None]]
        rows, asked = thinking, list[tuple[TensorDict, Any]]()
        if share is None:
            contexts = [(now, None) for now in uploaded(thinking, device)]
        else:
            driven = distributed.local_shard(driven_worlds(self.params.worlds, share))
            rows = [now[~driven[now]] for now in thinking]
            theirs, ours, *rows = uploaded([*led(driven)[:2], *rows], device)
            contexts = [(now, Led(theirs, ours, judged=finish is not None)) for now in rows]

        def tick(world: TensorDict, carry: RolloutCarry, now: Tensor, who: Led | None) -> Any:
            if who:
                asked.append((world[now], carry.expert[now]))
            return step(world, carry, now, who)

        def played(world: TensorDict, carry: RolloutCarry, contexts: Any) -> Any:
            world, carry = collect(tick, world, carry, buffer, contexts)
            if finish:
                with region("loss"):
                    finish(buffer, world)
            return world, carry

        work: Callable[..., Any] = played
        if device.type == "cuda" and share is None and profiling.current_watch is None:
            self.captured = work = self.captured or Captured(played)
        self.world, self.carry = work(self.world, self.carry, contexts)
        if asked and any(map(len, rows)):
            self._tell(buffer, rows, asked)

    def _tell(
        self, buffer: RolloutBuffer, rows: list[Tensor], asked: list[tuple[TensorDict, Any]]
    ) -> None:
        """Keep what the expert would have done in the worlds int64 [.] of each tick."""
        assert buffer.data is not None
        with region("expert"):
            worlds: Any = torch.cat([world for world, _ in asked])
            told = self.learner.told(worlds, torch.cat([expert for _, expert in asked]))
            each = [len(now) for now in rows]
            for name, all_ticks in told.items():
                kept = buffer.data[name].unflatten(1, (self.worlds, -1))
                for tick, part in enumerate(all_ticks.split(each)):
                    kept[tick].index_copy_(0, rows[tick], part)

    def count(self, buffer: RolloutBuffer) -> Tensor:
        """float32 []: the mean return of the lives that ended of late."""
        with region("data"):
            self.score, self.scores = episode_scores(buffer, self.score, self.scores)
        return self.scores[0]


def check_worlds(params: PolicyParams) -> None:
    """Raises a HamletError where not the same number of agents would deliberate at every tick."""
    worlds = distributed.local_count(params.worlds, "params.yaml: policy.worlds")
    if worlds % params.meta_period:
        whose = "params.yaml: policy.worlds" + " of a rank" * (distributed.ranks() > 1)
        raise HamletError(
            f"{whose} is {worlds}, not a multiple of policy.meta_period ({params.meta_period})",
            "change either, so that the same number of agents deliberates at every tick",
        )


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
    cast: Cast | None = None,
) -> Trained:
    """Train `mind.policy` in place.

    Args:
        first: blank minds of a number of worlds and of agents in each.
        critic: that of an earlier training, to go on with; else a new one.
        co_players: play the last agents of every world.
        teacher: who is imitated; else the scripted player that `params` names.
        cast: processes that act while IMPALA learns; else this one does, between its updates.
    """
    check_worlds(params)
    policy: Any = mind.policy
    torch.manual_seed(seed)
    critic = critic or Critic(shape, params.hidden).to(town.device)
    rng = torch.Generator().manual_seed(seed)
    losses = PolicyLosses(policy, critic, params)
    updates, precision = make_updates(policy, critic, losses, params, compiling)
    schedule = Schedule(params, losses, updates)

    expert = teacher or Scripted(town, [params.teacher], seed)
    learner = Learner(town, shape, mind, critic, expert, co_players)
    rollouts = Rollouts(learner, first, params, seed, rng)
    older = None
    if params.algorithm == "impala":
        older = Behind(learner, params, compiling.rollout, precision, schedule.iterations, cast)
    # The ticks of imitation choose rows by what is asked: not one graph, and not worth compiling.
    steps = {
        True: fused_step(town, learner, False, precision),
        False: fused_step(town, older.actor if older else learner, compiling.rollout, precision),
    }
    parts = {"policy": policy, "critic": critic, "rng": rng, **updates._asdict()}
    saved = Checkpoint(checkpoint, parts)
    start, extra = saved.load()
    imitated = extra.get("imitated") or weights_of(policy)
    if start:
        rollouts.load(extra)
        if older:
            older.load(extra)

    advantages = partial(add_advantages, learner=learner, params=params)
    # Of imitation, of its last part, and of what follows: their records differ.
    buffers = {kind: RolloutBuffer(params.rollout) for kind in ((1, 0), (1, 1), (0, 1))}
    with closing(older) if older else nullcontext():
        for iteration in log.steps(schedule.iterations, start):
            imitating, judged = schedule.imitates(iteration), schedule.judges(iteration)
            buffer, thinking = buffers[imitating, judged], rollouts.thinking(iteration)
            if co_players:
                co_players.meet(rng)
            told: Record = {}
            if older and not imitating:
                told = older.play(iteration, rollouts, steps[False], buffer, thinking)
            else:
                share = schedule.driven_share(iteration) if imitating else None
                judge = advantages if judged else None
                rollouts.play(steps[imitating], buffer, thinking, share, judge)
            metrics = schedule.learn(iteration, buffer, thinking, learner.agents, rng)
            if older and not imitating:
                older.learned()
            log.record(iteration, metrics | told | {"mean_return": rollouts.count(buffer)})
            if iteration + 1 == params.imitation_iterations:
                imitated = weights_of(policy)
            kept = {"scores": rollouts.scores, "imitated": imitated}
            saved.save(iteration + 1, kept | (older.state() if older else {}), rollouts.state())
    return Trained(critic, imitated)


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
        weight = (count / 256).clamp_max(1.0)
        first = torch.where(scores[1] == 0, 1.0, weight)
        rate = torch.where(count > 0, first, 0.0)
        scores = torch.stack([scores[0] + rate * (mean - scores[0]), scores[1] + count])
    return flat.view_as(score), scores
