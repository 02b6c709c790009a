"""What every stage does around its own work: params, seeds, tracking, progress, clear endings.

    def main() -> None:
        with stage("perception") as s:
            folder = s.checkpoint_dir("artifacts/dataset")
            for step in progress(s.params.perception.steps, "perception"):
                ...
                s.run.metrics({"loss": loss}, step)

A user's error is one red line and exit code 1; Ctrl-C and SIGTERM end with 130 and 143 and a line
saying what is kept; any other exception is a bug and keeps its traceback.

Under `torchrun` the training stages run on every rank; the first one alone tracks and writes.
"""

import ctypes
import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import psutil
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hamlet.artifacts import HamletError, how_to_make, sha256_json, sha256_path
from hamlet.params import Params, load_params
from hamlet.tracking import StageRun, is_dead, is_dvc, repo_root, stage_run
from hamlet.tracking.processes import (
    GRACE_SECONDS,
    dvc_identity,
    end_with_parents,
    is_interrupted,
)
from stages.overall import timed

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
PLAIN_SECONDS = 10.0
TRAINED = ("perception", "world_model", "social", "policy", "prove")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
PROFILE = "HAMLET_PROFILE"  # SKIP:STEPS:FOLDER while `hamlet profile` runs a stage
_console = Console(stderr=True)


class Stage:
    """A running stage.

    Attributes:
        name: as in dvc.yaml.
        params: all of params.yaml.
        device: where it computes: of `hamlet.device`, or the CPU where that makes no difference.
        first: True but in the second and further processes of `torchrun`, which only train.
    """

    def __init__(
        self,
        name: str,
        params: Params,
        device: "torch.device",
        run: StageRun | None,
        stack: ExitStack,
    ) -> None:
        self.name, self.params, self.device = name, params, device
        self.first = run is not None
        self._run, self._stack = run, stack
        self.folder: Path | None = None

    def made_on(self, precision: str = "fp32") -> dict[str, str]:
        """Facts for the card of what is written: the device, its name, the precision of forward
        passes. None of the CPU, on which a card says what it always did. The run is told all."""
        from hamlet.device import facts

        told = facts(self.device)
        self.run.tag("precision", precision)
        return told | {"precision": precision} if told else {}

    @property
    def run(self) -> StageRun:
        """The MLflow run of the first rank; see `hamlet.tracking.StageRun`."""
        assert self._run is not None, "only the first rank tracks"
        return self._run

    def checkpoint_dir(self, *inputs: str | Path, extra: Any = None) -> Path:
        """The folder for this stage's checkpoints; what is in it is from the same work, stopped.

        It lives in the (real) repository's `checkpoints/`, outside DVC's outputs, and its name
        holds a hash of the stage's params, the contents of `inputs` (files or folders, code too)
        and `extra`: other work never resumes from it. Removed when the stage succeeds. If another
        process is doing the very same work, this one gets a folder of its own; if that process is
        what a killed `dvc` left, this one waits for its end and goes on from where it was.
        """
        from hamlet.learning.distributed import from_first

        if PROFILE in os.environ:
            return Path(self._stack.enter_context(TemporaryDirectory()))
        dumped = self.params.model_dump(mode="json")
        sections = {k: dumped.get(k) for k in ("seed", "town", "compile", self.name)}
        hashes = [sha256_path(path) for path in inputs]
        key = sha256_json([sections, hashes, extra])[:16]
        folder = repo_root() / "checkpoints" / f"{self.name}-{key}"
        folder.parent.mkdir(exist_ok=True)
        other = 0
        if self.first:
            self.run.work(folder.name)
            if not self._take(folder):
                other = os.getpid()
        other = from_first(other)
        if other:
            folder = folder.with_name(f"{folder.name}-{other}")
        folder.mkdir(exist_ok=True)
        self.folder = folder
        return folder

    def _take(self, folder: Path) -> bool:
        """Take the lock of a checkpoint folder; False if another living execution has it."""
        lock = FileLock(folder.with_name(folder.name + ".lock"), timeout=0)
        owner = folder.with_name(folder.name + ".owner")
        try:
            self._stack.enter_context(lock)
        except Timeout:
            started_by = owner.read_text() if owner.exists() else ""
            if not is_dead(started_by):
                return False
            _say(f"{self.name}: waiting for what a killed dvc left running to end", "yellow")
            try:
                self._stack.enter_context(lock.acquire(timeout=2 * GRACE_SECONDS))
            except Timeout:
                return False
        owner.write_text(dvc_identity() or "")
        self._stack.callback(owner.unlink, missing_ok=True)
        return True


@contextmanager
def stage(name: str) -> Iterator[Stage]:
    """Run the body as the stage `name`: typed params, seeds, threads, one MLflow run.

    Raises:
        SystemExit: after a user's error (1), Ctrl-C (130) or SIGTERM (143), told in one line.
    """
    kept: list[Path] = []
    with one_line_errors(name, kept):
        if ranks() > 1 and name not in TRAINED:
            command = f"python -m stages.{name}"
            raise HamletError(f"{name} trains nothing on {ranks()} ranks", f"run `{command}`")
        end_with_parents()
        if is_interrupted(repo_root() / "checkpoints"):
            raise KeyboardInterrupt
        params = load_params()
        facts = prepare_torch(params.seed) | ({"ranks": str(ranks())} if ranks() > 1 else {})
        device = _device(name)
        from hamlet.device import facts as told
        from hamlet.device import memory_errors
        from hamlet.learning.distributed import process_group

        facts |= {"device": "cpu"} | told(device)
        with ExitStack() as stack:
            if not rank() and PROFILE not in os.environ:
                stack.enter_context(timed(name))
            run = None if rank() else stack.enter_context(stage_run(name, params))
            current = Stage(name, params, device, run, stack)
            for key, value in facts.items() if run else ():
                current.run.tag(key, value)
            stack.enter_context(process_group(device))
            stack.enter_context(memory_errors(name))
            try:
                yield current
            except BaseException:
                if current.folder and any(current.folder.iterdir()):
                    kept.append(current.folder)
                raise
            if current.first and current.folder:
                shutil.rmtree(current.folder, ignore_errors=True)


def _device(name: str) -> "torch.device":
    """Where a stage computes, told in one line by the first rank unless it was asked for."""
    import torch

    from hamlet.device import LARGE, chosen, facts, take

    if name not in LARGE:
        return torch.device("cpu")
    device, why = chosen()
    take(device)
    if not rank() and os.environ.get("HAMLET_DEVICE", "auto") == "auto":
        where = f"{device} ({facts(device)['device_name']})" if facts(device) else "the CPU"
        print(f"{name}: on {where}: {why}", file=sys.stderr, flush=True)
    return device


# ------------------------------------------------------------------------------------------------
# Endings


@contextmanager
def one_line_errors(
    name: str, kept: list[Path] | None = None, command: str | None = None
) -> Iterator[None]:
    """Turn a user's error or an interrupt in the body into one line on stderr and an exit code.

    `kept` lists the checkpoint folders that an interrupted run can resume from, by `command`; by
    default `dvc repro`.
    """
    if not gc.isenabled():  # since `stages` began to be imported
        gc.freeze()
        gc.set_threshold(20_000)  # objects; by 700 a compilation looks for garbage a tenth of it
        gc.enable()
    with _signals_interrupt():
        try:
            yield
        except HamletError as error:
            _fail(name, str(error))
        except KeyboardInterrupt as interrupt:
            _close_bars()
            code = 143 if interrupt.args == (signal.SIGTERM,) else 130
            again = f"`{command or f'dvc repro {name}'}`" if ranks() == 1 else "the same command"
            rest = f"run {again} to start it again"
            if kept:
                where = _short(kept[0])
                rest = f"the checkpoint in {where} is kept, {again} resumes from it"
            if not rank():
                _say(f"{name} was interrupted: {rest}", "yellow")
            raise SystemExit(code) from None
        except FileNotFoundError as error:
            if error.filename is None:
                raise
            path = os.fsdecode(error.filename)
            _fail(name, f"{_short(Path(path))} is missing: {how_to_make(path)}")
        except MemoryError:
            _fail(name, "the memory is full: make worlds or batch smaller in params.yaml")
        except PermissionError as error:
            _fail(name, f"{error.filename}: permission denied: check its owner and rights")
        finally:
            _close_bars()


def _fail(name: str, message: str) -> None:
    _close_bars()
    _say(f"{name}{f' (rank {rank()})' if ranks() > 1 else ''}: {message}", "red")
    raise SystemExit(1)


def _say(text: str, style: str) -> None:
    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _short(path: Path) -> str:
    with suppress(ValueError):
        return str(path.absolute().relative_to(Path.cwd()))
    return str(path)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and a closed terminal end the work as Ctrl-C does, so that nothing is lost."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in numbers:  # once: who ends a stage may well say so twice
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------
# Seeds and threads


def prepare_torch(seed: int) -> dict[str, str]:
    """Seed PyTorch, set its threads, allow only deterministic algorithms.

    Returns the precision of matrix products that was set.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic so only
    import torch

    from hamlet.learning.precision import set_precision

    keep_memory()
    torch.manual_seed(seed)
    torch.set_num_threads(threads())
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory is dear, and nothing here reads it unwritten.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    return set_precision()


def threads() -> int:
    """Threads of PyTorch: OMP_NUM_THREADS if set, else one.

    The tensors are too small to share out: no stage was faster with two, some took twice as long
    (`python -m benchmarks.scaling`). What a second core is good for is a second rank. And equal
    bits need equal thread counts: so they do not depend on the machine's cores.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else 1


def keep_memory() -> None:
    """Let freed memory stay with the process, where the C library is glibc.

    It gives the memory of every larger tensor back to the system, tick after tick, which then
    clears it again page by page: that was a tenth of a rollout's time, a sixth of module C's.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((M_MMAP_THRESHOLD, 1 << 25), (M_TRIM_THRESHOLD, 1 << 30)):
            mallopt(option, size)


def cores() -> int:
    """The cores that this process may use; the workers of a `dvc queue` share them."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with suppress(OSError, ValueError):  # a container's share
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        found = min(found or 1, -(-int(quota) // int(period)))
    return max(1, (found or 1) // _queue_workers())


def rank() -> int:
    """This process among those that `torchrun` started; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """How many processes `torchrun` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _queue_workers() -> int:
    """How many workers run queued experiments now; 1 outside such an experiment."""
    if ".dvc/tmp/exps" not in Path.cwd().as_posix():
        return 1
    workers = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = process.cmdline()
            workers += "queue-worker" in command and is_dvc(command)
    return max(1, workers)


# ------------------------------------------------------------------------------------------------
# Progress

_open_bars: list[Progress] = []


def _close_bars() -> None:
    while _open_bars:
        _open_bars.pop().stop()


class progress(Generic[T]):
    """Iterate and show it: a bar on a terminal, else a plain line every 10 seconds.

    Args:
        work: what to iterate over, or a number of steps.
        description: shown in front.
        start: first step, when `work` is a number and the stage resumes.
        total: number of items, where `work` does not know its length.
    """

    def __init__(
        self, work: Iterable[T] | int, description: str, start: int = 0, total: int | None = None
    ) -> None:
        if isinstance(work, int):
            self._items: Iterable[Any] = range(start, work)
            self._total: int | None = work
        else:
            self._items = work
            self._total = total if total is not None else getattr(work, "__len__", lambda: None)()
        self._start = start
        self._description = description
        self._note = ""

    def note(self, **values: Any) -> None:
        """Show the latest numbers beside the bar, for example `note(loss=0.3)`."""
        self._note = _format(values)

    def __iter__(self) -> Iterator[T]:
        return self._bar() if _console.is_terminal else self._lines()

    def _bar(self) -> Iterator[T]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[note]}"),
        )
        bar = Progress(*columns, console=_console)
        task = bar.add_task(
            self._description, total=self._total, completed=self._start, note=self._note
        )
        bar.start()
        _open_bars.append(bar)
        try:
            for item in self._items:
                yield item
                bar.update(task, advance=1, note=self._note)
        finally:
            if bar in _open_bars:
                _open_bars.remove(bar)
                bar.stop()

    def _lines(self) -> Iterator[T]:
        began = last = time.monotonic()
        done = self._start
        self._line(done, 0.0)
        for item in self._items:
            yield item
            done += 1
            now = time.monotonic()
            if now - last >= PLAIN_SECONDS:
                last = now
                self._line(done, now - began)
        self._line(done, time.monotonic() - began)

    def _line(self, done: int, seconds: float) -> None:
        parts = [f"{self._description}: {done}"]
        if self._total:
            parts[0] += f"/{self._total} ({100 * done // self._total} %)"
        fresh = done - self._start
        if seconds and fresh:
            parts.append(f"{seconds:.0f} s")
            if self._total and done < self._total:
                parts.append(f"{(self._total - done) * seconds / fresh:.0f} s left")
        if self._note:
            parts.append(self._note)
        print(", ".join(parts), file=sys.stderr, flush=True)


def _format(values: Mapping[str, Any]) -> str:
    shown = []
    for key, value in values.items():
        try:
            shown.append(f"{key} {float(value):.4g}")
        except (TypeError, ValueError):
            shown.append(f"{key} {value}")
    return "  ".join(shown)
