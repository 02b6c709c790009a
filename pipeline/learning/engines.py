"""Where the members of a population run: processes of this machine, or Ray Tune.

Both run the same function on the same turns and return the same scores: what becomes of them is
decided by `pbt`, between the generations. A member that is killed is started again and goes on from
its checkpoint.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hamlet.artifacts import HamletError
from hamlet.learning.actors import forks
from hamlet.learning.pbt import Engine, Train, Turn

RESTARTS = 3  # per generation


@contextmanager
def processes(workers: int) -> Iterator[Engine]:
    """Members in so many processes of this machine, which stay from generation to generation."""
    context = forks()
    pool: ProcessPoolExecutor | None = None
    others = multiprocessing.active_children()

    def run(train: Train, turns: list[Turn]) -> list[float]:
        nonlocal pool
        scores: dict[int, float] = {}
        for _ in range(RESTARTS + 1):
            pool = pool or ProcessPoolExecutor(workers, context, initializer=_end_with_parent)
            try:
                waiting = {
                    i: pool.submit(train, turn) for i, turn in enumerate(turns) if i not in scores
                }
                for i, future in waiting.items():
                    scores[i] = future.result()
                return [scores[i] for i in range(len(turns))]
            except BrokenProcessPool:  # one was killed, and the pool has ended the others
                pool.shutdown()
                pool = None
        raise _lost()

    try:
        yield run
    except BaseException:
        for child in multiprocessing.active_children():
            if child not in others:
                child.terminate()
        raise
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Leave Ctrl-C to the driver, and end when it has ended, however it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def ray_tune(workers: int, folder: Path) -> Iterator[Engine]:
    """Members as trials of Ray Tune, on the cluster that RAY_ADDRESS names, else on this machine.

    Every generation is one Tune experiment without a scheduler: Tune places the members and starts
    a lost one again. All machines must share the repository's folder.

    Args:
        workers: members side by side, where Ray is started on this machine.
        folder: for what Tune itself writes.
    """
    try:
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AIR_NEW_OUTPUT": "0"}
        import ray
        from ray import tune
    except ImportError:
        raise HamletError(
            "`--engine ray` needs Ray", 'run `pip install -c constraints.txt -e ".[ray]"`'
        ) from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if "RAY_ADDRESS" in os.environ:
        ray.init(**quiet)
    else:
        ray.init("local", num_cpus=workers, include_dashboard=False, **quiet)

    def run(train: Train, turns: list[Turn]) -> list[float]:
        repository = Path.cwd()

        def member(config: dict[str, int]) -> None:
            os.chdir(repository)  # Tune moves to a folder of its own
            tune.report({"score": train(turns[config["turn"]])})

        results = tune.Tuner(
            tune.with_resources(member, {"cpu": 1}),
            param_space={"turn": tune.grid_search(list(range(len(turns))))},
            tune_config=tune.TuneConfig(reuse_actors=True),  # to import PyTorch takes seconds
            run_config=tune.RunConfig(
                name=f"generation-{turns[0].generation}",
                storage_path=str(folder.absolute()),
                failure_config=tune.FailureConfig(max_failures=RESTARTS),
                verbose=0,
            ),
        ).fit()
        if results.errors:
            raise results.errors[0]
        told = (results[i] for i in range(len(results)))
        scores = {r.config["turn"]: r.metrics["score"] for r in told if r.config and r.metrics}
        return [scores[i] for i in range(len(turns))]

    try:
        yield run
    finally:
        ray.shutdown()


def _lost() -> HamletError:
    return HamletError(
        f"a member was killed more than {RESTARTS} times in one generation",
        "is the memory full? run the same command again: it goes on from the checkpoints",
    )
