"""Sessions that outlive the process: a file to which they are appended every few seconds.

The file is a line that says what it is and then frames: an agent (its card and its ONNX bytes, for
a session stays on its version, which the registry or the disk may no longer have), a session (its
state after some tick; a later frame of the same session replaces it) and the end of a session. A
process that is killed leaves at most half a frame at the end, which is cut off. The file is written
anew when most of it is old.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from hamlet.artifacts import HamletError, atomic_path
from hamlet.serving.agent import OnnxAgent
from hamlet.serving.engine import Engine
from hamlet.serving.errors import HTTPError
from hamlet.serving.model import Model
from hamlet.serving.repeats import Key
from hamlet.serving.session import Session

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two servers from one file there
    fcntl = None  # type: ignore[assignment]

MAGIC = b"hamlet sessions 2\n"
SPARE = 4 << 20  # bytes of old frames that are worth no new file
_FRAME = struct.Struct("<cIQI")  # kind, length of the JSON, of the bytes behind it, crc32 of both
AGENT, STATE, END = b"A", b"S", b"E"


class Frame(NamedTuple):
    kind: bytes
    head: dict[str, Any]
    body: bytes
    size: int


def frame(kind: bytes, head: dict[str, Any], body: bytes = b"") -> bytes:
    """A frame as bytes."""
    text = json.dumps(head).encode()
    crc = zlib.crc32(body, zlib.crc32(text))
    return b"".join((_FRAME.pack(kind, len(text), len(body), crc), text, body))


def frames(data: bytes, at: int = 0) -> Iterator[Frame]:
    """The frames from a place on, until the first that is not whole."""
    while at + _FRAME.size <= len(data):
        kind, text, body, crc = _FRAME.unpack_from(data, at)
        start, end = at + _FRAME.size, at + _FRAME.size + text + body
        if end > len(data) or zlib.crc32(data[start:end]) != crc:
            return
        head = json.loads(data[start : start + text])
        yield Frame(kind, head, data[start + text : end], end - at)
        at = end


# ------------------------------------------------------------------------------------------------
# One session


def session_frames(sessions: list[Session]) -> list[bytes]:
    """Each session's frame; all are of one model, and none is within a tick."""
    model = sessions[0].model
    slots = [session.slot for session in sessions]
    rows = [
        model.slab[name][slots].reshape(len(slots), -1).view(np.uint8).reshape(len(slots), -1)
        for name in model.states
    ]
    bodies = np.concatenate(rows, axis=1) if rows else np.zeros((len(slots), 0), np.uint8)
    now = time.monotonic()
    return [
        frame(
            STATE,
            {
                "id": s.id,
                "sha": model.agent.sha,
                "ticks": s.ticks,
                "idle": round(now - s.used, 3),
                "answered": _answered(s),
            },
            body.tobytes(),
        )
        for s, body in zip(sessions, bodies, strict=True)
    ]


def _answered(session: Session) -> list[list[Any]]:
    """Its last requests with an id: [id, what was asked, thoughts, action]."""
    kept = session.repeats.kept.items()
    return [
        [key.id, key.asked.hex(), key.thoughts, np.asarray(action).tolist()]
        for key, (action, _) in kept
    ]


def open_session(engine: Engine, model: Model, id_: str, head: dict[str, Any], body: bytes) -> None:
    """Go on with a session from its frame.

    Raises:
        HTTPError: 409 it is open, 429 there are too many. ValueError, KeyError: no such frame.
    """
    if len(body) != sum(model.signature.inputs[name].nbytes for name in model.states):
        raise ValueError("the state has another size")
    ticks, idle = int(head["ticks"]), float(head["idle"])
    kept = [
        (Key(request, bytes.fromhex(asked), thoughts), action)
        for request, asked, thoughts, action in head["answered"]
    ]
    session = engine.open(id_, model=model)
    at = 0
    for name in model.states:
        field = model.signature.inputs[name]
        value = np.frombuffer(body[at : at + field.nbytes], field.dtype)
        model.slab[name][session.slot] = value.reshape(field.shape)
        at += field.nbytes
    session.ticks, session.used = ticks, time.monotonic() - idle
    for key, action in kept:
        array = np.array(action, model.signature.outputs[model.action].dtype)
        session.repeats.kept[key] = (action if model.one_number else array, None)


# ------------------------------------------------------------------------------------------------
# The file


class StateFile:
    """The file of one server.

    Args:
        engine: whose sessions. path: of the file; it need not exist. log: takes (event, facts).

    Raises:
        HamletError: another server writes to it, or it cannot be opened.
    """

    def __init__(self, engine: Engine, path: Path, log: Callable[..., None]) -> None:
        self.engine, self.path, self.log = engine, path, log
        self.session_bytes: dict[str, int] = {}  # bytes of each session's last frame
        self.agent_bytes: dict[str, int] = {}  # and of each agent's
        self._size = 0
        self._complaint = ""
        lock = path.with_name(f".{path.name}.lock")
        try:
            self._lock = lock.open("w")
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HamletError(
                f"{path} is another server's", "give each its own --state-file"
            ) from None
        except OSError as error:
            raise HamletError(f"{path} cannot be written ({error.strerror})") from None

    def restore(self) -> int:
        """Open the sessions of the file again, on the versions they were on; returns how many.

        Raises:
            HamletError: the file does not hold sessions.
        """
        if not self.path.exists():
            return 0
        data = self.path.read_bytes()
        if not data.startswith(MAGIC):
            raise HamletError(
                f"{self.path} does not hold sessions", "delete it or name another --state-file"
            )
        self._size = len(MAGIC)
        agents: dict[str, Frame] = {}
        last: dict[str, Frame] = {}
        for found in frames(data, len(MAGIC)):
            self._size += found.size
            if found.kind == AGENT:
                agents[found.head["sha"]] = found
                self.agent_bytes[found.head["sha"]] = found.size
            elif found.kind == STATE:
                last.pop(found.head["id"], None)  # the order is that of their last use
                last[found.head["id"]] = found
            else:
                last.pop(found.head["id"], None)
        if self._size < len(data):
            self.log("sessions cut", bytes=len(data) - self._size, file=str(self.path))
            with self.path.open("r+b") as file:
                file.truncate(self._size)
        restored = 0
        for sha in dict.fromkeys(found.head["sha"] for found in last.values()):
            own = {id_: found for id_, found in last.items() if found.head["sha"] == sha}
            try:
                model = self._model(agents[sha])
            except HamletError as error:  # its weights lay in a file of their own, which is gone
                self.log("sessions lost", version=sha[:12], sessions=len(own), error=str(error))
                continue
            for id_, found in own.items():
                self._open(model, id_, found, len(last))
                restored += 1
        self.engine.sort_sessions()
        return restored

    def _open(self, model: Model, id_: str, found: Frame, sessions: int) -> None:
        try:
            open_session(self.engine, model, id_, found.head, found.body)
        except HTTPError:
            raise HamletError(
                f"{self.path} holds {sessions} sessions", f"give --max-sessions {sessions}"
            ) from None
        session = self.engine.sessions[id_]
        session.saved = session.ticks
        self.session_bytes[id_] = found.size

    def _model(self, found: Frame) -> Model:
        version = found.head["version"]
        for model in self.engine.models.values():
            if model.agent.sha == found.head["sha"]:
                return model
        agent = OnnxAgent.of(found.body, found.head["card"], f"version {version}")
        model = self.engine.prepare(agent, version)
        self.engine.add(model)
        return model

    def changes(self) -> list[bytes]:
        """Frames of what happened since the last time, the whole file if that is worth it."""
        live = sum(self.session_bytes.values()) + sum(self.agent_bytes.values())
        whole = not self._size or self._size > 2 * live + SPARE
        sessions = [s for s in self.engine.sessions.values() if s.ticks]
        made = []
        if whole:
            self.session_bytes, self.agent_bytes, self._size = {}, {}, 0
        else:
            gone = self.session_bytes.keys() - self.engine.sessions.keys()
            for id_ in gone:
                del self.session_bytes[id_]
            made += [frame(END, {"id": id_}) for id_ in gone]
            sessions = [s for s in sessions if s.ticks != s.saved]
        for model in self.engine.models.values():
            own = [s for s in sessions if s.model is model]
            if not own:
                continue
            agent = model.agent
            if agent.sha not in self.agent_bytes:
                head = {"sha": agent.sha, "version": model.version, "card": agent.card}
                made.append(frame(AGENT, head, agent.source))
                self.agent_bytes[agent.sha] = len(made[-1])
            for session, data in zip(own, session_frames(own), strict=True):
                made.append(data)
                self.session_bytes[session.id] = len(data)
                session.saved = session.ticks
        return [MAGIC, *made] if whole else made

    def write(self, made: list[bytes]) -> None:
        """Append frames, or begin the file with them; may be called in another thread.

        Raises:
            HamletError: the disk is full or the place cannot be written; the file is as it was.
        """
        data = b"".join(made)
        if not data:
            return
        if data.startswith(MAGIC):
            with atomic_path(self.path) as temporary, temporary.open("wb") as file:
                file.write(data)
        else:
            try:
                with self.path.open("r+b", buffering=0) as file:
                    self._append(file, data)
            except OSError as error:
                full = error.errno not in (None, 13)
                what = "the disk is full" if full else "permission denied"
                raise HamletError(f"{self.path} cannot be written: {what}") from None
        self._size += len(data)

    def _append(self, file: IO[bytes], data: bytes) -> None:
        file.seek(self._size)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(self._size)
            raise

    def failed(self, error: HamletError) -> None:
        """Say once that it could not be written; all of it is due again."""
        self._size = 0
        if str(error) != self._complaint:
            self._complaint = str(error)
            self.log("not saved", error=str(error))
