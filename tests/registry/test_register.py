"""The registry after real runs of the stage, on a real store and a real (small) ONNX file."""

import json
import shutil
from pathlib import Path

import mlflow
import numpy as np
import pytest
import yaml
from registered import (
    SCORES,
    champion,
    load_champion,
    play,
    run_stage,
    runs,
    start_stage,
    versions,
    write_prover,
)

from hamlet import registry, tracking
from hamlet.artifacts import HamletError, write_json
from hamlet.tracking import tracking_uri
from stages import register


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


def test_nothing_to_do_imports_neither_pytorch_nor_mlflow(repo):
    register.main()
    told, imported = run_stage("later")
    assert imported == set()
    assert "hamlet-agent version 1, is the champion" in told
    assert "/#/experiments/1/runs" in told
    assert len(runs()) == 2


@pytest.mark.slow
def test_what_somebody_changed_since_is_looked_at(repo, capsys, tmp_path):
    register.main()
    tracking.client().delete_registered_model_alias("hamlet-agent", "champion")
    capsys.readouterr()
    register.main()
    out = capsys.readouterr().out
    assert "hamlet-agent version 1, is not champion: nobody is" in out
    assert "hamlet-prover version 1, is the champion" in out
    registry.promote("hamlet-agent", 1)
    register.main()
    assert "hamlet-agent version 1, is the champion\n" in capsys.readouterr().out
    # The file of one of both is gone, or what a killed stage logged waits to be sent.
    assert run_stage("one")[1] == set()
    waits = tracking.unsent() / "waits"
    waits.mkdir(parents=True)
    assert run_stage("two")[1] == {"mlflow"}
    assert run_stage("three")[1] == set()
    beside = Path(f"{tracking.database()}-wal")  # SQLite's, where it is told to keep one
    beside.touch()
    assert run_stage("four")[1] == {"mlflow"}
    beside.unlink(missing_ok=True)
    kept = json.loads((repo / "checkpoints/registered.json").read_text())
    agent, prover = map(Path, kept["files"])
    prover.rename(tmp_path / "away")
    capsys.readouterr()
    register.main()
    assert "the file of hamlet-prover version 1 is gone" in capsys.readouterr().err
    assert agent.is_file()


def test_what_changes_while_it_is_looked_at_is_seen_the_next_time(repo, capsys, monkeypatch):
    register.main()
    client, look_up, champions = tracking.client(), register.known_version, ["champion"]

    def slowly(*given):
        held = look_up(*given)
        while champions:
            client.delete_registered_model_alias("hamlet-agent", champions.pop())
        return held

    (repo / "checkpoints/registered.json").unlink()
    with monkeypatch.context() as here:
        here.setattr(register, "known_version", slowly)
        register.main()
    capsys.readouterr()
    register.main()
    assert "hamlet-agent version 1, is not champion: nobody is" in capsys.readouterr().out


def test_a_store_that_fails_while_it_is_looked_at_is_one_line(repo, monkeypatch):
    def fails(*given):
        raise RuntimeError("database is locked")

    monkeypatch.setattr(register, "known_version", fails)
    with pytest.raises(SystemExit) as stopped:
        register.main()
    assert stopped.value.code == 1
