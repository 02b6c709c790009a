"""The last requests of a life by their ids: asked again, they are answered again, not done again.

A client whose connection breaks does not know whether its request was done. With an id it may ask
again: the answer comes from here, or from the tick that still runs. The same id with another
observation is another request: some clients give all of theirs the same id.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple

from hamlet.serving.errors import HTTPError

MAX_KEPT = 16  # as many as may wait for one session

Done = Callable[[Any, Any], None]


class Key(NamedTuple):
    """A request: its id, and what it asked as a hash."""

    id: str
    asked: bytes
    thoughts: bool


class Repeats:
    """Requests of one life.

    Attributes:
        kept: key -> (action, decision or None) of the last that were answered, oldest first.
        off: the client's ids are no ids.
    """

    __slots__ = ("kept", "off", "running")

    def __init__(self) -> None:
        self.off = False
        self.kept: OrderedDict[Key, tuple[Any, Any]] = OrderedDict()
        self.running: dict[Key, list[Done]] = {}

    @staticmethod
    def key(id_: str, record: bytes, start: bool, end: bool, thoughts: bool) -> Key:
        """What makes two requests the same one."""
        flags = bytes([start, end, thoughts])
        return Key(id_, blake2b(record + flags, digest_size=8).digest(), thoughts)

    def begun(self, key: Key) -> None:
        """A request was queued."""
        self.running[key] = []

    def answered(self, key: Key, done: Done) -> bool:
        """Whether it was asked before; then `done` is called, now or when the tick has run."""
        if key not in self.running and key not in self.kept:
            if any(key.id == other.id for known in (self.kept, self.running) for other in known):
                self.off = True
                self.kept.clear()
            return False
        if self.off:
            return False
        if key in self.running:
            self.running[key].append(done)
            return True
        action, decision = self.kept[key]
        if decision is None and key.thoughts:
            gone = f"request '{key.id:.60}' was answered before: only its action is still known"
            done(None, HTTPError(409, gone))
        else:
            done(action, decision)
        return True

    def ended(self, key: Key, action: Any, decision: Any) -> None:
        """A request was answered: so are those that asked the same meanwhile."""
        for done in self.running.pop(key, ()):
            done(action, decision)
        if self.off:
            return
        if self.kept:  # thoughts are large: those of the last request are kept
            last = next(reversed(self.kept))
            self.kept[last] = (self.kept[last][0], None)
        self.kept[key] = (action, decision)
        if len(self.kept) > MAX_KEPT:
            self.kept.popitem(last=False)

    def failed(self, key: Key, error: Exception) -> None:
        """A request was refused: it was not done and may be asked again."""
        for done in self.running.pop(key, ()):
            done(None, error)
