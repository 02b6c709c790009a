"""A PettingZoo parallel environment as a world of fixed slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.worlds.contract import (
    AGENT,
    Field,
    Moved,
    Seen,
    WorldShape,
    checked,
    checked_mask,
    checked_reward,
)
from hamlet.worlds.gymnasium_world import raised, taken
from hamlet.worlds.spaces import Leaf, actions_of, leaves, mask_in


class PettingZooWorld:
    """One environment. Slots are its `possible_agents`; who is not among its `agents` has an empty
    slot. Vectors of different lengths are padded with zeros, actions are padded and masked, and
    each agent also observes its own index, as the field `agent`.

    Args:
        env: a ParallelEnv. name: what to call it, if its metadata has no name.

    Raises:
        HamletError: its spaces cannot be taken.
    """

    def __init__(self, env: Any, name: str) -> None:
        name = getattr(env, "metadata", {}).get("name") or name
        self.env, self.name = env, name
        agents = list(getattr(env, "possible_agents", ()))
        if not agents:
            raise HamletError(f"{name}: it has no `possible_agents`", "list them in the world")
        self._agents = agents
        self._leaves: list[dict[str, Leaf]] = []
        ignored: list[str] = []
        for agent in agents:
            found, left_out = leaves(env.observation_space(agent), name)
            self._leaves.append({leaf.field.name: leaf for leaf in found})
            ignored += left_out
        counts = [actions_of(env.action_space(agent), name, str(agent)) for agent in agents]
        self._starts = [start for _, start in counts]
        sizes = tuple(count for count, _ in counts)
        own = Field(AGENT, "codes", (), "int64", 0, len(agents) - 1, len(agents))
        fields = (*self._common(), own)
        self.shape = WorldShape(
            name, fields, tuple(map(str, agents)), tuple(map(str, range(max(sizes)))), sizes,
            len(set(sizes)) > 1, tuple(dict.fromkeys(ignored)),
        )  # fmt: skip
        seen, info = self._reset(0)
        if any(self._mask_of(agent, seen, info) is not None for agent in agents):
            self.shape = WorldShape.from_dict(self.shape.to_dict() | {"masked": True})

    def _common(self) -> list[Field]:
        """The fields of all agents, padded to the longest."""
        merged: dict[str, Field] = {}
        for own in self._leaves:
            for name, (field, _, _) in own.items():
                if name == AGENT:
                    raise HamletError(
                        f"{self.name}: an observation is called `{AGENT}`, which is the agent's "
                        "index here",
                        "give it another name in the world file",
                    )
                merged[name] = _padded(merged[name], field, self.name) if name in merged else field
        return list(merged.values())

    def reset(self, seed: int) -> Seen:
        """See `World`."""
        seen, info = self._reset(seed)
        return self._seen(seen, info, set(self.env.agents))

    def _reset(self, seed: int) -> tuple[Any, Any]:
        try:
            seen, info = self.env.reset(seed=seed)
        except Exception as error:  # whatever somebody's world raises
            raise raised(self.name, "reset", error) from error
        return seen, info

    def step(self, actions: np.ndarray) -> Moved:
        """See `World`. Who vanishes without a word has terminated."""
        acting = list(self.env.agents)
        chosen = {
            agent: int(actions[i]) + self._starts[i]
            for i, agent in enumerate(self._agents)
            if agent in acting
        }
        try:
            seen, reward, terminated, truncated, info = self.env.step(chosen)
        except Exception as error:  # whatever somebody's world raises
            raise raised(self.name, "step", error) from error
        n, left = len(self._agents), set(self.env.agents)
        rewards, ends, cuts = np.zeros(n, np.float32), np.zeros(n, bool), np.zeros(n, bool)
        for i, agent in enumerate(self._agents):
            if agent not in chosen:
                continue
            rewards[i] = checked_reward(self.shape, str(agent), reward.get(agent, 0.0))
            cut = bool(truncated.get(agent, False))
            ends[i] = bool(terminated.get(agent, False)) or (agent not in left and not cut)
            cuts[i] = cut and not ends[i]
        # An agent that has ended is gone, though some worlds keep it among their agents.
        left -= {agent for i, agent in enumerate(self._agents) if ends[i] or cuts[i]}
        return Moved(self._seen(seen, info, left), rewards, ends, cuts, not left)

    def _seen(self, seen: Any, info: Any, alive: set[Any]) -> Seen:
        n = len(self._agents)
        fields = {f.name: np.zeros((n, *f.shape), f.dtype) for f in self.shape.fields}
        fields[AGENT][:] = np.arange(n)
        mask = self.shape.all_legal()
        for i, agent in enumerate(self._agents):
            if agent not in seen:
                if agent in alive:
                    raise HamletError(
                        f"{self.name}: {agent} is alive and has no observation",
                        "a world must give one to each of its agents",
                    )
                continue
            for name, (field, path, start) in self._leaves[i].items():
                value = checked(self.shape, field, taken(self.name, seen[agent], path, start))
                place: tuple[int | slice, ...] = (i, *(slice(0, k) for k in value.shape))
                fields[name][place] = value
            if agent in alive:
                mask[i] = checked_mask(self.shape, i, self._mask_of(agent, seen, info))
        return Seen(fields, mask, np.array([agent in alive for agent in self._agents]))

    @staticmethod
    def _mask_of(agent: Any, seen: Any, info: Any) -> Any:
        return mask_in(seen.get(agent), info.get(agent) if isinstance(info, dict) else None)

    def render(self) -> Any:
        """See `World`."""
        return self.env.render() if getattr(self.env, "render_mode", None) else None

    def close(self) -> None:
        """See `World`."""
        self.env.close()


def _padded(a: Field, b: Field, world: str) -> Field:
    """One field that holds either agent's."""
    if (a.kind, a.dtype, len(a.shape)) != (b.kind, b.dtype, len(b.shape)):
        raise HamletError(
            f"{world}: `{a.name}` is {a.kind} {list(a.shape)} for one agent and {b.kind} "
            f"{list(b.shape)} for another",
            "give the agents observations of one kind",
        )
    shape = tuple(max(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    low = None if a.low is None or b.low is None else min(a.low, b.low, 0.0)
    high = None if a.high is None or b.high is None else max(a.high, b.high, 0.0)
    count = None if a.count is None or b.count is None else max(a.count, b.count)
    return Field(a.name, a.kind, shape, a.dtype, low, high, count)
