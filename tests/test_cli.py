"""The command itself: how it starts, and what it says where nothing has been trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )


def test_the_module_is_the_command(tmp_path):
    done = run("-m", "hamlet.cli", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "play" in done.stdout


@pytest.mark.parametrize("command", ["play", "act"])
def test_nothing_trained_is_one_line_with_both_ways_to_mend_it(tmp_path, command):
    done = run("-m", "hamlet.cli", command, cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("artifacts/agent.onnx is missing, nothing has been trained here")
    assert "`dvc repro`" in line
    assert "`dvc pull agent`" in line


def test_help_loads_nothing_heavy():
    """`hamlet --help` is waited for by a person."""
    code = (
        "import sys, hamlet.cli; heavy = {'torch', 'numpy', 'mlflow', 'yaml', 'onnxruntime', "
        "'pydantic'} & set(sys.modules); assert not heavy, heavy"
    )
    done = run("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
