"""Under a `dvc` one process sends what all stages log; MLflow is imported in it alone."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tracked import ROOT, children_of, parent_of

from hamlet.tracking import identity, service

DVC = """
import os, subprocess, sys
env = {**os.environ, "DVC_ROOT": os.getcwd(), "DVC_STAGE": "work"}
for code in sys.argv[1:]:
    print("exit", subprocess.run([sys.executable, "-c", code], env=env).returncode, flush=True)
"""
STAGE = """
import os, psutil, signal, sys, time
from hamlet.tracking import stage_run
with stage_run("NAME") as run:
    for step in range(20):
        run.metrics({"x": step}, step)
    THEN
print("mlflow" in sys.modules, flush=True)
"""
ALL = [(step, float(step)) for step in range(20)]
# What a stage does after that.
BEREFT = """
    run.flush(60)
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "hamlet.tracking.service" in words and os.getcwd() in " ".join(words):
            process.kill()
            process.wait()
            print("killed", flush=True)
    run.metrics({"x": 20.0}, 20)
"""
KILLED = """
    run.flush(60)
    os.kill(os.getpid(), signal.SIGKILL)
"""
LONG = """
    run.flush(60)
    print("sent", flush=True)
    time.sleep(3)
"""
# Other commands of a dvc.
LOOK = """
import glob, os
for file in glob.glob("mlflow.db.unsent/service-*.json"):
    print(oct(os.stat(file).st_mode))
"""
BOTH = """
import subprocess, sys
for one in [subprocess.Popen([sys.executable, "-c", code]) for code in CODES]:
    one.wait()
"""


def work(name: str, then: str = "") -> str:
    return STAGE.replace("NAME", name).replace("    THEN", then.strip("\n"))


@pytest.fixture
def dvc(here, tmp_path):
    """Starts a `dvc` that runs these pieces of code, one after another."""
    script = tmp_path / "dvc"
    script.write_text(DVC)

    def start(*codes: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(script), *codes],
            cwd=here,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


def services(folder: Path) -> list[psutil.Process]:
    """The processes that send for somebody in this repository.

    What one of them starts looks like it for a moment, until it is another program.
    """
    found = {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = process.info["cmdline"] or []
        if "hamlet.tracking.service" in words and str(folder) in " ".join(words):
            found[process.pid] = process
    return [process for process in found.values() if process.info["ppid"] not in found]


def none_left(folder: Path) -> bool:
    until = time.monotonic() + 10
    while services(folder) and time.monotonic() < until:
        time.sleep(0.05)
    return not services(folder) and not list((folder / "mlflow.db.unsent").glob("service-*"))


def history(client, run) -> list[tuple[int, float]]:
    found = client.get_metric_history(run.info.run_id, "x")
    return sorted((metric.step, metric.value) for metric in found)


def logged(client):
    return children_of(client, parent_of(client, os.environ["HAMLET_EXECUTION"]))


def test_one_process_has_mlflow_and_the_stages_do_not(here, client, dvc):
    """A stage that ends does not end it, its `dvc` does; nobody else may read how to reach it."""
    out, err = dvc(work("first"), LOOK, work("second")).communicate(timeout=120)
    assert err == ""
    mode = oct(stat.S_IFREG | 0o600)
    assert out.split() == ["False", "exit", "0", mode, "exit", "0", "False", "exit", "0"]
    runs = logged(client)
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert [history(client, runs[name]) for name in ("first", "second")] == [ALL, ALL]
    assert none_left(here)


@pytest.mark.slow
def test_what_a_killed_one_left_is_cleared_away_and_nothing_else(here, dvc):
    folder = here / "mlflow.db.unsent"
    folder.mkdir(exist_ok=True)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    dead, living = f"{socket.gethostname()} {gone.pid} 1", identity()
    gone.wait()
    for name, of in (("dead", dead), ("living", living)):
        (folder / f"service-{name}.json").write_text(json.dumps({"dvc": of}))
        (folder / f"service-{name}.lock").touch()
    assert dvc(work("clearing")).wait(120) == 0
    left = {path.stem for path in folder.glob("service-*")}
    assert "service-dead" not in left
    for kind in ("json", "lock"):
        (folder / f"service-living.{kind}").unlink()
    assert none_left(here)


@pytest.mark.slow
def test_stages_at_the_same_time_share_it(here, client, dvc):
    both = BOTH.replace("CODES", repr([work("one"), work("two")]))
    process, most = dvc(both, "import time; time.sleep(1)"), 0
    while process.poll() is None:
        most = max(most, len(services(here)))
        time.sleep(0.05)
    assert process.communicate()[1] == ""
    assert most == 1
    runs = logged(client)
    assert [history(client, runs[name]) for name in ("one", "two")] == [ALL, ALL]
    assert none_left(here)


@pytest.mark.slow
def test_a_stage_sends_by_itself_when_it_was_killed(here, client, dvc):
    out, err = dvc(work("bereft", BEREFT), work("next")).communicate(timeout=120)
    assert err == ""
    assert out.split() == ["killed", "True", "exit", "0", "False", "exit", "0"]
    runs = logged(client)
    assert history(client, runs["bereft"]) == [*ALL, (20, 20.0)]
    assert history(client, runs["next"]) == ALL
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert none_left(here)


@pytest.mark.slow
def test_what_a_killed_stage_logged_is_sent_by_the_next_one(here, client, dvc):
    out, _ = dvc(work("killed", KILLED), work("after")).communicate(timeout=120)
    assert out.split() == ["exit", str(-signal.SIGKILL), "False", "exit", "0"]
    runs = logged(client)
    assert history(client, runs["killed"]) == ALL
    assert runs["killed"].info.status == "KILLED"
    assert runs["after"].info.status == "FINISHED"


def test_what_is_wrong_is_told_by_the_stage(here, dvc, tmp_path):
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"this is not a database" * 100)
    process = dvc(work("sturdy"), MLFLOW_TRACKING_URI=f"sqlite:///{broken}")
    out, err = process.communicate(timeout=120)
    assert out.split() == ["False", "exit", "0"]
    assert err.count("warning") == 1
    assert "the file is not a database" in err


@pytest.mark.slow
def test_it_ends_with_a_dvc_that_is_killed(here, dvc):
    process = dvc(work("long", LONG))
    assert process.stdout.readline() == "sent\n"
    (service,) = services(here)
    assert os.getsid(service.pid) == service.pid, "Ctrl-C reaches the stages, which go on logging"
    process.kill()
    process.wait()
    time.sleep(1.0)
    assert services(here), "a stage of it has yet to say how it went"
    assert none_left(here)


def test_garbage_is_looked_for_after_mlflow_is_imported_and_not_meanwhile(monkeypatch):
    def here() -> None:
        seen.append(gc.isenabled())
        if len(seen) == 2:
            raise OSError("MLflow is missing")

    seen: list[bool] = []
    monkeypatch.setattr(service, "Here", here)
    before = gc.get_freeze_count()
    service.import_mlflow()
    assert gc.get_freeze_count() > before
    assert gc.isenabled()
    with pytest.raises(OSError, match="missing"):
        service.import_mlflow()
    assert gc.isenabled()
    assert seen == [False, False]
