"""Lower bounds are run, not declared: what a deployment installs, at its oldest and its newest."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tomllib
import urllib.request
import venv
from pathlib import Path

import pytest
from copied_repo import pip_of

ROOT = Path(__file__).parents[1]
DEPLOYED = ("cpu", "serve", "grpc")  # extras whose lower bounds are run here


def bounds(requirements: list[str]) -> dict[str, str]:
    """Lower bound of each requirement, "" where there is none."""
    found = {}
    for line in requirements:
        name, _, bound = re.match(r"([\w.-]+)(\[[\w,]+\])?(?:>=([\d.]+))?", line).groups()
        if name != "hamlet":
            found[re.sub(r"[-_.]+", "-", name).lower()] = bound or ""
    return found


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    given = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in given.items()}


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def deployed(project) -> dict[str, str]:
    extras = project["optional-dependencies"]
    return bounds([*project["dependencies"], *(r for e in DEPLOYED for r in extras[e])])


def test_the_oldest_set_is_what_is_declared(project):
    oldest, declared = pins("tests/oldest.txt"), deployed(project)
    assert oldest.keys() == declared.keys()
    for name, bound in declared.items():
        assert re.sub(r"(\.0)+$", "", oldest[name]) == re.sub(r"(\.0)+$", "", bound), name


def test_every_other_bound_is_what_was_tested(project):
    """Nobody runs the training packages at older versions: they must not be promised."""
    tested = pins("constraints.txt")
    for extra, requirements in project["optional-dependencies"].items():
        if extra in DEPLOYED:
            continue
        for name, bound in bounds(requirements).items():
            if bound:
                minor = ".".join(tested[name].split(".")[:2])
                assert bound == minor, f"{extra}: {name}>={bound}, tested is {tested[name]}"


def hamlet(python: Path, folder: Path, *arguments: str, **options) -> subprocess.CompletedProcess:
    """A command of the installed package, in a folder that is no checkout."""
    done = subprocess.run(
        [python.with_name("hamlet"), *arguments],
        cwd=folder, capture_output=True, text=True, timeout=60, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_a_deployment_runs(copy, tmp_path, project, which):
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = pip_of(python)
    if which == "oldest":
        subprocess.run([*pip, "-r", ROOT / "tests/oldest.txt"], check=True)
        subprocess.run([*pip, "--no-deps", copy.path], check=True)
    else:
        subprocess.run([*pip, f"{copy.path}[{','.join(DEPLOYED)}]"], check=True)
    frozen = (
        subprocess.run([*pip[:-3], "freeze"], capture_output=True, text=True, check=True)
        .stdout.lower()
        .replace("_", "-")
    )
    if which == "oldest":
        for name, version in pins("tests/oldest.txt").items():
            assert f"{name}=={version}" in frozen
    place = tmp_path / "place"
    (place / "artifacts").mkdir(parents=True)
    for name in ("agent.onnx", "agent.onnx.json"):
        (place / "artifacts" / name).write_bytes((copy.artifacts / name).read_bytes())

    told = " ".join(hamlet(python, place, "doctor").stdout.split())
    version = re.search(r"onnxruntime==(\S+)", frozen)[1]
    assert f"opens in onnxruntime {version}" in told

    example = hamlet(python, place, "act", "--example").stdout
    thoughts = json.loads(hamlet(python, place, "act", input=example).stdout)
    assert (
        thoughts["action"]
        in json.loads((place / "artifacts/agent.onnx.json").read_text())["town"]["action_names"]
    )

    serving = subprocess.Popen(
        [python.with_name("hamlet"), "serve", "--port", "0", "--grpc-port", "0"],
        cwd=place, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for line in serving.stderr:
            if (event := json.loads(line))["event"] == "serving":
                break
        body = json.dumps({"observation": json.loads(example)}).encode()
        with urllib.request.urlopen(f"{event['url']}/act?thoughts=1", body, timeout=30) as answer:
            served = json.loads(answer.read())
        assert served["thoughts"].keys() == thoughts.keys()
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(30) == 0
    finally:
        serving.kill()
        serving.stderr.close()
