"""Gymnasium's spaces as fields: what a network can take, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.worlds.contract import MASK, RESERVED, WIDEST, Field

PLAIN = "observation"  # the name of an observation that has none
Path = tuple[Any, ...]


class Leaf(NamedTuple):
    """One field and where it lies in an observation.

    Attributes:
        path: keys and indices that lead to it.
        start: what is subtracted from codes.
    """

    field: Field
    path: Path
    start: Any = 0


def leaves(space: Any, world: str) -> tuple[list[Leaf], list[str]]:
    """The fields of an observation space, and the names of those that are left out (texts).

    Raises:
        HamletError: a part that cannot be taken, two of one name, or nothing at all.
    """
    found: list[Leaf] = []
    ignored: list[str] = []
    for path, part in _parts(space):
        if path and path[-1] == MASK:
            continue
        name = _name(path)
        if _is_text(part):
            ignored.append(name)
            continue
        found.append(_leaf(name, path, part, world))
    names = [leaf.field.name for leaf in found]
    if len(set(names)) < len(names):
        raise HamletError(
            f"{world}: two parts of its observation are called alike ({', '.join(names)})",
            "give them other names in the world file",
        )
    if not found:
        raise HamletError(
            f"{world}: its observation holds nothing that a network can take ({space})",
            "give Box, Discrete, MultiDiscrete or MultiBinary, alone or in a Dict or Tuple",
        )
    return found, ignored


def mask_in(seen: Any, info: Any) -> Any:
    """One agent's action mask, in its observation or in its info; None where there is none."""
    if isinstance(seen, dict) and MASK in seen:
        return seen[MASK]
    return info.get(MASK) if isinstance(info, dict) else None


def _parts(space: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    kind = type(space).__name__
    if kind == "Dict":
        for key, part in space.spaces.items():
            yield from _parts(part, (*path, key))
    elif kind == "Tuple":
        for i, part in enumerate(space.spaces):
            yield from _parts(part, (*path, i))
    else:
        yield path, space


def _is_text(space: Any) -> bool:
    """Whether a space holds texts: Gymnasium's own, or one like it (a MiniGrid mission)."""
    if type(space).__name__ in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        return False
    try:
        return isinstance(space.sample(), str)
    except Exception:  # somebody's own space
        return False


def _name(path: Path) -> str:
    # PettingZoo's classic worlds wrap what is observed beside the mask.
    name = re.sub(r"\W+", "_", "_".join(map(str, path))).strip("_").lower() or PLAIN
    return f"seen_{name}" if name in RESERVED or name.startswith(("state_", "next_")) else name


def _leaf(name: str, path: Path, space: Any, world: str) -> Leaf:
    kind, told = type(space).__name__, f"{world}: observation `{name}` is {space}"
    if kind == "Discrete":
        return Leaf(_codes(name, (), int(space.n), told), path, int(space.start))
    if kind == "MultiDiscrete":
        start = np.asarray(getattr(space, "start", 0))
        return Leaf(_codes(name, space.shape, int(space.nvec.max()), told), path, start)
    if kind == "MultiBinary":
        return Leaf(Field(name, "vector", tuple(space.shape), "float32", 0.0, 1.0), path)
    if kind != "Box":
        raise HamletError(
            f"{told}, which cannot be taken",
            "give Box, Discrete, MultiDiscrete or MultiBinary, alone or in a Dict or Tuple",
        )
    shape = tuple(int(n) for n in space.shape)
    if 0 in shape:
        raise HamletError(f"{told}, which is empty", "leave it out in the world file")
    low, high = (_finite(x) for x in (space.low.min(), space.high.max()))
    picture = (len(shape) == 3 and min(sorted(shape)[1:]) >= 5) or (
        len(shape) == 2 and min(shape) >= 5
    )
    dtype = "uint8" if picture and space.dtype == np.uint8 else "float32"
    return Leaf(Field(name, "picture" if picture else "vector", shape, dtype, low, high), path)


def _codes(name: str, shape: tuple[int, ...], count: int, told: str) -> Field:
    if count * max(1, int(np.prod(shape))) > WIDEST:
        raise HamletError(
            f"{told}: so many codes have no use as they are",
            "give their parts one by one in the world file (a wrapper that decodes them)",
        )
    return Field(name, "codes", shape, "int64", 0, count - 1, count)


def _finite(x: Any) -> float | None:
    return float(x) if np.isfinite(x) and abs(float(x)) < 1e30 else None


def at(observation: Any, path: Path) -> Any:
    """The part of an observation that a path leads to.

    Raises:
        LookupError, TypeError: it is not there.
    """
    for key in path:
        observation = observation[key]
    return observation


def actions_of(space: Any, world: str, agent: str = "") -> tuple[int, int]:
    """How many actions a space has, and which number the first one has.

    Raises:
        HamletError: they are not Discrete.
    """
    who = f" of {agent}" if agent else ""
    if type(space).__name__ != "Discrete":
        raise HamletError(
            f"{world}: the actions{who} are {space}; only Discrete ones can be learned here",
            "let the world file map a few choices onto them (gymnasium.ActionWrapper)",
        )
    if space.n > WIDEST:
        raise HamletError(f"{world}: {space.n} actions{who} are more than {WIDEST}")
    return int(space.n), int(space.start)
