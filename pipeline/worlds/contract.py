"""What a world is: its shape as data, and what it tells at a reset and at a step.

A world has a fixed number of slots for agents. An agent that has died, or has not come yet, leaves
its slot empty: its rows are zeros and `alive` is False.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from hamlet.artifacts import HamletError, sha256_json

Kind = Literal["vector", "codes", "picture"]
AGENT, MASK = "agent", "action_mask"  # fields that a world adds itself
# What the exported agent's own tensors are called.
RESERVED = (
    "action", "action_logits", "value", "imagined_reward", "imagined_going_on", "imagined_value",
    "imagined_uncertainty", "next_action_of_others",
)  # fmt: skip
WIDEST = 4096  # numbers of one-hot codes, and actions


@dataclass(frozen=True)
class Field:
    """One named observation of an agent.

    Attributes:
        kind: `vector` of numbers, `codes` that stand for things (0 to count - 1), or `picture`
            [height, width, channels], [channels, height, width] or [height, width].
        shape: of one agent's.
        dtype: float32 of vectors, int64 of codes, uint8 or float32 of pictures.
        low, high: what the numbers lie between, as the world says; None where it does not.
        count: of codes.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    low: float | None = None
    high: float | None = None
    count: int | None = None


@dataclass(frozen=True)
class WorldShape:
    """All that later stages know of a world. Data only.

    Attributes:
        name: for people, and for errors.
        fields: what every agent observes, in order.
        agents: names of the slots.
        actions: names, as many as the agent with the most has.
        action_counts: how many of them each agent has.
        masked: whether some actions are illegal at times, or always for some agent.
        ignored: fields that the world has and no network can take (texts).
    """

    name: str
    fields: tuple[Field, ...]
    agents: tuple[str, ...]
    actions: tuple[str, ...]
    action_counts: tuple[int, ...]
    masked: bool
    ignored: tuple[str, ...] = ()

    @property
    def num_agents(self) -> int:
        return len(self.agents)

    @property
    def num_actions(self) -> int:
        return len(self.actions)

    @property
    def content_hash(self) -> str:
        """Hex sha256 of all of it."""
        return sha256_json(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return {
            "name": self.name,
            "fields": [
                {
                    "name": f.name, "kind": f.kind, "shape": list(f.shape), "dtype": f.dtype,
                    "low": f.low, "high": f.high, "count": f.count,
                }
                for f in self.fields
            ],
            "agents": list(self.agents),
            "actions": list(self.actions),
            "action_counts": list(self.action_counts),
            "masked": self.masked,
            "ignored": list(self.ignored),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WorldShape:
        """What `to_dict` made.

        Raises:
            HamletError: it is something else.
        """
        try:
            fields = tuple(Field(**{**f, "shape": tuple(f["shape"])}) for f in data["fields"])
            return cls(
                data["name"], fields, tuple(data["agents"]), tuple(data["actions"]),
                tuple(data["action_counts"]), data["masked"], tuple(data["ignored"]),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise HamletError(
                f"this describes no world ({error})", "run `dvc repro world`"
            ) from None

    def same_as(self, other: WorldShape) -> str:
        """What differs between two worlds as an agent sees them; empty if nothing."""
        for what in ("fields", "agents", "actions", "action_counts", "masked"):
            if getattr(self, what) != getattr(other, what):
                return what
        return ""

    def all_legal(self) -> np.ndarray:
        """bool [N, A]: the actions that each agent has at all."""
        return np.arange(self.num_actions) < np.array(self.action_counts)[:, None]


class Seen(NamedTuple):
    """What all agents observe at one moment.

    Attributes:
        fields: each [N, ...] of its field's shape and dtype.
        mask: bool [N, A] legal actions; at least one for whoever is alive.
        alive: bool [N].
    """

    fields: dict[str, np.ndarray]
    mask: np.ndarray
    alive: np.ndarray


class Moved(NamedTuple):
    """What a step led to.

    Attributes:
        seen: after the step and before any reset. Where an agent ended this is the last that it
            saw, though it is alive no more.
        reward: float32 [N] of the step; 0 for empty slots.
        terminated: bool [N] it ended by the world's rules: nothing comes after.
        truncated: bool [N] it was cut off though its life could have gone on.
        over: nobody is left: the world must be reset.
    """

    seen: Seen
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    over: bool


class World(Protocol):
    """One world, stepped in this process. It cannot be compiled."""

    shape: WorldShape

    def reset(self, seed: int) -> Seen:
        """Begin an episode; the same seed begins the same one."""

    def step(self, actions: np.ndarray) -> Moved:
        """Let all agents act at once: int64 [N], of empty slots whatever it is.

        Raises:
            HamletError: the world raised, changed its spaces or gave a number that is not finite.
        """

    def render(self) -> Any:
        """A picture uint8 [height, width, 3], a text, or None where it cannot be shown."""

    def close(self) -> None: ...


def checked(shape: WorldShape, field: Field, value: Any) -> np.ndarray:
    """One agent's observation of a field, as its shape and dtype say.

    Raises:
        HamletError: another shape, a code out of range, or a number that is not finite.
    """
    told = f"{shape.name}: observation `{field.name}`"
    try:
        array = np.asarray(value)
        array = array if array.dtype == field.dtype else array.astype(field.dtype)
    except (TypeError, ValueError):
        raise HamletError(f"{told} is {type(value).__name__}, no array of numbers") from None
    if array.shape != field.shape:
        raise HamletError(
            f"{told} has shape {list(array.shape)}, its space says {list(field.shape)}",
            "a world must keep its spaces",
        )
    if field.dtype == "float32" and not np.isfinite(array).all():
        raise HamletError(f"{told} is not finite", "mend the world, it must give numbers")
    if field.count is not None and array.size and not 0 <= array.min() <= array.max() < field.count:
        raise HamletError(
            f"{told} is {array.max() if array.max() >= field.count else array.min()}, its space "
            f"has {field.count} codes",
            "a world must keep its spaces",
        )
    return array


def checked_reward(shape: WorldShape, agent: str, value: Any) -> float:
    """A reward as a float.

    Raises:
        HamletError: it is not one finite number.
    """
    try:
        reward = float(value)
    except (TypeError, ValueError):
        raise HamletError(
            f"{shape.name}: the reward of {agent} is {type(value).__name__}, not a number"
        ) from None
    if not np.isfinite(reward):
        raise HamletError(
            f"{shape.name}: the reward of {agent} is {reward}", "mend the world's reward"
        )
    return reward


def checked_mask(shape: WorldShape, agent: int, value: Any) -> np.ndarray:
    """bool [A] the legal actions of an agent; None of `value` allows all that it has.

    Raises:
        HamletError: of another length, or nothing is legal.
    """
    own = shape.all_legal()[agent]
    if value is None:
        return own
    mask = np.asarray(value).astype(bool).reshape(-1)
    if len(mask) != shape.action_counts[agent]:
        raise HamletError(
            f"{shape.name}: the action mask of {shape.agents[agent]} has {len(mask)} entries, it "
            f"has {shape.action_counts[agent]} actions"
        )
    if not mask.any():
        raise HamletError(
            f"{shape.name}: the action mask of {shape.agents[agent]} forbids every action",
            "allow one while the agent lives",
        )
    full = np.zeros(shape.num_actions, bool)
    full[: len(mask)] = mask
    return full
