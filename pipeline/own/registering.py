"""Stage `register`: the agent in MLflow's registry, champion if it passes its gate and is no worse
than the one that is, in the same episodes."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from typing import Any

from hamlet import tracking
from hamlet.artifacts import HamletError, check_card, how_to_make, read_json, sha256_json
from hamlet.own import paths
from hamlet.own.params import RegisterParams
from hamlet.own.running import Running
from hamlet.registry import Candidate, Cases, register_version

FACTS = {"mean_return": "score", "random_return": "random", "normalised_score": "normalised"}


def gate(params: RegisterParams, scores: Mapping[str, Any]) -> list[str]:
    """Why an agent may not be champion; empty if it may."""
    reasons = []
    low, high = scores["above_random_ci95"]
    if params.beats_random and low <= 0:
        reasons.append(
            f"it is {scores['above_random']:.4g} above random play (95 % from {low:.4g} to "
            f"{high:.4g}), which may be luck"
        )
    if params.min_return is not None and scores["mean_return"] < params.min_return:
        reasons.append(
            f"mean_return is {scores['mean_return']:.4g}, the gate asks min {params.min_return:g}"
        )
    return reasons


def candidate(params: RegisterParams) -> Candidate:
    """The agent that was evaluated last.

    Raises:
        HamletError: its file or its evaluation is missing, corrupt or of another agent.
    """
    card, scores = check_card(paths.AGENT), read_json(paths.metrics("evaluate"))
    if scores.get("agent_sha256") != card["sha256"]:
        raise HamletError(
            f"{paths.metrics('evaluate')} is about another agent than {paths.AGENT}",
            how_to_make(paths.metrics("evaluate")),
        )
    if not paths.RETURNS.exists():
        raise HamletError(f"{paths.RETURNS} is missing", how_to_make(paths.RETURNS))
    with paths.RETURNS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    own = [float(row["return"]) for row in rows if row["player"] == "agent"]
    # The same random play got the same returns: these are the same episodes.
    cases = sha256_json([row for row in rows if row["player"] != "agent"])
    return Candidate(
        params.model,
        paths.AGENT,
        card,
        scores,
        gate(params, scores),
        Cases("return", cases, own),
        FACTS,
    )


def register(s: Running) -> None:
    """Register the agent; a new version that passes may become champion."""
    found = candidate(s.params.register)
    client = tracking.client()
    s.run.flush(patience=60.0)
    if s.run.run_id is None:
        raise tracking.no_registry("it does not answer")
    try:
        now = register_version(client, s.run, found)
    except HamletError:
        raise
    except Exception as error:  # whatever MLflow, SQLite or the disk say
        raise tracking.no_registry(error) from error
    s.run.execution(found.facts(), {"registered": now.version, "champion": now.champion})
    low, high = found.scores["mean_return_ci95"]
    print(
        f"mean return {found.scores['mean_return']:.4g} (95 % from {low:.4g} to {high:.4g}), "
        f"random play {found.scores['random_return']:.4g}"
    )
    standing = "is the champion" if now.champion == now.version else "is not champion"
    reasons = now.why or "; ".join(found.reasons)
    print(f"{found.model} version {now.version} {standing}{f': {reasons}' if reasons else ''}")
    print(f"ONNX file {paths.AGENT}, report {paths.REPORT}; serve it: hamlet serve {paths.AGENT}")
    s.write(
        {
            "sha256": found.card["sha256"], "passed": not found.reasons, "reasons": found.reasons,
        }
    )  # fmt: skip
