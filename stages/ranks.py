"""Run a training stage in several processes of this machine, one thread each.

    python -m stages.ranks 2 social
    python -m stages.ranks auto social

The first is what `torchrun --standalone --nproc-per-node 2 -m stages.social` does, but it begins
sooner, and what goes wrong stays one line: torchrun follows the stage's own with a page. `auto`
takes as many ranks as help: on GPUs one for each; on the CPU one for each core that this process
may use (affinity and a container's share count), while no rank gets less than a batch's smallest
useful part. On either the batch divides evenly.
"""

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from hamlet.driver import has_gpu
from hamlet.params import Params, load_params
from hamlet.tracking.processes import (
    GRACE_SECONDS,
    LAUNCHER,
    WATCH_SECONDS,
    end_with_parents,
    identity,
)
from stages.common import TRAINED, cores, one_line_errors

AUTO = "auto"


class Batch(NamedTuple):
    """What the ranks of a stage share.

    Attributes:
        field: of the stage's section, the number of rows of a batch.
        least: rows of a rank below which another rank does not help.
        unit: a field that must divide the rows of a rank, or None.
        beside: cores that another stage has meanwhile (see `stages.beside`).
    """

    field: str
    least: int
    unit: str | None = None
    beside: int = 0


# Stages that gain from ranks; world_model and prove lose by a second one (`benchmarks.scaling`).
SHARED = {
    "perception": Batch("sequences", 4),
    "social": Batch("sequences", 4, beside=1),
    "policy": Batch("worlds", 16, "meta_period"),
}


def helpful(stage: str, params: Params, cores: int, gpus: int = 0) -> int:
    """The number of ranks that `auto` takes for a stage on so many cores, or GPUs if there are any.

    A world model whose weights are shared has them for room, so on GPUs it takes ranks too.
    """
    shared = SHARED
    if gpus and params.world_model.shard:
        shared = SHARED | {"world_model": Batch("batch", 1)}
    if stage not in shared:
        return 1
    batch, section = shared[stage], getattr(params, stage)
    rows = getattr(section, batch.field)
    unit = getattr(section, batch.unit) if batch.unit else 1
    free, least = (gpus, 1) if gpus else (cores - batch.beside, batch.least)
    for count in range(min(free, rows // least), 1, -1):
        if rows % count == 0 and (rows // count) % unit == 0:
            return count
    return 1


def shared_gpus() -> int:
    """The GPUs that ranks may take; 0 where the stage would run on the CPU."""
    asked = os.environ.get("HAMLET_DEVICE", "auto")
    if asked == "cpu" or (asked == "auto" and not has_gpu()):  # PyTorch takes long to import
        return 0
    from hamlet.device import chosen, found

    return found().number if chosen().device.type == "cuda" else 0


def _count(text: str) -> int | None:
    if text == AUTO:
        return None
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: ask for one process or more, or {AUTO}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m stages.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("count", type=_count, help=f"processes, or {AUTO}")
    parser.add_argument("stage", choices=TRAINED)
    asked = parser.parse_args(arguments)
    with one_line_errors(asked.stage):
        params = load_params()  # what is wrong in params.yaml is told once, not by every rank
        gpus = shared_gpus()  # and what is wrong with the device
        count = asked.count or helpful(asked.stage, params, cores(), gpus)
        if gpus and count > 1:
            from hamlet.device import check_ranks

            check_ranks(count, gpus)
    if count == 1:
        command = [sys.executable, "-m", f"stages.{asked.stage}"]
        sys.stdout.flush()
        os.execv(sys.executable, command)
    print(f"{asked.stage}: {count} ranks", file=sys.stderr, flush=True)
    _launch(asked.stage, count)


def _launch(stage: str, count: int) -> NoReturn:
    """Start the ranks and wait for them. Who fails ends the others, and so does who ends this.

    What torchrun does, which takes three seconds to import and to begin.
    """
    end_with_parents()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count, LAUNCHER: identity(),
    }  # fmt: skip
    environment = {"OMP_NUM_THREADS": "1", **os.environ} | {k: str(v) for k, v in told.items()}
    asked: list[int] = []
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: asked.append(number))
    command = [sys.executable, "-u", "-m", f"stages.{stage}"]
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(count)
    ]
    code, until = 0, math.inf
    while any(rank.poll() is None for rank in ranks):
        failed = [rank.returncode for rank in ranks if rank.poll()]
        if until == math.inf and (asked or failed):
            code = 128 + asked[0] if asked else failed[0]
            until = time.monotonic() + GRACE_SECONDS
            for rank in ranks:
                rank.terminate()
        if time.monotonic() > until:
            for rank in ranks:
                rank.kill()
        time.sleep(WATCH_SECONDS / 5)
    code = code or next((rank.returncode for rank in ranks if rank.returncode), 0)
    raise SystemExit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
