"""An exported policy through ONNX Runtime: numpy in, numpy out, no torch.

The graph is stateless; the state tensors that go in come out again with their next values. What
begins a life is all zeros unless the card says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hamlet.artifacts import HamletError, card_path, check_card
from hamlet.ort import open_session, open_unchecked
from hamlet.serving.signature import NEXT, STATE, TYPES, Field, card_of, nothing_of, signature_of
from hamlet.serving.words import action_in_words, plain_thoughts_in_words, thoughts_in_words

__all__ = ["NEXT", "STATE", "Arrays", "Decision", "OnnxAgent"]
Arrays = dict[str, np.ndarray]
CARD_FIX = "run `dvc repro`, or `hamlet card FILE` for a policy made elsewhere"


class Decision(NamedTuple):
    action: np.ndarray
    """[B, ...]; the agent's own is int64 [B]."""
    state: Arrays
    """The new state, to be handed in at the next tick."""
    thoughts: Arrays
    """Every other output, by name."""


class OnnxAgent:
    """An ONNX policy ready to act.

    Args:
        path: the file; a card beside it is checked. Without one the graph itself says what it is.
        threads: of ONNX Runtime; 1 is best for single observations.
        states: for a file without a card: which inputs and outputs are state, beside those found
            by their names.
        action: for a file without a card: the output that is the action.

    Attributes:
        signature: its tensors by what they are for.
        inputs: every input as its card says it, by name; outputs: names.
        sha: sha256 of the file, with that of a file of weights beside it.

    Raises:
        HamletError: file or card missing, corrupt, or not a policy's.
    """

    def __init__(
        self,
        path: str | Path,
        threads: int = 1,
        states: Mapping[str, str] | None = None,
        action: str | None = None,
    ) -> None:
        path = Path(path)
        card: dict[str, Any] | None = None
        if card_path(path).exists() or not path.exists():
            card = check_card(path)
            if states or action:
                raise HamletError(
                    f"{path} has a card, which says what its states and its action are",
                    f"write it anew with `hamlet card {path}` and these options",
                )
            session = open_session(path, threads=threads)
        else:
            session = open_unchecked(path.as_posix(), threads=threads, name=str(path))
        source, weights = path.read_bytes(), path.with_name(path.name + ".data")
        self._take(source, card, session, str(path), states, action)
        if weights.exists():
            self.sha = sha256(source + weights.read_bytes()).hexdigest()

    @classmethod
    def of(cls, source: bytes, card: dict[str, Any] | None, name: str) -> OnnxAgent:
        """An agent from the bytes of its file and its card; `name` is for errors."""
        agent = cls.__new__(cls)
        if card is not None and sha256(source).hexdigest() != card["sha256"]:
            raise HamletError(f"{name} does not match its card")
        agent._take(source, card, open_unchecked(source, name=name), name)
        return agent

    def _take(
        self,
        source: bytes,
        card: dict[str, Any] | None,
        session: Any,
        name: str,
        states: Mapping[str, str] | None = None,
        action: str | None = None,
    ) -> None:
        self.source, self.session = source, session
        self.sha = sha256(source).hexdigest()
        if card is None:
            card = card_of(session, name, states, action) | {"sha256": self.sha}
        elif self.sha != card["sha256"]:
            raise HamletError(f"{name} changed while it was opened", "try again")
        self.card = card
        self.inputs = {entry["name"]: entry for entry in card["schema"]["inputs"]}
        self.outputs = [entry["name"] for entry in card["schema"]["outputs"]]
        for what, have, said in (
            ("inputs", session.get_inputs(), self.inputs),
            ("outputs", session.get_outputs(), self.outputs),
        ):
            names = [value.name for value in have]
            if names != list(said):
                raise HamletError(
                    f"{name} has {what} {', '.join(names)}; its card says {', '.join(said)}",
                    CARD_FIX,
                )
        _same_tensors(session, card, name)
        self.signature = signature_of(card, name)

    def start(self, batch: int, seed: int = 0) -> Arrays:
        """Blank state of `batch` agents, each with random numbers of its own."""
        signature = self.signature
        state: Arrays = {}
        for name in signature.states:
            field = signature.inputs[name]
            state[name] = np.zeros(field.sent(batch), field.dtype)
            if name in signature.initial:
                field.rows_first(state[name])[:] = signature.initial[name]
        if signature.rng:
            state[signature.rng] = np.random.default_rng(seed).integers(2**31 - 2, size=batch)
        return state

    def check(self, observation: Mapping[str, Any]) -> Arrays:
        """The observation as arrays of the graph's shapes and dtypes.

        Raises:
            HamletError: naming the first field that is missing, unknown, misshapen or out of range.
        """
        signature = self.signature
        wanted = {name: signature.inputs[name] for name in signature.observation}
        for name in observation:
            if name not in wanted:
                raise HamletError(
                    f"observation field '{name}' is unknown", f"known fields: {', '.join(wanted)}"
                )
        arrays: Arrays = {}
        for name, field in wanted.items():
            if name not in observation:
                raise HamletError(f"observation field '{name}' is missing", _expected(field))
            arrays[name] = _checked(field, observation[name])
        sizes = {
            n: a.shape[axis] for n, a in arrays.items() if (axis := wanted[n].axis) is not None
        }
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise HamletError(f"observation fields have different batch sizes ({told})")
        mask = signature.mask
        if mask and not wanted[mask].rows_first(arrays[mask]).any(axis=-1).all():
            raise HamletError(f"observation field '{mask}' forbids every action", "allow one")
        return arrays

    def act(self, observation: Arrays, state: Arrays) -> Decision:
        """One tick for a batch; arrays as from `check` and `start`."""
        values = self.session.run(None, {**observation, **state})
        named = dict(zip(self.outputs, values, strict=True))
        action = named.pop(self.signature.action)
        following = {name: named.pop(self.signature.states[name]) for name in state}
        return Decision(action, following, named)

    def readable(self, decision: Decision, row: int = 0) -> dict[str, Any]:
        """One agent's action and thoughts in words and plain numbers."""
        field = self.signature.outputs[self.signature.action]
        action = field.rows_first(decision.action)[row]
        said = {"action": action_in_words(self.signature.names, action)}
        if "world" in self.card:
            return said | plain_thoughts_in_words(self.card, decision.thoughts, row)
        if "town" not in self.card:
            return said
        goal = int(decision.state["state_goal"][row])
        return said | thoughts_in_words(self.card, goal, decision.thoughts, row)


def _same_tensors(session: Any, card: Mapping[str, Any], name: str) -> None:
    """HamletError where a card says another type or shape than the graph has."""
    said = [*card["schema"]["inputs"], *card["schema"]["outputs"]]
    for entry, have in zip(said, [*session.get_inputs(), *session.get_outputs()], strict=True):
        dtype, shape = TYPES.get(have.type), list(have.shape)
        fits = len(shape) == len(entry["shape"]) or not shape
        fits = fits and all(
            not isinstance(a, int) or a == b for a, b in zip(shape, entry["shape"], strict=False)
        )
        if dtype != entry["dtype"] or not fits:
            raise HamletError(
                f"{name}: '{have.name}' is {dtype} {shape}; its card says {entry['dtype']} "
                f"{entry['shape']}",
                CARD_FIX,
            )


def _checked(field: Field, value: Any) -> np.ndarray:
    name = f"observation field '{field.name}'"
    try:
        raw = np.asarray(value)
        shape = list(raw.shape)
        rows = shape[field.axis] if field.axis is not None and len(shape) > field.axis else 0
        raw = nothing_of(raw, field.sent(rows))
        array = raw.astype(field.dtype)
    except (TypeError, ValueError):
        raise HamletError(f"{name} is not an array of numbers", _expected(field)) from None
    if list(array.shape) != field.sent(rows):
        raise HamletError(f"{name} has shape {shape}", _expected(field))
    if raw.dtype.kind == "f" and not np.isfinite(raw).all():
        raise HamletError(f"{name} is not finite", _expected(field))
    if field.dtype[:5] != "float" and not np.array_equal(array, raw):
        raise HamletError(f"{name} holds values that are not {field.dtype}", _expected(field))
    if array.size and (array.min() < field.low or array.max() > field.high):
        raise HamletError(
            f"{name} holds {array.min():g} to {array.max():g}",
            f"it must be {field.low:g} to {field.high:g}",
        )
    return array


def _expected(field: Field) -> str:
    shape = list(map(str, field.sent(0)))
    if field.axis is not None:
        shape[field.axis] = "batch"
    return f"expected {field.dtype} [{', '.join(shape)}]"
