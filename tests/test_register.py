"""The registry after real runs of the stage, on a real store and a real (small) ONNX file."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from mlflow.tracking import MlflowClient
from onnx import TensorProto, helper, numpy_helper

from hamlet import registry, tracking
from hamlet.artifacts import HamletError, write_card, write_json
from hamlet.tracking import tracking_uri
from stages import register

ROOT = Path(__file__).parents[1]
SCORES = {
    "mean_return": 400.5,
    "rest_return": 134.0,
    "survival": 0.998,
    "ratio_over_rest": 2.99,
    "ratio_over_rest_ci95": [2.9, 3.1],
    "scores": {
        "random": {"mean_return": 68.5, "survival": 0.0},
        "rest": {"mean_return": 134.0, "survival": 0.1},
        "expert": {"mean_return": 426.0, "survival": 0.999},
    },
}


# The training's own mean return is not what the gate looks at.
TRAINED = {"loss": 0.1, "value_loss": 0.01, "goal_entropy": 0.06, "mean_return": 1.0}


def write_agent(repo: Path, weight: float) -> None:
    """A small agent: two named inputs, a float output and an action, dynamic batch."""
    x = helper.make_tensor_value_info("view", TensorProto.FLOAT, ["batch", 3])
    h = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["batch", 4])
    action = helper.make_tensor_value_info("action", TensorProto.INT64, ["batch"])
    new = helper.make_tensor_value_info("new_hidden", TensorProto.FLOAT, ["batch", 4])
    matrix = np.linspace(-weight, weight, 12, dtype=np.float32).reshape(3, 4)
    nodes = [
        helper.make_node("MatMul", ["view", "w"], ["mixed"]),
        helper.make_node("Add", ["mixed", "hidden"], ["new_hidden"]),
        helper.make_node("ArgMax", ["new_hidden"], ["action"], axis=1, keepdims=0),
    ]
    weights = [numpy_helper.from_array(matrix, "w")]
    graph = helper.make_graph(nodes, "agent", [x, h], [action, new], weights)
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path = repo / "artifacts" / "agent.onnx"
    path.parent.mkdir(exist_ok=True)
    onnx.save(model, path)
    write_card(path, "agent", {"inputs": [], "outputs": []}, {"policy": "p" * 64})


def write_prover(repo: Path, mrr: float) -> None:
    """A small scorer, and its ranks beside the symbolic baseline's 0.95."""
    x = helper.make_tensor_value_info("prior", TensorProto.FLOAT, ["batch"])
    score = helper.make_tensor_value_info("score", TensorProto.FLOAT, ["batch"])
    nodes = [helper.make_node("Relu", ["prior"], ["score"])]
    graph = helper.make_graph(nodes, f"prover{mrr}", [x], [score])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path = repo / "artifacts" / "prover.onnx"
    onnx.save(model, path)
    write_card(path, "prover scorer", {"inputs": [], "outputs": []})
    ranks = {"mrr_all": mrr, "mrr_100": 0.97, "symbolic_mrr_all": 0.95, "symbolic_mrr_100": 0.97}
    write_json(repo / "artifacts/metrics/prove_evaluate.json", ranks)
    rows = [f"0 {i} {i + 1},2,{1 / (mrr + 0.01 * (-1) ** i):.6f},1.0" for i in range(20)]
    (repo / "artifacts/ranks.csv").write_text("\n".join(["triple,open,rank,symbolic_rank", *rows]))


def write_returns(repo: Path, *more: float, rest: float = 134.0) -> None:
    """What the agent and one that rests got in each world."""
    rows = [f"rest,{i},{rest + i:.6g}" for i in range(len(more))]
    rows += [f"agent,{i},{400 + i + more[i]:.6g}" for i in range(len(more))]
    path = repo / "artifacts/plots/returns.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["player,world,return", *rows]) + "\n")


def set_gate(repo: Path, ratio: float, **limits: float) -> None:
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    params["register"] |= {"min_ratio_over_rest": ratio, "min_mean_return": 0.0} | limits
    (repo / "params.yaml").write_text(yaml.safe_dump(params))


@pytest.fixture(scope="module")
def fresh_database(tmp_path_factory):
    path = tmp_path_factory.mktemp("db") / "mlflow.db"
    client = MlflowClient(f"sqlite:///{path}")
    client.search_experiments()
    client._tracking_client.store.engine.dispose()
    return path


@pytest.fixture
def repo(tmp_path, monkeypatch, fresh_database):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_RUN_ID", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HAMLET_EXECUTION", "first")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dvc").mkdir()
    shutil.copy(fresh_database, tmp_path / "mlflow.db")
    write_agent(tmp_path, 1.0)
    write_prover(tmp_path, 0.96)
    write_returns(tmp_path, 0, 0, 0, 0)
    write_json(tmp_path / "artifacts/metrics/evaluate.json", SCORES)
    write_json(tmp_path / "artifacts/metrics/policy.json", TRAINED)
    set_gate(tmp_path, 2.0)
    yield tmp_path
    mlflow.set_tracking_uri(None)
    mlflow.set_registry_uri(None)


def versions() -> dict[int, str]:
    found = tracking.client().search_model_versions("name = 'hamlet-agent'")
    return {int(v.version): v.tags["sha256"] for v in found}


def champion() -> int | None:
    found = tracking.champion(tracking.client())
    return int(found.version) if found else None


def runs() -> list:
    client = tracking.client()
    return client.search_runs([client.get_experiment_by_name("hamlet").experiment_id])


def load_champion() -> onnx.ModelProto:
    mlflow.set_tracking_uri(tracking_uri())
    mlflow.set_registry_uri(tracking_uri())
    return mlflow.onnx.load_model("models:/hamlet-agent@champion")


STAGE = (
    "import runpy, sys; runpy.run_module('stages.register', run_name='__main__'); "
    "assert 'torch' not in sys.modules"
)


def start_stage(execution: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", STAGE],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HAMLET_EXECUTION": execution},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_stage(execution: str) -> str:
    process = start_stage(execution)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    return out


def play(model: str | bytes) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    state, played = np.zeros((64, 4), np.float32), []
    for _ in range(20):
        view = rng.normal(size=(64, 3)).astype(np.float32)
        action, state = session.run(["action", "new_hidden"], {"view": view, "hidden": state})
        played += [action, state]
    return played


def test_it_registers_once_and_the_champion_is_the_file(repo, capsys, monkeypatch):
    register.main()
    out = capsys.readouterr().out
    card = json.loads((repo / "artifacts/agent.onnx.json").read_text())
    assert versions() == {1: card["sha256"]}
    assert champion() == 1
    for ours, theirs in zip(
        play(str(repo / "artifacts/agent.onnx")), play(load_champion().SerializeToString())
    ):
        np.testing.assert_array_equal(ours, theirs)
    # the summary: every baseline, best first, and where everything is
    order = [line.split()[0] for line in out.strip().splitlines()[1:5]]
    assert order == ["agent", "expert", "rest", "random"]
    for word in ("400.5", "426.0", "68.5", "2.99 (95 % from 2.90 to 3.10)", "version 1, new"):
        assert word in out
    for place in ("artifacts/agent.onnx", "artifacts/episode.gif", "artifacts/REPORT.md"):
        assert place in out
    assert "mlflow ui --backend-store-uri sqlite:///mlflow.db" in out
    verdict = json.loads((repo / "artifacts/metrics/register.json").read_text())
    prover = json.loads((repo / "artifacts/prover.onnx.json").read_text())
    passed = {"passed": True, "reasons": []}
    assert verdict == {
        "sha256": card["sha256"], **passed, "prover": {"sha256": prover["sha256"], **passed}
    }  # fmt: skip
    # a parent and a child, with the scores
    assert len(runs()) == 2
    child = next(r for r in runs() if r.data.tags.get("hamlet.stage") == "register")
    assert child.info.status == "FINISHED"
    assert child.data.metrics["ratio_over_rest"] == 2.99
    assert child.data.metrics["scores.expert.mean_return"] == 426.0
    # a later execution with nothing to do leaves no trace
    monkeypatch.setenv("HAMLET_EXECUTION", "second")
    before = (repo / "artifacts/metrics/register.json").read_bytes()
    register.main()
    assert "version 1, is the champion" in capsys.readouterr().out
    assert versions() == {1: card["sha256"]}
    assert len(runs()) == 2
    assert (repo / "artifacts/metrics/register.json").read_bytes() == before


def test_the_model_needs_exactly_one_runtime_and_is_one_file(repo):
    register.main()
    mlflow.set_tracking_uri(tracking_uri())
    folder = Path(mlflow.artifacts.download_artifacts("models:/hamlet-agent@champion"))
    needs = (folder / "requirements.txt").read_text()
    assert needs.count("onnxruntime") == 1
    assert [p.name for p in folder.glob("model.onnx*")] == ["model.onnx"]
    flavor = yaml.safe_load((folder / "MLmodel").read_text())["flavors"]["onnx"]
    assert flavor["providers"] == ["CPUExecutionProvider"]
    model = mlflow.pyfunc.load_model(str(folder))
    batch = {"view": np.ones((5, 3), np.float32), "hidden": np.zeros((5, 4), np.float32)}
    assert model.predict(batch)["action"].tolist() == [3] * 5


@pytest.mark.slow
def test_it_holds_when_the_database_was_deleted(repo):
    for execution in ("one", "two"):
        run_stage(execution)
        assert (repo / "mlflow.db").exists()
        if execution == "one":
            (repo / "mlflow.db").unlink()
            shutil.rmtree(repo / "mlartifacts")
    assert len(versions()) == 1
    assert champion() == 1
    assert play(load_champion().SerializeToString())
    record = json.loads((repo / "artifacts/runs/register.json").read_text())
    assert tracking.client().get_run(record["run_id"]).info.status == "FINISHED"


def test_a_version_whose_file_is_gone_stays_and_is_registered_again(repo, capsys):
    register.main()
    shutil.rmtree(repo / "mlartifacts")
    capsys.readouterr()
    register.main()
    assert "the file of hamlet-agent version 1 is gone" in capsys.readouterr().err
    assert set(versions()) == {1, 2}
    assert champion() == 2
    assert play(load_champion().SerializeToString())
    with pytest.raises(HamletError, match="the file of hamlet-agent version 1 is gone"):
        registry.promote("hamlet-agent", 1)
    assert champion() == 2


def tags(number: int) -> dict[str, str]:
    return tracking.client().get_model_version("hamlet-agent", str(number)).tags


def test_a_new_version_takes_the_alias_only_if_it_is_no_worse_in_the_same_worlds(repo, capsys):
    register.main()
    assert tags(1)["promoted"].startswith("yes: passed its gate, and no version was champion")
    assert tags(1)["score"] == "400.5"
    # Worse on average, better in two of the four worlds.
    write_agent(repo, 2.0)
    write_returns(repo, 4, -3, -5, 2)
    register.main()
    assert set(versions()) == {1, 2}
    assert champion() == 1
    said = "return is 0.5 lower than of version 1 in the same 4 cases (95 % from -4.619 to +3.619)"
    assert tags(2)["promoted"] == f"no: {said}"
    told = tracking.client().get_model_version("hamlet-agent", "2").description
    assert told.startswith("score 400.5, ")
    assert told.endswith(f"Not champion: {said}.")
    assert f"version 2, new, is not champion: {said}" in capsys.readouterr().out
    # Equal everywhere is no worse.
    write_agent(repo, 3.0)
    write_returns(repo, 0, 0, 0, 0)
    register.main()
    assert champion() == 3
    # Far better, but measured in other worlds: nothing to compare.
    write_agent(repo, 4.0)
    write_returns(repo, 99, 99, 99, 99, rest=150.0)
    register.main()
    assert champion() == 3
    assert tags(4)["promoted"] == (
        "no: version 3 was measured on other held-out cases, so they cannot be compared"
    )


def test_an_old_version_found_again_moves_no_alias(repo):
    """As with an older checkout on a shared server, or `dvc checkout` of an older commit."""
    register.main()
    write_agent(repo, 2.0)
    write_returns(repo, 1, 1, 1, 1)
    register.main()
    assert champion() == 2
    write_agent(repo, 1.0)
    write_returns(repo, 50, 50, 50, 50)
    register.main()
    assert set(versions()) == {1, 2}
    assert champion() == 2


def test_the_alias_stays_where_a_person_put_it(repo, monkeypatch, capsys):
    register.main()
    for weight in (2.0, 3.0):
        write_agent(repo, weight)
        write_returns(repo, weight, weight, weight, weight)
        register.main()
    assert champion() == 3
    assert registry.rollback("hamlet-agent") == (
        "hamlet-agent version 2 is the champion, version 3 no longer"
    )
    assert champion() == 2
    assert tags(2)["promoted"].startswith("yes, by hand (")
    assert tags(3)["promoted"].startswith("no longer: version 2 took its place by hand (")
    for execution in ("first", "later"):  # with stages run, and with nothing to do
        monkeypatch.setenv("HAMLET_EXECUTION", execution)
        capsys.readouterr()
        register.main()
        assert champion() == 2
    assert "version 3, is not champion, version 2 is" in capsys.readouterr().out
    registry.rollback("hamlet-agent")
    assert champion() == 1
    with pytest.raises(HamletError, match="nothing is known of one before"):
        registry.rollback("hamlet-agent")
    registry.rollback("hamlet-agent", 2)
    assert champion() == 2
    assert "version 3 is the champion, version 2 no longer" in registry.promote("hamlet-agent")
    assert champion() == 3
    assert registry.promote("hamlet-agent") == "hamlet-agent version 3 is the champion already"
    with pytest.raises(HamletError, match="has no version 9: it has 1, 2, 3"):
        registry.promote("hamlet-agent", 9)
    with pytest.raises(HamletError, match="no model nobody: it has hamlet-agent, hamlet-p"):
        registry.promote("nobody")
    tracking.client().delete_registered_model_alias("hamlet-agent", "champion")
    register.main()
    assert champion() is None, "taken away by hand"


def test_the_commands_promote_and_roll_back(repo):
    from typer.testing import CliRunner

    from hamlet.cli import app

    register.main()
    write_agent(repo, 2.0)
    write_returns(repo, 1, 1, 1, 1)
    register.main()
    done = CliRunner().invoke(app, ["rollback", "hamlet-agent"])
    assert (done.exit_code, done.output) == (
        0, "hamlet-agent version 1 is the champion, version 2 no longer\n"
    )  # fmt: skip
    assert champion() == 1
    assert CliRunner().invoke(app, ["promote", "hamlet-agent", "2"]).exit_code == 0
    assert champion() == 2
    assert CliRunner().invoke(app, ["promote", "hamlet-agent", "7"]).exit_code == 1


@pytest.mark.parametrize(
    ("new", "old", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], (0.0, 0.0, 0.0)),
        ([3.0, 5.0], [1.0, 1.0], (3.0, 3.0 - 1.96, 3.0 + 1.96)),
        ([1.0, 0.0, 2.0], [2.0, 2.0, 2.0], (-1.0, -1.0 - 1.96 / 3**0.5, -1.0 + 1.96 / 3**0.5)),
    ],
)
def test_paired_differences_and_their_interval(new, old, expected):
    assert registry.paired(new, old) == pytest.approx(expected)


def test_the_gate_keeps_the_alias_and_says_why(repo, capsys):
    register.main()
    write_agent(repo, 2.0)
    write_returns(repo, 9, 9, 9, 9)
    weak = SCORES | {"ratio_over_rest": 2.1, "ratio_over_rest_ci95": [1.8, 2.4]}
    write_json(repo / "artifacts/metrics/evaluate.json", weak)
    capsys.readouterr()
    register.main()
    out = capsys.readouterr().out
    assert set(versions()) == {1, 2}
    assert champion() == 1
    assert "version 2, new, is not champion: ratio_over_rest is 2.1 (95 % from 1.8 to 2.4)" in out
    assert "the gate asks min 2" in out
    verdict = json.loads((repo / "artifacts/metrics/register.json").read_text())
    assert verdict["passed"] is False
    assert len(verdict["reasons"]) == 1
    # A champion that would no longer pass keeps the alias, which is said.
    set_gate(repo, 5.0)
    write_agent(repo, 1.0)
    register.main()
    assert champion() == 1
    assert "version 1, is the champion, but its gate says: ratio_over_rest" in (
        capsys.readouterr().out
    )


def test_the_row_of_an_execution_tells_how_good_it_was(repo):
    register.main()
    (parent,) = [r for r in runs() if "hamlet.execution" in r.data.tags]
    numbers = parent.data.metrics
    assert numbers["score"] == 400.5
    assert numbers["ratio_over_rest"] == 2.99
    assert numbers["prover_mrr"] == 0.96
    assert numbers["seconds"] > 0
    assert {"seed", "town.pack", "perception.precision"} <= parent.data.params.keys()
    assert parent.data.tags["registered.agent"] == parent.data.tags["champion.agent"] == "1"
    assert {f"models:/{m.model_id}" for m in parent.outputs.model_outputs} == {
        tracking.client().get_model_version(name, "1").source
        for name in ("hamlet-agent", "hamlet-prover")
    }


@pytest.mark.parametrize(
    ("limit", "bound", "reason"),
    [
        ("min_mean_return", 450.0, "mean_return is 400.5, the gate asks min 450"),
        ("max_loss", 0.05, "loss is 0.1, the gate asks max 0.05"),
        ("max_value_loss", 0.001, "value_loss is 0.01, the gate asks max 0.001"),
        ("min_goal_entropy", 0.1, "goal_entropy is 0.06, the gate asks min 0.1"),
    ],
)
def test_every_limit_of_the_gate_can_block_and_is_named(repo, limit, bound, reason):
    set_gate(repo, 2.0, **{limit: bound})
    register.main()
    verdict = json.loads((repo / "artifacts/metrics/register.json").read_text())
    assert verdict["reasons"] == [reason]
    assert champion() is None


def test_the_prover_is_registered_behind_a_gate_of_its_own(repo, capsys):
    def prover_champion() -> int | None:
        found = tracking.champion(tracking.client(), tracking.PROVER_MODEL)
        return int(found.version) if found else None

    register.main()
    out = capsys.readouterr().out
    assert "hamlet-prover version 1, new, is the champion" in out
    assert "MRR 0.960 over all entities (symbolic baseline 0.950)" in out
    assert prover_champion() == 1
    mlflow.set_tracking_uri(tracking_uri())
    loaded = mlflow.onnx.load_model("models:/hamlet-prover@champion")
    assert [i.name for i in loaded.graph.input] == ["prior"]
    # worse than the symbolic baseline: registered still
    write_prover(repo, 0.94)
    register.main()
    out = capsys.readouterr().out
    assert "is not champion: mrr_all is 0.94, the symbolic baseline has 0.95" in out
    assert prover_champion() == 1
    assert champion() == 1
    # Better than the baseline, and worse than the champion on the same questions.
    write_prover(repo, 0.955)
    register.main()
    assert "version 3, new, is not champion: reciprocal rank is" in capsys.readouterr().out
    assert prover_champion() == 1
    write_prover(repo, 0.965)
    register.main()
    assert prover_champion() == 4
    write_prover(repo, 0.94)
    register.main()
    verdict = json.loads((repo / "artifacts/metrics/register.json").read_text())
    assert verdict["passed"] is True
    assert verdict["prover"]["passed"] is False
    assert register.gate_prover({"mrr_all": 1.0}) == [
        "mrr_all or symbolic_mrr_all is not in the evaluation",
        "mrr_100 or symbolic_mrr_100 is not in the evaluation",
    ]
    (repo / "artifacts/prover.onnx").unlink()
    with pytest.raises(SystemExit):
        register.main()
    assert "prover.onnx is missing" in capsys.readouterr().err


def test_bad_input_is_one_line(repo, capsys):
    def fails(says: str) -> None:
        with pytest.raises(SystemExit) as caught:
            register.main()
        err = capsys.readouterr().err.strip()
        assert caught.value.code == 1
        assert len(err.splitlines()) == 1
        assert says in err

    write_json(repo / "artifacts/metrics/evaluate.json", SCORES | {"agent_sha256": "0" * 64})
    fails("is about another agent")
    write_json(repo / "artifacts/metrics/evaluate.json", {"mean_return": 1.0})
    fails("lacks survival")
    (repo / "artifacts/metrics/evaluate.json").unlink()
    fails("evaluate.json is missing")
    with (repo / "artifacts/agent.onnx").open("ab") as file:
        file.write(b"\0")
    fails("does not match its card")
    (repo / "artifacts/agent.onnx").unlink()
    fails("agent.onnx is missing")
    assert versions() == {}


@pytest.mark.slow
def test_two_processes_make_one_version(repo):
    processes = [start_stage(key) for key in ("a", "b")]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert list(versions()) == [1]
    assert champion() == 1


def test_nothing_to_do_is_quick_and_without_torch(repo):
    register.main()
    began = time.monotonic()
    run_stage("later")
    print(f"nothing to do took {time.monotonic() - began:.1f} s")
    assert len(runs()) == 2


@pytest.mark.parametrize(
    ("limits", "scores", "reasons"),
    [
        ({"min_x": 2}, {"x": 2.0}, 0),
        ({"min_x": 2}, {"x": 1.9}, 1),
        ({"min_x": 2}, {"x": 9, "x_ci95": [1.9, 12]}, 1),
        ({"max_x": 2}, {"x": 1, "x_ci95": [0.5, 2.5]}, 1),
        ({"max_x": 2, "min_x": 0}, {"x": 1, "x_ci95": [0.5, 1.5]}, 0),
        ({"min_x": 2, "min_y": 1}, {}, 2),
        ({"min_x": 2}, {"x": None}, 1),
    ],
)
def test_the_gate_asks_the_near_end_of_the_interval(limits, scores, reasons):
    assert len(register.gate(limits, scores)) == reasons
