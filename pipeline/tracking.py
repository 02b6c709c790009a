"""MLflow: one parent run per execution, one child run per stage, in the repository's SQLite file.

An *execution* is one `dvc repro`, one `dvc exp run` or one queued experiment: the stages it starts
find their common parent by a tag, under a file lock. Between two stages the parent's status is the
worst of its children, so an execution that stops early needs nobody to close it.

The tracking must never cost a training: when the database is locked or broken a run goes on,
keeps its numbers in memory, tries again, and says so in one line if they could not be stored.
"""

import getpass
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock
from pydantic import BaseModel

from hamlet.artifacts import write_json

# Set before anything imports mlflow: nothing is sent anywhere.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")

EXPERIMENT = "hamlet"
MODEL = "hamlet-agent"
PROVER_MODEL = "hamlet-prover"
CHAMPION = "champion"
RUNS_DIR = Path("artifacts/runs")
FLUSH_SECONDS = 5.0
RETRY_SECONDS = 30.0  # how long the end of a stage waits for a database that does not answer
_EXECUTION, _PROCESS, _STAGE = "hamlet.execution", "hamlet.process", "hamlet.stage"


# ------------------------------------------------------------------------------------------------
# Where things are


def repo_root() -> Path:
    """The root of the DVC repository, the real one even inside a queued experiment's copy."""
    given = os.environ.get("DVC_ROOT")
    start = Path(given) if given else Path.cwd()
    root = next((p for p in (start, *start.parents) if (p / ".dvc").is_dir()), start).absolute()
    parts = root.parts
    for i in range(len(parts) - 2):
        if parts[i : i + 3] == (".dvc", "tmp", "exps"):
            return Path(*parts[:i])
    return root


def tracking_uri() -> str:
    """MLFLOW_TRACKING_URI if set, else the SQLite file at the root of the repository."""
    given = os.environ.get("MLFLOW_TRACKING_URI")
    return given or f"sqlite:///{(repo_root() / 'mlflow.db').as_posix()}"


def tracking_lock() -> FileLock:
    """The lock under which runs and model versions are looked up and made."""
    return FileLock(repo_root() / "mlflow.db.lock", timeout=120)


def client() -> Any:
    """An `MlflowClient` of `tracking_uri()`. The first one makes the database (seconds)."""
    import logging

    # A locked database is retried here and reported in one line, not as MLflow's traceback.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri(), registry_uri=tracking_uri())


def experiment_id(mlflow_client: Any) -> str:
    """The id of the experiment; made, or restored if somebody deleted it. Call under the lock."""
    found = mlflow_client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        local = tracking_uri().startswith("sqlite:")
        place = (repo_root() / "mlartifacts").as_uri() if local else None
        return mlflow_client.create_experiment(EXPERIMENT, artifact_location=place)
    if found.lifecycle_stage == "deleted":
        mlflow_client.restore_experiment(found.experiment_id)
    return found.experiment_id


def champion(mlflow_client: Any, model: str = MODEL) -> Any:  # mlflow's ModelVersion
    """The registered version of a model that the champion alias points to, or None."""
    from mlflow.exceptions import MlflowException

    try:
        return mlflow_client.get_model_version_by_alias(model, CHAMPION)
    except MlflowException:
        return None


# ------------------------------------------------------------------------------------------------
# Which execution this is


def execution_key() -> str:
    """What all stages of one execution share.

    HAMLET_EXECUTION if set, else the identity of the nearest `dvc` process above this one, else
    of this process.
    """
    given = os.environ.get("HAMLET_EXECUTION")
    if given:
        return given
    for process in psutil.Process().parents():
        with suppress(psutil.Error):
            if is_dvc(process.cmdline()):
                return _identity(process)
    return _identity(psutil.Process())


def is_dvc(command: list[str]) -> bool:
    """Whether a command line is `dvc ...`, `python .../dvc ...` or `python -m dvc ...`."""
    if command[1:3] == ["-m", "dvc"]:
        return True
    return any(Path(word).stem == "dvc" and " " not in word for word in command[:2])


def _identity(process: psutil.Process) -> str:
    return f"{socket.gethostname()} {process.pid} {_started(process.pid)}"


def _started(pid: int) -> str:
    """When a process started: in clock ticks since boot where /proc tells (no clock moves that)."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    with suppress(psutil.Error):
        return f"{psutil.Process(pid).create_time():.0f}"
    return ""


def _is_dead(identity: str) -> bool:
    host, _, rest = identity.partition(" ")
    pid, _, started = rest.partition(" ")
    return host == socket.gethostname() and pid.isdigit() and _started(int(pid)) != started


# ------------------------------------------------------------------------------------------------
# One stage's run


@contextmanager
def stage_run(stage: str, params: BaseModel | None = None) -> Iterator["StageRun"]:
    """Track one stage: a child run under the parent of this execution.

    Logs the stage's section of `params` with the seed and the town, git and system info, and ends
    as FINISHED, FAILED (an exception) or KILLED (Ctrl-C). A stage that made its outputs leaves
    `artifacts/runs/<stage>.json`, from which a later execution that takes the stage from the cache
    links to the run that made it.
    """
    run = StageRun(stage, _stage_params(stage, params))
    run.flush()
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
    run.flush(patience=RETRY_SECONDS)
    record = {"run_id": run.run_id, "experiment_id": run.experiment_id, "stage": stage}
    write_json(RUNS_DIR / f"{stage}.json", record)
    run.finish("FINISHED")


def _is_interrupt(stop: BaseException) -> bool:
    return isinstance(stop, KeyboardInterrupt) or getattr(stop, "code", None) in (130, 143)


class StageRun:
    """A child run. Its methods return even when the database cannot be reached.

    Attributes:
        run_id, experiment_id: as in MLflow; None as long as the database could not be reached.
    """

    def __init__(self, stage: str, params: Mapping[str, str]) -> None:
        self.stage = stage
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self._parent_id: str | None = None
        self._client: Any = None
        self._params = dict(params)
        self._started = time.time()
        self._metrics: deque[tuple[str, float, int, int]] = deque()
        self._artifacts: deque[tuple[Path, str | None]] = deque()
        self._tags: dict[str, str] = {}
        self._next_flush = 0.0
        self._warned = False

    def metrics(self, values: Mapping[str, Any], step: int = 0) -> None:
        """Log numbers at a step. Stored in batches, every few seconds and at the end."""
        now = int(time.time() * 1000)
        for key, value in flatten(values).items():
            self._metrics.append((key, float(value), now, step))
        if time.monotonic() >= self._next_flush:
            self.flush()

    def artifact(self, path: str | Path, folder: str | None = None) -> None:
        """Log a file as it is now."""
        self._artifacts.append((Path(path), folder))
        self.flush()

    def tag(self, key: str, value: Any) -> None:
        """Set a tag."""
        self._tags[key] = str(value)

    def flush(self, patience: float = 0.0) -> bool:
        """Store everything that waits; True if it is stored. Tries for `patience` seconds."""
        done = self._attempt(self._store, patience)
        # A database that does not answer costs MLflow 20 s a call: do not ask it too often.
        self._next_flush = time.monotonic() + (FLUSH_SECONDS if done else 12 * FLUSH_SECONDS)
        return done

    def finish(self, status: str, reason: str = "") -> None:
        """Store what waits and end the run as FINISHED, FAILED or KILLED."""
        if reason:
            self.tag("hamlet.reason", " ".join(reason.split())[:500])

        def end() -> None:
            self._store()
            with tracking_lock():
                self._client.set_terminated(self.run_id, status)
                for path in sorted(RUNS_DIR.glob("*.json")):
                    made_by = json.loads(path.read_text(encoding="utf-8")).get("run_id")
                    tag = f"hamlet.run.{path.stem}"
                    self._client.set_tag(self._parent_id, tag, str(made_by))
                _settle_parent(self._client, self.experiment_id, self._parent_id)

        self._attempt(end, RETRY_SECONDS if status == "FINISHED" else RETRY_SECONDS / 4)

    def _attempt(self, action: Callable[[], None], patience: float) -> bool:
        until = time.monotonic() + patience
        while True:
            try:
                action()
            except Exception as error:  # whatever MLflow, SQLite or the disk say
                if time.monotonic() >= until:
                    self._warn(error)
                    return False
                time.sleep(0.5)
            else:
                return True

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            print(
                f"warning: {tracking_uri()} cannot be written ({reason}): {self.stage} goes on, "
                "its numbers are kept and tried again",
                file=sys.stderr,
                flush=True,
            )
        self._warned = True

    def _store(self) -> None:
        if self.run_id is None:
            self._open()
        from mlflow.entities import Metric, Param, RunTag

        if self._params:
            params = [Param(k, v) for k, v in self._params.items()]
            for i in range(0, len(params), 100):
                self._client.log_batch(self.run_id, params=params[i : i + 100])
            self._params = {}
        if self._tags:
            self._client.log_batch(self.run_id, tags=[RunTag(k, v) for k, v in self._tags.items()])
            self._tags = {}
        while self._metrics:
            batch = [self._metrics[i] for i in range(min(len(self._metrics), 1000))]
            self._client.log_batch(self.run_id, metrics=[Metric(*m) for m in batch])
            for _ in batch:
                self._metrics.popleft()
        while self._artifacts:
            path, folder = self._artifacts[0]
            if path.exists():
                self._client.log_artifact(self.run_id, str(path), folder)
            self._artifacts.popleft()

    def _open(self) -> None:
        with tracking_lock():
            self._client = self._client or client()
            experiment = experiment_id(self._client)
            _bury_the_dead(self._client, experiment)
            parent = find_parent(self._client, experiment) or _make_parent(self._client, experiment)
            tags = {
                **_system_tags(),
                "mlflow.parentRunId": parent,
                _PROCESS: _identity(psutil.Process()),
                _STAGE: self.stage,
            }
            start = int(self._started * 1000)
            child = self._client.create_run(experiment, start, tags, run_name=self.stage)
            self._client.update_run(parent, status="RUNNING")
        self.experiment_id, self._parent_id = experiment, parent
        self.run_id = child.info.run_id


# ------------------------------------------------------------------------------------------------
# Parents


def find_parent(mlflow_client: Any, experiment: str) -> str | None:
    """The run id of this execution's parent, or None."""
    where = f"tags.`{_EXECUTION}` = '{execution_key()}'"
    found = mlflow_client.search_runs([experiment], where, max_results=1)
    return found[0].info.run_id if found else None


def _make_parent(mlflow_client: Any, experiment: str) -> str:
    tags = {**_system_tags(), _EXECUTION: execution_key()}
    name = os.environ.get("DVC_EXP_NAME") or time.strftime("repro-%Y%m%d-%H%M%S")
    return mlflow_client.create_run(experiment, tags=tags, run_name=name).info.run_id


def _settle_parent(mlflow_client: Any, experiment: str | None, parent: str | None) -> None:
    """Give a parent the worst status among the last run of each of its stages."""
    where = f"tags.`mlflow.parentRunId` = '{parent}'"
    order = ["attributes.start_time ASC"]
    children = mlflow_client.search_runs([experiment], where, order_by=order)
    last = {child.data.tags.get(_STAGE): child.info.status for child in children}
    for status in ("RUNNING", "FAILED", "KILLED"):
        if status in last.values():
            break
    else:
        status = "FINISHED"
    if status == "RUNNING":
        mlflow_client.update_run(parent, status=status)
    else:
        mlflow_client.set_terminated(parent, status)


def _bury_the_dead(mlflow_client: Any, experiment: str) -> None:
    """End the runs of stages that were killed outright and could not do it themselves."""
    parents = set()
    where = f"attributes.status = 'RUNNING' AND tags.`{_PROCESS}` LIKE '% %'"
    for run in mlflow_client.search_runs([experiment], where):
        if _is_dead(run.data.tags[_PROCESS]):
            mlflow_client.set_terminated(run.info.run_id, "KILLED")
            parents.add(run.data.tags["mlflow.parentRunId"])
    for parent in parents:
        _settle_parent(mlflow_client, experiment, parent)


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


def _stage_params(stage: str, params: BaseModel | None) -> dict[str, str]:
    if params is None:
        return {}
    dumped = params.model_dump(mode="json")
    chosen = {key: dumped[key] for key in ("seed", "town", stage) if key in dumped}
    return {key: str(value)[:6000] for key, value in flatten(chosen).items()}


def _system_tags() -> dict[str, str]:
    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    tags = {
        "mlflow.user": _user(),
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


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container without a user name
        return "unknown"
