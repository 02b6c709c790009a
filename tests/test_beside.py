"""A stage that another one does not wait for runs beside it, in a DVC of its own, and only once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from stages import beside
from stages.beside import whole_run

ROOT = Path(__file__).parents[1]
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
WORK = """
import os, sys, time
from pathlib import Path

from hamlet.tracking import execution_key
from hamlet.tracking.processes import end_with_parents, is_interrupted

end_with_parents()
if is_interrupted(Path("checkpoints")):
    sys.exit(130)
name, seconds, code = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
with Path("ran").open("a") as file:
    print(name, "begins", execution_key(), file=file, flush=True)
    time.sleep(seconds)
    print(name, "ends", file=file, flush=True)
Path(name).write_text(name)
Path(f"{name}.json").write_text("{}")
Path(f"{name}.run").write_text(str(os.getpid()))  # another one each time, as a link to a run is
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("command", "whole"),
    [
        ("dvc repro", True),
        ("/usr/bin/python3 /usr/bin/dvc repro -q", True),
        ("python -m dvc repro", True),
        ("dvc repro world_model", False),
        ("dvc repro --single-item a", False),
        ("dvc repro --force", False),
        ("dvc repro --no-run-cache", False),
        ("dvc exp run", False),
        ("python repro.py repro", False),
    ],
)
def test_only_a_whole_run_is_one(command, whole):
    assert whole_run(command.split()) == whole


def test_alone_on_one_core_under_a_profile_or_where_a_gpu_would_be_shared(monkeypatch):
    monkeypatch.delenv("HAMLET_PROFILE", raising=False)
    monkeypatch.setattr(beside, "dvc_identity", lambda: f"host {os.getpid()} 1")
    monkeypatch.setattr(beside, "whole_run", lambda command: True)
    monkeypatch.setattr(beside, "cores", lambda: 2)
    monkeypatch.setattr(beside, "shared_gpus", lambda: 0)
    assert beside.wanted()
    alone = ("cores", 1), ("shared_gpus", 1), ("dvc_identity", None), ("whole_run", False)
    for name, value in (*alone, ("find_spec", None)):
        with monkeypatch.context() as here:
            here.setattr(beside, name, lambda *_, value=value: value)
            assert not beside.wanted()
    monkeypatch.setenv("HAMLET_PROFILE", "1:1:x")
    assert not beside.wanted()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an archive has no committed lock")
def test_the_committed_lock_names_no_run_of_what_runs_beside_another():
    """With all outs in the lock DVC looks in its cache for these very ones, and the link to a run
    is another one each time: leave `artifacts/runs/STAGE.json` out of what is committed."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    commands = [one["cmd"] for one in stages.values() if "stages.beside" in one["cmd"]]
    names = [n for command in commands for n in command.split(" -- ")[0].split()[3:]]
    assert sorted(names) == ["prove", "prove_evaluate", "social"]
    shown = subprocess.run(
        ["git", "show", "HEAD:dvc.lock"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    locked = yaml.safe_load(shown.stdout)["stages"]
    for name in names:
        assert f"artifacts/runs/{name}.json" not in {out["path"] for out in locked[name]["outs"]}


class Repo:
    def __init__(self, folder: Path, **stages: str) -> None:
        self.folder = folder
        self.env = {**os.environ, "PYTHONPATH": str(ROOT)}
        for name in ("HAMLET_EXECUTION", "DVC_ROOT", "DVC_STAGE", "HAMLET_BESIDE"):
            self.env.pop(name, None)
        (folder / "work.py").write_text(WORK)
        made = {
            name: {
                "cmd": f"{command} {name} {rest}",
                "deps": ["work.py"],
                "outs": [name, f"{name}.run", {f"{name}.json": {"cache": False}}],
            }
            for name, (command, rest) in ((n, s.split("|")) for n, s in stages.items())
        }
        whole = yaml.safe_dump({"stages": made}, width=1_000)  # a command stays one line
        (folder / "dvc.yaml").write_text(whole)
        self.run("git", "init", "-q")
        self.run(sys.executable, "-m", "dvc", "init", "-q")
        config = "[core]\nanalytics = false\ncheck_update = false\n"  # each a process of its own
        (folder / ".dvc" / "config").write_text(config)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess:
        return subprocess.run(
            command, cwd=self.folder, env=self.env, check=check, text=True, capture_output=True
        )

    def repro(self, *more: str) -> tuple[int, list[str]]:
        """The exit code, and what ran since the last time."""
        ran = self.folder / "ran"
        ran.unlink(missing_ok=True)
        self.done = self.run(sys.executable, "-m", "dvc", "repro", *more, check=False)
        lines = ran.read_text().splitlines() if ran.exists() else []
        self.executions = {line.split("begins ")[1] for line in lines if "begins" in line}
        return self.done.returncode, [line.split()[:2] for line in lines]


def steps(*names: str) -> list[list[str]]:
    return [name.split() for name in names]


def a_first(ran: list[list[str]]) -> list[list[str]]:
    """What ran, `a begins` before all else: of two started together either may be first."""
    return sorted(ran, key=lambda step: step != ["a", "begins"])


WORKS = f"{sys.executable} work.py"
WITH_B = f"{sys.executable} -m stages.beside b -- {WORKS}"


@pytest.mark.slow
@pytest.mark.skipif(CORES < 2, reason="there is one core: nothing runs beside anything")
def test_it_runs_once_and_meanwhile_and_is_the_same_execution(tmp_path):
    repo = Repo(tmp_path, a=f"{WITH_B}|15 0", b=f"{WORKS}|.1 0")
    code, ran = repo.repro()
    assert (code, a_first(ran)) == (0, steps("a begins", "b begins", "b ends", "a ends"))
    assert len(repo.executions) == 1
    assert "'b' is cached" in repo.done.stdout
    assert "beside it run: b; they write to checkpoints/beside-" in repo.done.stderr
    assert (tmp_path / "b").read_text() == "b"
    assert repo.repro() == (0, [])
    # As in a fresh clone of a repository whose lock is up to date: it would not be found.
    for name in ("a", "a.run", "b", "b.run"):
        (tmp_path / name).unlink()
    shutil.rmtree(tmp_path / ".dvc" / "cache")
    assert repo.repro() == (0, steps("a begins", "a ends", "b begins", "b ends"))
    assert "waiting" not in repo.done.stderr


@pytest.mark.slow
@pytest.mark.skipif(CORES < 2, reason="there is one core: nothing runs beside anything")
def test_what_fails_beside_it_is_run_again_and_told(tmp_path):
    repo = Repo(tmp_path, a=f"{WITH_B}|15 0", b=f"{WORKS}|.1 3")
    code, ran = repo.repro()
    assert code != 0
    assert a_first(ran) == steps("a begins", "b begins", "b ends", "a ends", "b begins", "b ends")
    assert "not all of b ended well, they run again" in repo.done.stderr


@pytest.mark.slow
@pytest.mark.skipif(CORES < 2, reason="there is one core: nothing runs beside anything")
def test_when_it_fails_what_runs_beside_it_ends(tmp_path):
    repo = Repo(tmp_path, a=f"{WITH_B}|15 3", b=f"{WORKS}|60 0")
    began = time.monotonic()
    code, ran = repo.repro()
    assert code != 0
    assert a_first(ran) == steps("a begins", "b begins", "a ends")
    assert time.monotonic() - began < 50
    alive = [process.info for process in psutil.process_iter(["cwd", "cmdline"])]
    assert not [one["cmdline"] for one in alive if one["cwd"] == str(tmp_path)]
    # Nothing is in the way of the next one.
    (tmp_path / "dvc.yaml").write_text(
        (tmp_path / "dvc.yaml").read_text().replace(" 15 3", " .1 0").replace(" 60 0", " .1 0")
    )
    assert repo.repro()[0] == 0


@pytest.mark.slow
@pytest.mark.skipif(CORES < 2, reason="there is one core: nothing runs beside anything")
@pytest.mark.parametrize(
    ("shell", "locked"), [("/bin/sh", False), ("/bin/sh", True), ("/bin/bash", False)]
)
def test_interrupted_while_it_waits_it_is_kept_and_nothing_more_begins(tmp_path, shell, locked):
    if not Path(shell).exists():
        pytest.skip(f"there is no {shell}")
    repo = Repo(tmp_path, a=f"{WITH_B}|.1 0", b=f"{WORKS}|.1 0")
    repo.env["SHELL"] = shell  # DVC starts stages with it; dash dies when interrupted, bash waits
    if locked:  # the lock names all that a made, as in a fresh clone, whose cache is empty
        assert repo.repro()[0] == 0
        for name in ("a", "a.run", "b", "b.run", "ran"):
            (tmp_path / name).unlink()
        shutil.rmtree(tmp_path / ".dvc" / "cache")
    text = (tmp_path / "dvc.yaml").read_text()
    (tmp_path / "dvc.yaml").write_text(text.replace(" b .1 0", " b 60 0"))
    said, ran = tmp_path / "said", tmp_path / "ran"
    command = [sys.executable, "-m", "dvc", "repro"]
    with said.open("w") as out, subprocess.Popen(
        command, cwd=tmp_path, env=repo.env, stdout=out, stderr=out, start_new_session=True
    ) as dvc:  # fmt: skip
        while "waiting for b" not in said.read_text() or "b begins" not in ran.read_text():
            time.sleep(0.1)
        os.killpg(dvc.pid, signal.SIGINT)
        assert dvc.wait(60) != 0, said.read_text()
    assert ran.read_text().count("b begins") == 1
    text = (tmp_path / "dvc.yaml").read_text().replace(" 60 0", " .1 0")
    (tmp_path / "dvc.yaml").write_text(text)
    assert repo.repro() == (0, steps("b begins", "b ends")), said.read_text()
