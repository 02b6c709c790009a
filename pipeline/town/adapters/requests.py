"""What other libraries ask of the town, checked: one line says what is wrong and what to pass."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hamlet.artifacts import HamletError


def checked_actions(actions: Any, shape: tuple[int, ...], names: Sequence[str]) -> Tensor:
    """The actions as int64 of this shape.

    Raises:
        HamletError: another shape, no whole numbers, or numbers that no action has. -1 is one of
            those: inside the town it means not to take part.
    """
    given = actions.detach().cpu().numpy() if isinstance(actions, Tensor) else np.asarray(actions)
    if given.shape != shape or given.dtype.kind not in "iu":
        raise HamletError(
            f"actions are {given.dtype} {list(given.shape)}",
            f"pass whole numbers of shape {list(shape)}, one action for each",
        )
    wrong = given[(given < 0) | (given >= len(names))]
    if wrong.size:
        raise HamletError(
            f"action {wrong.flat[0]} does not exist",
            f"pass 0 to {len(names) - 1} ({', '.join(names)}); WAIT is {list(names).index('WAIT')}",
        )
    return torch.as_tensor(given.astype(np.int64))


def checked_render_mode(mode: str | None, metadata: Mapping[str, Any]) -> str | None:
    """The render mode. Raises HamletError for one that `metadata` does not list."""
    modes = metadata["render_modes"]
    if mode is not None and mode not in modes:
        raise HamletError(f"render_mode {mode!r} does not exist", f"use {', '.join(modes)} or None")
    return mode


def tell_options(options: Mapping[str, Any] | None) -> None:
    """Warns of options of `reset`: the town has none. (PettingZoo's own checker gives some.)"""
    for name in options or ():
        warnings.warn(f"reset has no option {name!r}: it is ignored", stacklevel=3)


def checked_seed(seed: Any) -> int:
    """The seed. Raises HamletError for what is not a whole number from 0."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise HamletError(f"seed {seed!r} is not a whole number from 0", "pass one, or None")
    return int(seed)
