"""How far a whole `dvc repro` is: stages done and to come, time so far and left, and where it went.

By how many seconds each stage made an execution longer is kept in `checkpoints/seconds.json`, by
preset, for the next estimate; what the one under way has done in `checkpoints/execution.json`.
Neither shapes a result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from hamlet.artifacts import parse_yaml, write_json
from hamlet.params import chosen_preset
from hamlet.tracking import execution_key, repo_root
from hamlet.tracking.processes import BESIDE

FINAL = "register"  # the stage whose summary ends a whole run


class Plan(NamedTuple):
    """The stages of a dvc.yaml.

    Attributes:
        after: stage -> all that depend on it, directly or not.
        outs: stage -> what it makes.
    """

    after: dict[str, set[str]]
    outs: dict[str, list[str]]


def read_plan(path: Path) -> Plan:
    """The stages of a dvc.yaml and who waits for whom."""
    stages = parse_yaml(path.read_text(encoding="utf-8"))["stages"]
    outs = {
        name: [_path(out) for kind in ("outs", "metrics", "plots") for out in stage.get(kind, [])]
        for name, stage in stages.items()
    }
    reads = {
        name: [
            *stage.get("deps", []),
            *(
                file
                for entry in stage.get("params", [])
                if isinstance(entry, dict)
                for file in entry
            ),
        ]
        for name, stage in stages.items()
    }

    def feeds(maker: str, user: str) -> bool:
        return any(dep == out or dep.startswith(f"{out}/") for out in outs[maker]
                   for dep in reads[user])  # fmt: skip

    after: dict[str, set[str]] = {}

    def dependents(stage: str) -> set[str]:
        if stage not in after:
            after[stage] = set()
            for user in stages:
                if user != stage and feeds(stage, user):
                    after[stage] |= {user} | dependents(user)
        return after[stage]

    for stage in stages:
        dependents(stage)
    return Plan(after, outs)


def _path(out: str | Mapping[str, Any]) -> str:
    return out if isinstance(out, str) else str(next(iter(out)))


def to_come(plan: Plan, stage: str, done: Iterable[str], folder: Path) -> list[str]:
    """The stages after `stage` that are going to run: its dependents, and what was never made.

    Stages that are stale for another reason are not known here: DVC finds them one by one.
    """
    missing = {
        name
        for name, outs in plan.outs.items()
        if outs and not all((folder / out).exists() for out in outs)
    }
    missing |= {user for name in missing for user in plan.after[name]}
    # `world` precedes all and seldom changes what they see.
    waiting = set() if stage == "world" else plan.after[stage]
    return sorted((waiting | missing | {FINAL}) - {stage, *done})


def line(
    stage: str,
    done: Mapping[str, float],
    coming: list[str],
    known: Mapping[str, float],
    so_far: float,
) -> str:
    """What is told at the start of a stage.

    Args:
        done: seconds of the stages that ran before, in this execution.
        coming: as `to_come` says.
        known: seconds by which stages made earlier executions longer.
        so_far: seconds since the first stage of this execution began.
    """
    parts = [f"stage {len(done) + 1} of {len(done) + 1 + len(coming)}"]
    if done:
        parts.append(f"{duration(so_far)} so far")
    wanted = [stage, *coming]
    unknown = [name for name in wanted if name not in known]
    if not unknown:
        parts.append(f"about {duration(sum(known[name] for name in wanted))} to go")
    elif len(unknown) < len(wanted):
        rest = sum(known[name] for name in wanted if name in known)
        parts.append(f"{duration(rest)} to go, and {len(unknown)} stages never timed here")
    return ", ".join(parts)


def table(done: Mapping[str, float], total: float, beside: Collection[str]) -> list[str]:
    """Where the time of an execution, `total` seconds, went, the longest first.

    Args:
        done: seconds of each stage.
        beside: those that ran beside another one; they made the whole no longer.
    """
    rows = sorted(done.items(), key=lambda row: -row[1])
    shown = [row for row in rows if row[1] >= 0.01 * total]
    lines = [
        f"{name:<18} {duration(s):>9}  "
        + ("beside another" if name in beside else f"{100 * s / total:3.0f} %")
        for name, s in shown
    ]
    rest = total - sum(s for name, s in shown if name not in beside)
    lines.append(f"{'starts, the rest':<18} {duration(max(0.0, rest)):>9}")
    return [*lines, f"{'in all':<18} {duration(total):>9}"]


def duration(seconds: float) -> str:
    """9 s, 4 min 05 s, 1 h 02 min"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


# ------------------------------------------------------------------------------------------------
# What is kept


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Tell how far the whole `dvc repro` is, and keep the seconds of the body, if DVC runs it."""
    if "DVC_STAGE" not in os.environ or not Path("dvc.yaml").is_file():
        yield
        return
    plan = read_plan(Path("dvc.yaml"))
    if stage not in plan.after:
        yield
        return
    began = time.time()
    nothing: dict[str, Any] = {
        "key": execution_key(), "began": int(began), "seconds": {}, "beside": []
    }  # fmt: skip
    with _kept_alone():
        write_json(_file(), _execution() or nothing)
    done = spent()
    coming = to_come(plan, stage, done, Path())
    told = line(stage, done, coming, _known(), so_far())
    print(f"{stage}: {told}", file=sys.stderr, flush=True)
    yield
    seconds = time.time() - began
    with _kept_alone():
        found = _execution() or nothing
        found["seconds"][stage] = seconds
        if BESIDE in os.environ:
            found["beside"] = [*found["beside"], stage]
        write_json(_file(), found)
        longer = 0.0 if BESIDE in os.environ else seconds
        write_json(_kept(), _read(_kept()) | {_name(stage): longer})


def spent() -> dict[str, float]:
    """Seconds of the stages that this execution has run."""
    return _execution().get("seconds", {})


def so_far() -> float:
    """Seconds since this execution's first stage began."""
    return max(0.0, time.time() - _execution().get("began", time.time()))


def where_it_went() -> list[str]:
    """The `table` of this execution; none where DVC ran nothing."""
    return table(spent(), so_far(), _execution()["beside"]) if spent() else []


def _known() -> dict[str, float]:
    own = _name("")
    return {k.removeprefix(own): v for k, v in _read(_kept()).items() if k.startswith(own)}


def _name(stage: str) -> str:
    return f"{chosen_preset(Path()) or 'default'}/{stage}"


def _execution() -> dict[str, Any]:
    found = _read(_file())
    return found if found.get("key") == execution_key() and "beside" in found else {}


def _file() -> Path:
    return repo_root() / "checkpoints" / "execution.json"


@contextmanager
def _kept_alone() -> Iterator[None]:
    """No other stage, of those that run at the same time, writes what is kept here meanwhile."""
    _file().parent.mkdir(exist_ok=True)
    with FileLock(_file().with_suffix(".lock")):
        yield


def _kept() -> Path:
    return repo_root() / "checkpoints" / "seconds.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or not ours: only an estimate is lost
        return {}
    return found if isinstance(found, dict) else {}
