"""Runs in a real SQLite store, made by real processes, some of which are killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import yaml
from tracked import ROOT, STAGE, children_of, parent_of, python

from hamlet import tracking
from hamlet.tracking import flatten, stage_run
from hamlet.tracking.journal import PROCESS, open_journal


def test_two_stages_share_a_parent_and_everything_is_logged(here, client, params, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)  # must not matter
    (here / "note.txt").write_text("hello")
    with stage_run("collect", params) as first:
        first.metrics({"a": {"b": 1}}, step=3)
    with stage_run("perception", params) as run:
        for step in range(2500):
            run.metrics({"loss": 1 / (step + 1)}, step=step)
        run.artifact("note.txt")
        run.tag("colour", "blue")
        assert run.flush(30)
        child_id = run.run_id
        assert client.get_run(child_id).info.status == "RUNNING"
        parent = parent_of(client, os.environ["HAMLET_EXECUTION"])
        assert parent.info.status == "RUNNING"
    parent = parent_of(client, os.environ["HAMLET_EXECUTION"])
    assert parent.info.status == "FINISHED"
    children = children_of(client, parent)
    assert set(children) == {"collect", "perception"}
    assert children["collect"].data.metrics.pop("seconds") > 0
    assert children["collect"].data.metrics == {"a.b": 1.0}
    child = children["perception"]
    assert child.info.run_id == child_id
    assert child.info.status == "FINISHED"
    history = client.get_metric_history(child_id, "loss")
    assert {(m.step, round(m.value * (m.step + 1), 6)) for m in history} == {
        (step, 1.0) for step in range(2500)
    }
    given = yaml.safe_load((ROOT / "params.yaml").read_text())
    logged = child.data.params
    assert logged["seed"] == str(given["seed"])
    assert {k.removeprefix("perception.") for k in logged if k.startswith("perception.")} >= {
        key for key, value in given["perception"].items() if not isinstance(value, dict)
    }
    assert not any(key.startswith("social.") for key in logged)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True
    )
    assert child.data.tags["mlflow.source.git.commit"] == head.stdout.strip()
    assert child.data.tags["colour"] == "blue"
    assert child.data.tags["system.python"]
    assert [f.path for f in client.list_artifacts(child_id)] == ["note.txt"]
    assert (here / "mlartifacts").is_dir()
    record = json.loads((here / "artifacts/runs/perception.json").read_text())
    assert record == {
        "experiment_id": child.info.experiment_id,
        "key": child.data.tags["hamlet.key"],
        "run_id": child_id,
        "stage": "perception",
    }
    # The parent links to the run behind each result, also of stages it did not run.
    assert parent.data.tags["hamlet.run.perception"] == child_id
    monkeypatch.setenv("HAMLET_EXECUTION", "a later execution, perception from the cache")
    with stage_run("social", params):
        pass
    later = parent_of(client, os.environ["HAMLET_EXECUTION"])
    assert set(children_of(client, later)) == {"social"}
    assert later.data.tags["hamlet.run.perception"] == child_id


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("bad\nthing"), "FAILED"), (KeyboardInterrupt(), "KILLED")],
)
def test_failure_and_interrupt_reach_child_and_parent(here, client, monkeypatch, error, status):
    monkeypatch.setenv("HAMLET_EXECUTION", f"ends {status}")
    (here / "artifacts/runs/policy.json").unlink(missing_ok=True)

    def work():
        with stage_run("policy") as run:
            run.metrics({"x": 1})
            raise error

    with pytest.raises(type(error)):
        work()
    parent = parent_of(client, f"ends {status}")
    child = children_of(client, parent)["policy"]
    assert child.info.status == parent.info.status == status
    assert child.data.metrics["x"] == 1.0
    assert child.data.tags["hamlet.reason"] in ("ValueError: bad thing", "interrupted")
    assert not (here / "artifacts/runs/policy.json").exists()
    # The stage run again by the same execution, well this time, mends the parent.
    with stage_run("policy"):
        pass
    assert parent_of(client, f"ends {status}").info.status == "FINISHED"
    again = children_of(client, parent)["policy"]
    assert again.info.run_id == child.info.run_id, "the same work goes on in the same run"
    assert "hamlet.reason" not in again.data.tags


def test_a_killed_process_is_buried_by_the_next_run(here, client):
    process = python(STAGE.replace("PAUSE", "time.sleep(60)"), here, HAMLET_EXECUTION="killed")
    run_id = process.stdout.readline().strip()
    assert client.get_run(run_id).info.status == "RUNNING"
    process.send_signal(signal.SIGKILL)
    process.wait()
    with stage_run("later"):
        pass
    assert client.get_run(run_id).info.status == "KILLED"
    assert parent_of(client, "killed").info.status == "KILLED"


def test_a_killed_stage_that_runs_again_goes_on_in_its_run(here, client, monkeypatch):
    """Under another execution, as `dvc repro` after a kill: one run, each number once."""
    process = python(
        STAGE.replace("PAUSE", "run.flush(30); print('sent', flush=True); time.sleep(60)"),
        here,
        HAMLET_EXECUTION="cut off",
    )
    run_id = process.stdout.readline().strip()
    assert process.stdout.readline() == "sent\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    monkeypatch.setenv("HAMLET_EXECUTION", "goes on")
    with stage_run("work") as run:
        for step in range(15, 30):
            run.metrics({"i": step}, step=step)
    assert run.run_id == run_id
    assert client.get_run(run_id).info.status == "FINISHED"
    steps = [m.step for m in client.get_metric_history(run_id, "i")]
    assert sorted(steps) == list(range(30))
    assert set(children_of(client, parent_of(client, "goes on"))) == {"work"}
    assert children_of(client, parent_of(client, "goes on"))["work"].info.run_id == run_id


@pytest.mark.parametrize("ends", [None, "dvc", "process", "who began it"])
def test_a_run_that_is_about_to_be_let_go_is_waited_for(here, ends):
    """What a killed dvc left is ending, or somebody sends what a killed stage logged: not a second
    run of one training. A living execution is not waited for."""
    gone = subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.PIPE)
    living, dead = tracking.identity(), tracking.identity(gone.pid)
    gone.communicate()

    def header(who):
        process, dvc = (dead if who == name else living for name in ("process", "dvc"))
        return {"uri": "", "tags": {PROCESS: process}, "dvc": dvc}

    waits = ends in ("dvc", "process")
    if ends == "who began it":  # long ago; who goes on with it lives
        begun = open_journal("waited for", ends)
        begun.begin(header("process"))
        begun.close()
    held = open_journal("waited for", ends)
    held.begin(header(ends))
    letting_go = threading.Timer(0.5, held.close)
    letting_go.start()
    began = time.monotonic()
    found = open_journal("waited for", ends)
    waited = time.monotonic() - began
    assert (found.folder == held.folder) == found.resumed == waits
    assert (waited >= 0.4) == waits
    letting_go.join()
    found.close(remove=True)
    open_journal("waited for", ends).close(remove=True)


ORPHAN = """
import sys, time
from hamlet.tracking import identity
print(identity(), flush=True)
time.sleep(float(sys.argv[1]))
from hamlet.tracking.processes import end_with_parents
end_with_parents()
time.sleep(60)
"""


@pytest.mark.parametrize("start_up", [0.0, 3.0])
def test_what_a_killed_dvc_started_ends_too(tmp_path, monkeypatch, start_up):
    """Also if dvc is gone before it could look who that is."""
    monkeypatch.delenv("HAMLET_EXECUTION", raising=False)
    (tmp_path / "work.py").write_text(ORPHAN)
    dvc = tmp_path / "dvc"
    dvc.write_text(
        "import os, subprocess, sys\n"
        "given = {**os.environ, 'DVC_ROOT': os.getcwd(), 'DVC_STAGE': 'work'}\n"
        f"subprocess.run([sys.executable, 'work.py', '{start_up}'], env=given)\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(dvc)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    orphan = process.stdout.readline().strip()
    time.sleep(1.0)
    assert not tracking.is_dead(orphan), "while dvc lives it works"
    process.kill()
    process.wait()
    until = time.monotonic() + 15
    while not tracking.is_dead(orphan):
        assert time.monotonic() < until, "it works on"
        time.sleep(0.05)
    assert process.stderr.read() == "what started this process was killed: it ends too\n"


@pytest.mark.slow
def test_concurrent_executions_keep_apart_and_lose_nothing(here, client):
    keys = ["one", "one", "two"]
    processes = [python(STAGE.replace("PAUSE", ""), here, HAMLET_EXECUTION=key) for key in keys]
    ids = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "warning" not in err
        ids.append(out.strip())
    assert len(set(ids)) == 3
    for run_id in ids:
        assert len(client.get_metric_history(run_id, "i")) == 20
    parents = {key: parent_of(client, key) for key in keys}
    tags = [client.get_run(i).data.tags["mlflow.parentRunId"] for i in ids]
    assert tags == [parents[key].info.run_id for key in keys]
    assert {p.info.status for p in parents.values()} == {"FINISHED"}


def test_flatten_and_import_cost():
    assert flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}
    code = "import sys, hamlet.tracking; print('mlflow' in sys.modules, 'torch' in sys.modules)"
    start = time.monotonic()
    out, _ = python(code, ROOT).communicate()
    assert out.split() == ["False", "False"], time.monotonic() - start
