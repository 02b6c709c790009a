"""Two recurrent PPOs made elsewhere, learning in the town: the peers of `benchmarks.learning`.

    python -m benchmarks.learning_peers {recurrent_ppo,lstm_ppo} [--everyone] [--worlds 8] ...

`recurrent_ppo` is that of Stable-Baselines3-contrib; `lstm_ppo` is plain PyTorch in the manner of
CleanRL's ppo_atari_lstm.py. Both learn the default pack on the CPU with one network: flat
observation -> linear -> tanh -> LSTM -> actor and critic. Neither knows action masks; an illegal
action wastes its tick.

They learn as their users run them: eight Gymnasium environments, each with one learner and three
scripted players, in the library's own vectorisation, which steps them one by one. Only the
learners' steps count. `everyone` lends them what our own training has: worlds stepped as one batch,
and all four agents of a world learning, a lane each under one policy, without scripted players.
What is left between them and us is then the learning alone. The last line is JSON: the options, a
`Peer` and `steps_per_second`. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn
from torch.distributions import Categorical

from pipeline.files import HamletError
from pipeline.town.adapters.flat import flat_observation
from pipeline.town.adapters.gymnasium_env import TownEnv, TownVectorEnv

GAMMA, LAM, CLIP, ENTROPY, VALUE, MAX_NORM, LEARNING_RATE = 0.99, 0.95, 0.2, 0.01, 0.5, 0.5, 2.5e-4
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

    Observations are f32 [worlds * agents, D]. A lane terminates when its agent dies or retires; the
    dead idle until their world begins the next life, and then terminate again.
    """

    def __init__(self, worlds: int, clock: Clock):
        super().__init__(worlds)
        self.worlds, self.clock = worlds, clock
        self.num_envs = worlds * self.town.num_agents
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._state = self.town.reset(seed or 0, self.worlds)
        return self._observe(), {}

    def step(self, actions: np.ndarray) -> Any:
        start = time.perf_counter()
        state = self.town.step_core(self._state, torch.from_numpy(actions).view(self.worlds, -1))
        over = state["episode_over"]
        ended = (state["died"] | state["retired"] | over[:, None]).flatten().numpy()
        self._state = self.town.renew(state, over) if over.any() else state
        seen = self._observe()
        self.clock.seconds += time.perf_counter() - start
        return seen, state["reward"].flatten().numpy(), ended, np.zeros_like(ended), {}

    def _observe(self) -> np.ndarray:
        return flat_observation(self.town, self.town.observe(self._state)).flatten(0, 1).numpy()


def recurrent_ppo(
    worlds: int, rollout: int, epochs: int, minibatches: int, hidden: int, iterations: int,
    threads: int, everyone: bool = False,
) -> Peer:  # fmt: skip
    """RecurrentPPO of Stable-Baselines3-contrib, its LSTM shared by actor and critic.

    Sets the number of torch's threads and seeds torch and numpy, for good.

    Args:
        worlds: one lane each, with `everyone` one per agent.
        rollout: ticks collected per iteration.
        epochs, minibatches: of each iteration's update.
        hidden: width of the linear layer and of the LSTM.
        iterations: that are timed, after one that is not.

    Raises:
        HamletError: if sb3-contrib is not installed or the lanes do not divide into minibatches.
    """
    try:
        from sb3_contrib import RecurrentPPO
        from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
        from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
    except ImportError as error:
        raise HamletError("sb3-contrib is not installed", 'pip install -e ".[bench]"') from error

    class Encoder(BaseFeaturesExtractor):
        def __init__(self, space: Any):
            super().__init__(space, hidden)
            self.linear = nn.Linear(space.shape[0], hidden)

        def forward(self, observation: Tensor) -> Tensor:
            return torch.tanh(self.linear(observation))

    class Batched(VecEnv):
        """The lanes as Stable-Baselines3 wants them: they are one environment, and share all."""

        def __init__(self, lanes: Everyone):
            self.lanes = lanes
            super().__init__(lanes.num_envs, lanes.single_observation_space, space)

        def reset(self) -> Any:
            return self.lanes.reset(seed=0)[0]

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

    torch.set_num_threads(threads)
    clock = Clock()
    space = Single(clock).action_space
    lanes = (
        Batched(Everyone(worlds, clock))
        if everyone
        else DummyVecEnv([lambda: Single(clock)] * worlds)
    )
    _must_divide(lanes.num_envs, minibatches)
    each = lanes.num_envs * rollout
    model = RecurrentPPO(
        "MlpLstmPolicy", lanes,
        LEARNING_RATE, rollout, each // minibatches, epochs, GAMMA, LAM, CLIP,
        ent_coef=ENTROPY, vf_coef=VALUE, max_grad_norm=MAX_NORM, seed=0, device="cpu",
        policy_kwargs={
            "features_extractor_class": Encoder, "lstm_hidden_size": hidden, "net_arch": [],
            "shared_lstm": True, "enable_critic_lstm": False,
        },
    )  # fmt: skip
    model.learn(each)
    clock.seconds, start = 0.0, time.perf_counter()
    model.learn(each * iterations, reset_num_timesteps=False)
    return _peer(model.policy, each * iterations, time.perf_counter() - start, clock)


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
        self, observation: Tensor, memory: tuple[Tensor, Tensor], begins: Tensor
    ) -> tuple[Categorical, Tensor, tuple[Tensor, Tensor]]:
        """Over T ticks of L lanes.

        Args:
            observation: f32 [T, L, D].
            memory: h and c before the first tick, f32 [1, L, hidden].
            begins: f32 [T, L], 1 where a life begins: what was remembered is forgotten there.

        Returns:
            the distribution of actions [T, L], values f32 [T, L], and the memory after.
        """
        features, kept = torch.tanh(self.encode(observation)), (1.0 - begins)[:, None, :, None]
        outputs = []
        for feature, keep in zip(features, kept, strict=True):
            output, memory = self.lstm(feature[None], (memory[0] * keep, memory[1] * keep))
            outputs.append(output)
        latent = torch.cat(outputs)
        choice = Categorical(logits=self.actor(latent), validate_args=False)
        return choice, self.critic(latent).squeeze(-1), memory


def lstm_ppo(
    worlds: int, rollout: int, epochs: int, minibatches: int, hidden: int, iterations: int,
    threads: int, everyone: bool = False,
) -> Peer:  # fmt: skip
    """PPO as in CleanRL's ppo_atari_lstm.py (Huang et al. 2022): a minibatch is a set of lanes with
    all their ticks, gradients run through the whole rollout, a truncated life counts as ended.
    Arguments, errors and side effects as of `recurrent_ppo`, without sb3-contrib.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    clock = Clock()
    lanes: VectorEnv = (
        Everyone(worlds, clock)
        if everyone
        else SyncVectorEnv([lambda: Single(clock)] * worlds, autoreset_mode=AutoresetMode.SAME_STEP)
    )
    _must_divide(lanes.num_envs, minibatches)
    now, count = torch.from_numpy(lanes.reset(seed=0)[0]), lanes.num_envs
    policy = LstmPolicy(now.shape[1], hidden, lanes.single_action_space.n)  # type: ignore[attr-defined]
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE, eps=1e-5)
    seen, action = torch.zeros(rollout, *now.shape), torch.zeros(rollout, count, dtype=torch.int64)
    log_prob, reward, value, begins, gains = torch.zeros(5, rollout, count)
    begun, memory = torch.ones(count), tuple(torch.zeros(2, 1, count, hidden))
    for iteration in range(1 + iterations):
        if iteration == 1:
            clock.seconds, start = 0.0, time.perf_counter()
        first = memory
        with torch.no_grad():
            for t in range(rollout):
                seen[t], begins[t] = now, begun
                choice, value[t : t + 1], memory = policy(now[None], memory, begun[None])
                chosen = choice.sample()
                action[t], log_prob[t] = chosen[0], choice.log_prob(chosen)[0]
                after, gained, terminated, truncated, _ = lanes.step(chosen[0].numpy())
                now, begun = torch.from_numpy(after), torch.from_numpy(terminated | truncated)
                reward[t], begun = torch.from_numpy(gained), begun.float()
            later, gain = policy(now[None], memory, begun[None])[1][0], torch.zeros(count)
            goes_on = 1.0 - begun
            for t in reversed(range(rollout)):
                delta = reward[t] + GAMMA * goes_on * later - value[t]
                gains[t] = gain = delta + GAMMA * LAM * goes_on * gain
                later, goes_on = value[t], 1.0 - begins[t]
            returns = gains + value
        for _ in range(epochs):
            for rows in torch.randperm(count).chunk(minibatches):
                start_memory = (first[0][:, rows], first[1][:, rows])
                choice, estimate, _ = policy(seen[:, rows], start_memory, begins[:, rows])
                gain, old, target = gains[:, rows], value[:, rows], returns[:, rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                ratio = (choice.log_prob(action[:, rows]) - log_prob[:, rows]).exp()
                surrogate = torch.min(gain * ratio, gain * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                clipped = old + (estimate - old).clamp(-CLIP, CLIP)
                error = torch.max((estimate - target) ** 2, (clipped - target) ** 2).mean()
                loss = VALUE * 0.5 * error - surrogate - ENTROPY * choice.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
                optimizer.step()
    return _peer(policy, count * rollout * iterations, time.perf_counter() - start, clock)


def _must_divide(lanes: int, minibatches: int) -> None:
    if lanes % minibatches:
        raise HamletError(f"minibatches: {minibatches} do not divide {lanes} lanes")


def _peer(policy: nn.Module, steps: int, seconds: float, clock: Clock) -> Peer:
    parameters = sum(value.numel() for value in policy.parameters())
    return Peer(steps, seconds, parameters, clock.seconds / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("peer", choices=["lstm_ppo", "recurrent_ppo"])
    parser.add_argument("--worlds", type=int, help="default: 8, with --everyone 256")
    defaults = {"rollout": 32, "epochs": 2, "minibatches": 4, "hidden": 192}
    for name, default in (defaults | {"iterations": 3, "threads": 2}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--everyone", action="store_true", help="all agents of a world learn")
    options = vars(parser.parse_args())
    name = options.pop("peer")
    usual = EVERYONES_WORLDS if options["everyone"] else STOCK_WORLDS
    options["worlds"] = options["worlds"] or usual
    peer = {"recurrent_ppo": recurrent_ppo, "lstm_ppo": lstm_ppo}[name](**options)
    speed = {"steps_per_second": round(peer.steps / peer.seconds, 1)}
    print(json.dumps({"peer": name} | options | peer._asdict() | speed))


if __name__ == "__main__":
    main()
