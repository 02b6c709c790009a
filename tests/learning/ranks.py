"""Processes as `torchrun` would start them, over real sockets, kept for test after test."""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import multiprocessing

from hamlet.learning.distributed import process_group

PRELOADED = [
    "hamlet.learning.preloaded",
    "hamlet.learning.train_policy",
    "hamlet.learning.train_world_model",
    "torch.distributed.fsdp",
]
"""What ranks need and takes seconds to import: one process does, and they are its forks."""
PATIENCE = 300  # seconds until a rank that says nothing is an error, not a test that hangs


class Ranks:
    """`run` has as many processes as asked for form a group and call a function."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.told = self.context.Queue()
        self.asked: list[Any] = []
        self.processes: list[Any] = []

    def _start(self) -> None:
        rank, asked = len(self.processes), self.context.SimpleQueue()
        given = rank, asked, self.told, self.folder
        process = self.context.Process(target=_serve, args=given, daemon=True)
        process.start()
        self.asked.append(asked)
        self.processes.append(process)

    def run(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a module's top-level function returns on each rank: tensors, in lists and dicts."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        while len(self.processes) < count:
            self._start()
        assert all(process.is_alive() for process in self.processes), "somebody ended a rank"
        for asked in self.asked[:count]:
            asked.put((count, port, function, arguments))
        said = [self._hear() for _ in range(count)]
        errors = [error for error in said if error]
        assert not errors, "\n".join(errors)
        return [torch.load(self.folder / f"{rank}.pt", weights_only=True) for rank in range(count)]

    def _hear(self) -> str:
        """What the next rank says; an error at once where a rank has ended instead."""
        for _ in range(PATIENCE):
            with suppress(queue.Empty):
                return str(self.told.get(timeout=1))
            codes = enumerate(process.exitcode for process in self.processes)
            ended = {rank: code for rank, code in codes if code is not None}
            assert not ended, f"ranks ended, by exit code: {ended}"
        raise AssertionError(f"no rank said anything in {PATIENCE} seconds")

    def close(self) -> None:
        for process in self.processes:
            process.kill()


def _serve(rank: int, asked: Any, told: Any, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    while True:
        count, port, function, arguments = asked.get()
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        try:
            with process_group():
                torch.save(function(*arguments), folder / f"{rank}.pt")
            told.put("")
        except BaseException as error:
            told.put(f"rank {rank}: {type(error).__name__}: {error}")
