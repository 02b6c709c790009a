"""Sessions, micro-batches and versions: everything of the server that is not HTTP.

Requests of different sessions that are there at the same time go through ONNX Runtime together.
While one batch runs the next one gathers, so the batch grows with the load and nobody waits when
there is none. A session has at most one request in a batch; its requests keep their order.

At the ticks at which a session deliberates it costs several times as much as at the others.
Sessions that began together deliberate together, and would make every few batches slow for all:
a batch takes only so many of them, more if it is of them alone; the others go first in the next.

Everything here runs on one event loop; only ONNX Runtime itself runs in another thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.serving.agent import Decision, OnnxAgent
from hamlet.serving.metrics import Metrics
from hamlet.serving.model import RNG_RANGE, Model

MAX_BATCH = 32  # rows; more are not much cheaper each, and all wait for the last
MAX_DEEP = 9  # rows that deliberate, in a batch with others; twice as many among themselves
MAX_QUEUE = 2048  # requests waiting, of all sessions together
MAX_QUEUE_OF_ONE = 16  # requests of one session waiting for one another
INLINE_ROWS = 2  # so few rows, one after another, run faster than a thread is woken


class Refused(Exception):
    """A request that is answered with an HTTP status of its own and one line.

    `retry` is the number of seconds after which trying again makes sense, where it does.
    """

    def __init__(self, status: int, message: str, retry: int | None = None) -> None:
        self.status, self.message, self.retry = status, message, retry
        super().__init__(message)


class Session:
    """One life on the server."""

    __slots__ = ("busy", "closed", "id", "model", "slot", "ticks", "used", "waiting")

    def __init__(self, id_: str, model: Model, slot: int) -> None:
        self.id, self.model, self.slot = id_, model, slot
        self.ticks = 0
        self.used = 0.0
        self.busy = False  # it has a request in the queue or in the batch that runs
        self.closed = False
        self.waiting: deque[Item] = deque()


class Item:
    """A request for one tick of a session.

    `done` is called once, with the action and, if thoughts were asked for, the `Decision`; or with
    -1 and the error, a Refused or a HamletError (a bad observation).
    """

    __slots__ = ("arrived", "deadline", "done", "end", "record", "session", "thoughts")

    def __init__(
        self,
        session: Session,
        record: bytes,
        seconds: float,
        end: bool,
        thoughts: bool,
        done: Callable[[int, Decision | Exception | None], None],
    ) -> None:
        self.session, self.record, self.end, self.thoughts = session, record, end, thoughts
        self.arrived = time.monotonic()
        self.deadline = self.arrived + seconds
        self.done = done


class Engine:
    """The sessions and the versions that serve them.

    Args:
        metrics: where it counts.
        max_sessions: of all versions together.
        session_ttl: seconds after which an idle session ends.

    Attributes:
        current: the version that new sessions begin with; None before the first is loaded.
    """

    def __init__(self, metrics: Metrics, max_sessions: int, session_ttl: float) -> None:
        self.metrics, self.max_sessions, self.session_ttl = metrics, max_sessions, session_ttl
        self.current: Model | None = None
        self.models: dict[str, Model] = {}
        self.sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self._ready: dict[str, deque[Item]] = {}
        self._queued = 0
        self._running = False
        self._scheduled = False
        self._small = True  # the last batch was: whoever comes next is probably alone
        self._handed = Lock()  # held until the thread has begun with its batch
        self._thread = ThreadPoolExecutor(1, "batches")
        self._other_thread = ThreadPoolExecutor(1, "stateless")

    # -- versions

    def prepare(self, agent: OnnxAgent, version: str) -> Model:
        """A version ready to be served; may be called in another thread.

        Raises:
            HamletError: its graph cannot run here.
        """
        sha = agent.card["sha256"]
        for model in list(self.models.values()):
            if model.agent.card["sha256"] == sha:  # the same agent twice is one version
                return model
        if version in self.models:  # a registry that numbers anew
            version = f"{version}-{sha[:8]}"
        model = Model(agent, version, self.max_sessions, MAX_BATCH)
        warm_up(model)
        return model

    def add(self, model: Model) -> None:
        """Serve a version without making it current."""
        if self.models.setdefault(model.version, model) is model:
            self._ready.setdefault(model.version, deque())

    def install(self, model: Model) -> None:
        """Make a version current. Sessions that are open stay with theirs."""
        self.add(model)
        self.current = model
        self._retire()

    def _retire(self) -> None:
        for version, model in list(self.models.items()):
            if model is not self.current and not model.sessions:
                del self.models[version], self._ready[version]

    # -- sessions

    def open(self, id_: str, seed: int | None = None) -> Session:
        """Begin a session with the current version.

        Args:
            seed: its random numbers; default: from its name, so that equal names live equal lives.

        Raises:
            Refused: 409 it is open, 429 there are too many, 503 no version is loaded yet.
        """
        model = self.ready()
        if id_ in self.sessions:
            raise Refused(
                409,
                f"sequence_id '{id_}' is open already: end it first, with sequence_end or DELETE "
                "/v2/sessions/ID",
            )
        slot = None
        if len(self.sessions) < self.max_sessions:
            rng = rng_of(id_) if seed is None else seed % RNG_RANGE
            slot = model.open(rng)
        if slot is None:
            oldest = next(iter(self.sessions.values()), None)
            idle = time.monotonic() - oldest.used if oldest else 0.0
            raise Refused(
                429,
                f"{self.max_sessions} sessions are open: end one, or wait until one has been idle "
                f"for {self.session_ttl:g} s",
                retry=max(1, round(self.session_ttl - idle)),
            )
        session = self.sessions[id_] = Session(id_, model, slot)
        session.used = time.monotonic()
        self.metrics.sessions_opened += 1
        return session

    def get(self, id_: str) -> Session:
        """An open session.

        Raises:
            Refused: 404 there is none of this name.
        """
        session = self.sessions.get(id_)
        if session is None:
            raise Refused(
                404,
                f"sequence_id '{id_}' is not open here: it ended, timed out or never began; begin "
                "it with sequence_start",
            )
        return session

    def ready(self) -> Model:
        """The current version; Refused with 503 before there is one."""
        if self.current is None:
            raise Refused(503, "no agent is loaded yet", retry=5)
        return self.current

    def close(self, session: Session, reason: str) -> None:
        """End a session; what waits for it is refused, what runs is answered first."""
        if session.closed:
            return
        session.closed = True
        del self.sessions[session.id]
        self.metrics.sessions_closed[reason] += 1
        while session.waiting:
            session.waiting.popleft().done(-1, Refused(404, f"session '{session.id}' ended"))
            self._queued -= 1
        if not session.busy:
            self._free(session)

    def _free(self, session: Session) -> None:
        model = session.model
        model.close(session.slot)
        if model is not self.current and not model.sessions:
            self._retire()

    def sweep(self) -> None:
        """End the sessions that have been idle for too long."""
        limit = time.monotonic() - self.session_ttl
        for session in list(self.sessions.values()):
            if session.used > limit:
                break
            if not session.busy:
                self.close(session, "timeout")

    # -- requests

    def submit(self, item: Item) -> None:
        """Queue a request.

        Raises:
            Refused: 429 the queue is full.
        """
        session = item.session
        if self._queued >= MAX_QUEUE or len(session.waiting) >= MAX_QUEUE_OF_ONE:
            self.metrics.pushed_back += 1
            raise Refused(429, "too many requests are waiting: try again later", retry=1)
        self._queued += 1
        session.used = item.arrived
        self.sessions.move_to_end(session.id)
        if session.busy:
            session.waiting.append(item)
        else:
            session.busy = True
            self._ready[session.model.version].append(item)
            self._schedule()

    async def once(
        self, model: Model, feeds: Mapping[str, np.ndarray], names: list[str]
    ) -> list[np.ndarray]:
        """A tick whose state the client keeps: one run of its own."""
        if self._queued >= MAX_QUEUE:
            self.metrics.pushed_back += 1
            raise Refused(429, "too many requests are waiting: try again later", retry=1)
        self._queued += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._other_thread, model.agent.session.run, names, dict(feeds)
            )
        finally:
            self._queued -= 1

    @property
    def queued(self) -> int:
        """Requests that wait for a batch."""
        return self._queued

    def _schedule(self) -> None:
        if not self._scheduled and not self._running:
            # After everything that has arrived by now is parsed.
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        ready = [queue for queue in self._ready.values() if queue]
        if self._running or not ready:
            return
        queue = min(ready, key=lambda q: q[0].arrived)
        model = queue[0].session.model
        batch: list[Item] = []
        later: list[Item] = []
        deep = 0
        now = time.monotonic()
        while queue and len(batch) < MAX_BATCH and len(later) < MAX_BATCH:
            item = queue.popleft()
            if item.session.closed:
                self._leave(item, Refused(404, f"session '{item.session.id}' ended"))
            elif item.deadline < now:
                self.metrics.late += 1
                waited = f"no turn within the timeout of {item.deadline - item.arrived:g} s"
                self._leave(item, Refused(429, waited, retry=1))
            elif not model.deliberates(item.session.slot):
                batch.append(item)
            elif deep < MAX_DEEP:
                deep += 1
                batch.append(item)
            else:
                later.append(item)
        if deep == len(batch):
            batch, later = batch + later[:MAX_DEEP], later[MAX_DEEP:]
        queue.extendleft(reversed(later))
        if not batch:
            self._schedule()
            return
        batch = self._load(model, batch)
        if not batch:
            self._schedule()
            return
        self._running = True
        began = time.monotonic()
        small = len(batch) <= INLINE_ROWS
        if small and self._small:
            self._finish(model, batch, began, _attempt(model.run, len(batch)))
            return
        self._small = small
        loop = asyncio.get_running_loop()

        def run() -> None:
            self._handed.release()
            error = _attempt(model.run, len(batch))
            loop.call_soon_threadsafe(self._finish, model, batch, began, error)

        self._handed.acquire()
        self._thread.submit(run)
        # Reading from a socket gives the interpreter's lock away, but for less time than a thread
        # takes to wake up: without this the run would not begin before everything is read.
        with self._handed:
            pass

    def _load(self, model: Model, batch: list[Item]) -> list[Item]:
        """Fill the input buffers; requests with a bad observation are refused and left out."""
        wrong = model.load([item.record for item in batch])
        if wrong:
            for row, error in wrong.items():
                self._leave(batch[row], error)
            batch = [item for row, item in enumerate(batch) if row not in wrong]
            if batch:
                model.load([item.record for item in batch])
        if batch:
            model.recall([item.session.slot for item in batch])
        return batch

    def _finish(
        self, model: Model, batch: list[Item], began: float, error: Exception | None
    ) -> None:
        now = time.monotonic()
        self._running = False
        if error is not None:
            self.metrics.failed_runs += 1
            for item in batch:
                self._leave(item, error)
            self._schedule()
            return
        model.store([item.session.slot for item in batch])
        actions = model.outputs["action"][: len(batch)].tolist()
        more = [model.decision(row) if item.thoughts else None for row, item in enumerate(batch)]
        if sum(map(len, self._ready.values())) >= MAX_BATCH // 2:
            self._dispatch()  # the next batch runs while the answers of this one are written
        for item, action, decision in zip(batch, actions, more, strict=True):
            item.session.ticks += 1
            item.done(action, decision)
            self._next(item)
        self.metrics.batch(len(batch), now - began, [began - item.arrived for item in batch])
        if any(self._ready.values()):  # few: with whoever is there by now, but not yet read
            asyncio.get_running_loop().call_soon(self._schedule)

    def _leave(self, item: Item, error: Exception) -> None:
        """A request that will not run; a session whose first request it was never began."""
        item.done(-1, error)
        if not item.session.ticks and not item.session.waiting:
            self.close(item.session, "refused")
        self._next(item)

    def _next(self, item: Item) -> None:
        """Whatever comes after a request: the session's next one, or its end."""
        session = item.session
        self._queued -= 1
        if item.end:
            self.close(session, "ended")
        if session.waiting:
            self._ready[session.model.version].append(session.waiting.popleft())
        else:
            session.busy = False
            if session.closed:
                self._free(session)

    async def drain(self) -> None:
        """Wait until nothing is queued or running."""
        while self._queued or self._running:
            await asyncio.sleep(0.01)

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._other_thread.shutdown()


def _attempt(run: Callable[[int], None], n: int) -> Exception | None:
    try:
        run(n)
    except Exception as error:  # whatever ONNX Runtime says; the server goes on
        return error
    return None


def rng_of(id_: str) -> int:
    """Where a session's random numbers begin: from its name, in [0, 2^31 - 2)."""
    return int.from_bytes(hashlib.blake2b(id_.encode(), digest_size=8).digest()) % RNG_RANGE


def warm_up(model: Model) -> None:
    """Run once with one row and with many, so that the first request does not pay for it, and see
    at which ticks of a life the agent deliberates.

    Raises:
        HamletError: the graph cannot run here.
    """
    example = np.zeros(model.record_bytes, np.uint8).tobytes()
    model.load([example])
    model._mask[:] = True
    model.inputs["state_clock"][:] = np.arange(model.max_batch)
    for n in (1, model.max_batch):
        error = _attempt(model.run, n)
        if error is not None:
            raise HamletError(
                f"the agent {model.version} cannot run ({str(error).splitlines()[0][:200]})"
            )
    model.look_at_deliberation()
