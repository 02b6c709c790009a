"""Work in a process of its own, on another core, while a stage does something else."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from hamlet.artifacts import HamletError
from hamlet.moving import dumped, loaded
from hamlet.params import Params
from stages.common import cores


def meanwhile(work: Callable[[Params, bool], Any], params: Params) -> Callable[[], Any]:
    """Begin `work(params, shown)`; call what is returned for its result, plain data and tensors.

    With one core it is done then, and `shown` is true: it may tell how far it is.
    """
    if cores() < 2:
        return lambda: work(params, True)
    context = multiprocessing.get_context("spawn")
    hear, tell = context.Pipe(duplex=False)
    process = context.Process(target=_do, args=(work, params, tell), daemon=True)
    process.start()
    tell.close()  # so that its end is noticed

    def result() -> Any:
        try:
            return loaded(hear.recv_bytes())
        except EOFError:
            process.join()
            raise HamletError(
                f"a process that worked for this stage ended with exit code {process.exitcode}",
                "see its own message, or is the memory full? run the same command again",
            ) from None

    return result


def _do(work: Callable[[Params, bool], Any], params: Params, tell: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the stage, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    tell.send_bytes(dumped(work(params, False)))
