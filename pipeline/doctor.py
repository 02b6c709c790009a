"""What is installed, what really runs, what is stale, and the command that mends each.

Every check really does the thing it reports on, and needs only what it checks: without PyTorch or
MLflow the others still answer.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hamlet.artifacts import HamletError, check_card, in_one_line, read_json

AGENT = Path("artifacts/agent.onnx")
EXTRAS = {
    "core": ["numpy", "pydantic", "typer", "rich"],
    "train": [
        *("torch", "tensordict", "onnx", "onnxscript", "dvc", "mlflow", "filelock", "psutil"),
        *("pyyaml", "pillow", "matplotlib", "scipy", "ruamel.yaml.clib"),
    ],
    "serve": ["uvicorn", "httptools", "orjson", "websockets", "prometheus-client"],
    "dev": [
        *("pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "tritonclient", "schemathesis"),
        *("stable-baselines3", "sb3-contrib", "coverage"),
    ],
}
# y = x + x on two floats, ir 8, opset 13; written by onnx.helper.
DOUBLING = (
    b'\x08\x08\x12\x00:5\n\x0e\n\x01x\n\x01x\x12\x01y"\x03Add\x12\x01dZ\x0f\n\x01x\x12\n\n\x08\x08'
    b"\x01\x12\x04\n\x02\x08\x02b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x02B\x04\n\x00"
    b"\x10\r"
)

# What dvc writes in place, what it says of one that is not whole, and what mends that.
HALF_WRITTEN = [
    (".dvc/tmp/rwlock", "Unable to read RWLock-file", "rm .dvc/tmp/rwlock"),
    ("dvc.lock", "dvc.lock' validation failed", "git checkout dvc.lock"),
]


class Check(NamedTuple):
    """One finding: status is "ok", "warn" (something is missing or stale) or "fail" (broken).

    `fix` is the command or change that mends it, empty when there is nothing to mend.
    """

    name: str
    status: str
    detail: str
    fix: str = ""


def report() -> list[Check]:
    """Check everything, in the repository of the current folder. Takes seconds."""
    sections: list[Callable[[], Iterator[Check]]] = [
        _python,
        _packages,
        _runtime,
        _torch,
        _params,
        _pack,
        _facts,
        _disk,
        _stages,
        _checkpoints,
        _registry,
    ]
    findings: list[Check] = []
    for section in sections:
        try:
            findings += section()
        except HamletError as error:
            findings.append(Check(_name(section), "fail", error.problem, error.fix))
        except Exception as error:  # a check that breaks is a finding, not the end of the report
            reason = f"{type(error).__name__}: {in_one_line(error)}"
            findings.append(Check(_name(section), "fail", reason))
    return findings


def _name(section: Callable[[], Iterator[Check]]) -> str:
    return section.__name__.strip("_")


# ------------------------------------------------------------------------------------------------
# What is installed


def _python() -> Iterator[Check]:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    old = sys.version_info < (3, 11)
    yield Check("python", "fail" if old else "ok", detail, "install Python 3.11+" if old else "")


def _packages() -> Iterator[Check]:
    for extra, packages in EXTRAS.items():
        found, missing = [], []
        for package in packages:
            try:
                found.append(f"{package} {version(package)}")
            except PackageNotFoundError:
                missing.append(package)
        name = "packages" if extra == "core" else f"extra {extra}"
        if not missing:
            yield Check(name, "ok", ", ".join(found))
        else:
            what = "." if extra == "core" else f'".[{extra}]"'
            status = "fail" if extra == "core" else "warn"
            detail = f"missing {', '.join(missing)}" if found else "not installed"
            yield Check(name, status, detail, f"pip install -c constraints.txt -e {what}")


def _runtime() -> Iterator[Check]:
    from hamlet.driver import has_gpu
    from hamlet.ort import check_runtime, open_unchecked

    build, build_version = check_runtime()
    import numpy as np
    import onnxruntime

    yield Check("onnx runtime", "ok", f"{build} {build_version}")
    for provider in onnxruntime.get_available_providers():
        name = f"provider {provider.removesuffix('ExecutionProvider')}"
        try:
            session = open_unchecked(DOUBLING, [provider])
            result = session.run(None, {"x": np.array([1, 2], np.float32)})[0]
        except HamletError:
            if provider == "CUDAExecutionProvider" and has_gpu():
                fix = f'pip install "{build}[cuda,cudnn]=={build_version}"'
                yield Check(name, "warn", "a GPU is here, the provider does not run", fix)
            else:
                yield Check(name, "ok", "listed by ONNX Runtime, does not run on this machine")
            continue
        right = result.tolist() == [2.0, 4.0]
        yield Check(name, "ok" if right else "fail", "runs" if right else f"wrong result {result}")


def _torch() -> Iterator[Check]:
    if find_spec("torch") is None:
        return  # told under the extra that installs it
    import torch

    detail = f"{torch.__version__}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    yield Check("torch", "ok", f"{detail}, {torch.backends.cpu.get_cpu_capability()}")
    speed = _time_matmul(torch, torch.float32) / _time_matmul(torch, torch.bfloat16)
    advice = "worth using" if speed > 1.1 else "not worth using here"
    yield Check("bfloat16", "ok", f"matrix product {speed:.1f} x as fast as float32, {advice}")
    yield _device()
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler or platform.system() == "Windows":
        yield Check("compiler", "ok", compiler or "")
    else:
        fix = "install g++ (for example `apt install g++`)"
        yield Check("compiler", "warn", "torch.compile has no C++ compiler and is not used", fix)


def _device() -> Check:
    """What a stage would run on, and why."""
    from hamlet.device import chosen, facts, take

    device, why = chosen()
    take(device)
    name = f" ({facts(device)['device_name']})" if facts(device) else ""
    detail = f"stages run on {device}{name}: {why}"
    if device.type == "cpu" and why != "HAMLET_DEVICE is cpu" and shutil.which("nvidia-smi"):
        fix = "install the CUDA build of torch for this driver (see pytorch.org)"
        return Check("device", "warn", detail, fix)
    return Check("device", "ok", detail)


def _time_matmul(torch: Any, dtype: Any) -> float:
    a = torch.ones(512, 512, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return best


# ------------------------------------------------------------------------------------------------
# The repository


def _params() -> Iterator[Check]:
    if find_spec("yaml") is None:
        return
    from hamlet.own.params import is_own, load_own_params
    from hamlet.params import chosen_preset, load_params

    if is_own():
        from hamlet.worlds.opening import open_world

        given = load_own_params().world
        yield Check("params.yaml", "ok", "valid, of an own world")
        world = open_world(given.make, given.kwargs)
        world.close()
        yield Check("world", "ok", f"{given.make} opens: {', '.join(world.shape.agents)}")
        return
    load_params()
    preset = chosen_preset(Path())
    yield Check("params.yaml", "ok", f"valid, preset {preset}" if preset else "valid")


def _pack() -> Iterator[Check]:
    if find_spec("yaml") is None:
        return
    from hamlet.own.params import is_own
    from hamlet.params import load_params
    from hamlet.town import load_pack

    if is_own():
        return
    try:
        source = load_params().town.pack
    except HamletError:
        return  # told as params.yaml's
    pack = load_pack(source)
    yield Check("town pack", "ok", f"{pack.name}, {pack.agents} agents, {pack.width}x{pack.height}")


def _facts() -> Iterator[Check]:
    if any(find_spec(package) is None for package in ("yaml", "torch")):
        return
    from hamlet.own.params import is_own
    from hamlet.params import load_params
    from hamlet.proofs import open_graph

    if is_own():
        return
    try:
        params = load_params()
    except HamletError:
        return
    graph = open_graph(params.proofs.data, params.seed)
    yield Check("facts", "ok", f"{graph.name}, {len(graph.known())} facts")


def _disk() -> Iterator[Check]:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    fix = "free some space" if free < 2 else ""
    yield Check("disk", "warn" if fix else "ok", f"{free:.0f} GB free", fix)


def _stages() -> Iterator[Check]:
    if find_spec("dvc") is None or not Path("dvc.yaml").is_file():
        return
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "status", "dvc.yaml", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DVC_NO_ANALYTICS": "true"},
    )
    if done.returncode:
        yield _refused(done.stderr)
        return
    changes = json.loads(done.stdout or "{}")
    stale = {stage: why for stage, entries in changes.items() if (why := _reasons(entries))}
    for stage, reasons in stale.items():
        more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        detail = "; ".join(reasons[:3]) + more
        # What `world` finds changes those after it: they are not stale before it has run.
        fix = "dvc repro" if stage == "world" else f"dvc repro {stage}"
        yield Check(f"stage {stage}", "warn", detail, fix)
    if not stale:
        yield Check("stages", "ok", "every stage is up to date")


def _refused(errors: str) -> Check:
    """Why `dvc status` failed, from what it printed, and what mends it."""
    for file, told, fix in HALF_WRITTEN:
        if told in errors:
            if fix.startswith("git") and not Path(".git").exists():
                fix = f"rm {file}"
            detail = f"{file} is half written, as a killed dvc leaves it; what was made is kept"
            return Check("stages", "fail", detail, fix)
    reason = (errors.strip().splitlines() or ["no reason given"])[-1]
    fix = "run `dvc status`"
    if "not a git repository" in reason:
        fix = "git init, or without Git: dvc config --local core.no_scm true"
    return Check("stages", "fail", f"`dvc status` failed: {reason}", fix)


def _reasons(changes: list[Any]) -> list[str]:
    """[{"changed deps": {"params.yaml": {"seed": "modified"}}}] -> ["params.yaml seed modified"]"""
    reasons = []
    for change in changes:
        if not isinstance(change, dict):  # "always changed" is no reason to run it
            continue
        for kind, entries in change.items():
            if isinstance(entries, str):
                reasons.append(f"{kind} {entries}")
                continue
            for file, what in entries.items():
                inner = what if isinstance(what, dict) else {"": what}
                reasons += [" ".join(f"{file} {key} {how}".split()) for key, how in inner.items()]
    return reasons


def _checkpoints() -> Iterator[Check]:
    for folder in sorted(Path("checkpoints").glob("*-*/")):
        match folder.name.split("-"):
            case ["study", variant, seed, *_]:
                what, fix = f"{variant} {seed}", f"python -m benchmarks.study cell {variant} {seed}"
            case ["tune", *_]:
                what, fix = "tune", "hamlet tune"
            case [stage, *_]:
                what, fix = stage, f"dvc repro {stage}"
        yield Check(f"checkpoint {what}", "ok", f"interrupted work in {folder}", fix)


def _registry() -> Iterator[Check]:
    if not AGENT.exists():
        yield Check("agent", "warn", f"{AGENT} is missing", "dvc repro agent")
        return
    sha256 = check_card(AGENT)["sha256"]
    from hamlet.ort import check_runtime, open_session

    open_session(AGENT)
    runtime = " ".join(check_runtime())
    detail = f"{AGENT} matches its card and opens in {runtime}, sha256 {sha256[:12]}"
    yield Check("agent", "ok", detail)
    if any(find_spec(package) is None for package in ("mlflow", "psutil", "filelock")):
        return
    from hamlet import tracking

    uri = tracking.tracking_uri()
    database = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not database.exists():
        yield Check("champion", "warn", f"no registry at {uri} yet", "dvc repro register")
        return
    from hamlet.own.params import is_own, load_own_params

    model = load_own_params().register.model if is_own() else tracking.MODEL
    found = tracking.champion(tracking.client(), model)
    verdict = Path("artifacts/metrics/register.json")
    if found is not None and found.tags.get("sha256") == sha256:
        detail = f"{model} version {found.version} is {AGENT}"
        yield Check("champion", "ok", detail)
        return
    held = f"version {found.version} of another agent" if found else "nobody"
    judged = read_json(verdict) if verdict.exists() else {}
    if judged.get("sha256") == sha256 and judged.get("reasons"):
        why = "; ".join(judged["reasons"])
        yield Check("champion", "warn", f"is {held}, the gate refused {AGENT}: {why}")
    else:
        yield Check("champion", "warn", f"is {held}, not {AGENT}", "dvc repro register")
