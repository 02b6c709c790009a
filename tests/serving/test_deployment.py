"""What a machine that only serves has to install."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
import venv

import pytest
from copied_repo import ROOT, pip_of

pytestmark = pytest.mark.slow


def test_serving_installs_in_150_mb_and_serves(agent, tmp_path, capsys):
    """A new environment with `.[serve,cpu]`: no torch, under 150 MB without pip itself, and the
    server answers in it."""
    home = tmp_path / "venv"
    venv.create(home)
    site = next(home.rglob("site-packages"))
    before = {p.name for p in site.iterdir()}
    source = tmp_path / "hamlet"
    ignored = shutil.ignore_patterns(".git", "artifacts", "__pycache__", "*.egg-info", ".dvc")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [*pip_of(home / "bin/python"), "-c", source / "constraints.txt",
               f"{source}[serve,cpu]"]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(list(map(str, command)), check=True, env=env, capture_output=True)
    files = [
        p
        for name in {p.name for p in site.iterdir()} - before
        for p in ([site / name] if (site / name).is_file() else (site / name).rglob("*"))
        if p.is_file() and p.suffix != ".pyc"
    ]
    total = sum(p.stat().st_size for p in files) / 1e6
    with capsys.disabled():
        print(f"\nhamlet[serve,cpu] installs {total:.0f} MB")
    assert total < 150
    assert not list(site.glob("torch*"))
    serve = [str(home / "bin/hamlet"), "serve", str(agent), "--port", "0"]
    with subprocess.Popen(
        serve, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    ) as server:
        assert server.stderr is not None
        told: dict[str, str] = {}
        until = time.monotonic() + 60
        while told.get("event") != "serving":
            assert time.monotonic() < until
            told = json.loads(server.stderr.readline())
        with urllib.request.urlopen(f"{told['url']}/v2/health/ready", timeout=10) as answer:
            assert answer.status == 200
        server.terminate()
        assert server.wait(30) == 0
