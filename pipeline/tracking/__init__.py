"""MLflow: one parent run per execution, one child run per stage.

An *execution* is one `dvc repro`, one `dvc exp run` or one queued experiment: the stages it starts
find their common parent by a tag, under a file lock. Between two stages the parent's status is the
worst of its children, so an execution that stops early needs nobody to close it.

- `stage_run`: what a stage logs with;
- `journal`, `sender`, `service`, `delivery`: from there to disk, to a thread, to a process that has
  MLflow, to MLflow;
- `processes`: which `dvc` started this process, and whether it still lives;
- `store`: where the database, the artifacts and the registry are.
"""

from hamlet.tracking.delivery import EXECUTION, find_run
from hamlet.tracking.journal import unsent
from hamlet.tracking.processes import execution_key, identity, is_dead, is_dvc
from hamlet.tracking.service import send_waiting
from hamlet.tracking.stage_run import RUNS_DIR, StageRun, flatten, stage_run, user
from hamlet.tracking.store import (
    CHAMPION,
    EXPERIMENT,
    MODEL,
    PROVER_MODEL,
    champion,
    client,
    database,
    experiment_id,
    experiment_name,
    file_of,
    log_file,
    no_registry,
    path_of,
    read_file,
    registry_uri,
    repo_root,
    tracking_lock,
    tracking_uri,
)

__all__ = [
    "CHAMPION",
    "EXECUTION",
    "EXPERIMENT",
    "MODEL",
    "PROVER_MODEL",
    "RUNS_DIR",
    "StageRun",
    "champion",
    "client",
    "database",
    "execution_key",
    "experiment_id",
    "experiment_name",
    "file_of",
    "find_run",
    "flatten",
    "identity",
    "is_dead",
    "is_dvc",
    "log_file",
    "no_registry",
    "path_of",
    "read_file",
    "registry_uri",
    "repo_root",
    "send_waiting",
    "stage_run",
    "tracking_lock",
    "tracking_uri",
    "unsent",
    "user",
]
