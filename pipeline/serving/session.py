"""A life on the server, and a request for one tick of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from hamlet.serving.agent import Decision
from hamlet.serving.model import Model
from hamlet.serving.repeats import Key, Repeats


class Session:
    """One life on the server."""

    __slots__ = (
        "busy", "closed", "id", "leaving", "model", "repeats", "saved", "slot", "ticks", "used",
        "waiting",
    )  # fmt: skip

    def __init__(self, id_: str, model: Model, slot: int) -> None:
        self.id, self.model, self.slot = id_, model, slot
        self.ticks = 0
        self.used = 0.0
        self.busy = False  # it has a request in the queue or in the batch that runs
        self.closed = False
        self.leaving = False  # another life has its name now; it ends after what waits for it
        self.saved = -1  # its ticks when it was last written to a state file
        self.waiting: deque[PendingTick] = deque()
        self.repeats = Repeats()


Action = int | np.ndarray
"""One life's action: int where the policy's is one int64, else an array [1, ...]."""
Done = Callable[[Action | None, "Decision | Exception | None"], None]


class PendingTick:
    """A request for one tick of a session.

    `done` is called once, with the action and, if thoughts were asked for, the `Decision`; or with
    None and the error, an HTTPError or a HamletError (a bad observation).
    """

    __slots__ = ("arrived", "done", "end", "key", "record", "seconds", "session", "thoughts")

    def __init__(
        self,
        session: Session,
        record: bytes,
        seconds: float,
        end: bool,
        thoughts: bool,
        done: Done,
        key: Key | None = None,
    ) -> None:
        self.session, self.record, self.end, self.thoughts = session, record, end, thoughts
        self.arrived = time.monotonic()
        self.seconds = seconds  # from then, in which its turn must come
        self.done, self.key = done, key
