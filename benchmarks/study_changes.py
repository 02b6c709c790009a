"""What a trained agent's parts change of what it decides, and what its habits are worth to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.study_players import Everyone
from hamlet.learning.rollout import Record
from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import RawObservation, observation_from

WHOLE_USES = torch.tensor([[1.0]])
CHANGES = {
    "memory": "A's memory: beliefs from what is in view only",
    "social": "C: nobody's goals are guessed",
    "world_model": "B: no menu, no futures",
    "imagination": "imagined ends and futures: only the end of a whole use is imagined",
    "futures": "imagined futures alone",
}
HABITS = {
    "scouts": "exploring where nobody else has looked",
    "stays": "leaving early: other ends of a use than the whole are imagined",
    "countdown": "counting down to the end of a life",
}
"""And as they are where an agent has not the habit:"""
WITHOUT: dict[str, Tensor] = {
    "scouts": torch.tensor([[False]]),
    "stays": WHOLE_USES,
    "countdown": torch.tensor([[0.0]]),
}


@contextmanager
def set_to(holder: Any, **values: Tensor) -> Iterator[None]:
    """Some tensors of a module are others meanwhile."""
    kept = {name: getattr(holder, name) for name in values}
    try:
        for name, value in values.items():
            setattr(holder, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(holder, name, value)


@torch.no_grad()
def goals_without(mind: Mind, obs: RawObservation, state: AgentState, part: str) -> Tensor:
    """int64 [.] the goals that those who all deliberate would choose without one of CHANGES; the
    whole agent's for another name. It was trained with that part."""
    policy: Any = mind.policy
    if part == "memory":
        state = state._replace(belief=torch.zeros_like(state.belief))
    f, log_std, *_ = mind.sense_features(obs, state)
    if part == "social":
        f = f._replace(rivals=torch.zeros_like(f.rivals), ahead=torch.zeros_like(f.ahead))
    menu = policy.prospects.menu
    ends = {"imagination": WHOLE_USES}.get(part, policy.stays)
    with (
        set_to(policy, stays=ends),
        set_to(policy.prospects, menu=torch.zeros_like(menu) if part == "world_model" else menu),
    ):
        prior = policy.prior_logits(f)
    if part in ("world_model", "imagination", "futures"):
        return prior.argmax(-1)
    candidates = prior.topk(mind.candidates, -1).indices
    future, returns = mind.imagine(log_std, f, obs.action_mask, candidates)
    return policy.goal_logits(prior, candidates, returns, future.confidence).argmax(-1)


class Counting(Everyone):
    """Counts, as it lives, in how many deliberations each of CHANGES changes the goal."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.deliberations, self.changed = 0, dict.fromkeys(CHANGES, 0)

    def act(
        self, world: TensorDict, seen: TensorDict, memory: AgentState
    ) -> tuple[Tensor, AgentState, Record]:
        due = memory.clock % self.mind.policy.meta_period == 0
        rows = (due & world["alive"].flatten()).nonzero().flatten()
        if len(rows):
            obs = RawObservation(*(x[rows] for x in observation_from(seen, 2)))
            state = AgentState(*(x[rows] for x in memory))
            whole = goals_without(self.mind, obs, state, "nothing")
            self.deliberations += len(rows)
            for part in CHANGES:
                other = goals_without(self.mind, obs, state, part)
                self.changed[part] += int((other != whole).sum())
        return super().act(world, seen, memory)


def changes(everyone: Everyone, played: Callable[[Everyone], Any]) -> dict[str, float]:
    """The share of its deliberations that each of CHANGES changes, in lives that are `played`."""
    counting = Counting(
        everyone.town, everyone.shape, everyone.mind, everyone.draws, everyone.blank
    )
    played(counting)
    return {part: count / counting.deliberations for part, count in counting.changed.items()}


def without_habits(mind: Mind, returns: Callable[[], float]) -> dict[str, float]:
    """The mean return of a trained agent without each of its habits."""
    found = {}
    for name, value in WITHOUT.items():
        with set_to(mind.policy, **{name: value}):
            found[name] = returns()
    return found
