"""What is wrong with the rows of a log: one line each that names the file, the row and the fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.offline.log_store import FINAL, TERMINATED
from hamlet.offline.schema import Schema

Report = Callable[[HamletError], None]


def refuse(problem: HamletError) -> None:
    """A `Report` that raises the first problem."""
    raise problem


@dataclass
class Checker:
    """Looks at a log's rows, chunk after chunk, in the order in which they are stored.

    `check` tells every problem to `report`, at most one of a kind for each row.
    """

    schema: Schema
    report: Report
    seen: set = field(default_factory=set)
    last: tuple | None = None
    """Episode, step and flags of the row before."""

    def check(
        self,
        file: str,
        offset: int,
        arrays: Mapping[str, np.ndarray],
        episode: np.ndarray,
        step: np.ndarray,
    ) -> np.ndarray:
        """bool [n]: rows that begin an episode.

        Args:
            file, offset: where the rows stand, for the lines.
            arrays: as of `log_store.Writer.add`.
            episode: [n] whatever can be compared; step: int64 [n].
        """
        real = arrays["flags"] & FINAL == 0
        tell = _Teller(self.report, file, offset)
        self._values(tell, arrays, real)
        return self._order(tell, arrays["flags"], episode, step)

    def _values(self, tell: _Teller, arrays: Mapping[str, np.ndarray], real: np.ndarray) -> None:
        names, n = self.schema, self.schema.num_actions
        reward, action = arrays["reward"], arrays["action"]
        tell(
            real & ~np.isfinite(reward),
            lambda i: f"`{names.reward}` is {reward[i]}",
            "give every decision a finite reward, or drop its episode",
        )
        bad = real & ((action < 0) | (action >= n))
        tell(
            bad,
            lambda i: f"`{names.action}` is {action[i]}, the schema has {n} actions (0 to {n - 1})",
            "correct the row, or `actions` in the schema",
        )
        if names.log_prob:
            log_prob = arrays["log_prob"]
            tell(
                real & ~(log_prob <= 0),
                lambda i: f"`{names.log_prob}` is {log_prob[i]:g}, a log-probability is 0 at most",
                "take the natural logarithm, or leave `log_prob` out of the schema",
            )
        if names.action_mask:
            mask = arrays["action_mask"]
            allowed = mask[np.arange(len(mask)), np.clip(action, 0, n - 1)]
            tell(
                real & ~bad & ~allowed,
                lambda i: f"`{names.action_mask}` forbids action {action[i]}, which was taken",
                "the mask belongs to the state before the action: shift or correct it",
            )
        for name, one in self.schema.fields.items():
            x = arrays[f"field.{name}"]
            x = x.reshape(len(x), -1)
            wrong = ((x < 0) | (x >= one.count)) if one.count else ~np.isfinite(x)
            allowed_range = f"codes 0 to {one.count - 1}" if one.count else "finite numbers"
            tell(
                np.asarray(wrong.any(1)),
                partial(_first_wrong, name, x, wrong),
                f"it must hold {allowed_range}",
            )

    def _order(
        self, tell: _Teller, flags: np.ndarray, episode: np.ndarray, step: np.ndarray
    ) -> np.ndarray:
        names = self.schema
        before = self.last or (None, -1, 0)
        previous = np.concatenate(
            [np.array([before[0]], episode.dtype if self.last else object), episode[:-1]]
        )
        previous_step = np.concatenate([[before[1]], step[:-1]])
        previous_flags = np.concatenate([[before[2]], flags[:-1]])
        begins = previous != episode
        same = ~begins
        shown = lambda i: f"`{names.episode}` {episode[i]}, `{names.step}` {step[i]}"  # noqa: E731
        tell(
            same & (step == previous_step),
            lambda i: f"{shown(i)} is there twice",
            "drop the duplicate",
        )
        tell(
            same & (step < previous_step),
            lambda i: f"{shown(i)} comes after step {previous_step[i]}",
            f"sort the file by `{names.episode}` and `{names.step}`",
        )
        tell(
            same & (step > previous_step + 1),
            lambda i: f"{shown(i)} comes after step {previous_step[i]}: rows are missing between",
            "give the rows that are missing, or another episode number from here on",
        )
        terminated = (previous_flags & TERMINATED > 0) & (flags & FINAL == 0)
        over = same & (terminated | (previous_flags & FINAL > 0))
        tell(
            over & (step != previous_step),
            lambda i: f"{shown(i)} goes on after its episode ended",
            f"give it another `{names.episode}`, or correct the ending before it",
        )
        again = np.zeros(len(begins), bool)
        for i in np.flatnonzero(begins):
            key = episode[i].item() if hasattr(episode[i], "item") else episode[i]
            again[i] = key in self.seen
            self.seen.add(key)
        tell(
            again,
            lambda i: f"{shown(i)} belongs to an episode that began further up: they overlap",
            f"sort the file by `{names.episode}` and `{names.step}`",
        )
        if len(step):
            self.last = (episode[-1], int(step[-1]), int(flags[-1]))
        return begins


@dataclass
class _Teller:
    report: Report
    file: str
    offset: int

    def __call__(self, wrong: np.ndarray, what: Callable[[int], str], fix: str) -> None:
        for i in np.flatnonzero(wrong):
            self.report(HamletError(f"{self.file}, row {self.offset + i}: {what(int(i))}", fix))


def _first_wrong(name: str, values: np.ndarray, wrong: np.ndarray, row: int) -> str:
    return f"field `{name}` holds {values[row][wrong[row]][0]:g}"
