"""A Gymnasium environment as a world of one agent."""

from __future__ import annotations

from typing import Any

import numpy as np

from hamlet.artifacts import HamletError, in_one_line
from hamlet.worlds.contract import (
    Moved,
    Seen,
    WorldShape,
    checked,
    checked_mask,
    checked_reward,
)
from hamlet.worlds.spaces import Leaf, actions_of, at, leaves, mask_in


class GymnasiumWorld:
    """One environment; we reset it ourselves, so its last observation is never lost.

    Args:
        env: as `gymnasium.make` makes it.
        name: what to call it, if it has no id.

    Raises:
        HamletError: its spaces cannot be taken.
    """

    def __init__(self, env: Any, name: str) -> None:
        spec = getattr(env, "spec", None)
        name = spec.id if spec is not None else name
        self.env, self.name = env, name
        found, ignored = leaves(env.observation_space, name)
        self._leaves: list[Leaf] = found
        count, self._start = actions_of(env.action_space, name)
        self.shape = WorldShape(
            name, tuple(leaf.field for leaf in found), ("agent",),
            _action_names(env, count), (count,), False, tuple(ignored),
        )  # fmt: skip
        seen, info = self._reset(0)
        if mask_in(seen, info) is not None:
            self.shape = WorldShape.from_dict(self.shape.to_dict() | {"masked": True})

    def reset(self, seed: int) -> Seen:
        """See `World`."""
        return self._seen(*self._reset(seed), alive=True)

    def _reset(self, seed: int) -> tuple[Any, Any]:
        try:
            seen, info = self.env.reset(seed=seed)
        except Exception as error:  # whatever somebody's world raises
            raise raised(self.name, "reset", error) from error
        return seen, info

    def step(self, actions: np.ndarray) -> Moved:
        """See `World`."""
        try:
            seen, reward, terminated, truncated, info = self.env.step(int(actions[0]) + self._start)
        except Exception as error:  # whatever somebody's world raises
            raise raised(self.name, "step", error) from error
        ended = bool(terminated) or bool(truncated)
        return Moved(
            self._seen(seen, info, alive=not ended),
            np.array([checked_reward(self.shape, "the agent", reward)], np.float32),
            np.array([bool(terminated)]),
            np.array([bool(truncated) and not bool(terminated)]),
            ended,
        )

    def _seen(self, seen: Any, info: Any, alive: bool) -> Seen:
        fields = {}
        for field, path, start in self._leaves:
            fields[field.name] = checked(self.shape, field, taken(self.name, seen, path, start))[
                None
            ]
        mask = mask_in(seen, info) if alive else None
        return Seen(fields, checked_mask(self.shape, 0, mask)[None], np.array([alive]))

    def render(self) -> Any:
        """See `World`."""
        return self.env.render() if getattr(self.env, "render_mode", None) else None

    def close(self) -> None:
        """See `World`."""
        self.env.close()


def taken(world: str, seen: Any, path: tuple[Any, ...], start: Any) -> Any:
    """A part of an observation, codes counted from 0.

    Raises:
        HamletError: it is not there.
    """
    try:
        value = at(seen, path)
        return np.asarray(value) - start if np.any(start) else value
    except (LookupError, TypeError, ValueError):
        told = ".".join(map(str, path))
        raise HamletError(
            f"{world}: `{told}` is missing in an observation", "a world must keep its spaces"
        ) from None


def raised(world: str, what: str, error: Exception) -> HamletError:
    """The error that somebody's world raised, in one line."""
    if isinstance(error, HamletError):
        return error
    return HamletError(
        f"{world}: its {what} raised {type(error).__name__}: {in_one_line(error)}",
        "mend the world file",
    )


def _action_names(env: Any, count: int) -> tuple[str, ...]:
    """Names of an environment's actions where it has them as an enumeration, else numbers."""
    inner = getattr(env, "unwrapped", env)
    named = getattr(inner, "actions", None)
    if isinstance(named, type) and hasattr(named, "__members__"):
        names = [str(name) for name in named.__members__]
        if len(names) == count:
            return tuple(names)
    return tuple(map(str, range(count)))
