"""Recurrent learners made elsewhere, in the town: the peers of `benchmarks.learning` (how fast) and
of `benchmarks.study` (how good).

    python -m benchmarks.learning_peers {recurrent_ppo,lstm_ppo} [--everyone] [--worlds 8] ...

`recurrent_ppo` is that of Stable-Baselines3-contrib; `lstm_ppo` is plain PyTorch in the manner of
CleanRL's ppo_atari_lstm.py. Both learn on the CPU with one network: flat observation -> linear ->
tanh -> LSTM -> actor and critic. The study has a third, of the same network but for its heads, the
recurrent DQN of `benchmarks.recurrent_dqn`. None knows action masks; an illegal action wastes its
tick.

They learn as their users run them: eight Gymnasium environments of the easy pack, each with one
learner and three scripted players, in the library's own vectorisation, which steps them one by one.
Only the learners' steps count. `everyone` lends them what our own training has: worlds stepped as
one batch, and all agents of a world learning, a lane each under one policy, without scripted
players. What is left between them and us is then the learning alone. The last line is JSON: the
options, a `Peer` and `steps_per_second`. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn
from torch.distributions import Categorical

from hamlet.artifacts import HamletError
from hamlet.town import Town
from hamlet.town.adapters.flat import flat_observation, flat_size
from hamlet.town.adapters.gymnasium_env import TownEnv, TownVectorEnv

GAMMA, LAM, CLIP, ENTROPY, VALUE, MAX_NORM, LEARNING_RATE = 0.995, 0.95, 0.2, 0.01, 0.5, 0.5, 1e-3
REWARD_SCALE = 3 * (1 - GAMMA)  # as in our own training: values are of the order of one
NOT_INSTALLED = "sb3-contrib is not installed", 'pip install -c constraints.txt -e ".[bench]"'
# As many as RL Baselines3 Zoo and CleanRL run, and with `everyone` the fastest of 8, 16 .. 256.
STOCK_WORLDS, EVERYONES_WORLDS = 8, 256


class Peer(NamedTuple):
    """What one run took; its first iteration is warm-up and not in it.

    Fields:
        steps: of learning agents, lanes * rollout * iterations.
        seconds: wall time of collecting them and learning from them.
        parameters: trained numbers in the network.
        environment_share: part of `seconds` spent in the environment's `step`, 0..1, with scripted
            players and the making of observations.
    """

    steps: int
    seconds: float
    parameters: int
    environment_share: float


State = tuple[Tensor, Tensor]
"""h and c of every lane, float32 [L, hidden]."""


class Learner(Protocol):
    """A peer, its lanes and what it learned in them."""

    @property
    def network(self) -> nn.Module: ...

    def learn(self, iterations: int) -> None:
        """Collect a rollout of every lane and learn from it, so many times."""
        ...

    def act(self, seen: Tensor, memory: State) -> tuple[Tensor, State]:
        """Actions int64 [L] for flat observations [L, D], and the new memory."""
        ...


class Clock:
    """Seconds spent in the environments' `step`."""

    seconds = 0.0


class Single(TownEnv):
    """The Gymnasium environment with a clock."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock

    def step(self, action: Any) -> Any:
        start = time.perf_counter()
        result = super().step(action)
        self.clock.seconds += time.perf_counter() - start
        return result


class Everyone(TownVectorEnv):
    """All agents of all worlds, with a clock; the agents of a world lie side by side.

    Observations are f32 [worlds * agents, D], rewards scaled. A lane terminates when its agent dies
    or retires; the dead idle until their world begins the next life, and then terminate again.

    Args:
        town: another one than the easy pack's.
    """

    def __init__(self, worlds: int, clock: Clock, town: Town | None = None):
        super().__init__(worlds)
        self.worlds, self.clock = worlds, clock
        self.town = town or self.town
        self.num_envs = worlds * self.town.num_agents
        self.single_observation_space = Box(-np.inf, np.inf, (flat_size(self.town),), np.float32)
        self.single_action_space = Discrete(self.town.num_actions)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.world = self.town.reset(seed or 0, self.worlds)
        return self._observe(), {}

    def step(self, actions: np.ndarray) -> Any:
        start = time.perf_counter()
        state = self.town.step_core(self.world, torch.from_numpy(actions).view(self.worlds, -1))
        over = state["episode_over"]
        ended = (state["died"] | state["retired"] | over[:, None]).flatten().numpy()
        self.world = self.town.renew(state, over) if over.any() else state
        seen = self._observe()
        self.clock.seconds += time.perf_counter() - start
        reward = REWARD_SCALE * state["reward"].flatten().numpy()
        return seen, reward, ended, np.zeros_like(ended), {}

    def _observe(self) -> np.ndarray:
        return flat_observation(self.town, self.town.observe(self.world)).flatten(0, 1).numpy()


class RecurrentPPO:
    """RecurrentPPO of Stable-Baselines3-contrib, its LSTM shared by actor and critic. A `Learner`.

    Args:
        lanes: what it plays: `Everyone`, or a vectorised environment of Stable-Baselines3.
        rollout: ticks collected per iteration.
        epochs, minibatches: of each iteration's update.
        hidden: width of the linear layer and of the LSTM.
        seed: of torch and numpy too, for good.

    Raises:
        HamletError: if sb3-contrib is not installed or the lanes do not divide into minibatches.
    """

    def __init__(
        self, lanes: Any, rollout: int, epochs: int, minibatches: int, hidden: int, seed: int = 0
    ) -> None:
        try:
            from sb3_contrib import RecurrentPPO as Theirs
            from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
            from stable_baselines3.common.vec_env import VecEnv
        except ImportError as error:
            raise HamletError(
                "sb3-contrib is not installed", 'pip install -e ".[bench]"'
            ) from error

        class Encoder(BaseFeaturesExtractor):
            def __init__(self, space: Any):
                super().__init__(space, hidden)
                self.linear = nn.Linear(space.shape[0], hidden)

            def forward(self, observation: Tensor) -> Tensor:
                return torch.tanh(self.linear(observation))

        class Batched(VecEnv):
            """The lanes as Stable-Baselines3 wants them: one environment that shares all."""

            def __init__(self, lanes: Everyone):
                self.lanes = lanes
                space, actions = lanes.single_observation_space, lanes.single_action_space
                super().__init__(lanes.num_envs, space, actions)

            def reset(self) -> Any:
                return self.lanes.reset(seed=seed)[0]

            def step_async(self, actions: np.ndarray) -> None:
                self.actions = actions

            def step_wait(self) -> Any:
                observation, reward, ended, _, _ = self.lanes.step(self.actions)
                return observation, reward, ended, [{} for _ in range(self.num_envs)]

            def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
                return [getattr(self.lanes, attr_name)] * self.num_envs

            def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
                return [False] * self.num_envs

            def env_method(
                self, method_name: str, *args: Any, indices: Any = None, **named: Any
            ) -> Any:
                return [getattr(self.lanes, method_name)(*args, **named)] * self.num_envs

            def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
                setattr(self.lanes, attr_name, value)

            def close(self) -> None:
                pass

        if isinstance(lanes, Everyone):
            lanes = Batched(lanes)
        _must_divide(lanes.num_envs, minibatches)
        self.each = lanes.num_envs * rollout
        self.model = Theirs(
            "MlpLstmPolicy", lanes, LEARNING_RATE, rollout, self.each // minibatches, epochs, GAMMA,
            LAM, CLIP, ent_coef=ENTROPY, vf_coef=VALUE, max_grad_norm=MAX_NORM, seed=seed,
            device="cpu",
            policy_kwargs={
                "features_extractor_class": Encoder, "lstm_hidden_size": hidden, "net_arch": [],
                "shared_lstm": True, "enable_critic_lstm": False,
            },
        )  # fmt: skip
        self.network = self.model.policy

    def learn(self, iterations: int) -> None:
        self.model.learn(self.each * iterations, reset_num_timesteps=False)

    def act(self, seen: Tensor, memory: State) -> tuple[Tensor, State]:
        state = tuple(x.unsqueeze(0).numpy() for x in memory)
        action, after = self.model.predict(seen.numpy(), state, np.zeros(len(seen), dtype=bool))
        assert after is not None  # it is a recurrent policy
        h, c = (torch.from_numpy(x)[0] for x in after)
        return torch.from_numpy(action), (h, c)


class LstmPolicy(nn.Module):
    """Flat observation -> linear -> tanh -> LSTM -> logits of actions, and value."""

    def __init__(self, inputs: int, hidden: int, actions: int):
        super().__init__()
        self.encode, self.lstm = nn.Linear(inputs, hidden), nn.LSTM(hidden, hidden)
        self.actor, self.critic = nn.Linear(hidden, actions), nn.Linear(hidden, 1)
        gain = {"encode": 2**0.5, "lstm": 1.0, "actor": 0.01, "critic": 1.0}
        for name, value in self.named_parameters():
            if value.ndim == 2:
                nn.init.orthogonal_(value, gain[name.partition(".")[0]])
            else:
                nn.init.zeros_(value)

    def forward(
        self, observation: Tensor, memory: State, begins: Tensor
    ) -> tuple[Tensor, Tensor, State]:
        """Over T ticks of L lanes.

        Args:
            observation: f32 [T, L, D].
            memory: h and c before the first tick, f32 [1, L, hidden].
            begins: f32 [T, L], 1 where a life begins: what was remembered is forgotten there.

        Returns:
            logits of actions f32 [T, L, A], values f32 [T, L], and the memory after.
        """
        features, kept = torch.tanh(self.encode(observation)), (1.0 - begins)[:, None, :, None]
        outputs = []
        for feature, keep in zip(features, kept, strict=True):
            output, memory = self.lstm(feature[None], (memory[0] * keep, memory[1] * keep))
            outputs.append(output)
        latent = torch.cat(outputs)
        return self.actor(latent), self.critic(latent).squeeze(-1), memory


class LstmPPO:
    """PPO as in CleanRL's ppo_atari_lstm.py (Huang et al. 2022): a minibatch is a set of lanes with
    all their ticks, gradients run through the whole rollout, a truncated life counts as ended. A
    `Learner`; arguments and errors as of `RecurrentPPO`, without sb3-contrib.
    """

    def __init__(
        self, lanes: Any, rollout: int, epochs: int, minibatches: int, hidden: int, seed: int = 0
    ) -> None:
        _must_divide(lanes.num_envs, minibatches)
        torch.manual_seed(seed)
        self.lanes, self.rollout, self.epochs = lanes, rollout, epochs
        self.minibatches = minibatches
        self.now = torch.from_numpy(lanes.reset(seed=seed)[0])
        count = lanes.num_envs
        self.network = LstmPolicy(self.now.shape[1], hidden, lanes.single_action_space.n)
        self.optimizer = torch.optim.Adam(self.network.parameters(), LEARNING_RATE, eps=1e-5)
        self.begun = torch.ones(count)
        self.memory: State = torch.zeros(1, count, hidden), torch.zeros(1, count, hidden)

    def learn(self, iterations: int) -> None:
        rollout, count = self.rollout, self.lanes.num_envs
        seen = torch.zeros(rollout, *self.now.shape)
        action = torch.zeros(rollout, count, dtype=torch.int64)
        log_prob, reward, value, begins, gains = torch.zeros(5, rollout, count)
        for _ in range(iterations):
            first = self.memory
            with torch.no_grad():
                for t in range(rollout):
                    seen[t], begins[t] = self.now, self.begun
                    logits, value[t : t + 1], self.memory = self.network(
                        self.now[None], self.memory, self.begun[None]
                    )
                    choice = Categorical(logits=logits, validate_args=False)
                    chosen = choice.sample()
                    action[t], log_prob[t] = chosen[0], choice.log_prob(chosen)[0]
                    after, gained, terminated, truncated, _ = self.lanes.step(chosen[0].numpy())
                    self.now, reward[t] = torch.from_numpy(after), torch.from_numpy(gained)
                    self.begun = torch.from_numpy(terminated | truncated).float()
                later = self.network(self.now[None], self.memory, self.begun[None])[1][0]
                gain, goes_on = torch.zeros(count), 1.0 - self.begun
                for t in reversed(range(rollout)):
                    delta = reward[t] + GAMMA * goes_on * later - value[t]
                    gains[t] = gain = delta + GAMMA * LAM * goes_on * gain
                    later, goes_on = value[t], 1.0 - begins[t]
                returns = gains + value
            for _ in range(self.epochs):
                for rows in torch.randperm(count).chunk(self.minibatches):
                    start = (first[0][:, rows], first[1][:, rows])
                    logits, estimate, _ = self.network(seen[:, rows], start, begins[:, rows])
                    choice = Categorical(logits=logits, validate_args=False)
                    gain, old, target = gains[:, rows], value[:, rows], returns[:, rows]
                    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                    ratio = (choice.log_prob(action[:, rows]) - log_prob[:, rows]).exp()
                    bounded = ratio.clamp(1 - CLIP, 1 + CLIP)
                    surrogate = torch.min(gain * ratio, gain * bounded).mean()
                    clipped = old + (estimate - old).clamp(-CLIP, CLIP)
                    error = torch.max((estimate - target) ** 2, (clipped - target) ** 2).mean()
                    loss = VALUE * 0.5 * error - surrogate - ENTROPY * choice.entropy().mean()
                    self.optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(self.network.parameters(), MAX_NORM)
                    self.optimizer.step()

    @torch.no_grad()
    def act(self, seen: Tensor, memory: State) -> tuple[Tensor, State]:
        kept = (memory[0][None], memory[1][None])
        logits, _, (h, c) = self.network(seen[None], kept, torch.zeros(1, len(seen)))
        return Categorical(logits=logits[0]).sample(), (h[0], c[0])


PEERS: dict[str, Callable[..., Learner]] = {"recurrent_ppo": RecurrentPPO, "lstm_ppo": LstmPPO}


def measure(
    peer: str, worlds: int, rollout: int, epochs: int, minibatches: int, hidden: int,
    iterations: int, threads: int, everyone: bool = False,
) -> Peer:  # fmt: skip
    """Time one of `PEERS`. Sets the number of torch's threads and seeds torch, for good.

    Args:
        worlds: one lane each, with `everyone` one per agent.
        rollout, epochs, minibatches, hidden: as the peer takes them.
        iterations: that are timed, after one that is not.

    Raises:
        HamletError: as the peer does.
    """
    torch.set_num_threads(threads)
    clock = Clock()
    lanes: Any
    if everyone:
        lanes = Everyone(worlds, clock)
    elif peer == "lstm_ppo":
        lanes = SyncVectorEnv(
            [lambda: Single(clock)] * worlds, autoreset_mode=AutoresetMode.SAME_STEP
        )
    else:
        lanes = _stock_lanes(worlds, clock)
    learner = PEERS[peer](lanes, rollout, epochs, minibatches, hidden)
    learner.learn(1)
    clock.seconds, start = 0.0, time.perf_counter()
    learner.learn(iterations)
    seconds = time.perf_counter() - start
    parameters = sum(value.numel() for value in learner.network.parameters())
    steps = lanes.num_envs * rollout * iterations
    return Peer(steps, seconds, parameters, clock.seconds / seconds)


def _stock_lanes(worlds: int, clock: Clock) -> Any:
    """Stable-Baselines3's own vectorisation."""
    try:
        from stable_baselines3.common.vec_env import DummyVecEnv
    except ImportError as error:
        raise HamletError(*NOT_INSTALLED) from error
    return DummyVecEnv([lambda: Single(clock)] * worlds)


def _must_divide(lanes: int, minibatches: int) -> None:
    if lanes % minibatches:
        raise HamletError(f"minibatches: {minibatches} do not divide {lanes} lanes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("peer", choices=sorted(PEERS))
    parser.add_argument("--worlds", type=int, help="default: 8, with --everyone 256")
    defaults = {"rollout": 32, "epochs": 2, "minibatches": 4, "hidden": 192}
    for name, default in (defaults | {"iterations": 3, "threads": 2}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--everyone", action="store_true", help="all agents of a world learn")
    options = vars(parser.parse_args())
    name = options.pop("peer")
    usual = EVERYONES_WORLDS if options["everyone"] else STOCK_WORLDS
    options["worlds"] = options["worlds"] or usual
    peer = measure(name, **options)
    speed = {"steps_per_second": round(peer.steps / peer.seconds, 1)}
    print(json.dumps({"peer": name} | options | peer._asdict() | speed))


if __name__ == "__main__":
    main()
