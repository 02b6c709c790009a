"""Loaded by each Python process of a traced `dvc repro`: writes down what a stage opens.

Lines of TRACED/STAGE are `r PATH` or `w PATH`, relative to the folder in which the stage runs.
"""

import os
import sys


def _trace(folder: str, stage: str) -> None:
    root, seen = os.getcwd() + os.sep, set()
    log = os.open(os.path.join(folder, stage), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def hook(event: str, arguments: tuple) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path, mode, flags = arguments
        path = os.path.abspath(os.fsdecode(path))
        if not path.startswith(root):
            return
        writes = set("wax+") & set(mode or "") or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
        line = f"{'w' if writes else 'r'} {path.removeprefix(root)}\n"
        if line not in seen:
            seen.add(line)
            os.write(log, line.encode())

    sys.addaudithook(hook)


_command = " ".join(sys.orig_argv)
if os.environ.get("TRACED") and " -m stages." in _command:
    _words = _command.split(" -m stages.")[1].split()
    _trace(os.environ["TRACED"], _words[-1] if _words[0] == "ranks" else _words[0])
