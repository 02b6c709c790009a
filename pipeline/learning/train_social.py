"""Train module C: true goals and next actions as labels, public information as input (CTDE)."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor

from hamlet.learning import distributed
from hamlet.learning.checkpoint import Checkpoint
from hamlet.learning.log import Log
from hamlet.learning.losses import cross_entropy, weighted_means, weighted_terms
from hamlet.learning.sequences import SequenceReader, per_agent, sent
from hamlet.learning.update import Update
from hamlet.modules.contracts import TownShape, others_of
from hamlet.modules.social import Social
from hamlet.params import SocialParams

HISTORY_TICKS = (1, 5, 20)
IMPORTANCE = {"goal": 1.0, "next_action": 1.0}
"""Weights of the terms of the loss."""


def with_labels(data: TensorDict, beliefs: TensorDict) -> TensorDict:
    """The recorded worlds with beliefs and, for each agent, the others' true goals and actions."""
    fields = ("self_state", "cues", "visible", "others_offset", "others_action", "action", "first")
    return TensorDict(
        {
            **{name: data[name] for name in fields},
            "alive": data["alive"],
            "mean": beliefs["mean"],
            "log_std": beliefs["log_std"],
            "others_goal": others_of(data["goal"]),
            "others_next_action": others_of(data["action"]),
            "others_alive": others_of(data["alive"]),
        },
        batch_size=data.shape,
    )


def predict(model: Social, chunk: TensorDict, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Goal logits [T, S, M, G], next action logits [T, S, M, A] and state after a chunk [T, S]."""
    goals, actions = [], []
    for t in range(chunk.shape[0]):
        now = chunk[t]
        state = state * (~now["first"])[:, None, None]
        goal, action, state = model.logits(
            now["mean"],
            now["log_std"],
            now["self_state"],
            now["cues"],
            now["visible"],
            now["others_offset"],
            now["others_action"],
            state,
        )
        goals.append(goal)
        actions.append(action)
    return torch.stack(goals), torch.stack(actions), state


def social_loss(
    model: Social, chunk: TensorDict, state: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Cross-entropy in nats of the others' goals and next actions in a chunk [T, S], and the state
    after it."""
    goal, action, after = predict(model, chunk, state)
    weight = (chunk["others_alive"] & chunk["alive"].unsqueeze(-1)).float()
    weight = weight * (0.1 + 0.9 * chunk["visible"].float())  # what can be seen matters most
    goal_loss = cross_entropy(goal, chunk["others_goal"])
    action_loss = cross_entropy(action, chunk["others_next_action"])
    losses = {"goal": (goal_loss, weight), "next_action": (action_loss, weight)}
    return weighted_means(losses), after


def train_social(
    data: TensorDict,
    worlds: Tensor,
    shape: TownShape,
    params: SocialParams,
    seed: int,
    checkpoint: Path,
    log: Log,
    until: int | None = None,
) -> Social:
    """Train on the given worlds of `data` [T, B] (see `with_labels`); where an agent is alone there
    is nothing to learn.

    Args:
        until: stop after so many of the steps; the checkpoint then goes on from there.
    """
    until = params.steps if until is None else until
    torch.manual_seed(seed)
    device = data["action"].device
    model = Social(shape, params.hidden).to(device)
    if not shape.num_others:
        return model.eval()
    reader = SequenceReader(
        data, worlds, params.sequences, params.chunk, torch.Generator().manual_seed(seed)
    )
    slots = (
        distributed.local_count(params.sequences, "params.yaml: social.sequences")
        * shape.num_agents
    )
    state = torch.zeros(slots, shape.num_others, model.recurrent_dim, device=device)
    carried: list[Tensor] = []

    def loss(chunk: TensorDict, state: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        parts, after = social_loss(model, chunk, state)
        carried[:] = [after.detach()]
        parts = weighted_terms(parts, IMPORTANCE)
        return parts["goal"] + parts["next_action"], parts

    update = Update(loss, model.parameters(), learning_rate=params.learning_rate)
    saved = Checkpoint(checkpoint, {"model": model, "update": update, "reader": reader})
    start, extra = saved.load()
    state = extra.get("state", state).to(device)
    for step in log.steps(until, start):
        update.set_learning_rate(params.learning_rate * (1 - step / params.steps))
        metrics = update(reader.read(), state)
        state = carried[0]
        log.record(step, metrics)
        saved.save(step + 1, rows={"state": state}, force=step + 1 == until)
    return model.eval()


@torch.no_grad()
def evaluate_social(
    model: Social, data: TensorDict, worlds: Tensor, chunk_ticks: int
) -> dict[str, float]:
    """Held-out accuracy beside the most frequent answer, after 1, 5 and 20 ticks in sight."""
    m, device = model.shape.num_others, data["action"].device
    (worlds,) = sent((worlds,), device)
    slots = len(worlds) * model.shape.num_agents
    state = torch.zeros(slots, m, model.recurrent_dim, device=device)
    in_sight = torch.zeros(state.shape[:2], dtype=torch.long, device=device)
    columns: dict[str, list[Tensor]] = {}
    for begin in range(0, data.shape[0], chunk_ticks):
        chunk = per_agent(data[begin : begin + chunk_ticks][:, worlds])
        goal, action, state = predict(model, chunk, state)
        history = []
        for t in range(chunk.shape[0]):
            in_sight = torch.where(
                chunk["visible"][t] & ~chunk["first"][t, :, None], in_sight + 1, 0
            )
            history.append(in_sight)
        keep = chunk["visible"] & chunk["others_alive"] & chunk["alive"].unsqueeze(-1)
        confidence, best = goal.softmax(-1).max(-1)
        for name, value in {
            "goal": chunk["others_goal"],
            "goal_right": best == chunk["others_goal"],
            "confidence": confidence,
            "action": chunk["others_next_action"],
            "action_right": action.argmax(-1) == chunk["others_next_action"],
            "history": torch.stack(history),
        }.items():
            columns.setdefault(name, []).append(value[keep])
    table = {name: torch.cat(parts) for name, parts in columns.items()}

    def share(right: Tensor) -> float:
        return right.double().mean().nan_to_num().item()

    def most_frequent(label: Tensor) -> float:
        return torch.bincount(label).max().item() / max(len(label), 1) if len(label) else 0.0

    result = {
        "goal_accuracy": share(table["goal_right"]),
        "goal_accuracy_prior": most_frequent(table["goal"]),
        "next_action_accuracy": share(table["action_right"]),
        "next_action_accuracy_prior": most_frequent(table["action"]),
        "goal_confidence_gap": (
            table["confidence"].mean() - table["goal_right"].float().mean()
        ).abs().nan_to_num().item(),
    }  # fmt: skip
    for ticks in HISTORY_TICKS:
        long_enough = table["history"] == ticks
        result[f"goal_accuracy_after_{ticks}"] = share(table["goal_right"][long_enough])
    return result
