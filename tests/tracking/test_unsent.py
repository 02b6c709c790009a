"""What a stage logged is found although the server was down, or the database locked or broken."""

import json
import os
import socket
import sqlite3
import tempfile
import time
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from tracked import children_of, mlflow_server, parent_of, python

from hamlet import tracking
from hamlet.tracking import sender, service, stage_run, tracking_uri


@pytest.mark.slow
def test_a_dead_server_costs_seconds_and_gets_everything_when_it_is_back(
    here, monkeypatch, capsys, tmp_path
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("HAMLET_EXECUTION", "before")
    (here / "note.txt").write_text("kept")
    began = time.monotonic()
    with stage_run("kept") as run:
        for step in range(2000):
            run.metrics({"x": step}, step=step)
        run.artifact("note.txt")
    assert time.monotonic() - began < 15
    assert run.run_id is None
    err = capsys.readouterr().err
    assert err.count("warning") == 1
    assert "it does not answer" in err
    assert "mlflow.db.unsent" in err
    (here / "note.txt").write_text("changed since")

    with mlflow_server(port, tmp_path / "served"):
        monkeypatch.setenv("HAMLET_EXECUTION", "a later one")
        with stage_run("later"):
            pass
        client = MlflowClient(uri)
        kept = children_of(client, parent_of(client, "before"))["kept"]
        assert kept.info.status == "FINISHED"
        history = client.get_metric_history(kept.info.run_id, "x")
        assert sorted((m.step, m.value) for m in history) == [(i, float(i)) for i in range(2000)]
        place = client.download_artifacts(kept.info.run_id, "note.txt", str(tmp_path))
        assert Path(place).read_text() == "kept"
        assert set(children_of(client, parent_of(client, "a later one"))) == {"later"}
        assert not [f for f in (here / "mlflow.db.unsent").glob("*/") if "kept-" in f.name]


def test_equal_work_done_twice_is_two_runs_while_the_server_is_down(here, monkeypatch, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    keys = []
    for execution in ("first", "second"):
        monkeypatch.setenv("HAMLET_EXECUTION", execution)
        with stage_run("alike") as run:
            run.metrics({"x": 1.0})
        keys.append(run.key)
    assert not list(tmp_path.iterdir()), "only where the repository is read-only"
    assert keys[0] != keys[1]
    kept = [path for path in (here / "mlflow.db.unsent").glob("*/") if "alike-" in path.name]
    told = [json.loads((path / "events.jsonl").read_text().splitlines()[0]) for path in kept]
    assert {one["open"]["execution"]["key"] for one in told} == {"first", "second"}

    # One that was stopped is still gone on with, though a finished one of its name waits.
    with pytest.raises(KeyboardInterrupt), stage_run("alike") as stopped:
        raise KeyboardInterrupt
    with stage_run("alike") as resumed:
        pass
    assert stopped.key not in keys
    assert resumed.key == stopped.key


def test_a_locked_database_delays_but_loses_nothing(here, client, capsys):
    """Another process holds the write lock while the stage starts and logs."""
    hold = (
        "import sqlite3, time\nc = sqlite3.connect('mlflow.db')\nc.execute('BEGIN EXCLUSIVE')\n"
        "print('held', flush=True)\ntime.sleep(2)\nc.rollback()\n"
    )
    process = python(hold, here)
    assert process.stdout.readline() == "held\n"
    with stage_run("patient") as run:
        run.metrics({"x": 7}, step=1)
    process.wait()
    parent = parent_of(client, os.environ["HAMLET_EXECUTION"])
    assert children_of(client, parent)["patient"].data.metrics["x"] == 7.0


def test_a_stage_that_fails_waits_for_a_database_that_is_only_slow(
    here, client, monkeypatch, capsys
):
    """Each event takes longer than a failed stage would wait for a server that is silent."""
    monkeypatch.setattr(sender, "RETRY_SECONDS", 0.4)
    monkeypatch.setattr(sender, "SILENCE_SECONDS", 0.1)
    deliver = service.deliver

    def slowly(*given):
        time.sleep(0.5)
        return deliver(*given)

    monkeypatch.setattr(service, "deliver", slowly)
    with pytest.raises(ZeroDivisionError), stage_run("slow") as run:
        run.metrics({"x": 1 / 0})
    assert "cannot be written" not in capsys.readouterr().err
    found = children_of(client, parent_of(client, os.environ["HAMLET_EXECUTION"]))["slow"]
    assert found.info.status == "FAILED"


def test_a_broken_database_costs_a_warning_not_the_stage(here, monkeypatch, capsys, tmp_path):
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"this is not a database" * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{broken}")
    with stage_run("sturdy") as run:
        run.metrics({"x": 1})
        trained = True
    assert trained
    assert run.run_id is None
    err = capsys.readouterr().err
    assert err.count("warning") == 1
    assert "broken.db" in err
    assert json.loads((here / "artifacts/runs/sturdy.json").read_text())["run_id"] is None


def test_a_database_that_comes_back_gets_everything(here, monkeypatch, capsys):
    database = here / "mlflow.db"
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA wal_checkpoint")
    connection.close()
    aside = database.rename(here / "aside.db")
    database.mkdir()  # nothing can be opened there
    with stage_run("early") as run:
        run.metrics({"x": 1}, step=1)
        assert not run.flush(30)
        assert run.run_id is None
        database.rmdir()
        aside.rename(database)
        run.metrics({"x": 2}, step=2)
    client = MlflowClient(tracking_uri())
    assert [m.value for m in client.get_metric_history(run.run_id, "x")] == [1.0, 2.0]


def test_the_deleted_experiment_is_restored(here, client):
    with stage_run("before"):
        pass
    client.delete_experiment(client.get_experiment_by_name(tracking.EXPERIMENT).experiment_id)
    with stage_run("after") as run:
        pass
    assert client.get_run(run.run_id).info.status == "FINISHED"
