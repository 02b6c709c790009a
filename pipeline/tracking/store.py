"""Where MLflow's database, its artifacts and its registry are, and how they are reached.

The database is `mlflow.db` at the root of the repository, or what MLFLOW_TRACKING_URI names. Beside
it lie the artifacts, in `mlartifacts/`, inside the repository under names relative to its root: a
moved or copied checkout takes its own along and never touches the old one's.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from filelock import FileLock

from hamlet.artifacts import HamletError, in_one_line

# Set before anything imports mlflow: nothing is sent anywhere, and nothing is tried for minutes.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}.items():
    os.environ.setdefault(_name, _value)

EXPERIMENT = "hamlet"
MODEL = "hamlet-agent"
PROVER_MODEL = "hamlet-prover"
CHAMPION = "champion"
PLACE = "mlartifacts"
HEALTH_SECONDS = 3.0
# Of MLflow's tables, the columns that say where files are.
_PLACES = {
    "experiments": "artifact_location",
    "runs": "artifact_uri",
    "logged_models": "artifact_location",
    "model_versions": "storage_location",
}


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
    """MLFLOW_TRACKING_URI if set, else the SQLite file at the root of the repository.

    A relative path is relative to that root, wherever the stage runs.
    """
    given = os.environ.get("MLFLOW_TRACKING_URI")
    return _absolute(given) if given else f"sqlite:///{(repo_root() / 'mlflow.db').as_posix()}"


def registry_uri() -> str:
    """MLFLOW_REGISTRY_URI if set, else `tracking_uri()`."""
    given = os.environ.get("MLFLOW_REGISTRY_URI")
    return _absolute(given) if given else tracking_uri()


def _absolute(uri: str) -> str:
    if uri.startswith("sqlite:///"):
        path = uri.removeprefix("sqlite:///")
        if path and not path.startswith(":memory:") and not Path(path).is_absolute():
            return f"sqlite:///{(repo_root() / path).as_posix()}"
    elif ":" not in uri and uri != "databricks":  # a folder
        return (repo_root() / uri).as_posix()
    elif uri.startswith("file:") and not uri.startswith("file:/"):
        return (repo_root() / uri.removeprefix("file:")).as_uri()
    return uri


def database() -> Path | None:
    """The file of an SQLite `tracking_uri()`, else None."""
    uri = tracking_uri()
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///").partition("?")[0])


def experiment_name() -> str:
    """MLFLOW_EXPERIMENT_NAME if set, else "hamlet"."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT


def tracking_lock() -> FileLock:
    """The lock under which runs and model versions are looked up and made."""
    return FileLock(repo_root() / "mlflow.db.lock", timeout=120)


def client() -> Any:
    """An `MlflowClient` of `tracking_uri()`. The first one makes the database (seconds).

    Raises:
        HamletError: a server does not answer, or a database cannot be written.
    """
    if reason := unusable(tracking_uri()) or unusable(registry_uri()):
        raise no_registry(reason)
    return open_client()


def open_client() -> Any:
    # A locked database is retried here and reported in one line, not as MLflow's traceback.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri(), registry_uri=registry_uri())


def forget_connections(mlflow_client: Any) -> None:
    """Let an SQLite store open its file again: another may stand there now."""
    with suppress(AttributeError):  # a server's has none
        mlflow_client._tracking_client.store.engine.dispose()


def unusable(uri: str) -> str:
    """Why a store cannot be used now, in plain words and within seconds; empty if it can."""
    if uri.startswith(("http://", "https://")):
        import requests

        try:
            requests.get(uri.rstrip("/") + "/health", timeout=HEALTH_SECONDS)
        except requests.Timeout:
            return f"it does not answer within {HEALTH_SECONDS:.0f} s"
        except requests.RequestException:
            return "it does not answer"
    elif uri.startswith("sqlite:///"):
        path = Path(uri.removeprefix("sqlite:///").partition("?")[0])
        if path.exists() and not os.access(path, os.W_OK):
            return f"{path.name} is read-only for this user"
        if path.parent.is_dir() and not os.access(path.parent, os.W_OK):
            return f"the folder {path.parent} is read-only for this user"
    return ""


def in_plain_words(error: Exception) -> str:
    """One line on what MLflow, SQLite, SQLAlchemy or the network said."""
    text = str(error)
    for said, plain in (
        ("database is locked", "another process keeps it locked"),
        ("readonly database", "it is read-only, or was moved away"),
        ("unable to open database", "the file cannot be opened"),
        ("not a database", "the file is not a database"),
        ("disk is full", "the disk is full"),
        ("Max retries exceeded", "it does not answer"),
        ("Connection refused", "it does not answer"),
        ("Out-of-date database schema", "an older MLflow made it: `mlflow db upgrade` renews it"),
        ("No module named 'mlflow", "MLflow is not installed"),
        ("mlflow halted", "MLflow is not installed"),
    ):
        if said in text:
            return plain
    return in_one_line(error)


def no_registry(error: Exception | str) -> HamletError:
    """The error that the store or the registry cannot be used."""
    if isinstance(error, HamletError):
        return error
    reason = error if isinstance(error, str) else in_plain_words(error)
    if registry_uri().startswith("http"):
        return HamletError(
            f"the registry {registry_uri()} cannot be used ({reason})",
            "start the server, or set MLFLOW_TRACKING_URI, and run `dvc repro register`",
        )
    fix = "free or mend the database (an old one: `mlflow db upgrade`), or move it away and rerun"
    return HamletError(f"the registry {registry_uri()} cannot be used ({reason})", fix)


# ------------------------------------------------------------------------------------------------
# The experiment and its files


def experiment_id(mlflow_client: Any) -> str:
    """The id of the experiment; made, or restored if somebody deleted it. Call under the lock."""
    if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return given
    found = mlflow_client.get_experiment_by_name(experiment_name())
    file = database()
    if found is None:
        place = (file.parent / PLACE).as_uri() if file else None
        mlflow_client.create_experiment(experiment_name(), artifact_location=place)
        found = mlflow_client.get_experiment_by_name(experiment_name())
    if found.lifecycle_stage == "deleted":
        mlflow_client.restore_experiment(found.experiment_id)
    if file and repo_root() in file.parents:
        _make_relative(file, found.artifact_location)
    return found.experiment_id


def _make_relative(file: Path, location: str) -> None:
    """Name the artifacts beside a database of the repository relative to the repository's root.

    MLflow makes every path absolute when an experiment is made, but takes a relative one as it is.
    """
    place = (file.parent / PLACE).relative_to(repo_root()).as_posix()
    parsed = urlparse(location)
    path = Path(unquote(parsed.path))
    if parsed.scheme not in ("", "file") or not path.is_absolute() or path.name != PLACE:
        return
    with closing(sqlite3.connect(file, timeout=20)) as connection, connection:
        for table, column in _PLACES.items():
            with suppress(sqlite3.OperationalError):  # MLflow before 3 has no logged models
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                    f"WHERE {column} = ? OR {column} LIKE ? ESCAPE '!'",
                    (place, len(location) + 1, location, _like(location) + "/%"),
                )


def _like(text: str) -> str:
    for special in "!%_":
        text = text.replace(special, "!" + special)
    return text


def local_place(uri: str) -> Path | None:
    """The path of an artifact's URI, None where it is not on this machine."""
    parsed = urlparse(uri)
    if parsed.scheme not in ("", "file"):
        return None
    return repo_root() / unquote(parsed.path)


def log_file(mlflow_client: Any, run_id: str, path: Path, folder: str | None = None) -> None:
    """Log a file to a run, wherever this process stands."""
    uri = mlflow_client.get_run(run_id).info.artifact_uri
    place = local_place(uri)
    if place is None or Path(urlparse(uri).path).is_absolute():
        mlflow_client.log_artifact(run_id, str(path), folder)
        return
    place = place / (folder or "")
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place / path.name)


def read_file(mlflow_client: Any, run_id: str, name: str) -> str | None:
    """The text of a run's artifact, None if there is none."""
    place = local_place(mlflow_client.get_run(run_id).info.artifact_uri)
    if place is not None:
        with suppress(OSError):
            return (place / name).read_text(encoding="utf-8")
        return None
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory() as folder, suppress(MlflowException, OSError):
        return Path(mlflow_client.download_artifacts(run_id, name, folder)).read_text("utf-8")
    return None


# ------------------------------------------------------------------------------------------------
# The registry


def champion(mlflow_client: Any, model: str = MODEL) -> Any:  # mlflow's ModelVersion
    """The registered version of a model that the champion alias points to, or None."""
    from mlflow.exceptions import MlflowException

    try:
        return mlflow_client.get_model_version_by_alias(model, CHAMPION)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def path_of(mlflow_client: Any, model_version: Any) -> Path | None:
    """Where a version's ONNX file is; None where it is not on this machine."""
    kind, _, model_id = model_version.source.partition(":/")
    if kind != "models":
        return None
    from mlflow.exceptions import MlflowException

    try:
        place = local_place(mlflow_client.get_logged_model(model_id).artifact_location)
    except MlflowException:  # the registry is not the tracking server's own
        return None
    return place and place / "model.onnx"


def file_of(mlflow_client: Any, model_version: Any) -> bool | None:
    """Whether a version's ONNX file exists; None where it is not on this machine."""
    path = path_of(mlflow_client, model_version)
    return None if path is None else path.is_file()
