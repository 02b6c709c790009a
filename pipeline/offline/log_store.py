"""A log on the disk, memory-mapped: rows of whole episodes one after another, of any length.

The observation after an episode's last action, where it is known, is a row of its own: a *final*
row. Nothing is learned from it; its value continues the row before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.artifacts import HamletError, read_json, require_space, write_json
from hamlet.offline.schema import Schema

TERMINATED, TRUNCATED, FINAL = 1, 2, 4
HELD_OUT = 5  # every fifth episode judges and is not learned from
FORMAT = 1


class Windows(NamedTuple):
    """Stretches of episodes, no longer than some length each."""

    start: np.ndarray
    """int64 [W] first row."""
    stop: np.ndarray
    """int64 [W] row after the last one that has an action."""
    end: np.ndarray
    """int64 [W] row after the episode's last one, final row included."""
    first: np.ndarray
    """bool [W] whether it begins an episode."""
    episode: np.ndarray
    """int64 [W]."""


class LogStore:
    """An opened store; see `Writer` and `open_store`.

    Attributes:
        fields: by name, [N, ...] memory maps of N rows.
        action: int32 [N], 0 in final rows; reward: float32 [N]; flags: uint8 [N] of TERMINATED,
            TRUNCATED and FINAL.
        log_prob: float32 [N] of the behaviour's action, None if the log does not tell.
        mask: bool [N, A] legal actions, None if all always are.
        starts: int64 [E + 1] first rows of the episodes, and N.
        facts: what was counted while it was written.
    """

    def __init__(self, folder: Path) -> None:
        meta = read_json(folder / "meta.json")
        self.folder, self.facts = folder, meta["facts"]
        self.schema = Schema.model_validate(meta["schema"])

        def array(name: str) -> np.ndarray:
            return np.load(folder / f"{name}.npy", mmap_mode="r")

        self.fields = {name: array(f"field.{name}") for name in self.schema.fields}
        self.action, self.reward, self.flags = array("action"), array("reward"), array("flags")
        self.mask = array("action_mask") if self.schema.action_mask else None
        self.log_prob: np.ndarray | None = None
        self.estimated = (folder / "estimated_log_prob.npy").exists()
        if self.estimated:
            self.log_prob = array("estimated_log_prob")
        elif self.schema.log_prob:
            self.log_prob = array("log_prob")
        self.starts: np.ndarray = np.load(folder / "starts.npy")

    @property
    def episodes(self) -> int:
        return len(self.starts) - 1

    def held_out(self) -> np.ndarray:
        """bool [E]: the episodes that judge; none of fewer than five."""
        return np.arange(self.episodes) % HELD_OUT == HELD_OUT - 1

    def lengths(self) -> np.ndarray:
        """int64 [E] actions in each episode."""
        last = self.starts[1:] - 1
        return np.diff(self.starts) - (self.flags[last] & FINAL > 0)

    def windows(self, length: int, episodes: np.ndarray) -> Windows:
        """All of these episodes (bool [E]) in stretches of at most `length` actions."""
        chosen = np.flatnonzero(episodes)
        actions = self.lengths()[chosen]
        count = -(-actions // length)
        episode = np.repeat(chosen, count)
        nth = np.arange(len(episode)) - np.repeat(np.cumsum(count) - count, count)
        start = self.starts[episode] + nth * length
        stop = np.minimum(start + length, self.starts[episode] + np.repeat(actions, count))
        return Windows(start, stop, self.starts[episode + 1], nth == 0, episode)

    def read(self, windows: Windows, which: np.ndarray, length: int) -> TensorDict:
        """The rows of some windows, time-major [length + 1, W].

        Beside the model's inputs: `action` int64, `reward`, `log_prob` (if known), `terminated`,
        `known` (what followed is known: learn from it), `acted` (it has an action and belongs to
        the window) and `first` (the model's memory begins here). The row after a window's last
        gives its value only.
        """
        start, stop, end = windows.start[which], windows.stop[which], windows.end[which]
        row = start + np.arange(length + 1)[:, None]
        acted = row < stop
        inside = row < end
        row = np.minimum(row, end - 1)
        flags = self.flags[row]
        terminated = (flags & TERMINATED > 0) & acted
        followed = row + 1 < end
        first = np.zeros(row.shape, bool)
        first[0] = True
        entries = {name: _tensor(array[row]) for name, array in self.fields.items()}
        if self.mask is not None:
            entries["action_mask"] = _tensor(self.mask[row])
        if self.log_prob is not None:
            entries["log_prob"] = _tensor(np.where(acted, self.log_prob[row], 0.0), torch.float32)
        return TensorDict(
            entries
            | {
                "action": _tensor(self.action[row], torch.int64),
                "reward": _tensor(np.where(acted, self.reward[row], 0.0), torch.float32),
                "terminated": _tensor(terminated),
                "known": _tensor(acted & (terminated | followed)),
                "acted": _tensor(acted & inside),
                "first": _tensor(first),
            },
            batch_size=row.shape,
        )

    def save_estimate(self, log_prob: np.ndarray) -> None:
        """Keep an estimate of the behaviour's log-probabilities, float32 [N], beside the log."""
        np.save(self.folder / "estimated_log_prob.npy", log_prob)
        self.log_prob, self.estimated = log_prob, True


def _tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


class Writer:
    """Fills a new store in `folder` (empty) with `rows` rows."""

    def __init__(self, folder: Path, schema: Schema, rows: int) -> None:
        self.folder, self.schema, self.rows, self.at = folder, schema, rows, 0
        shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
            f"field.{name}": (field.dtype, field.trailing) for name, field in schema.fields.items()
        }
        shapes |= {"action": ("int32", ()), "reward": ("float32", ()), "flags": ("uint8", ())}
        if schema.log_prob:
            shapes["log_prob"] = ("float32", ())
        if schema.action_mask:
            shapes["action_mask"] = ("bool", (schema.num_actions,))
        size = sum(np.dtype(d).itemsize * int(np.prod(s)) for d, s in shapes.values()) * rows
        require_space(folder, size)
        self.arrays = {
            name: np.lib.format.open_memmap(
                folder / f"{name}.npy", "w+", np.dtype(dtype), (rows, *trailing)
            )
            for name, (dtype, trailing) in shapes.items()
        }
        self.starts: list[int] = []
        self.moments: dict[str, list[np.ndarray]] = {}
        self.counts = np.zeros(schema.num_actions, np.int64)
        self.reward_range = [np.inf, -np.inf]
        self.reward_sum = 0.0

    def add(self, arrays: Mapping[str, np.ndarray], begins: np.ndarray) -> None:
        """Append rows by name, as the store's arrays; `begins` bool: a new episode's first row."""
        n = len(begins)
        at = slice(self.at, self.at + n)
        for name, array in self.arrays.items():
            array[at] = arrays[name]
        self.starts += (self.at + np.flatnonzero(begins)).tolist()
        for name, field in self.schema.fields.items():
            if field.count is None:
                x = arrays[f"field.{name}"].reshape(n, *field.trailing).astype(np.float64)
                axes = tuple(a for a in range(x.ndim) if a != _channel(field.kind))
                sums = [
                    x.sum(axes),
                    np.square(x).sum(axes),
                    np.array(x.size / x.shape[_channel(field.kind)]),
                ]
                old = self.moments.get(name)
                self.moments[name] = sums if old is None else [a + b for a, b in zip(old, sums)]
        real = arrays["flags"] & FINAL == 0
        self.counts += np.bincount(arrays["action"][real], minlength=len(self.counts))
        reward = arrays["reward"][real & np.isfinite(arrays["reward"])]
        if len(reward):
            low, high = self.reward_range
            self.reward_range = [min(low, float(reward.min())), max(high, float(reward.max()))]
            self.reward_sum += float(reward.sum(dtype=np.float64))
        self.at += n

    def close(self, source: Mapping[str, Any]) -> None:
        """Finish: what was counted, and where the rows came from, go beside them."""
        assert self.at == self.rows, (self.at, self.rows)
        starts = np.array([*self.starts, self.rows], np.int64)
        np.save(self.folder / "starts.npy", starts)
        last = self.arrays["flags"][starts[1:] - 1]
        actions = int(self.counts.sum())
        lengths = np.diff(starts) - (last & FINAL > 0)
        before = self.arrays["flags"][np.maximum(starts[1:] - 1 - (last & FINAL > 0), 0)]
        stats = {}
        for name, (total, squares, count) in self.moments.items():
            mean = total / count
            if not np.isfinite(squares).all():
                continue  # it was reported, row by row
            std = np.sqrt(np.maximum(squares / count - mean**2, 0.0))
            stats[name] = {"mean": mean.tolist(), "std": np.where(std > 1e-6, std, 1.0).tolist()}
        low, high = self.reward_range if actions else (0.0, 0.0)
        spread = lengths.min(), lengths.mean(), lengths.max()
        facts = {
            "rows": actions,
            "episodes": len(starts) - 1,
            "lengths": dict(zip(("min", "mean", "max"), spread)),
            "terminated": int((before & TERMINATED > 0).sum()),
            "final_observations": int((last & FINAL > 0).sum()),
            "action_counts": self.counts.tolist(),
            "reward": {"min": low, "mean": self.reward_sum / max(actions, 1), "max": high},
            "log_prob": bool(self.schema.log_prob),
            "statistics": stats,
        }  # fmt: skip
        for array in self.arrays.values():
            array.flush()
        write_json(
            self.folder / "meta.json",
            {
                "format": FORMAT, "schema": self.schema.model_dump(mode="json"),
                "facts": facts, "source": dict(source),
            },
        )  # fmt: skip


def _channel(kind: str) -> int:
    """The dimension of a row array whose entries are numbers of one meaning."""
    return {"vector": 1, "sequence": 2, "grid": 1}[kind]


def open_store(folder: Path) -> LogStore:
    """Open a finished store; raises HamletError if it is missing or of another format."""
    meta = read_json(folder / "meta.json")
    if meta.get("format") != FORMAT:
        raise HamletError(f"{folder} is of another format", "delete it and read the log again")
    return LogStore(folder)
