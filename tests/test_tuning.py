"""`stages.tune` on the tiny pipeline: one course under both engines, whoever is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.slow


def tune(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "stages.tune", *arguments]


def course(repo) -> tuple[str, dict]:
    folder = repo.artifacts / "tune"
    return (folder / "log.jsonl").read_text(), json.loads((folder / "best.json").read_text())


@pytest.fixture(scope="module")
def expected(tiny):
    done = tiny.run(*tune())
    assert "Traceback" not in done.stderr
    rows = [json.loads(line) for line in course(tiny)[0].splitlines()]
    assert (rows[0]["seed"], rows[0]["members"]) == (7, 3)
    assert len(rows) == 1 + 3 * 2
    assert any(row["parent"] != row["member"] for row in rows[1:])
    assert not list((tiny.path / "checkpoints").glob("tune-*/"))
    return course(tiny)


def interrupted(repo, *arguments: str, victim: str) -> tuple[int, str]:
    """Start the population; after its first generation kill a member or the driver: exit code of
    the driver and what was said."""
    said = repo.path / "said.txt"
    with (
        said.open("w") as output,
        subprocess.Popen(
            tune(*arguments), cwd=repo.path, env=repo.env, stdout=output, stderr=output
        ) as run,
    ):
        until = time.monotonic() + 500
        while not list((repo.path / "checkpoints").glob("tune-*/log.jsonl")):
            if run.poll() is not None or time.monotonic() > until:
                run.kill()
                raise AssertionError(said.read_text())
            time.sleep(0.002)
        # Ray's own agents take their time to see that it has gone; they hold no work.
        below = psutil.Process(run.pid).children(recursive=True)
        children = [c for c in below if not c.name().endswith("Agent")]
        if victim == "member":
            members = [c for c in children if c.ppid() != run.pid]  # forks of the driver's child
            members[-1].send_signal(signal.SIGKILL)
            children = []
        else:
            run.kill()
        code = run.wait(timeout=240)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, "processes outlive their driver"
    return code, said.read_text()


def test_a_killed_member_and_a_killed_driver_change_nothing(copy, expected):
    code, said = interrupted(copy, victim="member")
    assert code == 0, said
    assert course(copy) == expected

    (copy.artifacts / "tune" / "log.jsonl").unlink()
    code, _ = interrupted(copy, victim="driver")
    assert code == -signal.SIGKILL
    assert not (copy.artifacts / "tune" / "log.jsonl").exists()
    done = copy.run(*tune())
    assert course(copy) == expected
    assert "tune: 0/2" in done.stderr
    assert not list((copy.path / "checkpoints").glob("tune-*/"))


def test_ray_gives_the_same_though_its_driver_is_killed(copy, expected):
    pytest.importorskip("ray")
    code, _ = interrupted(copy, "--engine", "ray", victim="driver")
    assert code == -signal.SIGKILL
    done = copy.run(*tune("--engine", "ray"))
    assert course(copy) == expected
    assert "Traceback" not in done.stderr


def test_without_ray_it_says_what_to_install(copy):
    block = """
import sys
sys.modules["ray"] = None
import stages.tune
stages.tune.main(["--engine", "ray"])
"""
    done = copy.run(sys.executable, "-c", block, check=False)
    assert done.returncode == 1
    (line,) = [x for x in done.stderr.splitlines() if "needs Ray" in x]
    assert line.startswith("tune: `--engine ray` needs Ray")
    assert '".[ray]"' in line
