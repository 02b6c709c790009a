"""A trainer's log as a stage keeps it: progress on the screen, MLflow, and a curve for DVC."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from hamlet.artifacts import HamletError, atomic_path
from hamlet.moving import numbers
from hamlet.profiling import Watch, profiled
from stages.common import PROFILE, Stage, progress


class StageLog:
    """Implements `hamlet.learning.log.Log`.

    Args:
        stage: the running stage.
        folder: its checkpoint folder; the curve so far is kept there, for a resumed run.
        every: steps between rows.
    """

    def __init__(self, stage: Stage, folder: Path, every: int) -> None:
        self.stage, self.every = stage, every
        self.kept = folder / "curve.csv"
        self.rows: list[dict[str, float]] = []
        self.bar: progress[int] | None = None

    def steps(self, total: int, start: int) -> Iterable[int]:
        if start and self.kept.exists():
            with self.kept.open() as file:
                rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
            self.rows = [row for row in rows if row["step"] < start]
        if not self.stage.first:
            return range(start, total)
        window = os.environ.get(PROFILE)
        if window:
            return self._profiled(total, *window.split(":", 2))
        self.bar = progress(total, self.stage.name, start)
        return self.bar

    def _profiled(self, total: int, skip: str, count: str, folder: str) -> Iterable[int]:
        """Steps until the window is over; then the table, and the end of the process.

        Nothing of what the stage was to make is written. See `hamlet profile`.
        """
        trace, table = Path(folder) / "trace.json.gz", Path(folder) / "profile.txt"
        needed = int(skip) + int(count) + 1
        if needed > total:
            raise HamletError(
                f"{self.stage.name} takes {total} steps, the window ends at {needed}",
                "give smaller --skip and --steps",
            )
        self.bar = progress(needed, f"profile {self.stage.name}")
        for item in profiled(self.bar, int(skip), int(count), trace):
            if isinstance(item, Watch):
                with atomic_path(table) as temporary:
                    temporary.write_text(item.table() + "\n")
                self.stage.run.metrics({f"share_{k}": v for k, v in item.shares().items()})
                self.stage.run.artifact(table)
                self.stage.run.artifact(trace)
                raise SystemExit(0)
            yield item

    def record(self, step: int, metrics: dict[str, Tensor]) -> None:
        if step % self.every or not self.stage.first:
            return
        values = numbers(metrics)
        self.stage.run.metrics(values, step)
        self.rows.append({"step": step, **values})
        self.write(self.kept)
        if self.bar:
            self.bar.note(**dict(list(values.items())[:3]))

    def write(self, path: Path) -> None:
        """The curve as CSV, one row per recorded step, six significant digits."""
        names = list(dict.fromkeys(["step", *(name for row in self.rows for name in row)]))
        with atomic_path(path) as temporary, temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            for row in self.rows:
                writer.writerow({k: f"{v:.6g}" for k, v in row.items()})
