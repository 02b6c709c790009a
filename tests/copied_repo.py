"""A copy of this checkout as a repository of its own, in which the real commands run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import psutil
import yaml
from filelock import FileLock

from hamlet.params import load_params

ROOT = Path(__file__).parents[1]


WARM = Path(__file__).parent / "warm"


class Repo:
    """A repository of its own, in which the real commands run.

    What `run` runs is a fork of a process that has the libraries imported: see `warm/server.py`.

    Args:
        warm: False for what is about processes: each is then what it is for a user.
    """

    def __init__(self, path: Path, warm: bool = True) -> None:
        self.path, self.warm = path, warm
        self.artifacts = path / "artifacts"
        # What a shell in the activated environment has, without what this test run adds.
        drop = ("PYTEST_", "MLFLOW_", "DVC_", "HAMLET_", "PYTHONPATH")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        self.env |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(path),  # this copy's code, whichever is installed
            "DVC_NO_ANALYTICS": "true",
            "HAMLET_DEVICE": "cpu",
        }

    def run(self, *command: str, check: bool = True, **options) -> subprocess.CompletedProcess:
        """Run a command here; its output is text."""
        env = warm(self.env) if self.warm else self.env
        if self.warm and command[0] == sys.executable:
            command = ("python", *command[1:])
        done = subprocess.run(
            command, cwd=self.path, env=env, capture_output=True, text=True, **options
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.returncode}\n{tail(done)}")
        return done

    def repro(self, *arguments: str) -> list[str]:
        """`dvc repro`; returns the stages that ran."""
        done = self.run("dvc", "repro", *arguments)
        return re.findall(r"^Running stage '(\w+)'", done.stdout, re.M)

    def stage(self, name: str) -> subprocess.CompletedProcess:
        """One stage, without DVC, whatever its exit code."""
        return self.run(sys.executable, "-m", f"stages.{name}", check=False)

    def hamlet(self, *arguments: str, **options) -> subprocess.CompletedProcess:
        code = "from hamlet.cli import app; app(prog_name='hamlet')"
        return self.run(sys.executable, "-c", code, *arguments, check=False, **options)

    def replace(self, file: str, old: str, new: str) -> None:
        """Replace the one place where `old` stands in a file."""
        path = self.path / file
        text = path.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file}"
        path.write_text(text.replace(old, new))

    def set(self, section: str, key: str, value: object) -> None:
        """Change one number of params.yaml."""
        path = self.path / "params.yaml"
        pattern = rf"(?m)(^{section}:\n(?:  .*\n)*?  {key}: ).*$"
        text, count = re.subn(pattern, rf"\g<1>{value}", path.read_text())
        assert count == 1, f"{section}.{key} is not in params.yaml"
        path.write_text(text)


def warm(env: dict[str, str]) -> dict[str, str]:
    """An environment in which `python` and `dvc` are asked of the warm server."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # other systems than Linux
        return env
    path = f"{WARM / 'bin'}{os.pathsep}{env['PATH']}"
    return {**env, "PATH": path, "HAMLET_WARM": str(warm_server())}


@cache
def warm_server() -> Path:
    """The server of this test run: the first worker that asks starts it; it ends with the run."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    ending = os.getppid() if run else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"hamlet-warm-{run or ending}"
    folder.mkdir(mode=0o700, exist_ok=True)
    address = folder / "socket"
    with FileLock(folder / "lock"):
        if address.exists():
            return address
        command = [sys.executable, WARM / "server.py", address, str(ending)]
        with (folder / "pid").open("w+") as told:  # not a pipe, which the server would keep open
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=told, cwd="/", check=True)
            told.seek(0)
            server = psutil.Process(int(told.read()))
        until = time.monotonic() + 120
        while not address.exists():
            assert server.is_running(), "the warm server ended"
            assert time.monotonic() < until, "the warm server did not start"
            time.sleep(0.05)
    return address


def pip_of(python: Path) -> list[str]:
    """pip's install, of this process's pip, into another environment, which has none of its own:
    to install pip takes longer than what a deployment needs."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    return [*pip, "install", "-q", "--no-compile"]


def tail(done: subprocess.CompletedProcess) -> str:
    return f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def working_tree(target: Path) -> None:
    """Copy what git would commit of this checkout, as a new repository with one commit.

    Its params.yaml is the tiny preset, written out.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    params = load_params(ROOT / "params.yaml", "tiny").model_dump(mode="json")
    (target / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "copy"]):
        subprocess.run(["git", *command], cwd=target, check=True)
