"""What the registry holds, and which version is champion: a new one that is no worse on the same
cases, or by hand.

The alias `champion` moves in two ways only. A version that is registered for the first time takes
it if it passes its gate and is, on the same held-out cases, no worse on average than the version
that holds it. And a person moves it: `hamlet promote`, `hamlet rollback`, or any MLflow client.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import chdir, redirect_stderr
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hamlet import tracking
from hamlet.artifacts import HamletError
from hamlet.export.mlflow_signature import mlflow_signature
from hamlet.ort import check_runtime
from hamlet.tracking import CHAMPION, StageRun

BEFORE = "champion_before"  # tag of a version: the number of the one that it took the alias from


class Cases(NamedTuple):
    """What a version got in each held-out case.

    Attributes:
        what: the name of a value, for example "return".
        cases: a hash of what the cases are; equal hashes mean the same cases in the same order.
        values: one per case; more is better.
    """

    what: str
    cases: str
    values: Sequence[float]

    def text(self) -> str:
        return json.dumps({"what": self.what, "cases": self.cases, "values": list(self.values)})

    @classmethod
    def of(cls, text: str) -> Cases:
        held = json.loads(text)
        return cls(held["what"], held["cases"], held["values"])


def paired(new: Sequence[float], old: Sequence[float]) -> tuple[float, float, float]:
    """The mean of new - old, case by case, and the ends of its 95 % interval."""
    differences = [a - b for a, b in zip(new, old, strict=True)]
    count = len(differences)
    mean = math.fsum(differences) / count
    squares = math.fsum((d - mean) ** 2 for d in differences)
    half = 1.96 * math.sqrt(squares / (count - 1) / count) if count > 1 else math.inf
    return mean, mean - half, mean + half


def compare(new: Cases, old: Cases | None, holder: str) -> tuple[bool, str]:
    """Whether a new version is no worse than the one that holds the alias, and the comparison.

    No worse means that the mean difference over the same cases is not negative: who is in doubt
    leaves the alias where it is. The interval says how much is luck.

    Args:
        old: the cases of the version that holds the alias, or None if it has none.
        holder: what to call that version.
    """
    if old is None:
        return False, f"{holder} was registered without its cases, so they cannot be compared"
    if (new.what, new.cases) != (old.what, old.cases):
        return False, f"{holder} was measured on other held-out cases, so they cannot be compared"
    mean, low, high = paired(new.values, old.values)
    word = "higher" if mean >= 0 else "lower"
    text = (
        f"{new.what} is {abs(mean):.4g} {word} than of {holder} in the same {len(new.values)} cases"
        f" (95 % from {low:+.4g} to {high:+.4g})"
    )
    return mean >= 0, text


# ------------------------------------------------------------------------------------------------
# A new version


class Candidate(NamedTuple):
    """A file that wants to be champion of a registered model, and what speaks against it.

    Attributes:
        told: which of the scores stand beside a version and its execution, and by which name.
    """

    model: str
    file: Path
    card: Mapping[str, Any]
    scores: Mapping[str, Any]
    reasons: list[str]
    cases: Cases
    told: Mapping[str, str]

    def facts(self) -> dict[str, float]:
        """The numbers by which versions and executions are compared."""
        return {
            short: float(self.scores[name])
            for name, short in self.told.items()
            if isinstance(self.scores.get(name), int | float)
        }


class Registered(NamedTuple):
    """What the registry holds of a candidate now."""

    version: int
    new: bool
    champion: int | None
    """The version that holds the alias, whichever it is."""
    why: str
    """Of a new version, why it took the alias or did not."""


def register_version(client: Any, run: StageRun, candidate: Candidate) -> Registered:
    """Make sure that the registry holds a candidate; a new version may claim the alias."""
    with tracking.tracking_lock():  # two workers may have made the same file
        found = find_version(client, candidate.model, candidate.card["sha256"])
        if found is not None:
            return known_version(client, candidate, found)
        holder = tracking.champion(client, candidate.model)
        number = log_model(run, candidate)
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{candidate.model}.json"
            path.write_text(candidate.cases.text(), encoding="utf-8")
            tracking.log_file(client, str(run.run_id), path, "cases")
        passed, why = decide(client, candidate, holder)
        if passed:
            give_alias(client, candidate.model, number)
        _describe(client, candidate, number, passed, why)
    champion = number if passed else int(holder.version) if holder else None
    return Registered(number, True, champion, why)


def known_version(client: Any, candidate: Candidate, number: int) -> Registered:
    """What the registry holds of a candidate that is its version `number` already."""
    holder = tracking.champion(client, candidate.model)
    return Registered(number, False, int(holder.version) if holder else None, "")


def decide(client: Any, candidate: Candidate, holder: Any) -> tuple[bool, str]:
    """Whether a new version takes the alias from the version that holds it, and why."""
    if candidate.reasons:
        return False, "; ".join(candidate.reasons)
    if holder is None:
        return True, "passed its gate, and no version was champion"
    name = f"version {holder.version}"
    if tracking.file_of(client, holder) is False:
        return True, f"passed its gate, and the file of {name} is gone"
    text = tracking.read_file(client, holder.run_id, f"cases/{candidate.model}.json")
    old = Cases.of(text) if text else None
    return compare(candidate.cases, old, name)


def _describe(client: Any, candidate: Candidate, number: int, passed: bool, why: str) -> None:
    facts = {key: f"{value:.6g}" for key, value in candidate.facts().items()}
    tags = facts | {
        "gate": "; ".join(candidate.reasons) or "passed",
        "promoted": f"{'yes' if passed else 'no'}: {why}",
    }
    for key, value in tags.items():
        client.set_model_version_tag(candidate.model, str(number), key, value)
    scores = ", ".join(f"{key} {value}" for key, value in facts.items())
    verdict = "Champion when it was registered" if passed else "Not champion"
    client.update_model_version(candidate.model, str(number), f"{scores}. {verdict}: {why}.")


def find_version(client: Any, model: str, sha256: str) -> int | None:
    """The first version of a model with this hash whose file is still there, or None."""
    numbers: list[int] = []
    gone: list[int] = []
    for found in client.search_model_versions(f"name = '{model}'"):
        if found.tags.get("sha256") == sha256:
            lost = tracking.file_of(client, found) is False
            (gone if lost else numbers).append(int(found.version))
    if gone and not numbers:
        print(
            f"warning: the file of {model} version {min(gone)} is gone: it is registered again, as "
            "a new version",
            file=sys.stderr,
        )
    return min(numbers, default=None)


def log_model(run: StageRun, candidate: Candidate) -> int:
    """Log an ONNX file that requires one ONNX Runtime; returns its version.

    The execution's own run holds it, so that its row shows it.
    """
    import mlflow
    import onnx

    build, build_version = check_runtime()  # MLflow's own list would name both builds
    needs = [f"{build}=={build_version}", f"onnx=={version('onnx')}"]
    model, card = onnx.load(candidate.file), candidate.card
    mlflow.set_tracking_uri(tracking.tracking_uri())
    chatter = StringIO()
    try:
        with (
            redirect_stderr(chatter),
            chdir(tracking.repo_root()),  # artifacts have names relative to it
            mlflow.start_run(run_id=run.parent_id, log_system_metrics=False),
        ):
            logged = mlflow.onnx.log_model(
                model,
                name=candidate.file.stem,
                signature=mlflow_signature(model),
                pip_requirements=needs,
                onnx_execution_providers=["CPUExecutionProvider"],
                save_as_external_data=False,
                metadata={
                    "sha256": card["sha256"],
                    "upstream": dict(card["upstream"]),
                    "card": json.dumps(card),  # all that a server needs beside the graph
                },
            )
        made = tracking.client().create_model_version(
            _model_named(candidate.model),
            logged.model_uri,
            run.run_id,
            tags={"sha256": card["sha256"]},
            model_id=logged.model_id,
        )
    except BaseException:
        sys.stderr.write(chatter.getvalue())
        raise
    return int(made.version)


def _model_named(name: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        tracking.client().create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return name


# ------------------------------------------------------------------------------------------------
# By hand


def promote(model: str, version: int | None = None) -> str:
    """Give the alias to a version, by default the newest; returns what was done in one line.

    Raises:
        HamletError: there is no such model or version, or its file is gone.
    """
    client = tracking.client()
    with tracking.tracking_lock():
        numbers = _versions(client, model)
        return _move(client, model, version or max(numbers), numbers, back=False)


def rollback(model: str, version: int | None = None) -> str:
    """Give the alias back, by default to the version that held it before; returns what was done.

    Raises:
        HamletError: there is no such model or version, no champion or none before it, or the
            version's file is gone.
    """
    client = tracking.client()
    with tracking.tracking_lock():
        numbers = _versions(client, model)
        holder = tracking.champion(client, model)
        if version is None:
            before = holder.tags.get(BEFORE) if holder else None
            if before is None:
                held = f"version {holder.version}" if holder else "nobody"
                raise HamletError(
                    f"{held} is champion of {model} and nothing is known of one before",
                    f"name one: `hamlet rollback {model} VERSION` ({_listed(numbers)})",
                )
            version = int(before)
        return _move(client, model, version, numbers, back=True)


def give_alias(client: Any, model: str, version: int, back: bool = False) -> None:
    """Move the alias and remember from whom. Call under the lock."""
    holder = tracking.champion(client, model)
    client.set_registered_model_alias(model, CHAMPION, str(version))
    if holder is not None and int(holder.version) != version and not back:
        client.set_model_version_tag(model, str(version), BEFORE, str(holder.version))


def _versions(client: Any, model: str) -> list[int]:
    try:
        found = client.search_model_versions(f"name = '{model}'")
    except Exception as error:
        raise tracking.no_registry(error) from error
    numbers = sorted(int(v.version) for v in found)
    if not numbers:
        names = sorted(m.name for m in client.search_registered_models())
        raise HamletError(
            f"{tracking.registry_uri()} has no model {model}",
            f"it has {', '.join(names)}" if names else "run `dvc repro register`",
        )
    return numbers


def _listed(numbers: list[int]) -> str:
    return "it has " + ", ".join(map(str, numbers))


def _move(client: Any, model: str, version: int, numbers: list[int], back: bool) -> str:
    if version not in numbers:
        raise HamletError(f"{model} has no version {version}", _listed(numbers))
    wanted = client.get_model_version(model, str(version))
    if tracking.file_of(client, wanted) is False:
        raise HamletError(
            f"the file of {model} version {version} is gone, nothing could load it",
            f"name another version ({_listed(numbers)})",
        )
    holder = tracking.champion(client, model)
    if holder is not None and int(holder.version) == version:
        return f"{model} version {version} is the champion already"
    give_alias(client, model, version, back)
    who = f"by hand ({tracking.user()}, {time.strftime('%Y-%m-%d %H:%M')})"
    client.set_model_version_tag(model, str(version), "promoted", f"yes, {who}")
    line = f"{model} version {version} is the champion"
    if holder is not None:
        client.set_model_version_tag(
            model, holder.version, "promoted", f"no longer: version {version} took its place {who}"
        )
        line += f", version {holder.version} no longer"
    return line
