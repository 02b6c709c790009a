"""The real pipeline at its smallest size: what reruns, what stays equal, what a failure leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from copied_repo import Repo, pip_of, warm

from hamlet.artifacts import sha256_file
from stages.dependencies import NEUTRAL, module_of, sources
from stages.report import society

pytestmark = pytest.mark.slow

STAGES = [
    "agent", "collect", "evaluate", "freeze_perception", "perception", "policy", "population",
    "prove", "prove_evaluate", "register", "social", "world", "world_model",
]  # fmt: skip


def hashes(repo) -> dict[str, str]:
    """sha256 of every artifact, without the links to MLflow runs."""
    files = (p for p in sorted(repo.artifacts.rglob("*")) if p.is_file())
    names = {p.relative_to(repo.artifacts).as_posix(): p for p in files}
    return {name: sha256_file(p) for name, p in names.items() if not name.startswith("runs/")}


def outputs(repo, stage: str) -> list[Path]:
    """The files a training stage leaves."""
    names = {
        "perception": ["perception.pt"],
        "policy": [f"policy/{part}.pt2" for part in ("prior", "ended", "weigh", "act")],
    }.get(stage, [f"{stage}.pt2"])
    curve = repo.artifacts / "plots" / f"{stage}.csv"
    return [curve, *(repo.artifacts / f for name in names for f in (name, f"{name}.json"))]


def sentence(done: subprocess.CompletedProcess) -> str:
    """The one line a failed command told, of which nothing else may stand on stderr."""
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    return lines[0]


# ------------------------------------------------------------------------------------------------
# What runs, and what it makes


def test_one_command_runs_every_stage_and_sums_up(tiny):
    log = (tiny.path / "repro.log").read_text()
    ran = re.findall(r"Running stage '(\w+)'", log)
    assert sorted(ran) == STAGES
    assert ran[-1] == "register"  # its summary is the last that is read
    for word in (
        "expert",
        "always-REST",
        "artifacts/agent.onnx",
        "artifacts/episode.gif",
        "mlflow ui",
        "/#/experiments/1/runs",  # the page with the runs; MLflow's first one has none
    ):
        assert word in log
    metrics = json.loads((tiny.artifacts / "metrics" / "agent.json").read_text())
    for batch in (1, 7, 256):
        assert metrics[f"different_actions_batch_{batch}"] == 0
        assert metrics[f"parity_batch_{batch}"] <= 1e-4


def test_habits_are_tried_in_whole_lives_and_kept_with_the_policy(tiny):
    measured = json.loads((tiny.artifacts / "metrics/policy.json").read_text())
    weights = torch.load(tiny.artifacts / "policy/weights.pt", weights_only=True)
    for habit, without in (("scouts", 0.0), ("stays", 1.0), ("countdown", 0.0)):
        kept, imitated = (float(weights[of][habit][0, 0]) for of in ("policy", "imitated"))
        assert measured[habit] == pytest.approx(kept)
        assert imitated == without
        assert (measured[f"{habit}_gain"] > measured[f"{habit}_gain_ci95"]) == (kept != without)


def test_second_repro_only_looks_at_the_world_and_the_registry(tiny, capsys):
    before, began = hashes(tiny), time.monotonic()
    assert sorted(tiny.repro()) == ["register", "world"]
    with capsys.disabled():
        print(f"\nsecond dvc repro: {time.monotonic() - began:.1f} s")
    assert hashes(tiny) == before


UNTRACKED = (".git", "artifacts/runs", "checkpoints")  # of MLflow, and of resumption


@pytest.mark.parametrize("stage", sorted(set(STAGES) - {"world"}))
def test_what_a_stage_opens_is_among_its_dependencies(tiny, stage):
    """As traced while the pipeline ran; and what it depends on, it opens."""
    described = yaml.safe_load((tiny.path / "dvc.yaml").read_text())["stages"]
    lines = (tiny.path / "opened" / stage).read_text().splitlines()
    opened = {line[2:].replace("hamlet/", "pipeline/") for line in lines}
    own = described[stage]
    made = {next(iter(out)) if isinstance(out, dict) else out
            for kind in ("outs", "metrics", "plots") for out in own.get(kind, [])}  # fmt: skip
    code = set(sources(stage, module_of(own["cmd"]))) | {*own["deps"], *NEUTRAL}
    known = code | made | {"params.yaml", "presets", "dvc.yaml", "pipeline/town/packs"}
    known |= {*UNTRACKED, "pipeline/tracking", "mlartifacts"}
    known |= {"mlflow.db", "mlflow.db.lock", "mlflow.db.unsent"}
    known |= {"dvc.lock"}  # whose hashes MLflow is told: of data sets, that a run read

    def among(path: str, names) -> bool:
        return any(path == name or path.startswith(f"{name}/") for name in names)

    # Imported, not only hashed for a checkpoint's name: its byte code was asked for.
    imported = {
        re.sub(r"__pycache__/(\w+)\.cpython.*", r"\1.py", p) for p in opened if "__pyc" in p
    }
    read = {path for path in opened if not path.endswith((".py", ".pyc", "py.typed"))}
    files = {path for path in read | imported if (tiny.path / path).is_file()}
    files = {path for path in files if not path.endswith("__init__.py")}
    assert {path for path in files if not among(path, known)} == set()
    data = [dep for dep in own["deps"] if dep.startswith("artifacts/")]
    assert [dep for dep in data if not any(among(path, [dep]) for path in opened)] == []


def test_a_forced_stage_makes_the_same_bytes(copy):
    """Those that the tests of interrupts and of parameters do not make again."""
    before = hashes(copy)
    stages = ["collect", "freeze_perception", "prove"]
    assert copy.repro("--force", "--single-item", *stages) == stages
    after = hashes(copy)
    assert [name for name in before if before[name] != after.get(name)] == []
    assert before.keys() == after.keys()


def test_a_param_reruns_its_stage_and_what_depends_on_it(copy):
    """How long the agent is compared with its modules does not change the agent: exported again it
    has the same bytes, and so it is not judged again."""
    before = hashes(copy)
    touched = (copy.artifacts / "winner/act.pt2").stat().st_mtime_ns
    copy.set("agent", "parity_ticks", 13)
    copy.set("proofs", "hidden", 40)
    ran = [stage for stage in copy.repro() if stage != "world"]  # which always runs
    after = hashes(copy)
    # The report says how equal they were: another tick may be another number in it.
    told = ["evaluate"] * (before["metrics/agent.json"] != after["metrics/agent.json"])
    assert sorted(ran) == sorted(["agent", *told, "prove", "prove_evaluate", "register"])
    assert ran.index("prove") < ran.index("prove_evaluate") < ran.index("register")
    changed = {name for name in before if before[name] != after[name]}
    assert {"prover.onnx", "prover/weights.pt"} <= changed
    assert not changed & {"agent.onnx", "agent.onnx.json", "perception.pt2", "winner/act.pt2"}
    assert before.keys() == after.keys()
    assert (copy.artifacts / "winner/act.pt2").stat().st_mtime_ns == touched


def test_the_best_member_of_a_population_becomes_the_agent(copy):
    before = hashes(copy)
    weights = torch.load(copy.artifacts / "policy/weights.pt", weights_only=True)
    left = [weights[by]["goal_prior.sharpness"] for by in ("imitated", "policy")]
    assert left[0] != left[1]  # reinforcement moved what imitation left
    measured = json.loads((copy.artifacts / "metrics/population.json").read_text())
    assert measured["reinforced_return"] - measured["imitated_return"] == pytest.approx(
        measured["reinforcement_gain"]
    )
    assert before["winner/act.pt2"] == before["policy/act.pt2"]  # no rounds, no population
    copy.set("population", "rounds", 1)
    done = copy.stage("population")
    assert done.returncode == 0, done.stderr
    found = json.loads((copy.artifacts / "metrics" / "population.json").read_text())
    after, winner = hashes(copy), found["winner"]
    assert after["population/member_0/act.pt2"] == before["policy/act.pt2"]
    assert after["population/member_1/prior.pt2"] != before["policy/prior.pt2"]
    for part in ("prior", "ended", "weigh", "act"):
        name = f"{part}.pt2"
        assert after[f"winner/{name}"] == after[f"population/member_{winner}/{name}"]
    assert found["score"][winner] == max(found["score"])
    assert [len(row) for row in found["payoff"]] == [2, 2]
    assert [found["wins"][k][k] for k in (0, 1)] == [0.5, 0.5]
    assert found["wins"][0][1] + found["wins"][1][0] == pytest.approx(1)
    low, high = found["focal_gain_ci95"]
    assert low <= found["focal_gain"] <= high
    told = "\n".join(society(found))
    assert f"The winner is member {winner};" in told
    assert f"| member 1 | {found['payoff'][1][0]:.1f} | {found['payoff'][1][1]:.1f} |" in told
    assert len(found["characters"]) == 8
    assert max(dna["generation"] for dna in found["characters"]) == 1


def test_world_model_trains_where_perceptions_class_is_absent(copy):
    expected = sha256_file(copy.artifacts / "world_model.pt2")
    (copy.path / "pipeline/modules/perception.py").unlink()
    (copy.artifacts / "world_model.pt2").unlink()
    done = copy.stage("world_model")
    assert done.returncode == 0, done.stderr
    assert sha256_file(copy.artifacts / "world_model.pt2") == expected


# ------------------------------------------------------------------------------------------------
# The registry


def champion(repo):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{repo.path / 'mlflow.db'}")
    return client.get_model_version_by_alias("hamlet-agent", "champion"), client


def test_the_champion_in_mlflow_is_the_file(tiny, monkeypatch):
    import mlflow
    import onnxruntime

    from hamlet.serving.agent import OnnxAgent
    from hamlet.town import Town, load_pack

    monkeypatch.chdir(tiny.path)  # the artifacts' names are relative to it
    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    model = mlflow.onnx.load_model("models:/hamlet-agent@champion")
    theirs = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    ours = OnnxAgent(tiny.artifacts / "agent.onnx")
    town = Town(load_pack("brief"), num_layouts=4)
    world, mind, seen = town.reset(3, 2), ours.start(8), set()
    for _ in range(30):
        obs = town.observe(world)
        fields = {
            name: obs[name].flatten(0, 1).numpy()
            for name in ours.inputs
            if name in obs.keys()  # noqa: SIM118
        }
        decision = ours.act(fields, mind)
        (action,) = theirs.run(["action"], {**fields, **mind})
        np.testing.assert_array_equal(action, decision.action)
        seen |= set(action.tolist())
        mind = decision.state
        world = town.step_core(world, town_actions(decision.action))
    assert len(seen) > 1


def town_actions(action):
    import torch

    return torch.from_numpy(action).unflatten(0, (2, 4))


def test_a_deleted_database_is_filled_again_with_one_version(copy):
    (copy.path / "mlflow.db").unlink()
    assert sorted(copy.repro()) == ["register", "world"]
    assert sorted(copy.repro()) == ["register", "world"]
    version, client = champion(copy)
    card = json.loads((copy.artifacts / "agent.onnx.json").read_text())
    assert version.tags["sha256"] == card["sha256"]
    assert len(client.search_model_versions("name = 'hamlet-agent'")) == 1


# ------------------------------------------------------------------------------------------------
# hamlet act, with and without PyTorch


def test_a_profile_accounts_for_the_time_and_makes_nothing_else(tiny, tmp_path):
    before = hashes(tiny)
    done = tiny.hamlet("profile", "policy", "--skip", "9", "--steps", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w+) +([\d.]+)% +([\d.]+)$", done.stdout, re.M)
    shares = {name: float(share) for name, share, _ in rows}
    milliseconds = {name: float(ms) for name, _, ms in rows}
    assert shares.pop("all") == 100.0
    assert {"environment", "sense", "policy", "loss"} <= shares.keys()
    # The tenth step is the first of PPO: futures are imagined, and the expert still tells.
    assert {"imagination", "expert"} <= shares.keys()
    # Whatever its size, a step's row of the curve is written to a disk, which may be slow.
    assert shares.get("other", 0.0) < 5.0 or milliseconds["other"] < 40
    assert sum(shares.values()) == pytest.approx(100.0, abs=0.5)
    assert (tmp_path / "policy" / "trace.json.gz").stat().st_size > 10_000
    assert hashes(tiny) == before
    wrong = tiny.hamlet("profile", "policy", "--skip", "99", "--out", str(tmp_path))
    assert "give smaller --skip" in sentence(wrong)


def test_act_answers_the_same_without_torch(tiny, tmp_path):
    home = tmp_path / "small"
    venv.create(home)
    bin_ = home / ("Scripts" if os.name == "nt" else "bin")
    constraints = tiny.path / "constraints.txt"
    source = f"{tiny.path}[cpu]"
    command = [*pip_of(bin_ / "python"), "-c", str(constraints), source]
    subprocess.run(command, env=tiny.env, check=True, capture_output=True)
    bare = {k: v for k, v in tiny.env.items() if k != "PYTHONPATH"}

    def small(*command: str, **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(bin_ / command[0]), *command[1:]],
            cwd=tiny.path / "artifacts",  # not where the packages could be imported from
            env=bare,
            capture_output=True,
            text=True,
            check=False,
            **options,
        )

    assert "ModuleNotFoundError" in small("python", "-c", "import torch").stderr
    example = tiny.hamlet("act", "--example").stdout
    assert small("hamlet", "act", "--example", "--agent", "agent.onnx").stdout == example
    memories = [tmp_path / "ours.npz", tmp_path / "theirs.npz"]
    for _ in range(3):
        ours = tiny.hamlet("act", "--state", str(memories[0]), input=example)
        theirs = small(
            "hamlet", "act", "--agent", "agent.onnx", "--state", str(memories[1]), input=example
        )
        assert theirs.returncode == 0, theirs.stderr
        left, right = json.loads(ours.stdout), json.loads(theirs.stdout)
        assert (left["action"], left["goal"]) == (right["action"], right["goal"])
        assert left["action_odds"] == pytest.approx(right["action_odds"], abs=2e-3)

    refused = small("hamlet", "play", "--agent", "agent.onnx")
    assert "pip install -c constraints.txt" in sentence(refused)


def test_an_agent_is_played_where_only_its_files_are(tiny, tmp_path):
    elsewhere = Repo(tmp_path)
    elsewhere.env["PYTHONPATH"] = str(tiny.path)
    for name in ("agent.onnx", "agent.onnx.json"):
        shutil.copy(tiny.artifacts / name, tmp_path)
    given = ("--agent", "agent.onnx", "--world", "3", "--ticks", "5")
    played = elsewhere.hamlet("play", *given)
    assert played.returncode == 0, played.stderr
    assert played.stdout == tiny.hamlet("play", "--world", "3", "--ticks", "5").stdout
    elsewhere.run(sys.executable, "-m", "hamlet.export.int8", "agent.onnx")
    assert (tmp_path / "agent.int8.onnx.json").exists()

    card = json.loads((tmp_path / "agent.onnx.json").read_text())
    card["resolved_pack"]["lifespan"] += 1
    (tmp_path / "agent.onnx.json").write_text(json.dumps(card))
    assert "the town pack on its card is not the one" in sentence(elsewhere.hamlet("play", *given))


# ------------------------------------------------------------------------------------------------
# Bad input: one line, and the good output stays


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def corrupt_graph(repo) -> None:
    flip_a_byte(repo.artifacts / "perception.pt2")


def missing_graph(repo) -> None:
    (repo.artifacts / "perception.pt2").unlink()


def missing_card(repo) -> None:
    (repo.artifacts / "perception.pt2.json").unlink()


def corrupt_dataset(repo) -> None:
    flip_a_byte(next(iter(sorted((repo.artifacts / "dataset").glob("*.memmap")))))


def other_pack(repo) -> None:
    pack = repo.path / "pipeline/town/packs/brief.yaml"
    (repo.path / "other.yaml").write_text(pack.read_text().replace("lifespan: 60", "lifespan: 61"))
    repo.set("town", "pack", "other.yaml")


def unknown_param(repo) -> None:
    repo.replace("params.yaml", "  horizon: 2\n  steps: 30", "  horizn: 2\n  steps: 30")


def wrong_param(repo) -> None:
    repo.set("world_model", "steps", "many")


def no_params(repo) -> None:
    (repo.path / "params.yaml").unlink()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (corrupt_graph, r"artifacts/perception\.pt2 .*sha256.*: run `dvc repro freeze_perception`"),
        (missing_graph, r"artifacts/perception\.pt2 is missing: run `dvc repro freeze_perception`"),
        (missing_card, r"perception\.pt2\.json is missing: run `dvc repro freeze_perception`"),
        (corrupt_dataset, r"artifacts/dataset .*sha256.*: run `dvc repro collect`"),
        (other_pack, r"made for another town pack.*: run `dvc repro \w+`"),
        (unknown_param, r"unknown key `world_model\.horizn`.*did you mean `horizon`"),
        (wrong_param, r'`world_model\.steps` is "many".*integer'),
        (no_params, r"params\.yaml is missing"),
    ],
)
def test_bad_input_is_one_line_and_leaves_the_good_output(copy, spoil, told):
    spoil(copy)
    before = [sha256_file(path) for path in outputs(copy, "world_model")]
    assert re.search(told, sentence(copy.stage("world_model")))
    assert [sha256_file(path) for path in outputs(copy, "world_model")] == before


def test_dvc_repro_fails_on_a_wrong_param_too(copy):
    wrong_param(copy)
    done = copy.run("dvc", "repro", check=False)
    assert done.returncode
    assert "world_model.steps" in done.stderr


def test_a_corrupt_agent_is_refused_by_all_who_open_it(copy):
    flip_a_byte(copy.artifacts / "agent.onnx")
    for done in (copy.stage("evaluate"), copy.stage("register"), copy.hamlet("act", "--example")):
        assert re.search(r"agent\.onnx .*sha256.*: run `dvc repro agent`", sentence(done))


def test_an_agent_of_other_modules_is_refused(copy):
    """world_model made anew: the policy was trained against the old one."""
    copy.set("world_model", "steps", 31)
    assert copy.stage("world_model").returncode == 0
    assert re.search(r"policy was trained on another .*world_model", sentence(copy.stage("agent")))


def test_half_the_file_is_never_left_when_the_disk_is_full(copy):
    """The limit of a file's size stands in for a full disk."""
    resource = pytest.importorskip("resource")
    before = [sha256_file(path) for path in outputs(copy, "world_model")]
    code = (
        "import resource, signal, runpy; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "import mlflow, torch, tensordict, stages.world_model;"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, {resource.RLIM_INFINITY}));"
        "runpy.run_module('stages.world_model', run_name='__main__')"
    )
    copy.env["MLFLOW_TRACKING_URI"] = "sqlite:////dev/null/none"  # only the artifact is in question
    done = copy.run(sys.executable, "-c", code, check=False, timeout=300)
    assert done.returncode == 1
    assert "disk is full" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert [sha256_file(path) for path in outputs(copy, "world_model")] == before


# ------------------------------------------------------------------------------------------------
# Interrupts

# As `python -m stages.X`, but every step is saved, so that there is something to resume from, and
# Ctrl-C is heard even where these tests are a shell's background job, to which it means nothing.
EAGER = """
import runpy
import shutil
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from hamlet.learning.checkpoint import Checkpoint
Checkpoint.__init__.__defaults__ = (0.0,)
runpy.run_module("stages.{}", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("stage", "number"),
    [
        ("world_model", signal.SIGINT),
        ("policy", signal.SIGKILL),
    ],
)
def test_interrupted_training_resumes_to_the_same_bytes(copy, stage, number):
    command = [sys.executable, "-c", EAGER.format(stage)]
    copy.run(*command)  # dvc repro trains on two ranks, which round differently
    expected = [sha256_file(path) for path in outputs(copy, stage)]
    with subprocess.Popen(
        ["python", *command[1:]], cwd=copy.path, env=warm(copy.env), stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        until = time.monotonic() + 120
        while not list((copy.path / "checkpoints").glob(f"{stage}-*/checkpoint.pt")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < until, "no checkpoint"
            time.sleep(0.002)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + number
        assert f"`dvc repro {stage}` resumes from it" in said.strip().splitlines()[-1]
    assert [sha256_file(path) for path in outputs(copy, stage)] == expected  # nothing half-written
    for path in outputs(copy, stage):
        path.unlink()

    done = copy.run(*command, check=False)
    assert done.returncode == 0, done.stderr
    first = int(re.search(rf"{stage}: (\d+)/", done.stderr).group(1))
    assert first > 0, "began again instead of resuming"
    assert [sha256_file(path) for path in outputs(copy, stage)] == expected
    assert not list((copy.path / "checkpoints").glob(f"{stage}-*/"))
