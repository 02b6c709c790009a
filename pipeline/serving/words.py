"""What a Hamlet agent thinks, in words and plain numbers; other policies have only an action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def action_in_words(names: list[str] | None, action: np.ndarray) -> Any:
    """One action: its name where it has one, else its number or numbers."""
    if action.size != 1 or action.dtype.kind not in "iu":
        return action.tolist()
    number = int(action.reshape(()))
    return names[number] if names and 0 <= number < len(names) else number


def thoughts_in_words(
    card: Mapping[str, Any], goal: int, thoughts: Mapping[str, np.ndarray], row: int
) -> dict[str, Any]:
    """The goal and the other outputs of one row of a tick, by the names of the card's town."""
    town = card["town"]
    goals, actions = town["goal_names"], town["action_names"]

    def likeliest(names: list[str], p: np.ndarray) -> dict[str, float]:
        best = np.argsort(-p, kind="stable")[:3]
        return {names[i]: round(float(p[i]), 3) for i in best}

    reasons = card["reasons"]
    size = np.array([town["width"], town["height"]])
    places = 2 * len(town["affordance_names"])
    offsets = thoughts["belief_mean"][row, :places].reshape(-1, 2) * size
    spread = np.exp(thoughts["belief_log_std"][row, :places].reshape(-1, 2)) * size
    return {
        "goal": goals[goal],
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
                "uncertainty": reasons["uncertainty"][int(thoughts["uncertainty_reason"][row, c])],
            }
            for c in range(thoughts["candidates"].shape[1])
            if thoughts["imagination_confidence"][row, c] > 0  # it deliberated at this tick
        ],
        "others": [
            {
                "goal_odds": likeliest(goals, thoughts["goal_dist_of_others"][row, m]),
                "next_action_odds": likeliest(actions, thoughts["next_action_of_others"][row, m]),
                "confidence": round(float(thoughts["social_confidence"][row, m]), 3),
                "reason": reasons["social"][int(thoughts["social_reason"][row, m])],
            }
            for m in range(thoughts["social_confidence"].shape[1])
        ],
    }


def plain_thoughts_in_words(
    card: Mapping[str, Any], thoughts: Mapping[str, np.ndarray], row: int
) -> dict[str, Any]:
    """The other outputs of one row of a tick of an agent of somebody's own world."""
    names, logits = card["world"]["actions"], thoughts["action_logits"][row]
    odds = _softmax(logits)
    imagined = {
        name: {
            what: round(float(thoughts[f"imagined_{what}"][row, i]), 4)
            for what in ("reward", "going_on", "value", "uncertainty")
        }
        for i, name in enumerate(names)
        if logits[i] > -1e30  # legal
    }
    told = {
        "action_odds": {name: round(float(p), 3) for name, p in zip(names, odds, strict=True)},
        "value": round(float(thoughts["value"][row]), 4),
        "imagined": imagined,
    }
    if "next_action_of_others" in thoughts:
        told["others"] = [
            {name: round(float(p), 3) for name, p in zip(names, other, strict=True)}
            for other in thoughts["next_action_of_others"][row]
        ]
    return told


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()
