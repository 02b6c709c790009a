"""The exported agent through ONNX Runtime: numpy in, numpy out, no torch.

The graph is stateless; every state tensor is an input `state_X` and an output `next_X`. All zeros
begin a life.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hamlet.artifacts import HamletError, check_card
from hamlet.ort import open_session, open_unchecked

STATE, NEXT = "state_", "next_"
Arrays = dict[str, np.ndarray]


class Decision(NamedTuple):
    action: np.ndarray
    """int64 [B]."""
    state: Arrays
    """The new state, to be handed in at the next tick."""
    thoughts: Arrays
    """Every other output, by name."""


class OnnxAgent:
    """An `agent.onnx` ready to act.

    Args:
        path: the file; its card stands beside it.
        threads: of ONNX Runtime; 1 is best for single observations.

    Raises:
        HamletError: file or card missing, corrupt, or not an agent's.
    """

    def __init__(self, path: str | Path, threads: int = 1) -> None:
        card = check_card(path)
        session = open_session(path, threads=threads)
        self._take(Path(path).read_bytes(), card, session, str(path))

    @classmethod
    def of(cls, source: bytes, card: dict[str, Any], name: str) -> OnnxAgent:
        """An agent from the bytes of its file and its card; `name` is for errors."""
        agent = cls.__new__(cls)
        if sha256(source).hexdigest() != card["sha256"]:
            raise HamletError(f"{name} does not match its card")
        agent._take(source, card, open_unchecked(source, name=name), name)
        return agent

    def _take(self, source: bytes, card: dict[str, Any], session: Any, name: str) -> None:
        self.source, self.card, self.session = source, card, session
        if sha256(source).hexdigest() != card["sha256"]:
            raise HamletError(f"{name} changed while it was opened", "try again")
        self.inputs = {entry["name"]: entry for entry in card["schema"]["inputs"]}
        self.outputs = [entry["name"] for entry in card["schema"]["outputs"]]
        have = [i.name for i in session.get_inputs()]
        if have != list(self.inputs):
            raise HamletError(
                f"{name} takes inputs {', '.join(have)}; its card says {', '.join(self.inputs)}",
                "run `dvc repro agent`",
            )

    def start(self, batch: int, seed: int = 0) -> Arrays:
        """Blank state of `batch` agents, each with random numbers of its own."""
        state = {
            name: np.zeros((batch, *entry["shape"][1:]), entry["dtype"])
            for name, entry in self.inputs.items()
            if name.startswith(STATE)
        }
        state["state_rng"] = np.random.default_rng(seed).integers(2**31 - 2, size=batch)
        return state

    def check(self, observation: Mapping[str, Any]) -> Arrays:
        """The observation as arrays [B, ...] of the right dtype.

        Raises:
            HamletError: naming the first field that is missing, unknown, misshapen or out of range.
        """
        wanted = {n: e for n, e in self.inputs.items() if not n.startswith(STATE)}
        for name in observation:
            if name not in wanted:
                raise HamletError(
                    f"observation field '{name}' is unknown", f"known fields: {', '.join(wanted)}"
                )
        arrays: Arrays = {}
        for name, entry in wanted.items():
            if name not in observation:
                raise HamletError(f"observation field '{name}' is missing", _expected(entry))
            try:
                raw = np.asarray(observation[name])
                array = raw.astype(entry["dtype"])
            except (TypeError, ValueError):
                raise HamletError(
                    f"observation field '{name}' is not an array of numbers", _expected(entry)
                ) from None
            if array.ndim != len(entry["shape"]) or array.shape[1:] != tuple(entry["shape"][1:]):
                raise HamletError(
                    f"observation field '{name}' has shape {list(array.shape)}", _expected(entry)
                )
            if raw.dtype.kind == "f" and not np.isfinite(raw).all():
                raise HamletError(f"observation field '{name}' is not finite", _expected(entry))
            if entry["dtype"] != "float32" and not np.array_equal(array, raw):
                raise HamletError(
                    f"observation field '{name}' holds values that are not {entry['dtype']}",
                    _expected(entry),
                )
            limit = self.card["limits"].get(name)
            if limit and array.size and (array.min() < limit[0] or array.max() > limit[1]):
                raise HamletError(
                    f"observation field '{name}' holds {array.min():g} to {array.max():g}",
                    f"it must be {limit[0]} to {limit[1]}",
                )
            arrays[name] = array
        if len({len(array) for array in arrays.values()}) > 1:
            sizes = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
            raise HamletError(f"observation fields have different batch sizes ({sizes})")
        if not arrays["action_mask"].any(axis=1).all():
            raise HamletError(
                "observation field 'action_mask' forbids every action", "WAIT is legal"
            )
        return arrays

    def act(self, observation: Arrays, state: Arrays) -> Decision:
        """One tick for a batch; arrays as from `check` and `start`."""
        values = self.session.run(None, {**observation, **state})
        named = dict(zip(self.outputs, values, strict=True))
        action = named.pop("action")
        following = {name: named.pop(NEXT + name.removeprefix(STATE)) for name in state}
        return Decision(action, following, named)

    def readable(self, decision: Decision, row: int = 0) -> dict[str, Any]:
        """One agent's action and thoughts in words and plain numbers."""
        town, thoughts = self.card["town"], decision.thoughts
        goals, actions = town["goal_names"], town["action_names"]

        def likeliest(names: list[str], p: np.ndarray) -> dict[str, float]:
            best = np.argsort(-p, kind="stable")[:3]
            return {names[i]: round(float(p[i]), 3) for i in best}

        reasons = self.card["reasons"]
        size = np.array([town["width"], town["height"]])
        places = 2 * len(town["affordance_names"])
        offsets = thoughts["belief_mean"][row, :places].reshape(-1, 2) * size
        spread = np.exp(thoughts["belief_log_std"][row, :places].reshape(-1, 2)) * size
        return {
            "action": actions[int(decision.action[row])],
            "goal": goals[int(decision.state["state_goal"][row])],
            "goal_odds": likeliest(goals, _softmax(thoughts["goal_logits"][row])),
            "action_odds": likeliest(actions, _softmax(thoughts["action_logits"][row])),
            "believed_places": {
                name: {
                    "dx": round(float(dx), 2),
                    "dy": round(float(dy), 2),
                    "std": round(float(s.max()), 2),
                }
                for name, (dx, dy), s in zip(town["affordance_names"], offsets, spread, strict=True)
            },
            "imagined_futures": [
                {
                    "goal": goals[int(thoughts["candidates"][row, c])],
                    "return": round(float(thoughts["imagined_return"][row, c]), 3),
                    "confidence": round(float(thoughts["imagination_confidence"][row, c]), 3),
                    "uncertainty": reasons["uncertainty"][
                        int(thoughts["uncertainty_reason"][row, c])
                    ],
                }
                for c in range(thoughts["candidates"].shape[1])
                if thoughts["imagination_confidence"][row, c] > 0  # it deliberated at this tick
            ],
            "others": [
                {
                    "goal_odds": likeliest(goals, thoughts["goal_dist_of_others"][row, m]),
                    "next_action_odds": likeliest(
                        actions, thoughts["next_action_of_others"][row, m]
                    ),
                    "confidence": round(float(thoughts["social_confidence"][row, m]), 3),
                    "reason": reasons["social"][int(thoughts["social_reason"][row, m])],
                }
                for m in range(thoughts["social_confidence"].shape[1])
            ],
        }


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()


def _expected(entry: Mapping[str, Any]) -> str:
    shape = ", ".join(map(str, entry["shape"]))
    return f"expected {entry['dtype']} [{shape}]"
