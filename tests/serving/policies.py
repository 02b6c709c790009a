"""Policies made elsewhere, with random weights, exported as their users do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

OBS, HIDDEN = 6, 16


class Made(NamedTuple):
    """A file, and what must be said of it (the test knows it; the server must find it)."""

    path: Path
    states: Mapping[str, str]
    action: str
    options: tuple[str, ...] = ()


def export(
    module: nn.Module,
    path: Path,
    inputs: Mapping[str, torch.Tensor],
    outputs: list[str],
    batch: Mapping[str, int] | None,
) -> None:
    """`torch.onnx.export` with the batch of each tensor where `batch` says, or fixed."""
    axes = {name: {axis: "batch"} for name, axis in batch.items()} if batch else None
    module.eval()
    with torch.no_grad():
        torch.onnx.export(
            module, tuple(inputs.values()), str(path), input_names=list(inputs),
            output_names=outputs, dynamic_axes=axes, opset_version=17, dynamo=False,
        )  # fmt: skip


def hand_made_gru(folder: Path) -> Made:
    """obs [B, 6], h [B, 16] -> action int64 [B], h_out."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(OBS, HIDDEN), nn.Linear(HIDDEN, 5)

        def forward(self, obs, h):
            h = self.cell(obs, h)
            return self.head(4 * h).argmax(dim=-1), h

    path = folder / "gru.onnx"
    inputs = {"obs": torch.zeros(2, OBS), "h": torch.zeros(2, HIDDEN)}
    axes = {"obs": 0, "h": 0, "action": 0, "h_out": 0}
    export(Policy(), path, inputs, ["action", "h_out"], axes)
    return Made(path, {"h": "h_out"}, "action")


def masked_gru(folder: Path) -> Made:
    """obs [B, 6], action_mask bool [B, 5], level int64 [B, 2], h [B, 16] -> action, logits, h_out.
    The action follows its observation closely and its state a little."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.cell, self.head = nn.GRUCell(OBS, HIDDEN), nn.Linear(HIDDEN, 5)
            self.cell.weight_hh.data *= 6

        def forward(self, obs, action_mask, level, h):
            h = self.cell(3 * obs + level.sum(dim=1, keepdim=True), h)
            logits = self.head(4 * h).masked_fill(~action_mask, -1e9)
            return logits.argmax(dim=-1), logits, h

    path = folder / "masked.onnx"
    inputs = {
        "obs": torch.zeros(2, OBS), "action_mask": torch.ones(2, 5, dtype=torch.bool),
        "level": torch.zeros(2, 2, dtype=torch.int64), "h": torch.zeros(2, HIDDEN),
    }  # fmt: skip
    names = [*inputs, "action", "logits", "h_out"]
    export(Policy(), path, inputs, ["action", "logits", "h_out"], dict.fromkeys(names, 0))
    return Made(path, {"h": "h_out"}, "action")


def cleanrl_lstm(folder: Path) -> Made:
    """CleanRL's ppo_atari_lstm: nn.LSTM with state [1, B, H], zeroed where `done`; here without
    the pictures. Argmax of the logits."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(OBS, HIDDEN), nn.ReLU())
            self.lstm = nn.LSTM(HIDDEN, HIDDEN)
            for name, weight in self.lstm.named_parameters():
                nn.init.constant_(weight, 0) if "bias" in name else nn.init.orthogonal_(weight, 1.0)
            self.actor, self.critic = nn.Linear(HIDDEN, 4), nn.Linear(HIDDEN, 1)

        def forward(self, x, h, c, done):
            keep = (1.0 - done).view(1, -1, 1)
            hidden, (h, c) = self.lstm(self.network(x).unsqueeze(0), (keep * h, keep * c))
            logits = self.actor(5 * hidden[0])
            return logits.argmax(dim=-1), self.critic(hidden[0]), h, c

    path = folder / "cleanrl.onnx"
    inputs = {
        "x": torch.zeros(2, OBS), "h": torch.zeros(1, 2, HIDDEN), "c": torch.zeros(1, 2, HIDDEN),
        "done": torch.zeros(2),
    }  # fmt: skip
    axes = {"x": 0, "h": 1, "c": 1, "done": 0, "action": 0, "value": 0, "hn": 1, "cn": 1}
    export(Agent(), path, inputs, ["action", "value", "hn", "cn"], axes)
    return Made(path, {"h": "hn", "c": "cn"}, "action")


def rl_games_lstm(folder: Path, layers: int = 2, batched: bool = True) -> Made:
    """rl_games' a2c with an LSTM: states [layers, B, H], a Gaussian's mean as the action; its own
    recipe exports batch 1."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(OBS, HIDDEN), nn.ELU())
            self.rnn = nn.LSTM(HIDDEN, HIDDEN, num_layers=layers)
            self.mu, self.value = nn.Linear(HIDDEN, 3), nn.Linear(HIDDEN, 1)
            self.sigma = nn.Parameter(torch.zeros(3))

        def forward(self, obs, h, c):
            out, (h, c) = self.rnn(self.mlp(obs).unsqueeze(0), (h, c))
            mu = self.mu(3 * out[0])
            return mu, mu * 0 + self.sigma, self.value(out[0]), h, c

    path = folder / f"rl_games_{layers}_{batched}.onnx"
    rows = 2 if batched else 1
    state = torch.zeros(layers, rows, HIDDEN)
    inputs = {"obs": torch.zeros(rows, OBS), "out_state_in": state, "hidden_state_in": state + 0}
    outputs = ["mu", "log_std", "value", "out_state", "hidden_state"]
    axes = {
        "obs": 0, "out_state_in": 1, "hidden_state_in": 1, "mu": 0, "log_std": 0, "value": 0,
        "out_state": 1, "hidden_state": 1,
    }  # fmt: skip
    export(Network(), path, inputs, outputs, axes if batched else None)
    states = {"out_state_in": "out_state", "hidden_state_in": "hidden_state"}
    return Made(path, states, "mu")


def rl_games_fixed(folder: Path) -> Made:
    """As rl_games' recipe exports it: one row, for ever."""
    return rl_games_lstm(folder, batched=False)


def sb3_ppo(folder: Path) -> Made:
    """Stable-Baselines3's PPO as its documentation exports it: no state."""
    import gymnasium
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", _world(gymnasium), device="cpu", seed=1)

    class OnnxablePolicy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = model.policy

        def forward(self, observation):
            return self.policy(observation, deterministic=True)

    path = folder / "sb3_ppo.onnx"
    axes = {"observation": 0, "actions": 0, "values": 0, "log_prob": 0}
    inputs = {"observation": torch.zeros(2, OBS)}
    export(OnnxablePolicy(), path, inputs, ["actions", "values", "log_prob"], axes)
    return Made(path, {}, "actions")


def sb3_recurrent_ppo(folder: Path) -> Made:
    """sb3-contrib's RecurrentPPO: its LSTM's state [layers, B, H], here under names that say
    nothing, so that --state must."""
    import gymnasium
    from sb3_contrib import RecurrentPPO

    lstm = {"n_lstm_layers": 2, "lstm_hidden_size": HIDDEN, "enable_critic_lstm": False}
    model = RecurrentPPO(
        "MlpLstmPolicy", _world(gymnasium), device="cpu", seed=1, n_steps=8,
        policy_kwargs={**lstm, "shared_lstm": True},
    )  # fmt: skip

    class OnnxablePolicy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = model.policy

        def forward(self, obs, a, b):
            distribution, (c, d) = self.policy.get_distribution(
                obs, (a, b), torch.zeros(obs.shape[0])
            )
            return distribution.get_actions(deterministic=True), c, d

    path = folder / "sb3_recurrent.onnx"
    state = torch.zeros(2, 2, HIDDEN)
    inputs = {"obs": torch.zeros(2, OBS), "memory": state, "cell": state + 0}
    axes = {"obs": 0, "memory": 1, "cell": 1, "what": 0, "first": 1, "second": 1}
    export(OnnxablePolicy(), path, inputs, ["what", "first", "second"], axes)
    options = ("--state", "memory=first", "--state", "cell=second")
    return Made(path, {"memory": "first", "cell": "second"}, "what", options)


def _world(gymnasium: Any) -> Any:
    """Spaces without a world: nothing is trained here."""

    class Spaces(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (OBS,), np.float32)
        action_space = gymnasium.spaces.Discrete(4)

        def reset(self, **_):
            return np.zeros(OBS, np.float32), {}

        def step(self, _):
            return np.zeros(OBS, np.float32), 0.0, False, False, {}

    return Spaces()


MAKERS: list[Callable[[Path], Made]] = [
    hand_made_gru, cleanrl_lstm, rl_games_lstm, rl_games_fixed, sb3_ppo, sb3_recurrent_ppo,
]  # fmt: skip


def by_raw_onnxruntime(made: Made, observations: np.ndarray) -> np.ndarray:
    """[T, S, ...]: actions of S lives seeing `observations` [T, S, 6], life by life, one row at a
    time, by onnxruntime and nothing else."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(made.path, options, providers=["CPUExecutionProvider"])
    shapes = {
        i.name: [d if isinstance(d, int) else 1 for d in i.shape] for i in session.get_inputs()
    }
    names = [o.name for o in session.get_outputs()]
    first = next(n for n in shapes if n not in made.states)
    lives = []
    for life in range(observations.shape[1]):
        feeds = {n: np.zeros(shape, np.float32) for n, shape in shapes.items()}
        actions = []
        for seen in observations[:, life]:
            feeds[first] = seen[None]
            outputs = dict(zip(names, session.run(None, feeds), strict=True))
            actions.append(outputs[made.action][0])
            for given, following in made.states.items():
                feeds[given] = outputs[following]
        lives.append(actions)
    return np.swapaxes(np.array(lives), 0, 1)
