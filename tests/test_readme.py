"""Every command of the README and of the how-to pages, run in order as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest
from copied_repo import ROOT, Repo, tail

README = (ROOT / "README.md").read_text(encoding="utf-8")
# First what changes nothing: each change makes later commands run more of the pipeline.
PAGES = ("how-to/watch", "how-to/rerun", "explanation/modules", "how-to/gpu",
         "how-to/compare", "how-to/strangers", "how-to/cores", "how-to/load", "how-to/serve",
         "how-to/offline", "how-to/own-world")  # fmt: skip


class Block(NamedTuple):
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r"```(\w+)\n(.*?)```", text, re.S)]


BLOCKS = blocks(README)
ALL = [
    *BLOCKS,
    *(b for page in PAGES for b in blocks((ROOT / f"docs/{page}.md").read_text(encoding="utf-8"))),
]
INSTALL = 'pip install -c constraints.txt -e ".[dev]" && dvc repro'
# What .ci/run itself is: it installs as the first block says and runs the second.
OUTER = {INSTALL, "pytest"}
RUN = list(
    dict.fromkeys(
        b for b in ALL if b.language in ("bash", "python") and b.text.strip() not in OUTER
    )
)


def test_a_newcomer_meets_the_two_commands_first():
    assert [block.text.strip() for block in BLOCKS[:2]] == [INSTALL, "pytest"]
    ci = (ROOT / ".ci/run").read_text()
    assert INSTALL.partition(" -c")[2].partition(" &&")[0] in ci
    assert "check pytest\n" in ci


def test_every_block_is_run_or_is_a_picture():
    assert {block.language for block in ALL} == {"bash", "python", "text"}
    assert len(RUN) >= 9


def test_every_page_with_commands_is_listed():
    pages = {
        path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for path in (ROOT / "docs").rglob("*.md")
        if "```bash" in path.read_text(encoding="utf-8")
    }
    assert pages <= {*PAGES, "tutorial"}


def test_the_picture_and_the_text_name_what_exists():
    import yaml

    picture = next(block.text for block in BLOCKS if block.language == "text")
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert not [s for s in stages if s not in picture and not s.startswith("prove")]
    for path in re.findall(r"`((?:tests|\.ci)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path


@pytest.fixture(scope="module")
def reader(tiny, tmp_path_factory) -> Repo:
    """A copy of the tiny repository with the command `hamlet` of its own code on the path."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(tiny.path, folder / "hamlet", symlinks=True)
    repo = Repo(folder / "hamlet")
    bin_ = folder / "bin"
    bin_.mkdir()
    command = bin_ / "hamlet"
    code = "from hamlet.cli import app; app(prog_name='hamlet')"
    command.write_text(f'#!/bin/sh\nexec python -c "{code}" "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IEXEC)
    repo.env["PATH"] = f"{bin_}{os.pathsep}{repo.env['PATH']}"
    return repo


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=lambda b: re.sub(r"\W+", "-", b.text)[:50])
def test_a_block_runs_as_written(reader, block):
    if block.text.startswith("mlflow ui"):
        browse(reader, block.text.strip())
        return
    command = (
        ["bash", "-euo", "pipefail", "-c", block.text]
        if block.language == "bash"
        else [sys.executable, "-c", block.text]
    )
    done = reader.run(*command, check=False)
    assert done.returncode == 0, tail(done)
    assert "Traceback" not in done.stderr


# Quicker to start than four that answer, and one for jobs that nobody gives it here.
ONE_PROCESS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_WORKERS": "1"}


def browse(reader: Repo, command: str) -> None:
    """The page answers; on a port of our own, so that a busy one does not matter."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(reader.path / "ui.log")
    with (
        log.open("w") as output,
        subprocess.Popen(
            [*command.split(), "--port", str(port)],
            cwd=reader.path,
            env=reader.env | ONE_PROCESS,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as server,
    ):
        try:
            until = time.monotonic() + 120
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as page:
                        assert b"MLflow" in page.read()
                        return
                except OSError:
                    assert server.poll() is None, log.read_text()
                    assert time.monotonic() < until, log.read_text()
                    time.sleep(0.5)
        finally:
            os.killpg(server.pid, 15)
