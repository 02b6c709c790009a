"""Stage `register`: agent and prover in MLflow's registry, champions if they pass their gates.

A summary comes last. DVC runs this stage every time, also when every other one came from its cache;
it does nothing but look unless the registry lacks one of the two. It never imports PyTorch.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

from rich.console import Console
from rich.table import Table

from hamlet import tracking
from hamlet.artifacts import HamletError, check_card, how_to_make, read_json, write_json
from hamlet.ort import check_runtime
from hamlet.params import Params, load_params
from hamlet.tracking import CHAMPION, MODEL, PROVER_MODEL, StageRun, stage_run
from stages.common import one_line_errors
from stages.overall import spent, table, timed
from stages.paths import AGENT, EPISODE, PROVER_ONNX, REPORT, metrics


class Candidate(NamedTuple):
    """A file that wants to be champion of a registered model, and what speaks against it."""

    model: str
    file: Path
    card: Mapping[str, Any]
    scores: Mapping[str, Any]
    reasons: list[str]

    def verdict(self) -> dict[str, Any]:
        return {
            "sha256": self.card["sha256"], "passed": not self.reasons, "reasons": self.reasons
        }  # fmt: skip


def main() -> None:
    """Register both, make champions of those whose gate allows it, print the summary."""
    with one_line_errors("register"), timed("register"):
        params = load_params()
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
        trained = read_json(metrics("policy"))
        reasons = gate(params.register.model_dump(), trained | scores)
        agent = Candidate(MODEL, AGENT, card, scores, reasons)
        ranked = read_json(metrics("prove_evaluate"))
        card = check_card(PROVER_ONNX)
        prover = Candidate(PROVER_MODEL, PROVER_ONNX, card, ranked, gate_prover(ranked))
        versions = register(params, [agent, prover])
        write_json(metrics("register"), agent.verdict() | {"prover": prover.verdict()})
        summary([agent, prover], versions)
        where_time_went()


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


def register(params: Params, candidates: list[Candidate]) -> list[tuple[int, str]]:
    """Make sure the registry holds these and the aliases are right; returns (version, news) each.

    Raises:
        HamletError: the MLflow database cannot be reached.
    """
    try:
        client = tracking.client()
        with tracking.tracking_lock():
            experiment = tracking.experiment_id(client)
            idle = tracking.find_parent(client, experiment) is None
            found = [find_version(client, c.model, c.card["sha256"]) for c in candidates]
    except Exception as error:  # whatever MLflow, SQLite or the disk say
        raise _no_registry(error) from error
    if idle and all(n is not None and _alias_is_right(client, c, n)
                    for c, n in zip(candidates, found)):  # fmt: skip
        return [(number, "unchanged") for number in found if number is not None]
    with stage_run("register", params) as run:
        for candidate in candidates:
            scores = candidate.scores
            scores = scores if candidate.model == MODEL else {"prover": scores}
            numbers = tracking.flatten(scores)
            run.metrics({k: v for k, v in numbers.items() if isinstance(v, int | float)})
        run.artifact(metrics("evaluate"))
        run.artifact(metrics("prove_evaluate"))
        if run.run_id is None:
            raise _no_registry(None)
        return [_register(client, run, candidate) for candidate in candidates]


def _register(client: Any, run: StageRun, candidate: Candidate) -> tuple[int, str]:
    with tracking.tracking_lock():  # two workers may have made the same file
        found = find_version(client, candidate.model, candidate.card["sha256"])
        news = "unchanged" if found is not None else "new"
        number = found if found is not None else log_model(run, candidate)
        _set_alias(client, candidate, number)
    gate = "; ".join(candidate.reasons) or "passed"
    client.set_model_version_tag(candidate.model, str(number), "gate", gate)
    if candidate.model == MODEL:
        run.tag("hamlet.model_version", number)
    return number, news


def find_version(client: Any, model: str, sha256: str) -> int | None:
    """The version of a model with this hash whose file is still there, or None.

    A version whose file was deleted is removed: nothing could load it.
    """
    numbers = []
    for found in client.search_model_versions(f"name = '{model}'"):
        if found.tags.get("sha256") == sha256:
            if _file_of(client, found) is False:
                client.delete_model_version(model, found.version)
            else:
                numbers.append(int(found.version))
    return min(numbers, default=None)


def _file_of(client: Any, model_version: Any) -> bool | None:
    """Whether a version's ONNX file exists; None where it is not on this machine."""
    kind, _, model_id = model_version.source.partition(":/")
    if kind != "models":
        return None
    place = urlparse(client.get_logged_model(model_id).artifact_location)
    if place.scheme not in ("", "file"):
        return None
    return (Path(unquote(place.path)) / "model.onnx").is_file()


def log_model(run: StageRun, candidate: Candidate) -> int:
    """Log an ONNX file that requires one ONNX Runtime; returns its version."""
    import mlflow
    import onnx

    build, build_version = check_runtime()  # MLflow's own list would name both builds
    needs = [f"{build}=={build_version}", f"onnx=={version('onnx')}"]
    model, card = onnx.load(candidate.file), candidate.card
    mlflow.set_tracking_uri(tracking.tracking_uri())
    mlflow.set_registry_uri(tracking.tracking_uri())
    chatter = StringIO()
    try:
        with redirect_stderr(chatter), mlflow.start_run(run_id=run.run_id):
            logged = mlflow.onnx.log_model(
                model,
                name=candidate.file.stem,
                signature=_signature(model),
                pip_requirements=needs,
                onnx_execution_providers=["CPUExecutionProvider"],
                save_as_external_data=False,
                metadata={
                    "sha256": card["sha256"],
                    "upstream": dict(card["upstream"]),
                    "card": json.dumps(card),  # all that a server needs beside the graph
                },
            )
            tags = {"sha256": card["sha256"]}
            made = mlflow.register_model(logged.model_uri, candidate.model, tags=tags)
    except BaseException:
        sys.stderr.write(chatter.getvalue())
        raise
    return int(made.version)


def _signature(model: Any) -> Any:
    import numpy as np
    import onnx
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    def specs(values: Any) -> Schema:
        return Schema(
            [
                TensorSpec(
                    np.dtype(onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type)),
                    [d.dim_value or -1 for d in v.type.tensor_type.shape.dim],
                    v.name,
                )
                for v in values
            ]
        )

    return ModelSignature(inputs=specs(model.graph.input), outputs=specs(model.graph.output))


def _alias_is_right(client: Any, candidate: Candidate, number: int) -> bool:
    now = tracking.champion(client, candidate.model)
    return (now is not None and int(now.version) == number) == (not candidate.reasons)


def _set_alias(client: Any, candidate: Candidate, number: int) -> None:
    if not _alias_is_right(client, candidate, number):
        if candidate.reasons:  # it was champion under a lower gate
            client.delete_registered_model_alias(candidate.model, CHAMPION)
        else:
            client.set_registered_model_alias(candidate.model, CHAMPION, str(number))


def _no_registry(error: Exception | None) -> HamletError:
    reason = (
        (str(error).strip().splitlines() or [type(error).__name__])[0] if error else "see above"
    )
    fix = "free or mend the database (an old one: `mlflow db upgrade`), or move it away and rerun"
    return HamletError(f"the registry {tracking.tracking_uri()} cannot be used ({reason})", fix)


# ------------------------------------------------------------------------------------------------
# The summary


def summary(candidates: list[Candidate], versions: list[tuple[int, str]]) -> None:
    """Print the end of `dvc repro`: scores against the baselines and where everything is."""
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
    for candidate, (number, news) in zip(candidates, versions):
        title = f"{candidate.model} version {number}" + (", new" if news == "new" else "")
        if candidate.reasons:
            why = "; ".join(candidate.reasons)
            console.print(f"{title}, is not champion: {why}", style="yellow")
        else:
            console.print(f"{title}, is the champion", style="green")
    for what, where in (
        ("ONNX file", AGENT),
        ("report", REPORT),
        ("episode", EPISODE),
        ("MLflow", f"mlflow ui --backend-store-uri {_page_uri()}"),
    ):
        console.print(f"{what:<10} {where}")


def where_time_went() -> None:
    """Print the seconds of the stages that ran in this execution, if any trained."""
    seconds = spent()
    if set(seconds) - {"world"}:
        print("\n".join(["", *table(seconds)]))


def _page_uri() -> str:
    own = f"sqlite:///{(tracking.repo_root() / 'mlflow.db').as_posix()}"
    at_root = tracking.tracking_uri() == own and tracking.repo_root() == Path.cwd()
    return "sqlite:///mlflow.db" if at_root else tracking.tracking_uri()


if __name__ == "__main__":
    main()
