"""IMPALA (Espeholt et al. 2018) in the town: older weights act, V-trace corrects for it.

Every rollout is acted by module D as it was `policy.lag` updates of the policy before. In one
process its rollout is played when its turn comes, by a copy that holds those weights. With actors
(`Cast`), processes play the worlds, each its part, and are up to `lag` rollouts ahead of the
learner, who takes them in order: while it learns from one, the next are played. Which weights act
where does not depend on who is faster, so both ways make the same rollouts and the same updates,
but for roundings that depend on the size of a batch.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.learning.actors import Actors, Cast
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.learner import Learner, weights_of
from hamlet.learning.losses import weighted_mean
from hamlet.learning.policy_losses import features_of
from hamlet.learning.precision import Precision, autocast
from hamlet.learning.returns import vtrace
from hamlet.learning.rollout import Record, Step
from hamlet.modules.agent import Mind
from hamlet.modules.categorical import log_prob_of
from hamlet.moving import moved
from hamlet.params import PolicyParams
from hamlet.profiling import region

if TYPE_CHECKING:
    from hamlet.learning.train_policy import Rollouts

Weights = dict[str, Tensor]


class Behind:
    """Who acts while `learner` learns: module D as it was `lag` updates before.

    Attributes:
        actor: the learner with a module D of its own, whose weights are the older ones.

    Args:
        compile, precision: of the ticks.
        iterations: of the whole training; no rollout beyond the last is played.
        cast: processes that act; None: `actor` does, in this one.
    """

    def __init__(
        self,
        learner: Learner,
        params: PolicyParams,
        compile: bool,
        precision: Precision,
        iterations: int,
        cast: Cast | None,
    ) -> None:
        mind = learner.mind
        own = Mind(
            mind.perceive, mind.imagine_tick, mind.read_others, copy.deepcopy(mind.policy),
            mind.candidates, mind.horizon, mind.surprise_limit,
        )  # fmt: skip
        own.fused_sense = mind.fused_sense
        self.actor = Learner(
            learner.town, learner.shape, own, learner.critic, learner.expert, learner.co_players
        )
        self.learner, self.params, self.iterations = learner, params, iterations
        self.compile, self.precision, self.cast = compile, precision, cast
        self.policy: Any = mind.policy
        self.acting: Any = own.policy
        self.queue: deque[Weights] = deque()
        """The weights that act in the next rollout, in the one after it, and so on: lag + 1."""
        self.next = 0
        self.actors: Actors | None = None

    def play(
        self,
        iteration: int,
        rollouts: Rollouts,
        step: Step,
        buffer: RolloutBuffer,
        thinking: list[Tensor],
    ) -> Record:
        """Fill the buffer with the rollout of this iteration, and V-trace's targets; returns `lag`,
        by how many updates who acted is older, and what `add_traces` tells."""
        learner = self.learner
        if not self.queue:
            self.queue.extend([weights_of(self.policy)] * (self.params.lag + 1))
        if self.cast:
            if self.actors is None:
                self.actors = Actors(
                    self.cast, self.params, self.compile, self.precision, iteration,
                    rollouts.state(),
                )  # fmt: skip
                for ahead, weights in enumerate(self.queue):
                    if iteration + ahead < self.iterations:
                        self.actors.send(weights)
            with region("rollout"):
                data, rows = self.actors.receive()
            buffer.data, buffer.length = moved(data, learner.town.device), buffer.ticks
            rollouts.go_on(rows)
        else:
            self.acting.load_state_dict(self.queue[0])
            rollouts.play(step, buffer, thinking, None)
        self.queue.popleft()
        self.next = iteration + 1
        with region("loss"):
            told = add_traces(buffer, learner, rollouts.world, self.params, self.precision)
        first = self.params.imitation_iterations + self.params.critic_iterations
        lag = min(max(iteration - first, 0), self.params.lag)
        return told | {"lag": torch.tensor(float(lag))}

    def learned(self) -> None:
        """The policy's weights are new: they act in the rollout that is `lag` after the next."""
        self.queue.append(weights_of(self.policy))
        if self.actors and self.next + self.params.lag < self.iterations:
            self.actors.send(self.queue[-1])

    def state(self) -> dict[str, Any]:
        """For a checkpoint; `load` goes on with it."""
        return {"acting": list(self.queue)} if self.queue else {}

    def load(self, extra: dict[str, Any]) -> None:
        self.queue = deque(moved(list(extra.get("acting", ())), self.learner.town.device))

    def close(self) -> None:
        """End the actors, if there are any."""
        if self.actors:
            self.actors.close()


@torch.no_grad()
def goal_log_probs(policy: Any, data: TensorDict, precision: Precision) -> Tensor:
    """float32 [T, S]: log-probability of each tick's goal by the policy as it is now.

    Where no goal was chosen, that of who acted: nothing was drawn. Whether one is chosen, and which
    goals are imagined, depends a little on the policy too; both are taken as they were, as PPO
    takes them. The controller is the same in both, and so are the actions' odds.
    """
    flat = data.flatten(0, 1)
    f = features_of(flat)
    with autocast(precision, f.mean.device):
        prior = policy.prior_logits(f)
        imagined = (flat[x] for x in ("candidates", "imagined_return", "imagined_confidence"))
        considered = policy.goal_logits(prior, *imagined)
        logits = torch.where(flat["deliberate"].unsqueeze(-1), considered, prior)
    now = log_prob_of(logits.float(), flat["goal"])
    return torch.where(flat["decide"], now, flat["goal_log_prob"]).view(data.batch_size)


@torch.no_grad()
def add_traces(
    buffer: RolloutBuffer,
    learner: Learner,
    world: TensorDict,
    params: PolicyParams,
    precision: Precision,
) -> Record:
    """Add V-trace's `advantages` and `returns`, and the critic's `value`, to the experience.

    `world` follows its last row. Rewards are scaled as in `add_advantages`.

    Returns:
        `importance`: the mean of the clipped ratios of the goals that were chosen.
    """
    data = buffer.data
    assert data is not None
    values = learner.critic(data["privileged"])
    following = torch.cat([values[1:], learner.critic(learner.privileged(world)).unsqueeze(0)])
    now, then = goal_log_probs(learner.mind.policy, data, precision), data["goal_log_prob"]
    traced = vtrace(
        now, then, data["reward"] * (3 * (1 - params.gamma)), values, following,
        data["done"], data["done"], params.gamma, params.lam,
    )  # fmt: skip
    data["value"], data["advantages"], data["returns"] = values, traced.advantages, traced.targets
    chosen = (data["decide"] & data["active"]).float()
    return {"importance": weighted_mean((now - then).exp().clamp(max=1.0), chosen)}
