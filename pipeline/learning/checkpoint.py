"""Complete, exact checkpoints: an interrupted training resumes as if nothing had happened."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from hamlet.artifacts import HamletError, atomic_path
from hamlet.learning import distributed
from hamlet.moving import moved


class Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Checkpoint:
    """Saves modules, optimizers, generators and tensors to one file, at most every `interval` s.

    Ranks load the same file; the first one writes it, for any number of ranks to go on from.

    Args:
        path: the file; written to a temporary name and renamed.
        parts: named objects with state_dict/load_state_dict, or torch.Generators.
        interval: seconds between saves; an interrupt loses at most this much.
    """

    def __init__(
        self,
        path: Path,
        parts: Mapping[str, Stateful | torch.Generator],
        interval: float = 20.0,
    ) -> None:
        self.path, self.parts, self.interval = path, dict(parts), interval
        self.last = time.monotonic()

    def load(self) -> tuple[int, dict[str, Any]]:
        """Restore every part; returns (next step, extra), or (0, {}) when there is no file.

        What was saved as `rows` is in extra too: this rank's part of them.

        Raises:
            HamletError: the first rank loads another file than this one, or only one of them does.
        """
        saved: dict[str, Any] = {}
        if self.path.exists():
            saved = torch.load(self.path, weights_only=True, map_location="cpu")
        step = saved.get("step", 0)
        if step != distributed.from_first(step):
            raise HamletError(
                f"rank {distributed.rank()} would go on from step {step}, the first rank does not",
                "let all machines share the folder `checkpoints`, and the repository it is in",
            )
        if not saved:
            return 0, {}
        for name, part in self.parts.items():
            if isinstance(part, torch.Generator):
                part.set_state(saved["parts"][name])
            else:
                part.load_state_dict(saved["parts"][name])
        device, before = self._device(), saved.get("device", "cpu")
        if device.type != before and not distributed.rank():
            print(
                f"a training begun on {before} goes on on {device.type}: not bit for bit",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        elif device.type == "cuda":
            torch.cuda.set_rng_state(saved["drawn"], device)
        return step, saved["extra"] | distributed.local_shard(saved["rows"])

    def save(
        self,
        step: int,
        extra: Mapping[str, Any] | None = None,
        rows: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> None:
        """Save if `interval` seconds have passed. All ranks call it at every step.

        Args:
            extra: plain data and tensors, the same at every rank.
            rows: tensors, or dicts and tuples of them, of which each rank holds its part of the
                first dimension.
        """
        due = force or time.monotonic() - self.last >= self.interval
        if not distributed.from_first(int(due)):
            return
        rows = distributed.all_gather(dict(rows or {}))
        self.last = time.monotonic()
        # Asked of every rank: of what ranks share each has its part.
        parts = {
            name: part.get_state() if isinstance(part, torch.Generator) else part.state_dict()
            for name, part in self.parts.items()
        }
        if distributed.rank():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.path) as temporary:
            saved = {"step": step, "parts": parts, "extra": dict(extra or {}), "rows": rows}
            device = self._device()
            saved["device"] = device.type
            if device.type == "cuda":  # noise on a GPU is drawn by its own generator
                saved["drawn"] = torch.cuda.get_rng_state(device)
            torch.save(moved(saved, "cpu"), temporary)
        self.last = time.monotonic()

    def _device(self) -> torch.device:
        modules = (part for part in self.parts.values() if isinstance(part, torch.nn.Module))
        parameters = (parameter for module in modules for parameter in module.parameters())
        return next((parameter.device for parameter in parameters), torch.device("cpu"))
