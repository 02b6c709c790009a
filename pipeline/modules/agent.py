"""`think()`: sense, perceive (A), read the others (C), imagine (B), decide (D), act.

A, B and C are frozen graphs loaded from disk; nothing here knows their classes. The same functions
drive training rollouts and, exported whole, the ONNX file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hamlet.modules.categorical import log_prob_of, masked_logits
from hamlet.modules.contracts import (
    BeliefDistribution,
    Features,
    ImaginedFuture,
    RawObservation,
    SocialPrediction,
    rivals_of,
)
from hamlet.profiling import region

IMAGINED_DISCOUNT = 0.97
SWITCH_MARGIN = 0.5
"""Nats by which another goal must seem likelier than the pursued one to take its place at once."""
REVIEWED = 4  # imitation asks that at every fourth tick: it costs as much as all else that D does
MULTIPLIER, MODULUS = 48271, 2**31 - 1
SHOCK, SURPRISE_KEPT = 0.005, 0.9
"""What the worst foreseen meter of one tick can add to an agent's surprise: a place that was taken
says little of the world, needs that always grow too fast say much; and how long it lasts."""


class AgentState(NamedTuple):
    """Everything the agent carries from tick to tick; all zeros at the start of a life."""

    belief: Tensor
    """float32 [., R] perception's recurrent state."""
    social: Tensor
    """float32 [., M, S] the social model's."""
    goal: Tensor
    """int64 [.] current goal."""
    goal_age: Tensor
    """int64 [.] ticks the goal has been pursued; 0 while there is none."""
    clock: Tensor
    """int64 [.] ticks lived; D1 deliberates when it is a multiple of `meta_period`."""
    moved: Tensor
    """int64 [.] the last action + 1; 0 at the start of a life."""
    foreseen: Tensor
    """float32 [., N] what the world model said the meters would be now; zeros where it was not
    asked, or another action was taken."""
    surprise: Tensor
    """float32 [.] how wrong it was of late: running mean of the worst meter's error."""
    rng: Tensor
    """int64 [.] in [0, 2^31 - 2): the agent's own random numbers; any start is a fair one."""


class Thoughts(NamedTuple):
    """What can be read of one decision, besides the action."""

    belief_mean: Tensor
    belief_log_std: Tensor
    goal_logits: Tensor
    goal_dist_of_others: Tensor
    next_action_of_others: Tensor
    social_confidence: Tensor
    social_reason: Tensor
    candidates: Tensor
    imagined_actions: Tensor
    imagined_rewards: Tensor
    imagined_meters: Tensor
    imagined_return: Tensor
    imagination_confidence: Tensor
    uncertainty_reason: Tensor
    action_logits: Tensor


def should_switch_goal(prior: Tensor, goal: Tensor) -> Tensor:
    """bool [.]: some goal of `prior` float32 [., G] seems far likelier than `goal` int64 [.] now.

    A goal that is dropped when another one looks better loses nothing by having been long (Sutton,
    Precup and Singh 1999, section 6, interrupting options).
    """
    kept = prior.gather(-1, goal.unsqueeze(-1)).squeeze(-1)
    return prior.amax(-1) - kept > SWITCH_MARGIN


def of_slots(f: Features, state: AgentState, slots: Tensor) -> tuple[Features, AgentState]:
    """Of some slots int64 [S'] the features, and a state with their goal, goal_age and clock."""
    goal, age, clock = (x[slots] for x in (state.goal, state.goal_age, state.clock))
    return Features(*(x[slots] for x in f)), state._replace(goal=goal, goal_age=age, clock=clock)


def asked_of(due: Tensor) -> Tensor:
    """int64 [.] the slots that are `due` bool [.]; on a GPU, which would be waited for, all."""
    if due.device.type == "cpu":
        return due.nonzero().flatten()
    return torch.arange(len(due), device=due.device)


def foreseen(thoughts: Thoughts, goal: Tensor, action: Tensor) -> Tensor:
    """float32 [., N] the meters of the next tick in the imagined future of the goal int64 [.] that
    was chosen; zeros where none was imagined, or one with another first action than int64 [.]."""
    comes = (thoughts.candidates == goal[:, None]) & (
        thoughts.imagined_actions[..., 0] == action[:, None]
    )
    # At most one is not zero: the order of the sum does not matter.
    return torch.where(comes.unsqueeze(-1), thoughts.imagined_meters[:, :, 0], 0.0).sum(1)


def surprised(state: AgentState, known_state: Tensor) -> Tensor:
    """float32 [.] the surprise of `AgentState` after sensing known_state float32 [., K]."""
    meters = state.foreseen.shape[1]
    error = (known_state[:, :meters] - state.foreseen).abs().amax(-1).clamp_max(SHOCK)
    asked = state.foreseen.amax(-1) > 0
    mean = SURPRISE_KEPT * state.surprise + (1 - SURPRISE_KEPT) * error
    return torch.where(asked, mean, state.surprise)


class Deciding(Protocol):
    """Module D, as `modules.policy.Policy` in training and as `FrozenPolicy` afterwards."""

    num_meters: int
    places: int
    meta_period: int

    def prior_logits(self, f: Features) -> Tensor: ...
    def goal_ended(self, known_state: Tensor, goal: Tensor, age: Tensor) -> Tensor: ...
    def goal_logits(
        self, prior: Tensor, candidates: Tensor, returns: Tensor, confidence: Tensor
    ) -> Tensor: ...
    def action_logits(self, f: Features, goal: Tensor) -> Tensor: ...


class Mind(nn.Module):
    """The four modules together.

    Args:
        perceive, imagine_tick, read_others: the frozen graphs of A, B and C.
        policy: module D, live or frozen.
        candidates: C, how many goals are imagined when deliberating.
        horizon: H, ticks imagined for each.
        surprise_limit: surprise from which on the world is not the one that was learned: every
            imagined future is of a `novel_state`.
    """

    def __init__(
        self,
        perceive: Callable[..., tuple[Tensor, ...]],
        imagine_tick: Callable[..., tuple[Tensor, ...]],
        read_others: Callable[..., tuple[Tensor, ...]],
        policy: Deciding,
        candidates: int,
        horizon: int,
        surprise_limit: float = math.inf,
    ) -> None:
        super().__init__()
        self.perceive, self.imagine_tick, self.read_others = perceive, imagine_tick, read_others
        self.policy, self.candidates, self.horizon = policy, candidates, horizon
        self.surprise_limit = surprise_limit
        self.fused_sense: Callable[[RawObservation, AgentState], tuple[Tensor, ...]] | None = None

    def sense(
        self, obs: RawObservation, state: AgentState
    ) -> tuple[BeliefDistribution, SocialPrediction, Tensor, Features]:
        """Run A and C for one tick; also returns C's new state and the features for D."""
        with region("perception"):
            belief = BeliefDistribution(
                *self.perceive(
                    obs.view, obs.occupancy, obs.self_state, obs.cues, obs.visible,
                    obs.others_offset, state.belief,
                )
            )  # fmt: skip
        with region("social"):
            *predicted, social_state = self.read_others(
                belief.mean, belief.log_std, belief.known_state, belief.social_cues,
                obs.visible, obs.others_offset, obs.others_action, state.social,
            )  # fmt: skip
        social = SocialPrediction(*predicted)
        features = Features(
            belief.mean,
            belief.log_std[..., : self.policy.places],
            belief.known_state,
            rivals_of(social),
            social.ahead,
            torch.where(state.goal_age > 0, state.goal, social.goal_dist.shape[-1]),
            state.moved,
        )
        return belief, social, social_state, features

    def sense_features(
        self, obs: RawObservation, state: AgentState
    ) -> tuple[Features, Tensor, Tensor, Tensor]:
        """`sense` with only what learning needs: the features for D, the belief's log_std, and the
        new states of A and C; in one call of `fused_sense` (`export.sense`) where there is one."""
        if self.fused_sense is None:
            belief, _, social, f = self.sense(obs, state)
            return f, belief.log_std, belief.recurrent_state, social
        with region("sense"):
            mean, log_std, rivals, ahead, belief_state, social = self.fused_sense(obs, state)
        places, goals = self.policy.places, rivals.shape[-1]
        pursued = torch.where(state.goal_age > 0, state.goal, goals)
        own = obs.self_state
        f = Features(mean, log_std[..., :places], own, rivals, ahead, pursued, state.moved)
        return f, log_std, belief_state, social

    def imagine(
        self, belief_log_std: Tensor, f: Features, mask: Tensor, candidates: Tensor
    ) -> tuple[ImaginedFuture, Tensor]:
        """Roll each candidate goal out in the world model, the controller acting.

        Args:
            belief_log_std: float32 [., D]; f: features of now; mask: bool [., A]; candidates:
                int64 [., C] goals.

        Returns:
            the futures, and each candidate's imagined discounted return float32 [., C].
        """
        c = candidates.shape[1]

        def repeat(x: Tensor) -> Tensor:
            return x.unsqueeze(1).expand(-1, c, *x.shape[1:]).flatten(0, 1)

        goal, legal = candidates.flatten(), repeat(mask)
        given = [f.mean, belief_log_std, f.known_state, f.rivals]
        mean, log_std, known, rivals = repeat(torch.cat(given, -1)).split(
            [x.shape[-1] for x in given], -1
        )
        ahead, pursued, moved = repeat(f.ahead), repeat(f.pursued), repeat(f.moved)
        steps: list[tuple[Tensor, ...]] = []
        for tick in range(self.horizon):
            spread = log_std[:, : self.policy.places]
            now = Features(mean, spread, known, rivals, ahead, pursued, moved)
            logits = masked_logits(self.policy.action_logits(now, goal), legal)
            action = logits.argmax(-1)
            moved = action + 1
            mean, log_std, known, reward, survives, value, legal_logit, _, sure, new = (
                self.imagine_tick(mean, log_std, known, action)
            )
            if tick == 0:
                total, alive, trust, novel = reward, survives, sure, new
            else:
                total = total + IMAGINED_DISCOUNT**tick * alive * reward
                alive, trust, novel = alive * survives, trust * sure, novel | new
            # One action is always legal; waiting stays so whatever the model thinks.
            legal = (legal_logit > 0) | (legal_logit == legal_logit.amax(-1, keepdim=True))
            steps.append((action, known, reward, alive, value))
        total = total + IMAGINED_DISCOUNT**self.horizon * alive * value
        # Roots and logarithms in double precision: ONNX Runtime's single ones depend, in the last
        # bit, on where in the batch a row stands.
        confidence = (trust.clamp_min(1e-9).double() ** (1 / self.horizon)).float()
        reason = torch.where(novel, 1, torch.where(confidence < 0.37, 2, 0)).long()
        actions, knowns, rewards, continues, values = (
            torch.stack(x, 1).unflatten(0, (-1, c)) for x in zip(*steps, strict=True)
        )
        future = ImaginedFuture(
            actions,
            knowns,
            rewards,
            continues,
            values,
            confidence.unflatten(0, (-1, c)),
            reason.unflatten(0, (-1, c)),
        )
        return future, total.unflatten(0, (-1, c))

    def pursue(
        self, f: Features, state: AgentState, prior: Tensor, logits: Tensor
    ) -> tuple[Tensor, AgentState]:
        """Keep the goal, or take the likeliest by `logits` float32 [., G].

        Returns:
            whether there was a choice bool [.], and the state with the goal, a tick older.
        """
        deliberate = state.clock % self.policy.meta_period == 0
        ended = self.policy.goal_ended(f.known_state, state.goal, state.goal_age)
        decide = deliberate | ended | should_switch_goal(prior, state.goal)
        goal = torch.where(decide, logits.argmax(-1), state.goal)
        age = torch.where(decide, 0, state.goal_age) + 1
        return decide, state._replace(goal=goal, goal_age=age, clock=state.clock + 1)

    def sample_step(
        self,
        obs: RawObservation,
        state: AgentState,
        slice_: Tensor | None,
        goal_noise: Tensor,
        action_noise: Tensor,
    ) -> tuple[Tensor, AgentState, dict[str, Tensor]]:
        """One sampled tick for training, with everything an update needs to see it again.

        Only the slots in `slice_` deliberate at this tick: slots are staggered over the clock, so
        imagination costs a fixed part of the batch. The choice is the same as in `forward`, drawn
        by the Gumbel-max trick instead of argmax.

        Args:
            slice_: int64 [S / meta_period] the slots whose clock says so; None where nobody is to
                imagine: deliberating slots then decide by their prior.
            goal_noise, action_noise: float32 [., G], [., A] Gumbel noise.

        Returns:
            action int64 [.], the new state, and the record, to which `Learner` adds the outcome.
        """
        f, log_std, belief, social = self.sense_features(obs, state)
        logits = prior = self.policy.prior_logits(f)
        imagined = {}
        if slice_ is not None:
            part = Features(*(x[slice_] for x in f))
            candidates = prior[slice_].topk(self.candidates, -1).indices
            with region("imagination"):
                future, returns = self.imagine(
                    log_std[slice_], part, obs.action_mask[slice_], candidates
                )
            considered = self.policy.goal_logits(
                prior[slice_], candidates, returns, future.confidence
            )
            logits = prior.index_copy(0, slice_, considered)
            for name, value in {
                "candidates": candidates,
                "imagined_return": returns,
                "imagined_confidence": future.confidence,
            }.items():
                whole = value.new_zeros((prior.shape[0], *value.shape[1:]))
                imagined[name] = whole.index_copy(0, slice_, value)
        decide, after = self.pursue(f, state, prior, logits + goal_noise)
        action_logits = masked_logits(self.policy.action_logits(f, after.goal), obs.action_mask)
        action = (action_logits + action_noise).argmax(-1)
        record = {
            **{f"f_{name}": value for name, value in f._asdict().items()},
            **imagined,
            "mask": obs.action_mask,
            "goal": after.goal,
            "action": action,
            "decide": decide,
            "deliberate": state.clock % self.policy.meta_period == 0,
            "goal_log_prob": log_prob_of(logits, after.goal),
            "action_log_prob": log_prob_of(action_logits, action),
        }
        after = after._replace(belief=belief, social=social, moved=action + 1)
        return action, after, record

    def follow_step(
        self,
        obs: RawObservation,
        state: AgentState,
        free: Tensor,
        led_goal: Tensor,
        led_action: Tensor,
        goal_noise: Tensor,
        action_noise: Tensor,
    ) -> tuple[Tensor, AgentState, dict[str, Tensor]]:
        """One tick for imitation: all sense, only the slots in `free` decide, without imagination.

        Args:
            free: int64 [S'] the slots that decide; the others are led.
            led_goal, led_action: int64 [S] what the led ones pursue and do.
            goal_noise, action_noise: float32 [S', G], [S', A] Gumbel noise.

        Returns:
            action int64 [S], the new state, and the features of all slots.
        """
        f, _, belief, social = self.sense_features(obs, state)
        mine, own = of_slots(f, state, free)
        ended = self.policy.goal_ended(mine.known_state, own.goal, own.goal_age)
        due = ended | (own.clock % REVIEWED == 0) | (own.clock % self.policy.meta_period == 0)
        asked = asked_of(due)
        theirs, pursuits = of_slots(mine, own, asked)
        prior = self.policy.prior_logits(theirs)
        _, now = self.pursue(theirs, pursuits, prior, prior + goal_noise[asked])
        goal = own.goal.index_copy(0, asked, torch.where(due[asked], now.goal, pursuits.goal))
        age = torch.where(due[asked], now.goal_age, pursuits.goal_age + 1)
        logits = masked_logits(self.policy.action_logits(mine, goal), obs.action_mask[free])
        action = led_action.index_copy(0, free, (logits + action_noise).argmax(-1))
        agent = state._replace(
            belief=belief,
            social=social,
            goal=led_goal.index_copy(0, free, goal),
            goal_age=(state.goal_age + 1).index_copy(0, free[asked], age),
            clock=state.clock + 1,
            moved=action + 1,
        )
        return action, agent, {f"f_{name}": value for name, value in f._asdict().items()}

    def draw(self, rng: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Gumbel noise float32 [., count] and the next state of the generator int64 [.].

        Lehmer's generator in the minimal standard form (Park and Miller 1988): integer products and
        remainders are exact in every runtime.
        """
        multipliers = [pow(MULTIPLIER, k, MODULUS) for k in range(1, count + 1)]
        numbers = ((rng + 1).unsqueeze(-1) * rng.new_tensor(multipliers)) % MODULUS
        uniform = (numbers.double() / MODULUS).clamp(1e-6, 1 - 1e-6)
        return (-(-uniform.log()).log()).float(), numbers[..., -1] % (MODULUS - 1)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """One tick: observation fields then state fields, both flat.

        Goals are the likeliest; actions are drawn from the controller's odds with the state's own
        random numbers, so equal inputs give equal outputs. (A controller that always took its
        likeliest action could pace up and down for ever where it knows no better.)

        Returns:
            action int64 [.], the fields of the new `AgentState`, the fields of `Thoughts`;
            what is imagined is zero for those who do not deliberate.
        """
        return self.think(tensors, self.considered)

    def think(
        self, tensors: Sequence[Tensor], consider: Callable[..., Sequence[Tensor]]
    ) -> tuple[Tensor, ...]:
        """As `forward`, with somebody else calling `self.consider` for those who deliberate.

        Args:
            tensors: as `forward` takes them.
            consider: (deliberate bool [.], arguments of `self.consider`) -> what it returns, zero
                for those who do not deliberate.
        """
        obs = RawObservation(*tensors[: len(RawObservation._fields)])
        state = AgentState(*tensors[len(RawObservation._fields) :])
        belief, social, social_state, f = self.sense(obs, state)

        prior = self.policy.prior_logits(f)
        candidates = prior.topk(self.candidates, -1).indices
        deliberate = state.clock % self.policy.meta_period == 0
        considered, *imagined = consider(
            deliberate, belief.log_std, *f, obs.action_mask, candidates, prior
        )
        surprise = surprised(state, f.known_state)
        strange = deliberate & (surprise > self.surprise_limit)
        imagined[-1] = torch.where(strange[:, None], 1, imagined[-1])

        logits = torch.where(deliberate[:, None], considered, prior)
        _, after = self.pursue(f, state, prior, logits)
        action_logits = masked_logits(self.policy.action_logits(f, after.goal), obs.action_mask)
        noise, rng = self.draw(state.rng, action_logits.shape[1])
        thoughts = Thoughts._make(
            [
                belief.mean,
                belief.log_std,
                logits,
                social.goal_dist,
                social.next_action_dist,
                social.confidence,
                social.reason,
                candidates,
                *imagined,
                action_logits,
            ]
        )
        action = (action_logits + noise).argmax(-1)
        after = after._replace(
            belief=belief.recurrent_state,
            social=social_state,
            moved=action + 1,
            foreseen=foreseen(thoughts, after.goal, action),
            surprise=surprise,
            rng=rng,
        )
        return action, *after, *thoughts

    def considered(self, deliberate: Tensor, *asked: Tensor) -> tuple[Tensor, ...]:
        """What `consider` says to `asked`, zero for those who do not `deliberate` bool [.]."""
        return tuple(
            torch.where(deliberate.view(-1, *[1] * (x.ndim - 1)), x, 0).to(x.dtype)
            for x in self.consider(*asked)
        )

    def consider(
        self,
        log_std: Tensor,
        mean: Tensor,
        place_log_std: Tensor,
        known_state: Tensor,
        rivals: Tensor,
        ahead: Tensor,
        pursued: Tensor,
        moved: Tensor,
        mask: Tensor,
        candidates: Tensor,
        prior: Tensor,
    ) -> tuple[Tensor, ...]:
        """Imagine the candidates and weigh them: D1's goal logits float32 [., G], then the imagined
        actions, rewards, meters, returns, confidence and reasons of `Thoughts`."""
        f = Features(mean, place_log_std, known_state, rivals, ahead, pursued, moved)
        future, returns = self.imagine(log_std, f, mask, candidates)
        return (
            self.policy.goal_logits(prior, candidates, returns, future.confidence),
            future.actions,
            future.rewards,
            future.known_state[..., : self.policy.num_meters],
            returns,
            future.confidence,
            future.uncertainty_reason,
        )
