"""Where the time of a training step goes: named regions of the code, and PyTorch's profiler.

Regions cost nothing while nobody profiles, and do not exist in compiled or exported code: a
compiled rollout is one region.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

REGIONS = (
    # "sense" is perception and the social model in one call.
    "rollout", "environment", "expert", "co_players", "perception", "social", "sense",
    "imagination", "policy", "loss", "optimizer", "data",
)  # fmt: skip


@dataclass
class Watch:
    """Exclusive wall-clock seconds of every region; what is in none of them is `other`."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REGIONS, 0.0))
    total: float = 0.0
    steps: int = 0
    stack: list[str] = field(default_factory=list)
    changed: float = 0.0

    def switch(self) -> None:
        """Book the time since the last change to the innermost region."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.stack:
            self.seconds[self.stack[-1]] += now - self.changed
        self.changed = now

    def shares(self) -> dict[str, float]:
        """Each region's part of the wall time, and `other`; they add up to 1."""
        parts = {name: seconds / self.total for name, seconds in self.seconds.items()}
        return parts | {"other": 1 - sum(parts.values())}

    def table(self) -> str:
        """The shares as text, the largest first, with milliseconds per step."""
        rows = sorted(self.shares().items(), key=lambda item: -item[1])
        ms = 1000 * self.total / self.steps
        lines = [f"{'region':14} {'share':>7} {'ms/step':>10}"]
        lines += [f"{name:14} {share:7.1%} {share * ms:10.2f}" for name, share in rows if share > 0]
        return "\n".join([*lines, f"{'all':14} {1:7.1%} {ms:10.2f}"])


current_watch: Watch | None = None


class _Region:
    def __init__(self, watch: Watch, name: str) -> None:
        self.watch, self.name = watch, name
        self.mark = torch.profiler.record_function(name)

    def __enter__(self) -> None:
        self.watch.switch()
        self.watch.stack.append(self.name)
        self.mark.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.mark.__exit__(*error)
        self.watch.switch()
        self.watch.stack.pop()


def region(name: str) -> AbstractContextManager[None]:
    """`with region("loss"): ...`: book the time of the block, less that of regions inside it."""
    if torch.compiler.is_compiling() or current_watch is None:
        return nullcontext()
    return _Region(current_watch, name)


def profiled(steps: Iterable[int], skip: int, count: int, trace: Path) -> Iterator[int | Watch]:
    """The first steps of a training, watched; then the `Watch` itself, as the last item.

    Steps `skip` to `skip + count` are timed without PyTorch's profiler, which would slow small
    operations down; the one after them is traced by it into `trace`, a Chrome trace.

    Raises:
        ValueError: the training ends before.
    """
    global current_watch
    source = iter(steps)
    watch = Watch(steps=count)
    try:
        for _ in range(skip):
            yield next(source)
        current_watch = watch
        watch.switch()
        began = watch.changed
        for _ in range(count):
            yield next(source)
        watch.switch()
        watch.total = watch.changed - began
        current_watch = Watch()
        with torch.profiler.profile() as profiler:  # keeps every operation in memory
            yield next(source)
        profiler.export_chrome_trace(str(trace))
    except StopIteration:
        raise ValueError("the training ends before the window") from None
    finally:
        current_watch = None
    yield watch
