"""Which `dvc` started this process: its execution. An orphan of a killed one ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path, PurePath

import psutil

DVC = ("dvc", "dvc.exe")
PYTHON = ("python", "pypy")
LAUNCHER = "HAMLET_LAUNCHER"  # the identity of the `stages.ranks` that started a rank
BESIDE = "HAMLET_BESIDE"  # the identity of the `stages.beside` for which a second DVC runs a stage
INTERRUPTED = "interrupted"  # a file in `checkpoints`
ENDS = "what started this process was killed: it ends too"
WATCH_SECONDS = 0.25
GRACE_SECONDS = 20.0  # for a checkpoint, after which an orphan ends at once


def execution_key() -> str:
    """What all stages of one execution share.

    HAMLET_EXECUTION if set, else the identity of the nearest `dvc` process above this one, else
    of this process.
    """
    return os.environ.get("HAMLET_EXECUTION") or dvc_identity() or identity()


def dvc_identity() -> str | None:
    """The identity of the nearest `dvc` process above this one, or None.

    Told by its command line, else by DVC_ROOT, which dvc gives to what it starts and lacks itself.
    None too where that dvc was killed: then init, or what stands for it, is above instead.
    """
    above = processes_above()
    for process in above:
        with suppress(psutil.Error):
            if is_dvc(process.cmdline()):
                return identity(process.pid)
    if "DVC_ROOT" in os.environ:
        for process in above:
            with suppress(psutil.Error):
                if "DVC_ROOT" not in process.environ():
                    python = PurePath(process.exe()).name.lower().startswith(PYTHON)
                    return identity(process.pid) if python else None
    return None


def processes_above() -> list[psutil.Process]:
    """The processes above this one, the nearest first."""
    process = psutil.Process()
    if os.name == "nt":  # a parent that has ended may have left its number to somebody else
        return process.parents()
    # Elsewhere psutil's `parents` takes one for another where the clock was set back meanwhile.
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        while number := process.ppid():
            process = psutil.Process(number)
            found.append(process)
    return found


def is_dvc(command: list[str]) -> bool:
    """Whether a command line is `dvc ...`, `python .../dvc ...` or `python -m dvc ...`."""
    names = [PurePath(word).name.lower() for word in command]
    if not names or names[0] in DVC:
        return bool(names)
    if not names[0].startswith(PYTHON):
        return False
    rest = iter(range(1, len(command)))
    for i in rest:
        if command[i] == "-m":
            return command[i + 1 : i + 2] == ["dvc"]
        if command[i] in ("-X", "-W"):
            next(rest, None)
        elif not command[i].startswith("-"):
            return names[i] in DVC
        elif command[i] == "-c":
            return False
    return False


def identity(pid: int | None = None) -> str:
    """A process, this one by default, told apart from any later one with its number."""
    pid = os.getpid() if pid is None else pid
    return f"{socket.gethostname()} {pid} {_started(pid)}"


def _started(pid: int) -> str:
    """When a process started: in clock ticks since boot where /proc tells (no clock moves that)."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]  # a zombie is dead
    with suppress(psutil.Error):
        return f"{psutil.Process(pid).create_time():.0f}"
    return ""


def interrupt_execution(folder: Path) -> None:
    """Let every stage that the `dvc` above this process still starts end at once.

    Args:
        folder: `checkpoints` of the repository; see `is_interrupted`.
    """
    (folder / INTERRUPTED).write_text(dvc_identity() or "", encoding="utf-8")


def is_interrupted(folder: Path) -> bool:
    """Whether somebody interrupted the execution of the `dvc` above when no stage could tell it."""
    with suppress(OSError):
        told = (folder / INTERRUPTED).read_text(encoding="utf-8")
        return bool(told) and told == dvc_identity()
    return False


def is_dead(known: str) -> bool:
    """Whether the process of an `identity` of this machine is no more; False for what is none."""
    parts = known.split(" ")
    if len(parts) != 3 or parts[0] != socket.gethostname() or not parts[1].isdigit():
        return False
    return _started(int(parts[1])) != parts[2]


# ------------------------------------------------------------------------------------------------
# Orphans


def end_with_parents() -> None:
    """Let this process end soon after the `dvc` above it, or what runs it beside another stage, or
    the launcher of a rank was killed.

    It is interrupted as by SIGTERM, so that it keeps its checkpoint, and ends after GRACE_SECONDS
    in any case. Without this it would train on, beside the next `dvc repro`.

    Raises:
        SystemExit: one of them was killed while this process started.
    """
    watched = [dvc_identity(), os.environ.get(BESIDE)]
    if "LOCAL_RANK" in os.environ:  # torchrun's or `stages.ranks`'
        watched.append(os.environ.get(LAUNCHER) or identity(os.getppid()))
    above = [one for one in watched if one]
    if (watched[0] is None and "DVC_STAGE" in os.environ) or any(is_dead(one) for one in above):
        print(ENDS, file=sys.stderr, flush=True)
        raise SystemExit(143)
    if above:
        threading.Thread(target=_watch, args=(above,), daemon=True, name="parents").start()


def _watch(above: list[str]) -> None:
    while not any(is_dead(one) for one in above):
        time.sleep(WATCH_SECONDS)
    with suppress(OSError, ValueError):
        print(ENDS, file=sys.stderr, flush=True)
    signal.raise_signal(signal.SIGTERM) if os.name == "nt" else os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(143)
