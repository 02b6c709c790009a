"""The thread that sends journals to MLflow while the stage works, and never holds it up."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

from hamlet.tracking import store
from hamlet.tracking.journal import Journal
from hamlet.tracking.service import Here, There, reach

FLUSH_SECONDS = 5.0
RETRY_SECONDS = 30.0  # between attempts at what does not answer, and how long a lock is waited for
SILENCE_SECONDS = 8.0  # without an answer of a server: it hangs
START_SECONDS = 90.0  # for MLflow's import and a new database, on a busy machine


class Sender(threading.Thread):
    """Sends a journal, and after it those that wait for a server that is back.

    Attributes:
        error: why MLflow cannot be reached, in plain words; empty while it can.
        state: what MLflow has of the journal, and in which runs.
    """

    def __init__(self, journal: Journal, uri: str) -> None:
        super().__init__(daemon=True, name="mlflow")
        self.journal, self.uri = journal, uri
        self.error = ""
        self.state = journal.sent()
        self._told = False
        self._changed = threading.Condition()
        self._wanted = False  # something should be sent now
        self._ending = False
        self._attempts = 0
        self._sent = 0  # bytes of the journal
        self._answered = time.monotonic()
        self._waiting_sent = False
        self._mlflow: Here | There | None = None  # imported, its client made
        self._monitors = SystemMetrics()

    def run(self) -> None:
        while True:
            self._attempt()
            with self._changed:
                self._attempts += 1
                self._changed.notify_all()
                pause = FLUSH_SECONDS
                if self.error:
                    pause = 0.5 if self.busy() else RETRY_SECONDS
                if self.busy():
                    self._changed.wait(pause)
                self._changed.wait_for(lambda: self._wanted or self._ending, pause)
                if self._ending and not self.error and self._sent == self.journal.size():
                    return
                self._wanted = False
                if self._ending and self.error and not self.busy():
                    return

    def busy(self) -> bool:
        """Whether the database is only locked, so that waiting helps."""
        return "locked" in self.error

    def _attempt(self) -> None:
        try:
            self.error = store.unusable(self.uri)
            if self.error:
                self.tell()
                return
            self._mlflow = self._mlflow or reach()
            self._beat()
            if values := self._monitors.sample():
                self.journal.write({"metrics": values})
            self.state = self._mlflow.deliver(self.journal, self._beat)
            self._sent = self.state.offset
            self.error = ""
            if not self._waiting_sent:
                self._waiting_sent = True
                for line in self._mlflow.send_waiting(self.uri, self._beat):
                    print(line, file=sys.stderr, flush=True)
        except BaseException as error:  # whatever MLflow, SQLite or the disk say
            self.error = store.in_plain_words(
                error if isinstance(error, Exception) else RuntimeError(repr(error))
            )
            self.state = self.journal.sent()
            if not self.busy():
                self.tell()

    def _beat(self) -> None:
        self._answered = time.monotonic()

    def tell(self) -> None:
        """Say once that MLflow cannot be reached, and where the numbers are."""
        if not self._told and not self._ending:
            self._told = True
            stage = self.journal.header.get("stage", "the stage")
            print(
                f"warning: {self.uri} cannot be written ({self.error}): {stage} goes on, what it "
                f"logs is kept in {self.journal.folder.parent.name}/ and sent when it can be",
                file=sys.stderr,
                flush=True,
            )

    def wake(self) -> None:
        with self._changed:
            self._wanted = True
            self._changed.notify_all()

    def flush(self, patience: float) -> bool:
        """Wait until MLflow has everything, at most `patience` seconds; whether it has.

        Does not wait for what does not answer. A database that nobody locks is only slow.
        """
        began = time.monotonic()
        target = self.journal.size()
        with self._changed:
            attempts = self._attempts
            self._wanted = True
            self._changed.notify_all()
        while self._sent < target and self.is_alive():
            now = time.monotonic()
            failed = self.error and not self.busy() and self._attempts > attempts
            server = self.uri.startswith("http")
            slow = self._mlflow is None or not (server or self.busy())
            limit = START_SECONDS if slow and patience else patience
            silent = now - max(began, self._answered) > SILENCE_SECONDS
            hangs = self._mlflow and server and silent
            if failed or hangs or now - began > limit:
                break
            with self._changed:
                self._changed.wait(0.05)
        if patience and self._sent < target:
            self.error = self.error or "it does not answer"
            self.tell()
        return self._sent >= target

    def end(self, patience: float) -> bool:
        """As `flush`, then the thread ends."""
        done = self.flush(patience)
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self.join(patience if done else 0.1)
        return done and self._sent == self.journal.size()


class SystemMetrics:
    """Use of the machine, as MLflow measures it, if MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING is set."""

    def __init__(self) -> None:
        given = os.environ.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "").lower()
        self.on = given in ("true", "1")
        self.every = float(os.environ.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL") or 10.0)
        self._monitors: list[Any] = []
        self._next = 0.0
        self._step = 0

    def sample(self) -> list[list[Any]]:
        """Rows (name, value, milliseconds, step); empty if it is off or too early."""
        if not self.on or time.monotonic() < self._next:
            return []
        from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
        from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
        from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

        self._monitors = self._monitors or [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        self._next = time.monotonic() + self.every
        now, self._step = int(time.time() * 1000), self._step + 1
        rows = []
        for monitor in self._monitors:
            monitor.collect_metrics()
            for name, value in monitor.aggregate_metrics().items():
                rows.append([f"system/{name}", float(value), now, self._step])
            monitor.clear_metrics()
        return rows
