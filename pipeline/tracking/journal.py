"""What a stage logs, on disk first: nothing is lost when the tracking server or the stage dies.

One folder per run in `mlflow.db.unsent/`, at the root of the repository: a file of events, the
logged files, and how much of it MLflow has. It goes when MLflow has all of a finished run. That of
a run which was killed or failed stays, for its stage may be run again and then goes on in it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hamlet.artifacts import sha256_json
from hamlet.tracking.processes import GRACE_SECONDS, is_dead
from hamlet.tracking.store import repo_root

FOLDER = "mlflow.db.unsent"
PROCESS = "hamlet.process"
KEEP_DAYS = 14  # an unfinished run that nobody went on with


@dataclass
class Sent:
    """How far MLflow has a journal: `offset` bytes of its events, in which runs."""

    offset: int = 0
    run_id: str | None = None
    parent_id: str | None = None
    experiment_id: str | None = None
    buried: bool = False  # its process was killed, and MLflow knows


class Journal:
    """The events of one run. Whoever has its lock lets nobody else write or send it.

    Without a lock it is only read, for who has that.

    Attributes:
        header: of the run: key, stage, uri, experiment, params, tags, execution.
        resumed: whether an earlier process began it.
        logged: (metric, step) of what was logged before, which a resumed training logs again.
    """

    def __init__(self, folder: Path, lock: FileLock | None = None) -> None:
        self.folder, self._lock = folder, lock
        self._writing = threading.Lock()
        self._count = 0
        events = [event for event, _ in self.events()]
        self.resumed = bool(events)
        self.header: dict[str, Any] = dict(events[0]["open"]) if events else {}
        self.work = next((e["work"] for e in reversed(events) if "work" in e), None)
        self.ended = bool(events) and "end" in events[-1]
        self.finished = self.ended and events[-1]["end"][0] == "FINISHED"
        self.logged = {(m[0], m[3]) for e in events for m in e.get("metrics", ())}
        self.seconds = sum(e["end"][2] for e in events if "end" in e)

    @property
    def _file(self) -> Path:
        return self.folder / "events.jsonl"

    def begin(self, header: Mapping[str, Any]) -> None:
        """Begin the run, or go on with the one that an earlier process left."""
        if self.resumed:
            with suppress(FileNotFoundError), self._file.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)  # killed while it wrote a line
            self.write({"resume": dict(header)})
        else:
            self.header = {"key": uuid.uuid4().hex, **header}
            self.write({"open": self.header})

    def write(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(event) + "\n"
        with self._writing, self._file.open("a", encoding="utf-8") as file:
            file.write(line)

    def keep(self, path: Path) -> str:
        """Copy a file as it is now; returns where to, relative to the folder."""
        self._count += 1
        place = Path("files") / f"{os.getpid()}-{self._count}" / path.name
        (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, self.folder / place)
        return place.as_posix()

    def events(self, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
        """Events from a place in the file on, each with the place after it."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                with suppress(ValueError):  # a line cut by a full disk
                    yield json.loads(line), offset

    def size(self) -> int:
        """Bytes of events."""
        return self._file.stat().st_size if self._file.exists() else 0

    def sent(self) -> Sent:
        with suppress(OSError, ValueError, TypeError):
            return Sent(**json.loads((self.folder / "sent.json").read_text()))
        return Sent()

    def save(self, sent: Sent) -> None:
        temporary = self.folder / "sent.tmp"
        temporary.write_text(json.dumps(asdict(sent)))
        temporary.replace(self.folder / "sent.json")

    def close(self, remove: bool = False) -> None:
        """Let another process have it; `remove` once MLflow has all of it."""
        if remove:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock:
            self._lock.release()
        if remove:
            with suppress(OSError):
                self.folder.with_suffix(".lock").unlink()

    def put_aside(self) -> None:
        """Let nobody go on with this run: other work has its name now."""
        aside = self.folder.with_name(f"{self.folder.name}-{uuid.uuid4().hex[:8]}")
        with self._writing:
            self.folder.rename(aside)
        self.close()


def open_journal(stage: str, work: Any) -> Journal:
    """The journal of a stage's work: one that a dead process left unfinished, else a new one.

    If another execution has it, this one gets a new one; if whoever has it is about to let it go,
    this one waits for that: what a killed `dvc` left, or who sends what a killed stage logged.

    Args:
        work: what the run is about, as JSON; only a run of equal work is gone on with.
    """
    name = f"{stage}-{sha256_json(work)[:16]}"
    for root in _roots():
        with suppress(OSError):
            root.mkdir(exist_ok=True)
            for place in (name, f"{name}-{os.getpid()}-{uuid.uuid4().hex[:6]}"):
                journal = _locked(root / place)
                if journal is None:
                    journal = _awaited(root / place, stage)
                if journal is not None and journal.finished:  # it only waits to be sent
                    journal.put_aside()
                    journal = _locked(root / place)
                if journal is not None:
                    return journal
    raise AssertionError("a new name is free")


def _roots() -> Iterator[Path]:
    yield unsent()
    yield Path(tempfile.mkdtemp(prefix="hamlet-unsent-"))  # where the repository is read-only


def unsent() -> Path:
    """The folder of the journals."""
    return repo_root() / FOLDER


def _locked(folder: Path) -> Journal | None:
    lock = FileLock(folder.with_suffix(".lock"), thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    folder.mkdir(exist_ok=True)
    return Journal(folder, lock)


def _awaited(folder: Path, stage: str) -> Journal | None:
    """The journal that somebody is about to let go, once that is done; None if nobody is."""
    journal, began, told = None, time.monotonic(), False
    while journal is None and _let_go(folder) and time.monotonic() < began + 2 * GRACE_SECONDS:
        if not told and time.monotonic() > began + 1.0:
            told = True
            what = f"{stage}: waiting for what a killed dvc left running to end"
            print(what, file=sys.stderr, flush=True)
        time.sleep(0.1)
        journal = _locked(folder)
    return journal


def _let_go(folder: Path) -> bool:
    """Whether who has the journal of this folder will not have it for long."""
    try:
        lines = (folder / "events.jsonl").read_bytes().splitlines()
    except OSError:
        return False
    for line in reversed(lines):
        with suppress(ValueError):
            event = json.loads(line)
            if header := event.get("resume") or event.get("open"):
                return is_dead(header["tags"].get(PROCESS, "")) or is_dead(header["dvc"] or "")
    return False


def waiting() -> Iterator[Journal]:
    """The journals of processes that are gone and of which MLflow lacks something, oldest first.

    The caller closes each.
    """
    for folder in sorted(unsent().glob("*/"), key=_last_change):
        with suppress(OSError):
            journal = _locked(folder)
            if journal is None:
                continue
            sent = journal.sent()
            complete = sent.offset == journal.size() and (journal.ended or sent.buried)
            old = time.time() - _last_change(folder) > KEEP_DAYS * 86400
            if complete or not journal.header:
                journal.close(remove=not journal.header or old)
            else:
                yield journal


def _last_change(folder: Path) -> float:
    with suppress(OSError):
        return (folder / "events.jsonl").stat().st_mtime
    return 0.0
