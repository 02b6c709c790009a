"""The examples are what `hamlet new` writes, and run through `dvc repro` to a served agent."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from copied_repo import warm
from own_worlds import Counting

from hamlet.artifacts import HamletError
from hamlet.own.params import is_own, load_own_params
from hamlet.own.project import write_project
from hamlet.own.running import own_files
from hamlet.worlds.opening import open_world

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SOURCES = {
    "own_gymnasium": "python:world.make",
    "own_pettingzoo": "pettingzoo:mpe2.simple_tag_v3",
}
TINY = {
    "collect": "{ticks: 320, lanes: 4}",
    "perception": "{hidden: 16, steps: 4, chunk: 16}",
    "world_model": "{members: 2, hidden: 16, steps: 4}",
    "policy": "{ticks: 512, lanes: 4, rollout: 32, epochs: 1, gamma: 0.99, kept_ticks: 256}",
    "social": "{steps: 4, hidden: 16}",
    "evaluate": "{episodes: 4, lanes: 2}",
    "register": "{model: tiny, beats_random: false}",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("world", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    sys.modules.pop("world", None)


def hamlet(*arguments, cwd, **options):
    code = "from hamlet.cli import app; app(prog_name='hamlet')"
    return subprocess.run(
        ["python", "-c", code, *arguments],
        cwd=cwd, env=warm(environment()), capture_output=True, text=True, check=False, **options,
    )  # fmt: skip


def environment():
    drop = ("PYTEST_", "MLFLOW_", "DVC_", "HAMLET_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return kept | {"PATH": path, "PYTHONPATH": str(ROOT), "DVC_NO_ANALYTICS": "true"}


# ------------------------------------------------------------------------------------------------
# What `hamlet new` writes


@pytest.mark.parametrize("example", SOURCES)
def test_an_example_is_what_hamlet_new_writes(example, here):
    if example == "own_pettingzoo":
        pytest.importorskip("mpe2")
    source = SOURCES[example]
    if source.startswith("python:world"):
        shutil.copyfile(EXAMPLES / example / "world.py", here / "world.py")
    shape = open_world(source).shape
    write_project(here / example, source, shape, [])
    written = (
        ".dvc/config", ".dvc/plots/players.json", ".dvcignore", ".gitignore", "dvc.yaml",
        "params.yaml", "world.py",
    )  # fmt: skip
    for name in written:
        made, kept = (folder / example / name for folder in (here, EXAMPLES))
        assert made.read_text() == kept.read_text(), name
    assert is_own(here / example)
    assert load_own_params(here / example / "params.yaml").world.make == "python:world.make"


def test_a_module_of_this_folder_comes_along(here):
    (here / "mine.py").write_text("from own_worlds import Counting\nmake = Counting\n")
    write_project(here / "new", "python:mine.make", open_world("python:mine.make").shape, [])
    assert (here / "new" / "mine.py").read_text() == (here / "mine.py").read_text()
    assert "from mine import make as make" in (here / "new" / "world.py").read_text()
    assert "      - mine.py\n" in (here / "new" / "dvc.yaml").read_text()


def test_what_the_world_is_made_of_is_part_of_its_description(here):
    (here / "mine.py").write_text("from own_worlds import Counting\nmake = Counting\n")
    open_world("python:mine.make")
    before = own_files()
    (here / "mine.py").write_text("from own_worlds import Counting\n\n\nmake = Counting\n")
    assert before.keys() == own_files().keys() == {"mine.py"}
    assert before != own_files()


def test_a_folder_that_holds_something_is_left_alone(here):
    (here / "full").mkdir()
    (here / "full" / "kept").write_text("mine")
    with pytest.raises(HamletError, match="full exists and is not empty"):
        write_project(here / "full", "python:mine.make", open_shape(), [])
    assert [path.name for path in (here / "full").iterdir()] == ["kept"]


def open_shape():
    from hamlet.worlds.gymnasium_world import GymnasiumWorld

    return GymnasiumWorld(Counting(), "counting").shape


def test_nothing_is_written_for_a_world_that_cannot_be_taken(tmp_path):
    done = hamlet("new", "mine", "--world", "gymnasium:Pendulum-v1", cwd=tmp_path)
    assert done.returncode == 1
    assert "only Discrete ones can be learned here" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "mine").exists()


def test_wrong_parameters_are_told_by_name(here):
    path = here / "params.yaml"
    for text, told in {
        "world: {make: 'python:world.make'}\npolicy: {tiks: 3}": "`policy.tiks`",
        "world: {make: 'atari:Pong'}": "`world.make`",
        "policy: {ticks: 3}": "`world`",
        "a: [": "is not YAML",
    }.items():
        path.write_text(text)
        with pytest.raises(HamletError, match=re.escape(told)):
            load_own_params(path)


# ------------------------------------------------------------------------------------------------
# The whole pipeline


@pytest.mark.slow
@pytest.mark.parametrize("example", SOURCES)
def test_an_example_runs_to_a_registered_and_served_agent(example, tmp_path):
    if example == "own_pettingzoo":
        pytest.importorskip("mpe2")
    folder = tmp_path / example
    tracked = (
        "world.py", "params.yaml", "dvc.yaml", ".dvcignore", ".dvc/config",
        ".dvc/plots/players.json",
    )  # fmt: skip
    for name in tracked:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(EXAMPLES / example / name, folder / name)
    sections = "\n".join(f"{name}: {value}" for name, value in TINY.items())
    (folder / "params.yaml").write_text(
        f"seed: 0\nworld: {{make: 'python:world.make'}}\n{sections}\n"
    )
    done = subprocess.run(
        ["dvc", "repro"], cwd=folder, env=warm(environment()),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "tiny version 1 is the champion" in done.stdout
    ran = re.findall(r"^Running stage '(\w+)'", done.stdout, re.M)
    assert ("social" in ran) == (example == "own_pettingzoo")
    drawn = subprocess.run(
        ["dvc", "plots", "show"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert drawn.returncode == 0, drawn.stderr
    page = (folder / "dvc_plots" / "index.html").read_text()
    curves = yaml.safe_load((folder / "dvc.yaml").read_text())["plots"]
    for name, what in (item for curve in curves for item in curve.items()):
        assert page.count(what["title"]) == 1, name
        ((file, columns),) = what["y"].items()
        header = (folder / file).read_text().partition("\n")[0].split(",")
        assert {what["x"], *([columns] if isinstance(columns, str) else columns)} <= set(header)
    assert page.count('"anchor": "middle"') == len(curves)  # and nothing else
    asked = hamlet("act", "--example", cwd=folder)
    told = hamlet("act", input=asked.stdout, cwd=folder)
    assert told.returncode == 0, told.stderr
    assert {"action", "action_odds", "imagined", "value"} <= json.loads(told.stdout).keys()
    if example == "own_pettingzoo":
        played = hamlet("play", "--ticks", "3", cwd=folder)
        assert "return after 3 ticks" in played.stdout, played.stderr
    else:
        found = " ".join(hamlet("doctor", cwd=folder).stdout.split())
        assert "version 1 is artifacts/agent.onnx" in found
    assert served(folder, json.loads(asked.stdout)) in json.loads(told.stdout)["action_odds"]


def served(folder, observation):
    """The name of the action that the served champion takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = "from hamlet.cli import app; app(prog_name='hamlet')"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "models:/tiny@champion", "--port", str(port)],
        cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        body = json.dumps({"observation": observation}).encode()
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/act", body) as answer:
                    return json.load(answer)["action"]
            except OSError:
                assert process.poll() is None
                time.sleep(0.1)
        raise AssertionError("the server did not answer")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
