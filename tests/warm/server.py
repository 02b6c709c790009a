"""Runs commands in forks of one process that has the large libraries imported already.

    python tests/warm/server.py SOCKET PID

Half of what the slow tests took was the same imports: some 250 processes, four seconds each. What
`bin/python` and `bin/dvc` are asked for runs here instead, in a process of its own with the
directory, environment and streams of whoever asked; a stage that dvc starts is a fork of that dvc.
The project's own code is never imported before the fork: every command has that of its repository.
Ends with the process PID, and takes the folder of its socket along.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import runpy
import selectors
import shlex
import shutil
import signal
import site
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

LIBRARIES = (
    "torch", "torch._dynamo", "torch.export._trace", "torch._export.serde.serialize",
    "torch.export.pt2_archive._package", "torch.onnx._internal.exporter._core",
    "torch.onnx._internal.exporter._torchlib.ops", "torch.onnx._internal.exporter._compat",
    "torch._inductor.ir", "torch.fx.experimental.validator", "sympy.tensor.tensor",
    "torch.distributed.elastic.multiprocessing.api", "torch.distributed.run", "tensordict",
    "onnx", "onnxruntime", "onnxscript", "onnxscript.optimizer", "onnxscript.rewriter",
    "onnxscript.version_converter", "onnxscript.function_libs.torch_lib.ops",
    "onnxscript._framework_apis.torch_2_9", "mlflow.tracking", "mlflow.pyfunc", "alembic.command",
    "mlflow.store.tracking.sqlalchemy_workspace_store", "sqlalchemy.dialects.sqlite",
    "mlflow.store.model_registry.sqlalchemy_store", "pydantic", "rich.progress", "psutil", "typer",
    "dvc.cli", "dvc.cli.parser", "dvc.repo", "dvc.repo.reproduce", "dvc.stage.run",
    "dvc.dependency", "dvc.output", "dvc_data.hashfile.build", "tabulate", "PIL.Image",
)  # fmt: skip
STAGE = re.compile(r"(python -m|hamlet) [\w.]+( [\w./=-]+)*")
HAMLET = "from hamlet.cli import app; app(prog_name='hamlet')"
LENGTH = 8
PYTHON = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "python")


def serve(path: str, ending: int) -> None:
    """Fork a process for every request, answer with its exit code when it has ended.

    Args:
        ending: the pidfd of the process with which this one ends.
    """
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ, None)
    waiting.register(ending, selectors.EVENT_READ, None)
    while True:
        for key, _ in waiting.select():
            if key.fd == ending:
                return
            if key.fileobj is listening:
                asking, _ = listening.accept()
                asked, streams = receive(asking)
                pid = fork(lambda: command(asked, streams, [listening, asking]))  # noqa: B023
                for stream in streams:
                    os.close(stream)
                done = os.pidfd_open(pid)
                waiting.register(done, selectors.EVENT_READ, (pid, asking, done))
                waiting.register(asking, selectors.EVENT_READ, (pid, asking, done))
                continue
            pid, asking, done = key.data
            if key.fd != done:  # a signal to pass on; or whoever asked is gone
                numbers = asking.recv(16)
                with suppress(ProcessLookupError):
                    for number in numbers:
                        os.kill(pid, number)
                    if not numbers:
                        os.killpg(pid, signal.SIGKILL)
                if not numbers:
                    waiting.unregister(asking)
                continue
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(OSError):
                asking.sendall(str(code).encode())
            with suppress(KeyError):
                waiting.unregister(asking)
            waiting.unregister(done)
            os.close(done)
            asking.close()


def receive(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What is asked for, and the caller's standard streams."""
    size, streams, _, _ = socket.recv_fds(asking, LENGTH, 3)
    left, parts = int(size), []
    while left:
        parts.append(asking.recv(left))
        left -= len(parts[-1])
    return json.loads(b"".join(parts)), streams


def fork(work: Callable[[], Any]) -> int:
    """A process that does `work` and ends as a Python process does."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        work()
        code = 0
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code or 0)


def command(asked: Mapping[str, Any], streams: Sequence[int], close: Sequence[Any]) -> None:
    """In the fork: the command that was asked for."""
    os.setsid()
    for one in close:
        one.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.umask(asked["umask"])
    enter(asked["cwd"], asked["env"])
    words = asked["words"]
    if words[0] == "python":
        python(words[1:])
    from dvc.stage import run

    run.subprocess = Stages()  # type: ignore[attr-defined]
    sys.argv = sys.orig_argv = words
    from dvc.cli import main

    raise SystemExit(main(words[1:]))


def enter(folder: str, environment: Mapping[str, str]) -> None:
    """The directory, environment and import path of a process that begins there."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "HAMLET_EXECUTION" not in environment:  # else what is above it would be asked
        with open("/proc/self/stat") as stat:
            started = stat.read().rpartition(")")[2].split()[19]
        os.environ["HAMLET_EXECUTION"] = f"{socket.gethostname()} {os.getpid()} {started}"
    sys.executable = PYTHON  # what this process starts is asked for too
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*given, *INSTALLED]
    sys.path_importer_cache.clear()


def python(words: Sequence[str]) -> NoReturn:
    """As the interpreter would: -m MODULE, -c CODE or a file, with arguments."""
    sys.orig_argv = [sys.executable, *words]
    if "sitecustomize" not in sys.modules:  # else this process has been another command
        site.execsitecustomize()
    kind, *rest = words[1:] if words[0] == "-u" else words
    if kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = ModuleType("__main__")  # not this file's names
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
        sys.argv = list(words)
        runpy.run_path(kind, run_name="__main__")
    raise SystemExit(0)


class Stages:
    """Stands for `subprocess` in dvc: a stage in Python is a fork of dvc, all else a process."""

    def __getattr__(self, name: str) -> Any:
        import subprocess

        return getattr(subprocess, name)

    def Popen(self, words: Sequence[str], **options: Any) -> Any:
        import subprocess

        if not STAGE.fullmatch(words[-1]):
            return subprocess.Popen(words, **options)
        name, *rest = shlex.split(words[-1])
        rest = rest if name == "python" else ["-c", HAMLET, *rest]
        return Forked(rest, options["cwd"], options["env"])


class Forked:
    """What dvc asks of a process."""

    returncode = None

    def __init__(self, words: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        def work() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            enter(folder, environment)
            os.execv = execv  # type: ignore[assignment]
            python(words)

        self.pid = fork(work)

    def communicate(self) -> tuple[None, None]:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return None, None


def execv(path: str, words: Sequence[str]) -> None:
    """Python instead of this Python: this one goes on."""
    assert path == words[0] == sys.executable
    python(words[1:])


if __name__ == "__main__":
    ADDED = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    INSTALLED = [path for path in sys.path[1:] if path not in ADDED]
    RUN = os.pidfd_open(int(sys.argv[2]))
    if server := os.fork():  # nobody's child: what others ask for is no child of who asked first
        print(server)
        raise SystemExit
    gc.disable()
    for library in LIBRARIES:
        with suppress(ImportError):
            __import__(library)
    sys.modules.pop("sitecustomize", None)
    assert not {"hamlet", "stages"} & set(sys.modules)
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()
    for end in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        end.atexit = False  # a fork that ends need not take PyTorch's operators apart
    gc.set_threshold(20_000)  # as in a stage
    gc.enable()
    serve(sys.argv[1], RUN)
    shutil.rmtree(os.path.dirname(sys.argv[1]))
