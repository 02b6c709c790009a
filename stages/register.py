"""Stage `register`: agent and prover in MLflow's registry.

A new version becomes champion if it passes its gate and is no worse than the one that is, in the
same held-out cases. A version that the registry has already never moves the alias: it is the user's
to hold. A summary comes last. DVC runs this stage every time, also when every other one came from
its cache; it does nothing but look unless the registry lacks one of the two, and not even that
where nothing has changed since it last looked. It never imports PyTorch.
"""

import csv
import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from hamlet import tracking
from hamlet.artifacts import (
    HamletError,
    check_card,
    how_to_make,
    read_json,
    sha256_json,
    write_json,
)
from hamlet.params import Params, load_params
from hamlet.registry import (
    Candidate,
    Cases,
    Registered,
    find_version,
    known_version,
    register_version,
)
from hamlet.tracking import MODEL, PROVER_MODEL, stage_run
from stages.common import one_line_errors
from stages.overall import spent, timed, where_it_went
from stages.paths import AGENT, EPISODE, PROVER_ONNX, RANKS, REPORT, curve, metrics

# What of a model's scores stands beside its version and its execution, and by which name.
FACTS: dict[str, dict[str, str]] = {
    MODEL: {
        "mean_return": "score",
        "share_of_expert": "ratio_to_expert",
        "ratio_over_rest": "ratio_over_rest",
        "survival": "survival",
    },
    PROVER_MODEL: {"mrr_all": "prover_mrr", "symbolic_mrr_all": "prover_mrr_symbolic"},
}


def judged(candidate: Candidate) -> dict[str, Any]:
    """What artifacts/metrics/register.json says of it."""
    return {
        "sha256": candidate.card["sha256"], "passed": not candidate.reasons,
        "reasons": candidate.reasons,
    }  # fmt: skip


def main() -> None:
    """Register both, make champions of new ones that are no worse, print the summary."""
    with one_line_errors("register"), timed("register"):
        params = load_params()
        candidates = [agent(params), prover()]
        first, second = candidates
        write_json(metrics("register"), judged(first) | {"prover": judged(second)})
        try:
            look = last_look(candidates) or register(params, candidates)
        except HamletError:
            summary(candidates, None)
            raise
        summary(candidates, look)
        where_time_went()


def agent(params: Params) -> Candidate:
    """The agent that was played last.

    Raises:
        HamletError: its file or its evaluation is missing, corrupt or of another agent.
    """
    card = check_card(AGENT)
    scores = read_json(metrics("evaluate"))
    played = scores.get("agent_sha256", card["sha256"])
    if played != card["sha256"]:
        raise HamletError(
            f"{metrics('evaluate')} is about another agent ({played}) than {AGENT} "
            f"({card['sha256']})",
            how_to_make(metrics("evaluate")),
        )
    if lacking := {"mean_return", "survival"} - scores.keys():
        raise HamletError(
            f"{metrics('evaluate')} lacks {', '.join(sorted(lacking))}",
            how_to_make(metrics("evaluate")),
        )
    reasons = gate(params.register.model_dump(), read_json(metrics("policy")) | scores)
    rows = _table(curve("returns"))
    own = [float(row["return"]) for row in rows if row["player"] == "agent"]
    # The same scripted players got the same returns: these are the same worlds.
    cases = sha256_json([row for row in rows if row["player"] != "agent"])
    return Candidate(MODEL, AGENT, card, scores, reasons, Cases("return", cases, own), FACTS[MODEL])


def prover() -> Candidate:
    """The prover that ranked last.

    Raises:
        HamletError: its file or its ranks are missing or corrupt.
    """
    card, scores = check_card(PROVER_ONNX), read_json(metrics("prove_evaluate"))
    rows = _table(RANKS)
    own = [1.0 / float(row["rank"]) for row in rows]
    cases = sha256_json([{k: v for k, v in row.items() if k != "rank"} for row in rows])
    ranks = Cases("reciprocal rank", cases, own)
    return Candidate(
        PROVER_MODEL, PROVER_ONNX, card, scores, gate_prover(scores), ranks, FACTS[PROVER_MODEL]
    )


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------------------
# The gate


def gate(limits: Mapping[str, Any], scores: Mapping[str, Any]) -> list[str]:
    """Why the agent may not be champion; empty if it may.

    A limit `min_x` or `max_x` is compared with `scores["x"]`, or with the near end of its 95 %
    interval `scores["x_ci95"]` where there is one: luck does not pass the gate.
    """
    reasons = []
    for limit, bound in limits.items():
        kind, _, name = limit.partition("_")
        if kind not in ("min", "max"):
            continue
        value = scores.get(name)
        if not isinstance(value, int | float):
            reasons.append(f"{name} is not in the evaluation, the gate asks {kind} {bound:g}")
            continue
        low, high = scores.get(f"{name}_ci95") or (value, value)
        near = low if kind == "min" else high
        if (near < bound) if kind == "min" else (near > bound):
            interval = "" if low == high else f" (95 % from {low:.4g} to {high:.4g})"
            reasons.append(f"{name} is {value:.4g}{interval}, the gate asks {kind} {bound:g}")
    return reasons


def gate_prover(scores: Mapping[str, Any]) -> list[str]:
    """Why the prover may not be champion: it ranks worse than the plain symbolic baseline."""
    reasons = []
    for name in ("mrr_all", "mrr_100"):
        value, floor = scores.get(name), scores.get(f"symbolic_{name}")
        if not isinstance(value, int | float) or not isinstance(floor, int | float):
            reasons.append(f"{name} or symbolic_{name} is not in the evaluation")
        elif value < floor:
            reasons.append(f"{name} is {value:.4g}, the symbolic baseline has {floor:.4g}")
    return reasons


# ------------------------------------------------------------------------------------------------
# The registry


class Look(NamedTuple):
    """What the registry held when it was looked at.

    Attributes:
        experiment: the number of the experiment with the runs.
    """

    found: list[Registered]
    experiment: str


def register(params: Params, candidates: list[Candidate]) -> Look:
    """Make sure that the registry holds these; only a version that is new may claim the alias.

    Raises:
        HamletError: the MLflow database cannot be reached.
    """
    client = tracking.client()
    try:
        with tracking.tracking_lock():
            experiment = tracking.experiment_id(client)
            key = tracking.execution_key()
            idle = tracking.find_run(client, experiment, tracking.EXECUTION, key) is None
            found = [find_version(client, c.model, c.card["sha256"]) for c in candidates]
        if idle:
            tracking.send_waiting(client, tracking.tracking_uri())
        if idle and all(found):
            held = [known_version(client, c, n) for c, n in zip(candidates, found) if n is not None]
        else:
            held = _logged(client, params, candidates)
        return keep_look(client, candidates, held)
    except HamletError:
        raise
    except Exception as error:  # whatever MLflow, SQLite or the disk say
        raise tracking.no_registry(error) from error


def last_look(candidates: list[Candidate]) -> Look | None:
    """What was found last time; None unless a database of our own and the files in it are as they
    were then. It spares MLflow's import, most of what this stage takes when there is nothing to do.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        seen = json.loads(_seen().read_text(encoding="utf-8"))
        state = _state(candidates)
        if state and seen["state"] == state and all(Path(f).is_file() for f in seen["files"]):
            return Look([Registered(*one) for one in seen["found"]], seen["experiment"])
    return None


def keep_look(client: Any, candidates: list[Candidate], found: list[Registered]) -> Look:
    """What was found now; kept for the next time, when none of it is new any more."""
    state = _state(candidates)  # of before what is kept is read: nobody's change falls between
    look = Look(found, tracking.experiment_id(client))
    known = [known_version(client, c, f.version) for c, f in zip(candidates, found)]
    held = [client.get_model_version(c.model, str(f.version)) for c, f in zip(candidates, found)]
    files = [tracking.path_of(client, version) for version in held]
    if state and all(files):
        kept = {"state": state, "found": known, "files": [str(path) for path in files]}
        write_json(_seen(), {**kept, "experiment": look.experiment})
    return look


def _seen() -> Path:
    return tracking.repo_root() / "checkpoints" / "registered.json"


def _state(candidates: list[Candidate]) -> str:
    """A hash of all that `last_look` depends on; empty where it cannot be told: elsewhere than in a
    file, while something waits to be sent, or where SQLite keeps a file of changes beside it."""
    file, uri = tracking.database(), tracking.tracking_uri()
    if file is None or tracking.registry_uri() != uri or any(tracking.unsent().glob("*/")):
        return ""
    if Path(f"{file}-wal").exists():
        return ""
    stat = file.stat()
    when = [uri, stat.st_ino, stat.st_size, stat.st_mtime_ns]
    where = [tracking.experiment_name(), os.environ.get("MLFLOW_EXPERIMENT_ID")]
    return sha256_json([when, where, [c.card["sha256"] for c in candidates]])


def _logged(client: Any, params: Params, candidates: list[Candidate]) -> list[Registered]:
    with stage_run("register", params) as run:
        for candidate in candidates:
            scores = candidate.scores
            scores = scores if candidate.model == MODEL else {"prover": scores}
            numbers = tracking.flatten(scores)
            run.metrics({k: v for k, v in numbers.items() if isinstance(v, int | float)})
        run.artifact(metrics("evaluate"))
        run.artifact(metrics("prove_evaluate"))
        run.flush(patience=60.0)
        if run.run_id is None:
            raise tracking.no_registry("it does not answer")
        done = [register_version(client, run, candidate) for candidate in candidates]
        for candidate, now in zip(candidates, done):
            name = candidate.model.removeprefix("hamlet-")
            run.execution(
                candidate.facts(),
                {f"registered.{name}": now.version, f"champion.{name}": now.champion},
            )
        run.tag("hamlet.model_version", done[0].version)
        return done


# ------------------------------------------------------------------------------------------------
# The summary


def summary(candidates: list[Candidate], look: Look | None) -> None:
    """Print the end of `dvc repro`: scores against the baselines and where everything is.

    Args:
        look: what the registry holds, None if it could not be reached.
    """
    scores, ranked = (candidate.scores for candidate in candidates)
    console = Console(highlight=False, soft_wrap=True)
    table = Table("", "mean return", "survival", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {name: row for name, row in scores.get("scores", {}).items() if name != "agent"}
    rows = {"agent": scores} | dict(sorted(rows.items(), key=lambda r: -r[1]["mean_return"]))
    for name, row in rows.items():
        table.add_row(name, f"{row['mean_return']:.1f}", f"{row['survival']:.4g}")
    console.print()
    console.print(table)
    low, high = scores.get("ratio_over_rest_ci95") or (None, None)
    if low is not None:
        ratio = scores["ratio_over_rest"]
        console.print(f"agent / always-REST: {ratio:.2f} (95 % from {low:.2f} to {high:.2f})")
    if "mrr_all" in ranked and "symbolic_mrr_all" in ranked:
        learnt, plain = ranked["mrr_all"], ranked["symbolic_mrr_all"]
        console.print(f"prover: MRR {learnt:.3f} over all entities (symbolic baseline {plain:.3f})")
    console.print()
    for candidate, now in zip(candidates, look.found if look else ()):
        text, style = verdict(candidate, now)
        console.print(text, style=style)
    places = [("ONNX file", AGENT), ("report", REPORT), ("episode", EPISODE)]
    for what, where in [*places, *(_page(look.experiment) if look else ())]:
        console.print(f"{what:<10} {where}")


def where_time_went() -> None:
    """Print the seconds of the stages that ran in this execution, if any trained."""
    if set(spent()) - {"world"}:
        print("\n".join(["", *where_it_went()]))


def verdict(candidate: Candidate, now: Registered) -> tuple[str, str]:
    """One line on a candidate's place in the registry, and its colour."""
    title = f"{candidate.model} version {now.version}" + (", new" if now.new else "")
    if now.champion == now.version:
        if candidate.reasons and not now.new:
            return f"{title}, is the champion, but its gate says: {candidate.reasons[0]}", "yellow"
        return f"{title}, is the champion" + (f": {now.why}" if now.why else ""), "green"
    by_hand = f"`hamlet promote {candidate.model} {now.version}` makes it champion"
    if now.new:
        return f"{title}, is not champion: {now.why} ({by_hand})", "yellow"
    if now.champion is None:
        why = "; ".join(candidate.reasons) or "nobody is"
        return f"{title}, is not champion: {why} ({by_hand})", "yellow"
    return f"{title}, is not champion, version {now.champion} is ({by_hand})", "yellow"


def _page(number: str) -> list[tuple[str, str]]:
    """The command that opens MLflow, and the page with the runs."""
    uri = tracking.tracking_uri()
    if uri.startswith("http"):
        return [("MLflow", f"{uri.rstrip('/')}/#/experiments/{number}/runs")]
    file = tracking.database()
    if file and Path.cwd() == tracking.repo_root() and Path.cwd() in file.parents:
        uri = f"sqlite:///{file.relative_to(Path.cwd()).as_posix()}"
    page = f"http://127.0.0.1:5000/#/experiments/{number}/runs"
    return [
        ("MLflow", f"mlflow ui --backend-store-uri {shlex.quote(uri)}"),
        ("", f"then open {page}"),
    ]


if __name__ == "__main__":
    main()
