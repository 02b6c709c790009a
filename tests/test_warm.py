"""What stands in for a process in the slow tests ends, speaks and is interrupted as one does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest
from copied_repo import WARM, Repo, warm

pytestmark = pytest.mark.slow

DVC = """
stages:
  good: {{cmd: python -m mine good, outs: [good]}}
  bad: {{cmd: python -m mine {bad}}}
  after: {{cmd: python -m mine after, deps: [good], outs: [after]}}
"""
CALL = "import sys; from subprocess import call"
MINE = """
import os, sys
from pathlib import Path
assert sys.argv[1:] != ["fails"], "as asked"
print("parent", os.getppid(), "of", os.getpid())
Path(sys.argv[1]).write_text(os.environ["DVC_STAGE"])
"""


@pytest.fixture
def repo(tmp_path) -> Repo:
    (tmp_path / "mine.py").write_text(MINE)
    return Repo(tmp_path)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('no')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(5)", 5),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        (f"{CALL}; sys.exit(call([sys.executable, '-c', '1 / 0']) + 2)", 3),
        ("os", 1),  # a name of the server's
    ],
)
def test_the_exit_code_is_that_of_the_command(repo, code, expected):
    done = repo.run(sys.executable, "-c", code, check=False)
    assert done.returncode == expected
    assert ("ZeroDivisionError" in done.stderr) == ("1 / 0" in code)
    assert (done.stderr == "no\n") == ("'no'" in code)


def test_a_hook_of_its_path_is_run_once_before_it(repo):
    (repo.path / "sitecustomize.py").write_text("import sys; print('hooked', sys.orig_argv[1:])")
    done = repo.run(sys.executable, "-c", "print('it')", "word")
    assert done.stdout == "hooked ['-c', \"print('it')\", 'word']\nit\n"


def test_it_has_the_directory_environment_arguments_and_streams_of_who_asked(repo):
    code = (
        "import os, sys; print(os.getcwd(), sys.argv[1:], os.environ.get('MINE'), "
        "os.environ.get('HOME'), sys.stdin.read()); print('told', file=sys.stderr)"
    )
    repo.env["MINE"] = "yes"
    del repo.env["HOME"]  # which the server has
    done = repo.run(sys.executable, "-c", code, "a b", "c", input="asked", timeout=20)
    assert done.stdout == f"{repo.path} ['a b', 'c'] yes None asked\n"
    assert done.stderr == "told\n"
    assert repo.run("bash", "-c", "python -c 'import mine' x; echo $?").stdout.endswith("\n1\n")


def test_each_command_has_the_code_of_its_own_path(repo, tmp_path):
    """Before what is installed: `this` is a module of Python's."""
    for text in ("one", "two"):
        (tmp_path / text).mkdir()
        for name in ("hamlet", "this"):
            (tmp_path / text / f"{name}.py").write_text(f"print('{text}')")
        repo.env["PYTHONPATH"] = str(tmp_path / text)
        assert repo.run(sys.executable, "-m", "hamlet").stdout == f"{text}\n"
        assert repo.run(sys.executable, "-c", "import this").stdout == f"{text}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_reaches_the_command(repo, number):
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(9))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    command = ["python", "-c", code]
    with subprocess.Popen(
        command, cwd=repo.path, env=warm(repo.env), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        pid = int(process.stdout.readline())
        process.send_signal(number)
        process.communicate(timeout=20)
    expected = {signal.SIGINT: 130, signal.SIGTERM: 9, signal.SIGKILL: -signal.SIGKILL}
    assert process.returncode == expected[number]
    until = time.monotonic() + 10
    while psutil.pid_exists(pid):
        assert time.monotonic() < until, "it lives on"
        time.sleep(0.05)


def test_dvc_runs_stages_below_itself_and_stops_at_one_that_fails(repo):
    (repo.path / "dvc.yaml").write_text(DVC.format(bad="fails"))
    repo.run("git", "init", "-q")
    repo.run("dvc", "init", "-q")
    done = repo.run("dvc", "repro", "bad", check=False)
    assert done.returncode != 0
    assert "as asked" in done.stderr
    assert "failed to reproduce 'bad'" in done.stderr
    done = repo.run("dvc", "repro", "after")
    assert (repo.path / "after").read_text() == "after"
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("parent")]
    assert len({parent for _, parent, *_ in said}) == 1
    assert len({pid for *_, pid in said}) == 2


def test_the_server_is_nobodys_child_and_ends_with_the_run(tmp_path):
    """Of tests that look at their children, what another worker asks for must be none of them."""
    folder = tmp_path / "warm"
    folder.mkdir()
    with subprocess.Popen(["sleep", "300"]) as run:
        command = [sys.executable, WARM / "server.py", folder / "socket", str(run.pid)]
        told = tmp_path / "told"
        with told.open("w") as output:
            subprocess.run(command, stdout=output, check=True)
        server = psutil.Process(int(told.read_text()))
        until = time.monotonic() + 120
        while not (folder / "socket").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert server not in psutil.Process().children(recursive=True)
        assert server.is_running()
        run.kill()
    while folder.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
