"""How a trainer tells what it does, without knowing of progress bars, files or MLflow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor


class Log(Protocol):
    def steps(self, total: int, start: int) -> Iterable[int]:
        """The steps from `start` (0, or where a checkpoint left off) to `total`."""
        ...

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        """Scalars of one step, still on the device: reading them is up to the log."""
        ...
