"""The report names what is broken or stale, and its commands mend it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest
from copied_repo import warm
from onnx import TensorProto, helper

from hamlet import doctor, tracking
from hamlet.artifacts import write_card, write_json
from hamlet.doctor import Check, report

ROOT = Path(__file__).parents[1]


def by_name() -> dict[str, Check]:
    return {check.name: check for check in report()}


def write_agent(weight: float = 1.0) -> str:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch"])
    add = helper.make_node("Add", ["x", "w"], ["y"])
    w = onnx.numpy_helper.from_array(np.float32([weight]), "w")
    graph = helper.make_graph([add], "g", [x], [y], [w])
    Path("artifacts").mkdir(exist_ok=True)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    onnx.save(model, "artifacts/agent.onnx")
    return write_card("artifacts/agent.onnx", "agent", {"inputs": [], "outputs": []})["sha256"]


@pytest.fixture
def repo(tmp_path, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


def dvc(*command: str) -> None:
    subprocess.run(["dvc", *command, "-q"], env=warm(dict(os.environ)), check=True)


def test_this_installation_is_healthy(repo):
    found = by_name()
    assert not [check for check in found.values() if check.status == "fail"]
    for name in ("python", "packages", "extra train", "extra dev", "onnx runtime", "torch"):
        assert found[name].status == "ok", found[name]
    assert found["provider CPU"].detail == "runs"
    assert found["device"].detail == "stages run on cpu: HAMLET_DEVICE is cpu"
    assert "float32" in found["bfloat16"].detail
    assert found["params.yaml"].status == "ok"
    assert found["agent"] == Check(
        "agent", "warn", "artifacts/agent.onnx is missing", "dvc repro agent"
    )
    for check in found.values():
        assert "\n" not in check.detail + check.fix


def test_the_extras_are_those_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        plain = {r.split(";")[0].split(">")[0].split("[")[0].strip().lower() for r in requirements}
        types = {name for name in plain if name.startswith("types-")}
        return plain - types - {"hamlet", "onnxruntime", "onnxruntime-gpu"}

    extras = project["optional-dependencies"]
    assert set(doctor.EXTRAS["core"]) == names(project["dependencies"])
    assert set(doctor.EXTRAS["train"]) == names(extras["train"])
    assert set(doctor.EXTRAS["serve"]) == names(extras["serve"])
    assert set(doctor.EXTRAS["dev"]) == names(extras["dev"])


def test_the_small_model_is_a_valid_one():
    model = onnx.load_model_from_string(doctor.DOUBLING)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["Add"]


def test_broken_files_are_found_with_the_fix(repo):
    write_agent()
    with open("artifacts/agent.onnx", "ab") as file:
        file.write(b"\0")
    Path("params.yaml").write_text("sed: 1\n")
    found = by_name()
    assert found["registry"].status == "fail"
    assert "does not match its card" in found["registry"].detail
    assert found["params"].status == "fail"
    assert "`sed`" in found["params"].detail
    assert "did you mean `seed`" in found["params"].fix


def test_a_pack_or_facts_that_cannot_be_read_are_found(repo):
    Path("bad.yaml").write_text("name: [\n")
    text = Path("params.yaml").read_text()
    found = by_name()
    assert found["town pack"].detail.startswith("l7_scarce")
    assert found["facts"].detail.startswith("kinship")
    for pack, told in (("gone.yaml", "no such pack"), ("bad.yaml", "not readable as YAML")):
        broken = text.replace("pack: l7_scarce", f"pack: {pack}")
        Path("params.yaml").write_text(broken.replace("data: kinship", "data: nowhere"))
        found = by_name()
        assert found["params.yaml"].status == "ok"
        for check, detail in (("pack", f"{pack}: {told}"), ("facts", "nowhere")):
            assert found[check].status == "fail"
            assert detail in found[check].detail + found[check].fix
            assert "\n" not in found[check].detail


def test_without_git_the_fix_is_named_and_mends_it(repo):
    (repo / ".dvc").mkdir()
    (repo / ".dvc" / "config").write_text("[core]\n    analytics = false\n")
    shutil.copy(ROOT / ".dvc" / ".gitignore", repo / ".dvc")
    Path("dvc.yaml").write_text("stages: {one: {cmd: 'true'}}\n")
    fix = by_name()["stages"].fix
    assert fix.startswith("git init, or without Git: dvc config")
    dvc(*fix.partition("dvc ")[2].split())
    assert "stages" not in by_name() or by_name()["stages"].status != "fail"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "left"),
    [(".dvc/tmp/rwlock", ""), ("dvc.lock", "schema: '2.0'\nstages:\n  one:\n")],
)
def test_what_a_killed_dvc_leaves_half_written_is_named_and_mended(repo, file, left):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q"], check=True)
    dvc("init")
    Path("dvc.yaml").write_text(
        "stages:\n"
        "  one: {cmd: cp params.yaml a.txt && echo 1 >> ran, deps: [params.yaml], outs: [a.txt]}\n"
    )
    Path("dvc.lock").write_text("schema: '2.0'\n")
    subprocess.run(["git", "add", "dvc.lock"], check=True)
    subprocess.run([*git, "commit", "-qm", "before it was run"], check=True)
    dvc("repro")
    (repo / file).write_text(left)
    found = by_name()["stages"]
    assert (found.status, found.detail.split()[0]) == ("fail", file)
    subprocess.run(found.fix, shell=True, check=True)
    dvc("repro")
    assert by_name()["stages"].status == "ok"
    assert Path("ran").read_text() == "1\n", "what was made is kept"
    shutil.rmtree(".git")
    dvc("config", "--local", "core.no_scm", "true")
    (repo / file).write_text(left)
    assert by_name()["stages"].fix == f"rm {file}"


def test_interrupted_work_is_listed(repo):
    for name in ("world_model", "tune", "study-no_social-2"):
        (repo / "checkpoints" / f"{name}-0123456789abcdef").mkdir(parents=True)
    found = by_name()
    assert found["checkpoint world_model"].fix == "dvc repro world_model"
    assert found["checkpoint tune"].fix == "hamlet tune"
    fix = "python -m benchmarks.study cell no_social 2"
    assert found["checkpoint no_social 2"].fix == fix


@pytest.mark.slow
def test_stale_stages_are_named_and_the_command_mends_them(repo):
    subprocess.run(["git", "init", "-q"], check=True)
    dvc("init")
    (repo / "dvc.yaml").write_text(
        "stages:\n"
        "  one: {cmd: cp params.yaml a.txt, params: [seed], outs: [a.txt]}\n"
        "  two: {cmd: cp a.txt b.txt, deps: [a.txt], outs: [b.txt]}\n"
        "  last: {cmd: 'true', deps: [b.txt], always_changed: true}\n"
    )
    assert by_name()["stage one"].status == "warn"
    dvc("repro")
    found = by_name()
    assert found["stages"].detail == "every stage is up to date"
    assert not [name for name in found if name.startswith("stage ")]
    text = (repo / "params.yaml").read_text()
    (repo / "params.yaml").write_text(re.sub(r"^seed: \d+", "seed: 987", text, flags=re.M))
    (repo / "b.txt").unlink()
    found = by_name()
    assert found["stage one"].detail == "params.yaml seed modified"
    assert "b.txt deleted" in found["stage two"].detail
    for name in ("one", "two", "last"):  # each changes what the next one reads
        words = by_name()[f"stage {name}"].fix.split()
        assert words[0] == "dvc"
        dvc(*words[1:])
    assert by_name()["stages"].status == "ok"


@pytest.mark.slow
def test_the_champion_is_compared_with_the_file(repo):
    sha256 = write_agent()
    assert by_name()["champion"].fix == "dvc repro register"
    assert not Path("mlflow.db").exists(), "looking must not make a database"
    client = tracking.client()
    client.create_registered_model(tracking.MODEL)
    made = client.create_model_version(tracking.MODEL, "somewhere", tags={"sha256": sha256})
    assert by_name()["champion"].detail == "is nobody, not artifacts/agent.onnx"
    client.set_registered_model_alias(tracking.MODEL, tracking.CHAMPION, made.version)
    assert by_name()["champion"].status == "ok"
    new = write_agent(2.0)
    assert by_name()["champion"].fix == "dvc repro register"
    verdict = {"sha256": new, "passed": False, "reasons": ["ratio_over_rest is 1.2"]}
    write_json("artifacts/metrics/register.json", verdict)
    refused = by_name()["champion"]
    assert "the gate refused artifacts/agent.onnx: ratio_over_rest is 1.2" in refused.detail


def test_it_reports_without_the_training_extra(repo):
    """A deployment: nothing of the train extra can be found or imported."""
    code = (
        "import sys, json, importlib.abc, importlib.metadata as m\n"
        f"names = {[*doctor.EXTRAS['train'], 'yaml', 'PIL']!r}\n"
        "class Hide(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in names: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "real = m.distribution\n"
        "def hidden(name):\n"
        "    if name in names: raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.distribution = hidden\n"
        "import importlib.util as u; spec = u.find_spec\n"
        "def find(name, package=None):\n"
        "    return None if name in names else spec(name, package)\n"
        "u.find_spec = find\n"
        "from hamlet.doctor import report\n"
        "print(json.dumps(report()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = {name: (status, fix) for name, status, _, fix in json.loads(done.stdout)}
    assert found["extra train"] == ("warn", 'pip install -c constraints.txt -e ".[train]"')
    assert found["provider CPU"][0] == "ok"
    assert found["packages"][0] == "ok"
    assert "torch" not in found
    assert not [name for name, (status, _) in found.items() if status == "fail"]
