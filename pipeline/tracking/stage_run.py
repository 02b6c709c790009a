"""One stage's run: what a stage logs while it works.

The tracking never costs a training: everything goes to a journal on disk, a thread sends it to
MLflow, and what cannot be sent waits there for a later stage, said in one line.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import yaml
from pydantic import BaseModel

from hamlet.artifacts import parse_yaml, write_json
from hamlet.tracking import sender
from hamlet.tracking.delivery import EXECUTION
from hamlet.tracking.journal import PROCESS, Journal, open_journal
from hamlet.tracking.processes import dvc_identity, execution_key, identity
from hamlet.tracking.store import experiment_name, tracking_uri

RUNS_DIR = Path("artifacts/runs")


@contextmanager
def stage_run(stage: str, params: BaseModel | None = None) -> Iterator[StageRun]:
    """Track one stage: a child run under the parent of this execution.

    Logs the sections of `params` that dvc.yaml names for the stage, the data it is made from, git
    and system info, and ends as FINISHED, FAILED (an exception) or KILLED (Ctrl-C). If the same
    stage with the same params was killed or failed before, its run goes on. A stage that made its
    outputs leaves `artifacts/runs/<stage>.json`, from which a later execution that takes the stage
    from the cache links to the run that made it.
    """
    run = StageRun(stage, params)
    try:
        yield run
    except (KeyboardInterrupt, SystemExit) as stop:
        if getattr(stop, "code", None) == 0:  # a profile: done, with nothing made
            run.finish("FINISHED")
        else:
            run.finish("KILLED" if _is_interrupt(stop) else "FAILED", "interrupted")
        raise
    except BaseException as error:
        run.finish("FAILED", f"{type(error).__name__}: {error}")
        raise
    run.flush(sender.RETRY_SECONDS)
    record = {
        "run_id": run.run_id, "experiment_id": run.experiment_id, "key": run.key, "stage": stage
    }  # fmt: skip
    write_json(RUNS_DIR / f"{stage}.json", record)
    run.finish("FINISHED")


def _is_interrupt(stop: BaseException) -> bool:
    return isinstance(stop, KeyboardInterrupt) or getattr(stop, "code", None) in (130, 143)


class StageRun:
    """A child run. Its methods return at once, whatever becomes of the tracking server.

    Attributes:
        key: a name of the run that is known before MLflow gives it an id.
    """

    def __init__(self, stage: str, params: BaseModel | None) -> None:
        self.stage = stage
        self._work = None
        self._began = time.time()
        self._header = _header(stage, params, int(self._began * 1000))
        uri = self._header["uri"]
        # Only a run of this work goes on; a profile does other work than the stage.
        self._name = [
            stage, self._header["params"], uri, self._header["experiment"],
            os.environ.get("HAMLET_PROFILE"),
        ]  # fmt: skip
        self._begin(open_journal(stage, self._name))

    def _begin(self, journal: Journal) -> None:
        self._journal = journal
        journal.begin(self._header)
        self.key = journal.header["key"]
        self._sender = sender.Sender(journal, self._header["uri"])
        self._sender.start()

    @property
    def run_id(self) -> str | None:
        """As in MLflow; None as long as it could not be reached."""
        return self._sender.state.run_id

    @property
    def parent_id(self) -> str | None:
        """The id of the execution's run; None as long as MLflow could not be reached."""
        return self._sender.state.parent_id

    @property
    def experiment_id(self) -> str | None:
        """As in MLflow; None as long as it could not be reached."""
        return self._sender.state.experiment_id

    def metrics(self, values: Mapping[str, Any], step: int = 0) -> None:
        """Log numbers at a step. Sent in batches, every few seconds and at the end."""
        now = int(time.time() * 1000)
        rows = [[key, float(value), now, step] for key, value in flatten(values).items()]
        logged = self._journal.logged  # by the process that was killed; the same, as it resumed
        if rows := [row for row in rows if (row[0], step) not in logged]:
            self._journal.write({"metrics": rows})

    def artifact(self, path: str | Path, folder: str | None = None) -> None:
        """Log a file as it is now."""
        if Path(path).exists():
            self._journal.write({"file": [self._journal.keep(Path(path)), folder]})
            self._sender.wake()

    def tag(self, key: str, value: Any) -> None:
        """Set a tag."""
        self._journal.write({"tags": {key: str(value)}})

    def execution(self, values: Mapping[str, float], tags: Mapping[str, Any] | None = None) -> None:
        """Facts of the whole execution, for its own row in MLflow: numbers, and tags."""
        now = int(time.time() * 1000)
        rows = [[key, float(value), now, 0] for key, value in flatten(values).items()]
        named = {key: str(value) for key, value in (tags or {}).items()}
        self._journal.write({"execution": {"metrics": rows, "tags": named}})

    def work(self, name: str) -> None:
        """Say by a name which work this is, before anything is logged.

        A run that an earlier process began is gone on with if its work has the same name.
        """
        before = self._journal.work
        if self._journal.resumed and before is not None and before != name:
            self._sender.end(0.0)
            self._journal.put_aside()
            self._begin(open_journal(self.stage, self._name))
        self._journal.work = name
        self._journal.write({"work": name})

    def flush(self, patience: float = 0.0) -> bool:
        """Wait until MLflow has everything, at most `patience` seconds; whether it has.

        Does not wait for a server that does not answer.
        """
        return self._sender.flush(patience)

    def finish(self, status: str, reason: str = "") -> None:
        """End the run as FINISHED, FAILED or KILLED."""
        if reason:
            self.tag("hamlet.reason", " ".join(reason.split())[:500])
        now = time.time()
        seconds = now - self._began + self._journal.seconds
        stamp = int(now * 1000)
        self._journal.write({"metrics": [["seconds", seconds, stamp, 0]]})
        self._journal.write({"links": _records()})
        self._journal.write({"end": [status, stamp, now - self._began]})
        patience = sender.RETRY_SECONDS
        done = self._sender.end(patience if status == "FINISHED" else patience / 4)
        self._journal.close(remove=done and status == "FINISHED")


# ------------------------------------------------------------------------------------------------
# What is logged


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _header(stage: str, params: BaseModel | None, started: int) -> dict[str, Any]:
    dumped = params.model_dump(mode="json") if params is not None else {}
    read = _read_yaml("dvc.yaml").get("stages", {}).get(stage, {})
    sections = _sections(read, stage)
    facts = _system_tags()
    return {
        "stage": stage,
        "uri": tracking_uri(),
        "experiment": experiment_name(),
        "started": started,
        "params": _texts({key: dumped[key] for key in sections if key in dumped}),
        "inputs": _inputs(read),
        "tags": {**facts, PROCESS: identity()},
        "dvc": dvc_identity(),
        "execution": {
            "key": execution_key(),
            "name": os.environ.get("DVC_EXP_NAME") or time.strftime("repro-%Y%m%d-%H%M%S"),
            "started": started,
            "params": _texts(dumped),
            "tags": facts,
        },
    }


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value)[:6000] for key, value in flatten(values).items()}


def _sections(read: Mapping[str, Any], stage: str) -> list[str]:
    """The sections of the parameters that a stage depends on, by dvc.yaml."""
    named = []
    for entry in read.get("params") or []:
        named += [entry] if isinstance(entry, str) else [k for keys in entry.values() for k in keys]
    sections = [key.removeprefix("preset.").split(".")[0] for key in named]
    return list(dict.fromkeys(sections)) or ["seed", "town", stage]


def _inputs(read: Mapping[str, Any]) -> list[dict[str, str]]:
    """The data and the files that a stage is made from, with the hash that DVC knows them by."""
    hashes = {
        out["path"]: out.get("md5", "")
        for stage in (_read_yaml("dvc.lock").get("stages") or {}).values()
        for out in stage.get("outs") or []
    }
    return [
        {
            "name": path,
            "digest": hashes[path],
            "source_type": "dvc",
            "source": json.dumps({"path": path, "md5": hashes[path]}),
            "context": "training" if hashes[path].endswith(".dir") else "upstream",
        }
        for path in read.get("deps") or []
        if isinstance(path, str) and hashes.get(path) and not path.endswith(".json")
    ]


def _read_yaml(path: str) -> dict[str, Any]:
    with suppress(OSError, yaml.YAMLError):
        read = parse_yaml(Path(path).read_text(encoding="utf-8"))
        if isinstance(read, dict):
            return read
    return {}


def _records() -> dict[str, Any]:
    found = {}
    for path in sorted(RUNS_DIR.glob("*.json")):
        with suppress(OSError, ValueError):
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _system_tags() -> dict[str, str]:
    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    tags = {
        "mlflow.user": user(),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": Path(sys.argv[0]).name,
        "system.python": platform.python_version(),
        "system.platform": platform.platform(),
        "system.cpu": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
        "system.memory_gb": f"{psutil.virtual_memory().total / 2**30:.0f}",
    }
    for package in ("torch", "tensordict", "onnx", "onnxruntime", "onnxruntime-gpu", "dvc"):
        with suppress(PackageNotFoundError):
            tags[f"version.{package}"] = version(package)
    with suppress(OSError):
        if commit := git("rev-parse", "HEAD"):
            tags["mlflow.source.git.commit"] = commit
            tags["mlflow.source.git.branch"] = git("rev-parse", "--abbrev-ref", "HEAD")
            tags["git.dirty"] = str(bool(git("status", "--porcelain", "-uno"))).lower()
    for variable in ("DVC_EXP_NAME", "DVC_EXP_BASELINE_REV"):
        if value := os.environ.get(variable):
            tags[variable.lower()] = value
    return tags


def user() -> str:
    """The name of who runs this."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without a user name
        return "unknown"


__all__ = ["EXECUTION", "StageRun", "flatten", "stage_run", "user"]
