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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import isinf
from threading import Lock

import numpy as np

from hamlet.serving.agent import OnnxAgent
from hamlet.serving.errors import HTTPError
from hamlet.serving.metrics import Metrics
from hamlet.serving.model import NAME, RNG_RANGE, Model, attempt, warm_up
from hamlet.serving.repeats import Repeats
from hamlet.serving.session import Action, Done, PendingTick, Session

MAX_BATCH = 32  # rows; more are not much cheaper each, and all wait for the last
MAX_DEEP = 9  # rows that deliberate, in a batch with others; twice as many among themselves
MAX_QUEUE = 2048  # requests waiting, of all sessions together
MAX_QUEUE_OF_ONE = 16  # requests of one session waiting for one another
MAX_ENDED = 10_000  # lives that ended and whose last requests can still be asked for again
MAX_RETRY = 3600.0  # seconds at most after which a client is told to try again
DEADLINE_SECONDS = 10.0  # in which a request's turn must come, where it does not say
INLINE_ROWS = 2  # so few rows, one after another, run faster than a thread is woken
INLINE_SECONDS = 5e-4  # a model whose full batch takes less never needs one


class Engine:
    """The sessions and the versions that serve them.

    Args:
        metrics: where it counts.
        max_sessions: of all versions together.
        session_ttl: seconds after which an idle session ends; inf: never.
        name: of the model, as clients call it.

    Attributes:
        current: the version that new sessions begin with; None before the first is loaded.
    """

    def __init__(
        self, metrics: Metrics, max_sessions: int, session_ttl: float, name: str = NAME
    ) -> None:
        self.metrics, self.max_sessions, self.session_ttl = metrics, max_sessions, session_ttl
        self.name = name
        self.current: Model | None = None
        self.models: dict[str, Model] = {}
        self.sessions: OrderedDict[str, Session] = OrderedDict()  # least recently used first
        self.ended: OrderedDict[str, Session] = OrderedDict()  # of lives that ended, for a while
        self._ready: dict[str, deque[PendingTick]] = {}
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
        sha = agent.sha
        for model in list(self.models.values()):
            if model.agent.sha == sha:  # the same agent twice is one version
                return model
        if version in self.models:  # a registry that numbers anew
            version = f"{version}-{sha[:8]}"
        model = Model(agent, version, self.max_sessions, MAX_BATCH, self.name)
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

    def tick(
        self,
        sequence: str,
        record: bytes,
        done: Done,
        *,
        start: bool = False,
        end: bool = False,
        seed: int | None = None,
        seconds: float = DEADLINE_SECONDS,
        thoughts: bool = False,
        request: str | None = None,
    ) -> Session:
        """Queue one tick of a session, begun or found; every way into the server ends here.

        Args:
            sequence: the session's name. record: its observation, of the right length.
            done: as `PendingTick` says; called at once if the request was answered before.
            start: begin a life; one of the same name that lives ends after what waits for it.
            seed: of a new life, see `open`. seconds: in which its turn must come.
            request: the request's id: the same one with the same observation within a life is
                answered again, not ticked again. None or "": every request is a tick.

        Raises:
            HTTPError: 404 no such session, 429 too many sessions or requests, 503 no version.
            HamletError: the observation of a new life of a name that lives is out of range.
        """
        session = self.sessions.get(sequence)
        key = Repeats.key(request, record, start, end, thoughts) if request else None
        if key is not None and not start:  # to begin anew once more is the same life
            asked = session or self.ended.get(sequence)
            if asked is not None and asked.repeats.answered(key, done):
                self.metrics.repeated += 1
                return asked
        if start:
            if session is not None:
                self._room(None)
                self.ready().check(record)
                self._replace(session)
            session = self.open(sequence, seed)
        elif session is None:
            session = self.get(sequence)
        try:
            self.submit(PendingTick(session, record, seconds, end, thoughts, done, key))
        except HTTPError:
            if start:
                self.close(session, "refused")
            raise
        return session

    def open(self, id_: str, seed: int | None = None, model: Model | None = None) -> Session:
        """Begin a session with the current version.

        Args:
            model: another version, for a session that began elsewhere.
            seed: its random numbers; default: from its name, so that equal names live equal lives.

        Raises:
            HTTPError: 409 it is open, 429 there are too many, 503 no version is loaded yet.
        """
        begins = model is None
        model = model or self.ready()
        if id_ in self.sessions:
            raise HTTPError(409, f"session '{id_}' is open already")
        slot = None
        if len(self.sessions) < self.max_sessions:
            rng = rng_of(id_) if seed is None else seed % RNG_RANGE
            slot = model.open(rng)
        if slot is None:
            raise self._too_many()
        self.ended.pop(id_, None)
        session = self.sessions[id_] = Session(id_, model, slot)
        session.used = time.monotonic()
        self.metrics.sessions_opened += begins
        return session

    def _too_many(self) -> HTTPError:
        oldest = next(iter(self.sessions.values()), None)
        idle = time.monotonic() - oldest.used if oldest else 0.0
        wait = "" if isinf(self.session_ttl) else (
            f", or wait until one has been idle for {self.session_ttl:g} s"
        )  # fmt: skip
        return HTTPError(
            429,
            f"{self.max_sessions} sessions are open: end one{wait}",
            retry=round(min(max(1.0, self.session_ttl - idle), MAX_RETRY)),
        )

    def _replace(self, session: Session) -> None:
        """Give a session's name free; it ends when everything that waits for it is answered."""
        if not session.busy:
            self.close(session, "restarted")
            return
        session.leaving = True
        del self.sessions[session.id]
        self.metrics.sessions_closed["restarted"] += 1

    def sort_sessions(self) -> None:
        """Put the sessions in the order of their last use, after many were opened otherwise."""
        used = sorted(self.sessions.values(), key=lambda session: session.used)
        self.sessions = OrderedDict((session.id, session) for session in used)

    def get(self, id_: str) -> Session:
        """An open session.

        Raises:
            HTTPError: 404 there is none of this name.
        """
        session = self.sessions.get(id_)
        if session is None:
            raise HTTPError(
                404,
                f"sequence_id '{id_}' is not open here: it ended, timed out or never began; begin "
                "it with sequence_start",
            )
        return session

    def ready(self) -> Model:
        """The current version; HTTPError with 503 before there is one."""
        if self.current is None:
            raise HTTPError(503, "no version is loaded yet", retry=5)
        return self.current

    def close(self, session: Session, reason: str) -> None:
        """End a session; what waits for it is refused, what runs is answered first."""
        if session.closed:
            return
        session.closed = True
        if not session.leaving:
            del self.sessions[session.id]
            self.metrics.sessions_closed[reason] += 1
            if session.repeats.kept:
                self.ended[session.id] = session
                if len(self.ended) > MAX_ENDED:
                    self.ended.popitem(last=False)
        while session.waiting:
            ended = HTTPError(404, f"session '{session.id}' ended")
            self._fail(session.waiting.popleft(), ended)
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

    def submit(self, item: PendingTick) -> None:
        """Queue a request.

        Raises:
            HTTPError: 429 the queue is full.
        """
        session = item.session
        self._room(session)
        self._queued += 1
        session.used = item.arrived
        self.sessions.move_to_end(session.id)
        if item.key is not None:
            session.repeats.begun(item.key)
        if session.busy:
            session.waiting.append(item)
        else:
            session.busy = True
            self._ready[session.model.version].append(item)
            self._schedule()

    def _room(self, session: Session | None) -> None:
        """HTTPError with 429 where no request more may wait."""
        full = session is not None and len(session.waiting) >= MAX_QUEUE_OF_ONE
        if full or self._queued >= MAX_QUEUE:
            self.metrics.pushed_back += 1
            raise HTTPError(429, "too many requests are waiting: try again later", retry=1)

    async def once(
        self, model: Model, feeds: Mapping[str, np.ndarray], names: list[str], rows: int = 1
    ) -> list[np.ndarray]:
        """A tick whose state the client keeps: one run of its own, in the graph's layout."""
        self._room(None)
        self._queued += 1
        arrived = time.monotonic()
        began = ended = 0.0

        def run() -> list[np.ndarray]:
            nonlocal began, ended
            began = time.monotonic()
            values: list[np.ndarray] = model.agent.session.run(names, dict(feeds))
            ended = time.monotonic()
            return values

        try:
            loop = asyncio.get_running_loop()
            values = await loop.run_in_executor(self._other_thread, run)
        finally:
            self._queued -= 1
        self.metrics.batch(model.counts, rows, ended - began, [began - arrived])
        return values

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
        batch: list[PendingTick] = []
        later: list[PendingTick] = []
        deep = 0
        now = time.monotonic()
        while queue and len(batch) < model.max_batch and len(later) < MAX_BATCH:
            item = queue.popleft()
            if item.session.closed:
                self._leave(item, HTTPError(404, f"session '{item.session.id}' ended"))
            elif item.arrived + item.seconds < now:
                self.metrics.late += 1
                waited = f"no turn within the timeout of {item.seconds:g} s"
                self._leave(item, HTTPError(429, waited, retry=1))
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
        quick = model.batch_seconds < INLINE_SECONDS
        small = len(batch) <= INLINE_ROWS
        if quick or (small and self._small):
            self._finish(model, batch, began, attempt(model.run, len(batch)))
            return
        self._small = small
        loop = asyncio.get_running_loop()

        def run() -> None:
            self._handed.release()
            error = attempt(model.run, len(batch))
            loop.call_soon_threadsafe(self._finish, model, batch, began, error)

        self._handed.acquire()
        self._thread.submit(run)
        # Reading from a socket gives the interpreter's lock away, but for less time than a thread
        # takes to wake up: without this the run would not begin before everything is read.
        with self._handed:
            pass

    def _load(self, model: Model, batch: list[PendingTick]) -> list[PendingTick]:
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
        self, model: Model, batch: list[PendingTick], began: float, error: Exception | None
    ) -> None:
        now = time.monotonic()
        self._running = False
        if error is not None:
            self.metrics.failed_runs += 1
            model.counts.failed += len(batch)
            for item in batch:
                self._leave(item, error)
            self._schedule()
            return
        model.store([item.session.slot for item in batch])
        chosen = model.outputs[model.action]
        actions: list[Action] = (
            chosen[: len(batch)].ravel().tolist()
            if model.one_number
            else [chosen[row : row + 1].copy() for row in range(len(batch))]
        )
        more = [model.decision(row) if item.thoughts else None for row, item in enumerate(batch)]
        waiting = sum(map(len, self._ready.values()))
        if waiting >= MAX_BATCH // 2 and model.batch_seconds >= INLINE_SECONDS:
            self._dispatch()  # the next batch runs while the answers of this one are written
        for item, action, decision in zip(batch, actions, more, strict=True):
            item.session.ticks += 1
            item.done(action, decision)
            if item.key is not None:
                item.session.repeats.ended(item.key, action, decision)
            self._next(item)
        waited = [began - item.arrived for item in batch]
        self.metrics.batch(model.counts, len(batch), now - began, waited)
        if any(self._ready.values()):  # few: with whoever is there by now, but not yet read
            asyncio.get_running_loop().call_soon(self._schedule)

    def _leave(self, item: PendingTick, error: Exception) -> None:
        """A request that will not run; a session whose first request it was never began."""
        self._fail(item, error)
        if not item.session.ticks and not item.session.waiting:
            self.close(item.session, "refused")
        self._next(item)

    def _next(self, item: PendingTick) -> None:
        """Whatever comes after a request: the session's next one, or its end."""
        session = item.session
        self._queued -= 1
        if item.end or (session.leaving and not session.waiting):
            self.close(session, "ended")
        if session.waiting:
            self._ready[session.model.version].append(session.waiting.popleft())
        else:
            session.busy = False
            if session.closed:
                self._free(session)

    def _fail(self, item: PendingTick, error: Exception) -> None:
        item.done(None, error)
        if item.key is not None:
            item.session.repeats.failed(item.key, error)

    async def drain(self) -> None:
        """Wait until nothing is queued or running."""
        while self._queued or self._running:
            await asyncio.sleep(0.01)

    def shutdown(self) -> None:
        self._thread.shutdown()
        self._other_thread.shutdown()


def rng_of(id_: str) -> int:
    """Where a session's random numbers begin: from its name, in [0, 2^31 - 2)."""
    return int.from_bytes(hashlib.blake2b(id_.encode(), digest_size=8).digest()) % RNG_RANGE
