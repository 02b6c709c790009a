"""offline: learn a policy from a log, judge it on held-out episodes, export and register it.

    python -m stages.offline DATA --out FOLDER [--schema FILE] [--params FILE] [--objective NAME]
    python -m stages.offline DATA --out FOLDER --judge [--register]

Not part of `dvc repro`; `examples/offline` is a small pipeline of its own. Interrupted or killed,
the same command goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel, Field, ValidationError

from hamlet.artifacts import (
    HamletError,
    atomic_path,
    read_json,
    sha256_file,
    sha256_json,
    write_json,
)
from hamlet.offline.export import export_policy
from hamlet.offline.judge import GateParams, gate, judge
from hamlet.offline.log_store import LogStore
from hamlet.offline.open_log import open_log
from hamlet.offline.train import (
    OfflineParams,
    estimate_behaviour,
    new_policy,
    train_policy_on_log,
)
from hamlet.params import Section
from hamlet.tracking import StageRun, repo_root, stage_run
from stages.common import one_line_errors, prepare_torch
from stages.log import StageLog

MODEL = "hamlet-logged-policy"
COMMAND = "HAMLET_COMMAND"  # what `hamlet` was asked, where it runs this stage
COUNTS = {"episodes": "episodes", "rows": "decisions"}


class OfflineFile(Section):
    """A params file: what `--params` names."""

    offline: OfflineParams = Field(default_factory=OfflineParams)
    gate: GateParams = Field(default_factory=GateParams)


class Running:
    """What `StageLog` asks of a stage."""

    def __init__(self, name: str, run: StageRun) -> None:
        self.name, self.run, self.first = name, run, True


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schema", type=Path)
    parser.add_argument("--params", type=Path)
    parser.add_argument("--objective", choices=("ppo", "impala", "imitation"))
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--register", action="store_true")
    given = parser.parse_args(arguments)
    kept: list[Path] = []
    with one_line_errors("offline", kept, _asked(arguments)), ExitStack() as stack:
        params = load_offline_params(given.params)
        if given.objective:
            chosen = params.offline.model_copy(update={"objective": given.objective})
            params = params.model_copy(update={"offline": chosen})
        facts = prepare_torch(params.offline.seed)
        store = open_log(given.data, given.schema, given.out / "cache")
        run = stack.enter_context(stage_run("offline", params))
        for name, value in facts.items():
            run.tag(name, value)
        if given.judge:
            publish(store, params, given.out, run, given.register)
        else:
            train(store, params, given.out, run, kept)


def _asked(arguments: list[str] | None) -> str:
    """The command that was run: what started this stage, if it says so, or this one."""
    own = ["python", "-m", "stages.offline", *(sys.argv[1:] if arguments is None else arguments)]
    return os.environ.get(COMMAND) or shlex.join(own)


def load_offline_params(path: Path | None) -> OfflineFile:
    """The sections `offline` and `gate` of a YAML file; defaults where it says nothing.

    Raises:
        HamletError: naming the file and the entry that is wrong.
    """
    if path is None:
        return OfflineFile()
    try:
        return OfflineFile.model_validate(yaml.safe_load(path.read_text()) or {})
    except FileNotFoundError:
        raise HamletError(
            f"{path} is missing", "name another file, or leave --params out"
        ) from None
    except (ValidationError, yaml.YAMLError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        where = ".".join(map(str, first["loc"])) if first else "not YAML"
        why = first["msg"] if first else str(error)
        raise HamletError(f"{path}: {where}: {why}", "correct the entry") from None


# ------------------------------------------------------------------------------------------------
# Training


def train(store: LogStore, params: OfflineFile, out: Path, run: StageRun, kept: list[Path]) -> None:
    """Write `policy.pt`, `training.json` and `curve.csv` to `out`."""
    chosen = params.offline
    work = out / f"checkpoint-{_key(store, chosen)}"
    work.mkdir(parents=True, exist_ok=True)
    kept.append(work)
    if chosen.objective != "imitation" and store.log_prob is None:
        log = StageLog(Running("behaviour", run), work, every=10)  # type: ignore[arg-type]
        estimate_behaviour(store, chosen, work / "behaviour.pt", log)
    if store.estimated:
        print(
            "the log has no behaviour log-probabilities: they are estimated by a policy fitted to "
            "what was done; the ratios and all that follows from them are approximate"
        )
    policy = new_policy(store, chosen)
    log = StageLog(Running("offline", run), work, every=10)  # type: ignore[arg-type]
    train_policy_on_log(store, policy, chosen, work / "checkpoint.pt", log)
    with atomic_path(out / "policy.pt") as temporary:
        torch.save(policy.state_dict(), temporary)
    log.write(out / "curve.csv")
    last = log.rows[-1] if log.rows else {}
    told = {
        "objective": chosen.objective,
        "params": chosen.model_dump(mode="json"),
        "log": store.folder.name,
        "log_prob_estimated": store.estimated,
        "policy_sha256": sha256_file(out / "policy.pt"),
        "last": {k: v for k, v in last.items() if k != "compile_active"},
    }
    write_json(out / "training.json", told)
    run.metrics({name: store.facts[name] for name in COUNTS})
    run.artifact(out / "curve.csv")
    shutil.rmtree(work, ignore_errors=True)
    kept.clear()
    print(f"{out / 'policy.pt'} written; judge it: hamlet offline judge DATA --out {out}")


def _key(store: LogStore, params: BaseModel) -> str:
    return sha256_json([store.folder.name, store.estimated, params.model_dump(mode="json")])[:16]


# ------------------------------------------------------------------------------------------------
# Judging and publishing


def publish(store: LogStore, params: OfflineFile, out: Path, run: StageRun, register: bool) -> None:
    """Judge `policy.pt`, export it, write `judge.json`; register it if asked and the gate passes.

    Raises:
        HamletError: it was trained on another log; it is to be registered and the gate refuses.
    """
    trained = read_json(out / "training.json")
    if trained["log"] != store.folder.name:
        raise HamletError(
            f"{out / 'policy.pt'} was trained on another log ({trained['log']}, this one is "
            f"{store.folder.name})",
            "judge it on the log it was trained on, or train on this one",
        )
    chosen = OfflineParams.model_validate(trained["params"])
    if store.log_prob is None:
        raise HamletError(
            "the log has no behaviour log-probabilities and none were estimated",
            "train with `ppo` or `impala` first, which estimates them",
        )
    policy = new_policy(store, chosen)
    policy.load_state_dict(torch.load(out / "policy.pt", weights_only=True))
    judged = judge(store, policy, chosen.gamma, chosen.seed)
    reasons = gate(judged, params.gate, chosen.objective)
    extra = {"objective": chosen.objective, "judged": judged, "gate": reasons}
    parity = export_policy(policy, store, out / "policy.onnx", extra)
    write_json(out / "judge.json", judged | {"passed": not reasons, "reasons": reasons})
    run.metrics({k: v for k, v in _flat(judged).items() if isinstance(v, int | float)})
    run.artifact(out / "judge.json")
    _say(judged, reasons, parity, out)
    if register:
        if reasons:
            raise HamletError(f"not registered: {'; '.join(reasons)}", "see judge.json")
        version = _register(out / "policy.onnx", run, judged)
        print(f"{MODEL} version {version} is the champion of {repo_root().name}'s registry")


def _register(path: Path, run: StageRun, judged: dict[str, Any]) -> int:
    """Register the file under its own name and make it champion; returns its version."""
    from hamlet import tracking
    from hamlet.artifacts import check_card
    from hamlet.registry import Candidate, Cases, give_alias, log_model

    card = check_card(path)
    client = tracking.client()
    with tracking.tracking_lock():
        number = log_model(run, Candidate(MODEL, path, card, judged, [], Cases("", "", []), {}))
        give_alias(client, MODEL, number)
    return number


def _flat(judged: dict[str, Any]) -> dict[str, Any]:
    return {k: v["value"] if isinstance(v, dict) else v for k, v in judged.items()}


def _say(judged: dict[str, Any], reasons: list[str], parity: float, out: Path) -> None:
    for name in ("behaviour", "importance", "doubly_robust", "fitted_q", "improvement"):
        value, (low, high) = judged[name]["value"], judged[name]["ci95"]
        print(f"{name:<14} {value:10.4g}   95 % from {low:.4g} to {high:.4g}")
    print(
        f"{judged['held_out_episodes']} held-out episodes, worth "
        f"{judged['effective_episodes']:.1f} of the policy's own; entropy {judged['entropy']:.3f}, "
        f"KL from the behaviour {judged['behaviour_kl']:.3f} nats"
    )
    if judged["log_prob_estimated"]:
        print("the behaviour's log-probabilities are estimates: so is all that rests on ratios")
    if judged["cut_episodes"]:
        print(
            f"{judged['cut_episodes']} of them were cut before they terminated: every estimate is "
            "of what is earned until there"
        )
    print(f"{out / 'policy.onnx'} written, equal to the policy within {parity:.1g}")
    print("gate: passed" if not reasons else "gate: refused: " + "; ".join(reasons))


if __name__ == "__main__":
    main()
