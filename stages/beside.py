"""Run a stage, and meanwhile, on another core, stages that do not wait for it.

    python -m stages.beside social -- python -m stages.world_model

While the command after `--` runs, so does `python -m stages.beside social`, which reproduces
`social` alone, as another DVC in the same checkout, and keeps what it made in DVC's run cache:
there the first `dvc repro` finds it when it comes to `social`. This is done only where a whole
`dvc repro` asked (no target, no option that changes what it does), there is a core to spare and no
GPU is to be shared; else the command runs by itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import psutil

from hamlet.artifacts import in_one_line
from hamlet.tracking import repo_root
from hamlet.tracking.processes import (
    BESIDE,
    GRACE_SECONDS,
    dvc_identity,
    end_with_parents,
    identity,
    interrupt_execution,
    is_dvc,
)
from stages.common import PROFILE, cores
from stages.ranks import shared_gpus

QUIET = {"-q", "--quiet", "-v", "--verbose"}


def whole_run(command: Sequence[str]) -> bool:
    """Whether a command line of DVC's reproduces all that is stale, and does nothing else."""
    if not is_dvc(list(command)) or "repro" not in command:
        return False
    return set(command[list(command).index("repro") + 1 :]) <= QUIET


def wanted() -> bool:
    """Whether other stages are to run beside this one."""
    above = dvc_identity()
    if above is None or PROFILE in os.environ or cores() < 2 or shared_gpus():
        return False
    if find_spec("dvc") is None:  # it has an environment of its own
        return False
    with suppress(psutil.Error):
        return whole_run(psutil.Process(int(above.split(" ")[1])).cmdline())
    return False


class Others:
    """A process that reproduces some stages; what it says goes to a file."""

    def __init__(self, stages: Sequence[str], beside: str) -> None:
        self.stages, self.beside = ", ".join(stages), beside
        self.log = repo_root() / "checkpoints" / f"beside-{beside}.log"
        self.log.parent.mkdir(exist_ok=True)
        env = os.environ | {BESIDE: identity()}
        command = [sys.executable, "-m", "stages.beside", *stages]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self._say(f"beside it run: {self.stages}; they write to {os.path.relpath(self.log)}")

    def wait(self) -> None:
        """Until they have ended; what failed will run again, by itself.

        Who interrupts this, when the stage itself is done, means what DVC would do next. DVC may
        not learn that it is done: a shell such as dash, which starts it, ends when interrupted.
        """
        began = time.monotonic()
        if self.process.poll() is None:
            signal.signal(signal.SIGINT, lambda *_: interrupt_execution(self.log.parent))
            try:
                keep_what_was_made(os.environ["DVC_STAGE"])
                self._say(f"done and kept; waiting for {self.stages}")
            except Exception as error:  # whatever it is, it is no reason to lose the stage
                why = in_one_line(error)
                self._say(f"done, but not kept yet: {why}; waiting for {self.stages}")
        if self.process.wait():
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            self._say(f"beside it not all of {self.stages} ended well, they run again: {last}")
        elif time.monotonic() - began > 1:
            self._say(f"waited {time.monotonic() - began:.0f} s")

    def end(self) -> None:
        """Interrupt the stage that runs: it keeps its checkpoint, and who started it ends."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2 * GRACE_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _say(self, text: str) -> None:
        print(f"{self.beside}: {text}", file=sys.stderr, flush=True)


def run(command: Sequence[str]) -> int:
    """The exit code of a command, to which what ends this process is passed on."""
    own = subprocess.Popen(command)

    def pass_on(number: int, _: object) -> None:
        own.send_signal(number)

    # Ctrl-C reaches the command by itself.
    for number, handler in ((signal.SIGINT, lambda *_: None), (signal.SIGTERM, pass_on)):
        signal.signal(number, handler)
    code = own.wait()
    return code if code >= 0 else 128 - code


def awaited(stage: Any) -> bool:
    """Whether DVC, when it comes to this stage, looks for the very files that its lock names.

    So it does where the lock has all of them and nothing that they are made of has changed. The
    link to a run is another one each time, so what is made anew would not be found.
    """
    locked = all(bool(out.hash_info) for out in stage.outs)
    return locked and not stage.changed_stage() and bool(stage.deps_cached())


def keep_what_was_made(name: str) -> None:
    """Tell `dvc.lock` and DVC's cache what a stage made whose command has ended, as DVC does when
    the whole command line of the stage has: whatever befalls this run, the next one has it."""
    from dvc.repo import Repo

    repo = Repo()
    with repo.lock:
        stage = repo.stage.load_one(name=name)
        stage.save()
        for out in stage.outs:  # `stage.commit` would wait for the DVC that runs this stage
            out.commit()
        stage.dump(update_pipeline=False)


def reproduce(stages: Sequence[str]) -> None:
    """What `dvc repro --single-item` does, and keep it in the run cache: DVC itself leaves out what
    has files that it does not cache, as our metrics are, which Git keeps.

    It ends when the stage does that runs, which watches who started all this.

    Raises:
        SystemExit: a stage failed, and said why.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    repo = Repo()
    try:
        for name in stages:
            if awaited(repo.stage.load_one(name=name)):
                print(f"{name}: dvc.lock names what it must make, links to runs too: it runs alone")
                return  # and what follows needs it
            for stage in repo.reproduce(name, single_item=True):
                with repo.lock:
                    repo.stage_cache.save(stage)
    except DvcException as error:
        raise SystemExit(in_one_line(error)) from None


def main(arguments: Sequence[str] | None = None) -> None:
    stages = list(sys.argv[1:] if arguments is None else arguments)
    if not stages or "--" in (stages[0], stages[-1]):
        raise SystemExit("usage: python -m stages.beside STAGE ... [-- COMMAND ...]")
    if "--" not in stages:
        return reproduce(stages)
    end_with_parents()
    middle = stages.index("--")
    stages, command = stages[:middle], stages[middle + 1 :]
    others = Others(stages, command[-1].removeprefix("stages.")) if wanted() else None
    code = run(command)
    if others and code:
        others.end()
    elif others:
        others.wait()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
