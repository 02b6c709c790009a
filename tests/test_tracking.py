"""Runs in a real SQLite store, made by real processes, some of which are killed or locked out."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

pytest.importorskip("mlflow")

from mlflow.entities import ViewType
from mlflow.tracking import MlflowClient

from hamlet import tracking
from hamlet.params import Params, load_params
from hamlet.tracking import execution_key, flatten, repo_root, stage_run, store, tracking_uri

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """An empty DVC repository whose database is already made (that takes seconds)."""
    root = tmp_path_factory.mktemp("repo")
    (root / ".dvc").mkdir()
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    commit = ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "--allow-empty", "-qm", "one"]
    subprocess.run(["git", *commit], cwd=root, check=True)
    MlflowClient(f"sqlite:///{root / 'mlflow.db'}").search_experiments()
    return root


@pytest.fixture
def here(repo, monkeypatch, request):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_RUN_ID", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(repo)
    monkeypatch.setenv("HAMLET_EXECUTION", request.node.name)
    return repo


@pytest.fixture
def client(here):
    return MlflowClient(tracking_uri())


@pytest.fixture(scope="module")
def params() -> Params:
    return load_params(ROOT / "params.yaml")


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


ORPHAN = """
import time
from hamlet.tracking import identity
from hamlet.tracking.processes import end_with_parents
end_with_parents()
print(identity(), flush=True)
time.sleep(60)
"""


def test_what_a_killed_dvc_started_ends_too(tmp_path, monkeypatch):
    monkeypatch.delenv("HAMLET_EXECUTION", raising=False)
    (tmp_path / "work.py").write_text(ORPHAN)
    dvc = tmp_path / "dvc"
    dvc.write_text("import subprocess, sys\nsubprocess.run([sys.executable, 'work.py'])\n")
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

    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}"]
    command += ["--artifacts-destination", str(tmp_path / "files")]
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    try:
        until = time.monotonic() + 120
        while store.unusable(uri):
            assert server.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.2)
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
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


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


# Where and who


def test_the_database_is_at_the_root_of_the_real_repository(repo, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    copy = repo / ".dvc" / "tmp" / "exps" / "tmpabc"
    (copy / ".dvc").mkdir(parents=True, exist_ok=True)
    (repo / "sub").mkdir(exist_ok=True)
    for folder in (repo, repo / "sub", copy):
        monkeypatch.chdir(folder)
        assert repo_root() == repo
    monkeypatch.setenv("DVC_ROOT", str(copy))
    assert repo_root() == repo
    assert tracking_uri() == f"sqlite:///{repo}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:1")
    assert tracking_uri() == "http://localhost:1"


KEY = "from hamlet.tracking import execution_key; print(execution_key())"


def test_children_of_one_dvc_process_share_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("HAMLET_EXECUTION", raising=False)
    dvc = tmp_path / "dvc"  # a process whose program is called dvc, as the real one's is
    dvc.write_text(
        f"import subprocess, sys\nfor _ in range(2):\n"
        f"    subprocess.run('{sys.executable} -c \"{KEY}\"; true', shell=True, check=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def keys():
        done = subprocess.run(
            [sys.executable, str(dvc)], env=env, capture_output=True, text=True, check=True
        )
        return done.stdout.split("\n")[:2]

    first, second = keys(), keys()
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0] != second[0]
    monkeypatch.setenv("HAMLET_EXECUTION", "mine")
    assert execution_key() == "mine"


def test_without_dvc_a_process_is_its_own_execution(monkeypatch):
    monkeypatch.delenv("HAMLET_EXECUTION", raising=False)
    assert execution_key() == execution_key()
    assert str(os.getpid()) in execution_key() or "dvc" in " ".join(sys.argv)


def test_flatten_and_import_cost():
    assert flatten({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}
    code = "import sys, hamlet.tracking; print('mlflow' in sys.modules, 'torch' in sys.modules)"
    start = time.monotonic()
    out, _ = python(code, ROOT).communicate()
    assert out.split() == ["False", "False"], time.monotonic() - start


# Under the real DVC

WORK = """
import os, sys, time
from pathlib import Path
from hamlet.tracking import stage_run
from stages.common import cores
with stage_run(sys.argv[1]) as run:
    run.metrics({"x": 1.0})
    run.tag("cores", cores())
    time.sleep(float(os.environ["NAP"]))
    Path(sys.argv[1]).write_text(Path("params.yaml").read_text())
"""


@pytest.mark.slow
def test_repro_exp_run_and_a_queue_of_two_workers(tmp_path, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "DVC_ROOT", "HAMLET_EXECUTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("NAP", "0")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    def run(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout

    def dvc(*command: str) -> str:
        return run(sys.executable, "-m", "dvc", *command)

    run("git", "init", "-q")
    run("git", "config", "user.email", "t@t")
    run("git", "config", "user.name", "t")
    dvc("init", "-q")
    Path("work.py").write_text(WORK)
    Path("params.yaml").write_text("seed: 1\n")
    Path(".gitignore").write_text("/mlflow.db*\n/artifacts\n/one\n/two\n")
    Path("dvc.yaml").write_text(
        "stages:\n"
        "  one: {cmd: python work.py one, deps: [work.py], params: [seed],\n"
        "        outs: [one, artifacts/runs/one.json]}\n"
        "  two: {cmd: python work.py two, deps: [work.py, one],\n"
        "        outs: [two, artifacts/runs/two.json]}\n"
    )
    dvc("repro", "-q")
    run("git", "add", "-A")
    run("git", "commit", "-qm", "one")
    dvc("exp", "run", "-q", "--name", "in-place", "-S", "seed=2")
    run("git", "reset", "-q", "--hard")
    monkeypatch.setenv("NAP", "4")
    names = {"queued-3", "queued-4"}
    for name in names:
        dvc("exp", "run", "-q", "--queue", "--name", name, "-S", f"seed={name[-1]}")
    dvc("queue", "start", "-q", "-j", "2")
    until = time.monotonic() + 150
    try:
        while (status := dvc("queue", "status")).count("Success") < 2:
            assert "Failed" not in status
            assert time.monotonic() < until, status
            time.sleep(2)
    finally:
        dvc("queue", "stop", "--kill")

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    parents = {r.info.run_name: r for r in runs(client) if "hamlet.execution" in r.data.tags}
    assert len(parents) == 4
    assert {"in-place", *names} < set(parents)
    for parent in parents.values():
        children = children_of(client, parent)
        assert set(children) == {"one", "two"}
        for stage, child in children.items():
            assert child.info.status == parent.info.status == "FINISHED"
            assert child.data.metrics["x"] == 1.0
            assert parent.data.tags[f"hamlet.run.{stage}"] == child.info.run_id
    queued = [children_of(client, parents[name])["one"] for name in names]
    starts, ends = [r.info.start_time for r in queued], [r.info.end_time for r in queued]
    assert max(starts) < min(ends), "the two workers should have run side by side"
    # the workers share the cores
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not os.environ.get("OMP_NUM_THREADS"):
        assert {int(r.data.tags["cores"]) for r in queued} <= {max(1, cores // 2)}
