"""What the tests of tracking ask MLflow, and how they start other processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlflow.entities import ViewType

from hamlet import tracking
from hamlet.tracking import store

ROOT = Path(__file__).parents[2]


def runs(client, where="", view=ViewType.ACTIVE_ONLY):
    experiment = client.get_experiment_by_name(tracking.EXPERIMENT)
    return client.search_runs([experiment.experiment_id], where, view, max_results=1000)


def parent_of(client, key):
    (parent,) = runs(client, f"tags.`hamlet.execution` = '{key}'")
    return parent


def children_of(client, parent):
    found = runs(client, f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    return {run.data.tags["hamlet.stage"]: run for run in found}


def python(code, cwd, **env):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


STAGE = """
import sys, time
from hamlet.tracking import stage_run
with stage_run(sys.argv[1] if len(sys.argv) > 1 else "work") as run:
    run.flush(60)
    print(run.run_id, flush=True)
    for i in range(20):
        run.metrics({"i": i}, step=i)
        run.flush()
        time.sleep(0.01)
    PAUSE
"""


@contextmanager
def mlflow_server(port: int, folder: Path) -> Iterator[None]:
    """A real `mlflow server`, until the block ends."""
    folder.mkdir()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder / 'server.db'}"]
    command += ["--artifacts-destination", str(folder / "files")]
    # Its eight processes for jobs, which nobody gives it, take longer to start than it does.
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until = time.monotonic() + 120
        while store.unusable(f"http://127.0.0.1:{port}"):
            assert process.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.2)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
