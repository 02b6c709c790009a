"""Complete, exact checkpoints: an interrupted training resumes as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from pipeline.files import atomic_path


class Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Checkpoint:
    """Saves modules, optimizers, generators and tensors to one file, at most every `interval` s.

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
        """Restore every part; returns (next step, extra), or (0, {}) when there is no file."""
        if not self.path.exists():
            return 0, {}
        saved = torch.load(self.path, weights_only=True)
        for name, part in self.parts.items():
            if isinstance(part, torch.Generator):
                part.set_state(saved["parts"][name])
            else:
                part.load_state_dict(saved["parts"][name])
        return saved["step"], saved["extra"]

    def save(self, step: int, extra: Mapping[str, Any] | None = None, force: bool = False) -> None:
        """Save if `interval` seconds have passed; `extra` holds plain data and tensors."""
        if not force and time.monotonic() - self.last < self.interval:
            return
        parts = {
            name: part.get_state() if isinstance(part, torch.Generator) else part.state_dict()
            for name, part in self.parts.items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(self.path) as temporary:
            torch.save({"step": step, "parts": parts, "extra": dict(extra or {})}, temporary)
        self.last = time.monotonic()
