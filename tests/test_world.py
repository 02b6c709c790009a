"""What the params only name is a dependency: an edit of it reruns what it concerns."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from copied_repo import ROOT, Repo

from hamlet.params import choose_preset
from stages import world


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A folder with what the stage reads."""
    monkeypatch.chdir(tmp_path)
    for name in ("params.yaml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("presets", "inputs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=lambda *_: ["chosen"])
    return tmp_path


def set_params(old: str, new: str) -> None:
    text = Path("params.yaml").read_text()
    assert text.count(old) == 1
    Path("params.yaml").write_text(text.replace(old, new))


def made() -> dict:
    world.main()
    return json.loads(Path("artifacts/world.json").read_text())


def links() -> dict[str, str]:
    return {p.name: p.resolve().name for p in Path("inputs").iterdir() if p.is_symlink()}


def own_pack() -> None:
    Path("packs").mkdir()
    shutil.copy(ROOT / "pipeline/town/packs/l4_contention.yaml", "packs/parent.yaml")
    Path("packs/mine.yaml").write_text("extends: parent\nname: mine\n")
    set_params("pack: l7_scarce", "pack: packs/mine.yaml")


def test_a_pack_is_its_content_with_all_that_it_extends(repo):
    own_pack()
    first = made()["town"]
    assert first["name"] == "mine"
    assert links() == {"packs_mine.yaml": "mine.yaml", "packs_parent.yaml": "parent.yaml"}
    parent = Path("packs/parent.yaml")
    parent.write_text("# a comment\n" + parent.read_text())
    assert made()["town"] == first
    parent.write_text(parent.read_text().replace("lifespan: 500", "lifespan: 400"))
    second = made()["town"]
    assert second["sha256"] != first["sha256"]
    assert second["pack"]["lifespan"] == 400
    set_params("pack: packs/mine.yaml", "pack: l7_scarce")
    assert made()["town"]["name"] == "l7_scarce"
    assert links() == {}  # DVC hashes the built-in packs as they are


def test_the_facts_are_the_content_of_their_folder(repo):
    assert made()["proofs"]["sha256"] == "kinship"
    Path("family").mkdir()
    Path("family/train.txt").write_text("parent(a,b).\n")
    set_params("data: kinship", "data: family")
    first = made()["proofs"]["sha256"]
    Path("family/test.txt").write_text("parent(a,c).\n")
    assert made()["proofs"]["sha256"] not in (first, "kinship")


def test_a_preset_is_its_values(repo):
    assert set(map(str, made()["preset"].values())) == {"{}"}
    choose_preset(Path(), "tiny")
    found = made()["preset"]
    assert found["social"] == {"steps": 12, "sequences": 4, "chunk": 16}
    assert found["freeze_perception"] == {}


def test_another_torch_is_another_result(repo, monkeypatch):
    usual = made()["libraries"]
    pins = Path("constraints.txt")
    pins.write_text(pins.read_text().replace(f"torch=={usual['torch']}", "torch==9.9.9"))
    found = made()["libraries"]
    assert found["torch"] == f"{usual['torch']} (constraints.txt has pinned 9.9.9)"
    assert {k: v for k, v in found.items() if k != "torch"} == {
        k: v for k, v in usual.items() if k != "torch"
    }
    monkeypatch.setattr(world, "version", lambda name: "1.2.3+cpu")
    pins.unlink()
    assert made()["libraries"]["torch"] == "1.2.3"  # the build for this machine does not count


@pytest.mark.parametrize(
    ("pack", "told"),
    [
        ("gone.yaml", "gone.yaml: no such pack"),
        ("bad.yaml", "bad.yaml: not readable as YAML"),
        ("list.yaml", "list.yaml: a pack is a mapping"),
        ("short.yaml", "short.yaml: width: Field required"),
        ("orphan.yaml", "orphan.yaml: extends: no pack named 'nobody'"),
    ],
)
def test_a_wrong_pack_is_one_line(repo, capsys, pack, told):
    Path("bad.yaml").write_text("name: [\n")
    Path("list.yaml").write_text("- a\n")
    Path("short.yaml").write_text("name: short\n")
    Path("orphan.yaml").write_text("extends: nobody\n")
    set_params("pack: l7_scarce", f"pack: {pack}")
    with pytest.raises(SystemExit):
        world.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"world: {told}")


def test_facts_that_are_not_there_are_one_line(repo, capsys):
    set_params("data: kinship", "data: nowhere")
    with pytest.raises(SystemExit):
        world.main()
    assert "proofs.data is nowhere, which is not a folder" in capsys.readouterr().err


def test_the_stage_loads_no_torch():
    """It runs at every `dvc repro`."""
    code = "import sys, stages.world; assert not {'torch', 'mlflow', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_an_experiment_does_not_set_what_the_preset_overrules(repo, monkeypatch, capsys):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "params.yaml"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setenv("DVC_EXP_BASELINE_REV", "HEAD")
    choose_preset(Path(), "tiny")
    world.main()
    set_params("steps: 1300", "steps: 20")
    set_params("kl_weight: 1.0e-3", "kl_weight: 2.0e-3")  # tiny says nothing of it
    capsys.readouterr()
    with pytest.raises(SystemExit):
        world.main()
    told = capsys.readouterr().err
    assert "world_model.steps is set to 20 in params.yaml, the preset tiny overrules it" in told
    assert "--set-param presets/tiny.yaml:world_model.steps=20" in told
    choose_preset(Path(), None)
    world.main()


DVC = [sys.executable, "-m", "dvc"]


@pytest.mark.slow
def test_dvc_sees_an_edit_of_what_a_pack_extends(repo):
    """The real dvc, with the stage `world` as it is and two that stand for the others."""
    import yaml

    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    stage = stages["world"] | {"deps": [d for d in stages["world"]["deps"] if "pipeline" not in d]}
    keys = {"town": ["town.sha256", "preset.town"], "proofs": ["proofs.sha256", "preset.proofs"]}
    content = {"world": stage} | {
        name: {
            "cmd": f"echo {name} > {name}.txt",
            "params": [name, {"artifacts/world.json": names}],
            "outs": [f"{name}.txt"],
        }
        for name, names in keys.items()
    }
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": content}))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "DVC_NO_ANALYTICS": "true"}

    def dvc(*command: str) -> str:
        done = subprocess.run([*DVC, *command], env=env, capture_output=True, text=True, check=True)
        return done.stdout

    def ran(*command: str) -> set[str]:
        lines = dvc("repro", *command).splitlines()
        return {line.split("'")[1] for line in lines if line.startswith("Running stage")}

    dvc("init", "--no-scm", "-q")
    own_pack()
    assert ran() == {"world", "town", "proofs"}
    assert ran() == {"world"}
    assert "inputs" not in dvc("status")
    parent = Path("packs/parent.yaml")
    parent.write_text(parent.read_text().replace("lifespan: 500", "lifespan: 400"))
    assert "inputs" in dvc("status")
    assert ran() == {"world", "town"}
    parent.write_text("# only a comment\n" + parent.read_text())
    assert ran() == {"world"}
    choose_preset(Path(), "tiny")
    assert "presets" in dvc("status")
    assert ran() == {"world", "town", "proofs"}


@pytest.mark.slow
def test_an_archive_without_git_needs_no_setting(tmp_path):
    """Such as a host's zip, whose .dvc/config says that there is no Git."""
    with subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE) as packed:
        subprocess.run(["tar", "-x", "-C", tmp_path], stdin=packed.stdout, check=True)
    archive = Repo(tmp_path)
    assert archive.repro("world") == ["world"]
    in_git = archive.run("dvc", "--cd", str(ROOT), "config", "core.no_scm", check=False)
    assert in_git.stdout.strip() != "true", "in a checkout DVC uses Git"
