"""`hamlet offline train`, interrupted: it says how to go on, by the command that was run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
from tests.offline.logged import BEHAVIOUR, play, write

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_an_interrupted_training_names_its_own_command(tmp_path):
    log = write(tmp_path, play(BEHAVIOUR, 100, 0))
    (tmp_path / "long.yaml").write_text("offline: {steps: 1000000}\n")
    arguments = ["offline", "train", log.name, "--out", "made here", "--params", "long.yaml"]
    run = "from hamlet.cli import app; app(prog_name='hamlet')"
    process = subprocess.Popen(
        [sys.executable, "-c", run, *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not list((tmp_path / "made here").glob("checkpoint-*")) and time.monotonic() < until:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C: to both processes
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    again = f"`hamlet offline train {log.name} --out 'made here' --params long.yaml`"
    assert f"is kept, {again} resumes from it" in said
    assert "dvc" not in said
    assert "Traceback" not in said
