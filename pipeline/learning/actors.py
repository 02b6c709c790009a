"""Processes that act while another one learns; they end when it does, however it ends.

Each plays its part of the worlds: it is sent weights, plays one rollout with them, sends it back
with the worlds as they stand then, and takes the next weights. The learner never waits for a free
pipe: a thread of the actor takes in what is sent. They act on the CPU, wherever the learner is.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tensordict import TensorDict
from torch import Tensor

from hamlet.artifacts import HamletError
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.distributed import joined, shard
from hamlet.learning.learner import Learner, packed, thinking_in, unpacked
from hamlet.learning.precision import Precision
from hamlet.learning.rollout import collect, fused_step
from hamlet.moving import dumped, loaded
from hamlet.params import PolicyParams

GRACE = 10.0  # seconds


def forks() -> Any:
    """How a process is started: as a fork of one that has PyTorch imported, which takes seconds and
    is done once; where the system cannot, each imports it."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hamlet.learning.preloaded"])
    return context


class Cast(NamedTuple):
    """Who acts in other processes.

    Attributes:
        size: how many processes.
        make: called in each, and sent there: pickled.
    """

    size: int
    make: Callable[[], Learner]


class Job(NamedTuple):
    """What an actor is sent when it starts: its worlds in `rows` stand before `iteration`."""

    make: Callable[[], Learner]
    params: PolicyParams
    compile: bool
    precision: Precision
    iteration: int
    rows: bytes


class Actors:
    """Started processes, each with its part of the worlds.

    Args:
        iteration: of the first rollout.
        rows: the worlds and memories before it, of `packed`.
    """

    def __init__(
        self,
        cast: Cast,
        params: PolicyParams,
        compile: bool,
        precision: Precision,
        iteration: int,
        rows: dict[str, Any],
    ) -> None:
        context = forks()
        self.processes, self.told, self.heard = [], [], []
        for index in range(cast.size):
            weights, tell = context.Pipe(duplex=False)
            hear, rollouts = context.Pipe(duplex=False)
            own = dumped(shard(rows, index, cast.size))
            job = Job(cast.make, params, compile, precision, iteration, own)
            name = f"actor {index}"
            process = context.Process(
                target=_act, args=(job, weights, rollouts), name=name, daemon=True
            )
            process.start()
            weights.close()  # the actor's ends: so that one that has ended is noticed
            rollouts.close()
            self.processes.append(process)
            self.told.append(tell)
            self.heard.append(hear)

    def send(self, weights: Mapping[str, Tensor]) -> None:
        """The weights of the rollout after those that were sent before.

        Raises:
            HamletError: an actor has ended.
        """
        content = dumped(dict(weights))
        for index, pipe in enumerate(self.told):
            try:
                pipe.send_bytes(content)
            except OSError:
                raise self._lost(index) from None

    def receive(self) -> tuple[TensorDict, dict[str, Any]]:
        """The next rollout [T, S] of all worlds, and the rows of `packed` that follow it.

        Raises:
            HamletError: an actor has ended.
        """
        parts, rows = [], []
        for index, pipe in enumerate(self.heard):
            try:
                data, after = loaded(pipe.recv_bytes())
            except (EOFError, OSError):
                raise self._lost(index) from None
            parts.append(data)
            rows.append(after)
        data = joined(parts, 1)
        size = next(iter(data.values())).shape[:2]
        return TensorDict(data, batch_size=size), joined(rows)

    def _lost(self, index: int) -> HamletError:
        process = self.processes[index]
        process.join(GRACE)
        code = process.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return HamletError(
            f"{process.name} of {len(self.processes)} ended {how}",
            "see its own message, or is the memory full? run the same command again: it goes on "
            "from the checkpoint",
        )

    def close(self) -> None:
        """End them and wait for it."""
        for pipe in (*self.told, *self.heard):
            pipe.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()


# ------------------------------------------------------------------------------------------------
# In the actor


def _act(job: Job, weights: Connection, rollouts: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the learner, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_take_in, args=(weights, inbox), daemon=True).start()
    try:
        _play(job, inbox, rollouts)
    except BrokenPipeError:  # the learner has ended
        return
    except HamletError as error:
        print(f"{multiprocessing.current_process().name}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


def _take_in(weights: Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    """Keep what is sent until it is wanted; end the process when nobody is left to send."""
    try:
        while True:
            inbox.put(weights.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _play(job: Job, inbox: queue.SimpleQueue[bytes], rollouts: Connection) -> None:
    learner = job.make()
    policy: Any = learner.mind.policy
    step = fused_step(learner.town, learner, job.compile, job.precision)
    world, carry = unpacked(loaded(job.rows))
    buffer, iteration = RolloutBuffer(job.params.rollout), job.iteration
    while True:
        policy.load_state_dict(loaded(inbox.get()))
        thinking = thinking_in(iteration, len(world), job.params)
        world, carry = collect(step, world, carry, buffer, [(now, None) for now in thinking])
        assert buffer.data is not None
        rollouts.send_bytes(dumped((dict(buffer.data.items()), packed(world, carry))))
        iteration += 1
