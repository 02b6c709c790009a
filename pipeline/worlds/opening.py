"""A world by its name: `gymnasium:ID`, `pettingzoo:MODULE` or `python:module.make`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hamlet.artifacts import HamletError, in_one_line
from hamlet.worlds.contract import World, WorldShape
from hamlet.worlds.gymnasium_world import GymnasiumWorld
from hamlet.worlds.pettingzoo_world import PettingZooWorld

KINDS = ("gymnasium", "pettingzoo", "python")
# Packages that register environments when they are imported, by how their ids begin.
REGISTER = {"MiniGrid-": "minigrid", "BabyAI-": "minigrid", "ALE/": "ale_py"}
PACKAGES = {"ale_py": "ale-py", "mpe2": "mpe2", "pettingzoo": "pettingzoo"}


def open_world(
    source: str, kwargs: Mapping[str, Any] | None = None, render_mode: str | None = None
) -> World:
    """One new world.

    Args:
        source: see above. `python:` names a function that returns a Gymnasium environment, a
            PettingZoo parallel environment or a `World`; its module may lie in this folder.
        kwargs: given to what makes it.
        render_mode: given too, unless None.

    Raises:
        HamletError: no such kind, package, id or function; it raises; its spaces cannot be taken.
    """
    kind, _, name = source.partition(":")
    if kind not in KINDS or not name:
        raise HamletError(
            f"world `{source}` is of no kind that is known here",
            "write gymnasium:ID, pettingzoo:MODULE or python:module.function",
        )
    given = {**(kwargs or {}), **({"render_mode": render_mode} if render_mode else {})}
    make = {"gymnasium": _gymnasium, "pettingzoo": _pettingzoo, "python": _python}[kind]
    made = make(name, given, source)
    return wrapped(made, source)


def wrapped(env: Any, name: str) -> World:
    """An environment as a world.

    Raises:
        HamletError: it is none, or of a kind that cannot be taken.
    """
    if isinstance(getattr(env, "shape", None), WorldShape):
        return env
    if hasattr(env, "num_envs"):
        raise HamletError(
            f"{name}: it is a vector of environments", "return one, Hamlet makes as many as it asks"
        )
    if hasattr(env, "agent_iter"):
        raise HamletError(
            f"{name}: its agents move in turns (AECEnv)",
            "give a parallel environment, where all move at once",
        )
    if hasattr(env, "possible_agents"):
        return PettingZooWorld(env, name)
    if hasattr(env, "observation_space") and hasattr(env, "action_space"):
        return GymnasiumWorld(env, name)
    raise HamletError(
        f"{name}: it made {type(env).__name__}, which is no environment",
        "return a Gymnasium environment or a PettingZoo parallel environment",
    )


def _gymnasium(name: str, kwargs: Mapping[str, Any], source: str) -> Any:
    gymnasium = _imported("gymnasium", source)
    for begin, package in REGISTER.items():
        if name.startswith(begin):
            module = _imported(package, source)
            if hasattr(gymnasium, "register_envs"):
                gymnasium.register_envs(module)
    try:
        return gymnasium.make(name, **kwargs)
    except Exception as error:  # whatever somebody's world raises
        raise _not_made(source, error) from error


def _pettingzoo(name: str, kwargs: Mapping[str, Any], source: str) -> Any:
    module = _imported(name, source)
    make = getattr(module, "parallel_env", None)
    if make is None:
        raise HamletError(
            f"{source}: the module has no `parallel_env`",
            "only worlds whose agents move at once can be taken",
        )
    try:
        return make(**kwargs)
    except Exception as error:  # whatever somebody's world raises
        raise _not_made(source, error) from error


def _python(name: str, kwargs: Mapping[str, Any], source: str) -> Any:
    module_name, _, function = name.rpartition(".")
    if not module_name:
        raise HamletError(f"{source} names no function", "write python:module.function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    module = _imported(module_name, source)
    make = getattr(module, function, None)
    if not callable(make):
        raise HamletError(f"{source}: {module_name} has no function `{function}`")
    try:
        return make(**kwargs)
    except Exception as error:  # whatever somebody's world raises
        raise _not_made(source, error) from error


def _imported(module: str, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if missing == module or module.startswith(f"{missing}."):
            package = missing.split(".")[0]
            raise HamletError(
                f"{source} needs {missing}, which is not installed here",
                f"run `pip install {PACKAGES.get(package, package)}`, or correct the name",
            ) from None
        raise HamletError(
            f"{source}: {module} needs {missing}, which is not installed here",
            f"run `pip install {missing.split('.')[0]}`",
        ) from None
    except Exception as error:  # a world file that is wrong
        raise HamletError(
            f"{source}: {module} raised {type(error).__name__} when it was read: "
            f"{in_one_line(error)}",
            "mend the world file",
        ) from error


def _not_made(source: str, error: Exception) -> HamletError:
    if isinstance(error, HamletError):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name:
        return HamletError(
            f"{source} needs {error.name}, which is not installed here",
            f"run `pip install {error.name.split('.')[0]}`",
        )
    return HamletError(
        f"{source} cannot be made ({type(error).__name__}: {in_one_line(error)})",
        "correct its name, its arguments or the world file",
    )
