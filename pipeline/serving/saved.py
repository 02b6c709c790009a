"""Sessions that outlive the process: one file with every open session and the agents they are on.

The agents themselves are in the file too, because a session stays on its version, which the
registry or the disk may no longer have.
"""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from hamlet.artifacts import HamletError, atomic_path
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.engine import Engine, Session

# What reading a file that holds no sessions may raise.
_NONE = (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile)


def save(engine: Engine, path: Path) -> int:
    """Write every open session; returns how many.

    Raises:
        HamletError: the disk is full or the place cannot be written; an older file is untouched.
    """
    arrays: dict[str, Any] = {}
    heads = []
    now = time.monotonic()
    for number, model in enumerate(engine.models.values()):
        sessions = [s for s in engine.sessions.values() if s.model is model]
        if not sessions:
            continue
        slots = [s.slot for s in sessions]
        for name in model.states:
            arrays[f"{number}/{name}"] = model.slab[name][slots]
        arrays[f"{number}/onnx"] = np.frombuffer(model.agent.source, np.uint8)
        heads.append(
            {
                "number": number,
                "version": model.version,
                "card": model.agent.card,
                "sessions": [[s.id, s.ticks, now - s.used] for s in sessions],
            }
        )
    head = np.frombuffer(json.dumps(heads).encode(), np.uint8)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez(file, head=head, **arrays)
    return len(engine.sessions)


def restore(engine: Engine, path: Path) -> int:
    """Open the sessions of a file again, on the versions they were on; returns how many.

    Raises:
        HamletError: the file does not hold sessions.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        heads = json.loads(arrays["head"].tobytes())
        restored = [_restore(engine, head, arrays) for head in heads]
    except _NONE as error:
        raise HamletError(
            f"{path} does not hold sessions ({type(error).__name__})", "delete it or name another"
        ) from None
    found = sorted((s for part in restored for s in part), key=lambda s: s.used)
    for session in found:
        engine.sessions[session.id] = session
    return len(found)


def _restore(engine: Engine, head: dict[str, Any], arrays: dict[str, Any]) -> list[Session]:
    number = head["number"]
    source = arrays[f"{number}/onnx"].tobytes()
    version = head["version"]
    model = engine.prepare(OnnxAgent.of(source, head["card"], f"agent {version}"), version)
    engine.add(model)
    now = time.monotonic()
    sessions = []
    for row, (id_, ticks, idle) in enumerate(head["sessions"]):
        slot = model.open(0)
        if slot is None:
            raise HamletError(f"the file holds more than {model.capacity} sessions")
        for name in model.states:
            model.slab[name][slot] = arrays[f"{number}/{name}"][row]
        session = Session(id_, model, slot)
        session.ticks, session.used = ticks, now - idle
        sessions.append(session)
    return sessions
