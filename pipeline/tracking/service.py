"""Who sends journals to MLflow: one process for all stages of a `dvc repro`, else the stage itself.

MLflow takes some three seconds to import, more than some stages work. So the first stage that a
`dvc` starts starts this too, the stages after it find it, and it ends with that `dvc`:

    python -m hamlet.tracking.service FILE DVC

FILE will say how it is reached, DVC is the `identity` of the process that it ends with.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from filelock import FileLock

from hamlet.artifacts import sha256_json
from hamlet.tracking import store
from hamlet.tracking.delivery import bury, deliver
from hamlet.tracking.journal import Journal, Sent, unsent, waiting
from hamlet.tracking.processes import GRACE_SECONDS, WATCH_SECONDS, dvc_identity, is_dead

Beat = Callable[[], None]
START_SECONDS = 30.0  # for Python to start on a busy machine; MLflow is imported after that


class Here:
    """Sends in this process. MLflow is imported and its client made at once.

    Raises:
        Exception: MLflow is missing, or its store cannot be used. So do the methods, where it
            cannot be written.
    """

    def __init__(self) -> None:
        self._client = store.open_client()

    def deliver(self, journal: Journal, beat: Beat) -> Sent:
        """Send what MLflow lacks of a journal. `beat` is called after all that was answered."""
        try:
            return deliver(journal, self._client, beat)
        except BaseException:
            store.forget_connections(self._client)
            raise

    def send_waiting(self, uri: str, beat: Beat) -> list[str]:
        """Send what earlier stages could not; returns what there is to tell of that."""
        told: list[str] = []
        send_waiting(self._client, uri, beat, told.append)
        return told


class There:
    """Has the process send that does so for a `dvc`; starts it if there is none.

    It does so in this process where that one cannot be reached.
    """

    def __init__(self, dvc: str) -> None:
        mlflow = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}
        name = sha256_json([dvc, mlflow])[:16]
        self._dvc, self._file = dvc, unsent() / f"service-{name}.json"
        self._connection: Connection | None = None
        self._here: Here | None = None
        self._ask("open", None, lambda: None)

    def deliver(self, journal: Journal, beat: Beat) -> Sent:
        return self._ask("deliver", journal.folder, beat)

    def send_waiting(self, uri: str, beat: Beat) -> list[str]:
        return self._ask("send_waiting", uri, beat)

    def _ask(self, what: str, about: Any, beat: Beat) -> Any:
        if self._here is None:
            try:
                return self._ask_there(what, about, beat)
            except (OSError, EOFError, TimeoutError):  # it was killed, or cannot be started
                self._here = Here()
        return _do(self._here, what, about, beat)

    def _ask_there(self, what: str, about: Any, beat: Beat) -> Any:
        self._connection = self._connection or self._connect()
        self._connection.send((what, about))
        while True:
            kind, value = self._connection.recv()
            if kind == "failed":
                raise RuntimeError(value)
            beat()
            if kind == "done":
                return value

    def _connect(self) -> Connection:
        self._file.parent.mkdir(exist_ok=True)
        with FileLock(self._file.with_suffix(".lock"), timeout=2 * START_SECONDS):
            if self._file.exists():
                with suppress(OSError):
                    return self._connected()
                self._file.unlink(missing_ok=True)  # it was killed
            command = [sys.executable, "-m", "hamlet.tracking.service", str(self._file), self._dvc]
            # Whoever reads what `dvc` says waits for the end of all that could still say something.
            nowhere = subprocess.DEVNULL
            process = subprocess.Popen(
                command, cwd=store.repo_root(), start_new_session=True,
                stdin=nowhere, stdout=nowhere, stderr=nowhere,
            )  # fmt: skip
            until = time.monotonic() + START_SECONDS
            while not self._file.exists():
                if process.poll() is not None or time.monotonic() > until:
                    process.kill()
                    raise TimeoutError
                time.sleep(0.02)
            return self._connected()

    def _connected(self) -> Connection:
        told = json.loads(self._file.read_text())
        return Client(told["address"], authkey=bytes.fromhex(told["key"]))


def _do(here: Here, what: str, about: Any, beat: Beat) -> Any:
    if what == "open":
        return None
    if what == "deliver":  # who asks has its lock
        return here.deliver(Journal(about), beat)
    return here.send_waiting(about, beat)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def reach() -> Here | There:
    """Who sends what this process logs."""
    dvc = dvc_identity()
    return There(dvc) if dvc else Here()


def send_waiting(
    mlflow_client: Any, uri: str, beat: Beat = lambda: None, tell: Callable[[str], None] = _say
) -> int:
    """Send what earlier stages could not, and end the runs of those that were killed."""
    sent = 0
    for journal in waiting():
        try:
            if journal.header["uri"] != uri:
                journal.close()
                continue
            behind = journal.size() - journal.sent().offset
            state = deliver(journal, mlflow_client, beat)
            bury(journal, state, mlflow_client)
            sent += behind > 0
        except Exception as error:  # whatever MLflow, SQLite or the disk say
            tell(
                f"warning: the run kept in {journal.folder} could not be sent "
                f"({store.in_plain_words(error)}): it is tried again with the next stage"
            )
            journal.close()
            continue
        journal.close(remove=_finished(journal))
    if sent:
        runs = "1 run that was" if sent == 1 else f"{sent} runs that were"
        tell(f"{runs} kept on disk went to {uri}")
    return sent


def _finished(journal: Journal) -> bool:
    """Whether a run ended well: nobody will go on with it."""
    last: dict[str, Any] = {}
    for event, _ in journal.events():
        last = event
    return "end" in last and last["end"][0] == "FINISHED"


# ------------------------------------------------------------------------------------------------
# The process


class Service:
    """Answers every stage in a thread of its own."""

    def __init__(self) -> None:
        self._here: Here | None = None
        self._making = threading.Lock()
        self._answering: list[threading.Thread] = []

    def serve(self, file: Path, dvc: str) -> None:
        """Until `dvc` is dead, and a while longer for a stage that has yet to end."""
        for other in file.parent.glob("service-*.json"):  # of those that were killed
            with suppress(OSError, ValueError):
                if is_dead(json.loads(other.read_text())["dvc"]):
                    other.unlink()
                    other.with_suffix(".lock").unlink(missing_ok=True)
        key = secrets.token_bytes(16)
        with Listener(authkey=key) as listener:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            temporary = file.with_suffix(".new")
            temporary.touch(0o600)
            temporary.write_text(
                json.dumps({"address": listener.address, "key": key.hex(), "dvc": dvc})
            )
            temporary.replace(file)
            while not is_dead(dvc):
                time.sleep(WATCH_SECONDS)
            until = time.monotonic() + GRACE_SECONDS
            while any(one.is_alive() for one in self._answering) and time.monotonic() < until:
                time.sleep(WATCH_SECONDS)
            file.unlink(missing_ok=True)
            file.with_suffix(".lock").unlink(missing_ok=True)

    def _accept(self, listener: Listener) -> None:
        while True:
            with suppress(OSError, EOFError):  # who asked was killed
                given = (listener.accept(),)
                self._answering.append(
                    threading.Thread(target=self._answer, args=given, daemon=True)
                )
                self._answering[-1].start()

    def _answer(self, connection: Connection) -> None:
        def beat() -> None:
            connection.send(("beat", None))

        with suppress(OSError, EOFError), connection:  # who asks ends, or is killed
            while True:
                what, about = connection.recv()
                try:
                    with self._making:
                        self._here = self._here or import_mlflow()
                    done = _do(self._here, what, about, beat)
                except Exception as error:  # whatever MLflow, SQLite or the disk say
                    connection.send(("failed", store.in_plain_words(error)))
                else:
                    connection.send(("done", done))


def import_mlflow() -> Here:
    """MLflow is no garbage: to look for some while it is imported takes a fifth longer."""
    gc.disable()
    try:
        return Here()
    finally:
        gc.freeze()
        gc.enable()


def main() -> None:
    Service().serve(Path(sys.argv[1]), sys.argv[2])


if __name__ == "__main__":
    main()
