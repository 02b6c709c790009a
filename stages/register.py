"""Stage `register`: the agent in MLflow's registry, champion if it passes the gate, and a summary.

DVC runs this stage every time, also when every other one came from its cache; it does nothing but
look unless the registry lacks this agent. It never imports PyTorch.
"""

import sys
from collections.abc import Mapping
from contextlib import redirect_stderr
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from rich.console import Console
from rich.table import Table

from pipeline import tracking
from pipeline.files import HamletError, check_card, how_to_make, read_json, write_json
from pipeline.ort import check_runtime
from pipeline.params import Params, load_params
from pipeline.tracking import CHAMPION, MODEL, StageRun, stage_run
from stages.common import one_line_errors
from stages.paths import AGENT, EPISODE, REPORT, metrics


def main() -> None:
    """Register the agent, make it champion if the gate allows, print the summary."""
    with one_line_errors("register"):
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
        reasons = gate(params.register.model_dump(), scores)
        number, news = register(params, card, scores, reasons)
        verdict = {"sha256": card["sha256"], "passed": not reasons, "reasons": reasons}
        write_json(metrics("register"), verdict)
        summary(scores, number, news, reasons)


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


# ------------------------------------------------------------------------------------------------
# The registry


def register(
    params: Params, card: Mapping[str, Any], scores: Mapping[str, Any], reasons: list[str]
) -> tuple[int, str]:
    """Make sure the registry holds this agent and the alias is right; returns (version, news).

    Raises:
        HamletError: the MLflow database cannot be reached.
    """
    try:
        client = tracking.client()
        with tracking.tracking_lock():
            experiment = tracking.experiment_id(client)
            idle = tracking.find_parent(client, experiment) is None
            found = find_version(client, card["sha256"])
    except Exception as error:  # whatever MLflow, SQLite or the disk say
        raise _no_registry(error) from error
    if found is not None and idle and _alias_is_right(client, found, reasons):
        return found, "unchanged"
    with stage_run("register", params) as run:
        numbers = tracking.flatten(scores)
        run.metrics({k: v for k, v in numbers.items() if isinstance(v, int | float)})
        run.artifact(metrics("evaluate"))
        if run.run_id is None:
            raise _no_registry(None)
        with tracking.tracking_lock():  # two workers may have made the same agent
            found = find_version(client, card["sha256"])
            news = "unchanged" if found is not None else "new"
            number = found if found is not None else log_model(run, card)
            _set_alias(client, number, reasons)
        client.set_model_version_tag(MODEL, str(number), "gate", "; ".join(reasons) or "passed")
        run.tag("hamlet.model_version", number)
    return number, news


def find_version(client: Any, sha256: str) -> int | None:
    """The version of the agent with this hash whose file is still there, or None.

    A version whose file was deleted is removed: nothing could load it.
    """
    numbers = []
    for found in client.search_model_versions(f"name = '{MODEL}'"):
        if found.tags.get("sha256") == sha256:
            if _file_of(client, found) is False:
                client.delete_model_version(MODEL, found.version)
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


def log_model(run: StageRun, card: Mapping[str, Any]) -> int:
    """Log the agent as one file that requires one ONNX Runtime; returns its version."""
    import mlflow
    import onnx

    build, build_version = check_runtime()  # MLflow's own list would name both builds
    needs = [f"{build}=={build_version}", f"onnx=={version('onnx')}"]
    model = onnx.load(AGENT)
    mlflow.set_tracking_uri(tracking.tracking_uri())
    mlflow.set_registry_uri(tracking.tracking_uri())
    chatter = StringIO()
    try:
        with redirect_stderr(chatter), mlflow.start_run(run_id=run.run_id):
            logged = mlflow.onnx.log_model(
                model,
                name="agent",
                signature=_signature(model),
                pip_requirements=needs,
                onnx_execution_providers=["CPUExecutionProvider"],
                save_as_external_data=False,
                metadata={"sha256": card["sha256"], "upstream": dict(card["upstream"])},
            )
            made = mlflow.register_model(logged.model_uri, MODEL, tags={"sha256": card["sha256"]})
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


def _alias_is_right(client: Any, number: int, reasons: list[str]) -> bool:
    now = tracking.champion(client)
    return (now is not None and int(now.version) == number) == (not reasons)


def _set_alias(client: Any, number: int, reasons: list[str]) -> None:
    if not _alias_is_right(client, number, reasons):
        if reasons:  # it was champion under a lower gate
            client.delete_registered_model_alias(MODEL, CHAMPION)
        else:
            client.set_registered_model_alias(MODEL, CHAMPION, str(number))


def _no_registry(error: Exception | None) -> HamletError:
    reason = (
        (str(error).strip().splitlines() or [type(error).__name__])[0] if error else "see above"
    )
    fix = "free or mend the database (an old one: `mlflow db upgrade`), or move it away and rerun"
    return HamletError(f"the registry {tracking.tracking_uri()} cannot be used ({reason})", fix)


# ------------------------------------------------------------------------------------------------
# The summary


def summary(scores: Mapping[str, Any], number: int, news: str, reasons: list[str]) -> None:
    """Print the end of `dvc repro`: scores against the baselines and where everything is."""
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
    console.print()
    title = f"{MODEL} version {number}" + (", new" if news == "new" else "")
    if reasons:
        console.print(f"{title}, is not champion: {'; '.join(reasons)}", style="yellow")
    else:
        console.print(f"{title}, is the champion", style="green")
    for what, where in (
        ("ONNX file", AGENT),
        ("report", REPORT),
        ("episode", EPISODE),
        ("MLflow", f"mlflow ui --backend-store-uri {_page_uri()}"),
    ):
        console.print(f"{what:<10} {where}")


def _page_uri() -> str:
    own = f"sqlite:///{(tracking.repo_root() / 'mlflow.db').as_posix()}"
    at_root = tracking.tracking_uri() == own and tracking.repo_root() == Path.cwd()
    return "sqlite:///mlflow.db" if at_root else tracking.tracking_uri()


if __name__ == "__main__":
    main()
