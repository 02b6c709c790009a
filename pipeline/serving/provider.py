"""Which execution provider answers: CUDA if it is asked for, works and says what the CPU says."""

from __future__ import annotations

import sys
from typing import Any, Literal

import numpy as np

from hamlet.artifacts import HamletError
from hamlet.ort import open_unchecked
from hamlet.serving.agent import Arrays, OnnxAgent
from hamlet.serving.source import FileSource, Source

Provider = Literal["cpu", "cuda", "auto"]
CUDA = "CUDAExecutionProvider"
BATCH, TOLERANCE = 4, 1e-3  # agents of the first batch; difference, relative beyond 1


class Placed:
    """A source whose policies run on CUDA; see `Source`.

    Args:
        source: where they come from.
        provider: cuda, or auto: on the CPU, with one line that says why, where CUDA fails.
    """

    def __init__(self, source: Source, provider: Literal["cuda", "auto"]) -> None:
        self.source, self.provider = source, provider
        self.name, self.model = source.name, source.model

    def look(self) -> str:
        return self.source.look()

    def fetch(self) -> tuple[OnnxAgent, str]:
        """The agent and its version.

        Raises:
            HamletError: as of the source; or CUDA was asked for and fails, or answers otherwise.
        """
        agent, version = self.source.fetch()
        file = self.source.path.as_posix() if isinstance(self.source, FileSource) else None
        try:
            session = open_unchecked(file or agent.source, [CUDA], name=self.name)
            check_parity(agent, session, self.name)
        except HamletError as error:
            if self.provider == "cuda":
                raise HamletError(error.problem, "serve with --provider cpu") from None
            print(f"{self.name} is served on the CPU: {error.problem}", file=sys.stderr, flush=True)
        else:
            agent.session = session
        return agent, version


def first_batch(agent: OnnxAgent, batch: int = BATCH) -> Arrays:
    """Inputs of the graph's shapes and types: blank states, random numbers, every action legal."""
    rng, inputs = np.random.default_rng(0), dict(agent.start(batch))
    for name, entry in agent.inputs.items():
        if name in inputs:
            continue
        kind = np.dtype(entry["dtype"])
        shape = [batch if isinstance(size, str) else size for size in entry["shape"]]
        numbers = rng.random(shape) if kind.kind == "f" else np.ones(shape)
        inputs[name] = numbers.astype(kind) if kind.kind in "fb" else np.zeros(shape, kind)
    return inputs


def check_parity(agent: OnnxAgent, session: Any, name: str) -> None:
    """Raise a HamletError where a session's numbers are not those of the agent's own."""
    inputs = first_batch(agent)
    ours, theirs = (each.run(agent.outputs, inputs) for each in (agent.session, session))
    for output, one, other in zip(agent.outputs, ours, theirs, strict=True):
        if one.dtype.kind != "f" or not one.size:
            continue
        gap = np.abs(one.astype(np.float64) - other) / np.maximum(np.abs(one), 1.0)
        if not float(gap.max()) <= TOLERANCE:
            raise HamletError(
                f"{name}: '{output}' on CUDA differs from the CPU's by {gap.max():.2g}"
            )
