"""Two recurrent PPOs made elsewhere, learning in the town: the peers of `benchmarks.learning`.

    python -m benchmarks.learning_peers {recurrent_ppo,lstm_ppo} [--everyone] [--worlds 256] ...

`recurrent_ppo` is that of Stable-Baselines3-contrib; `lstm_ppo` is plain PyTorch in the manner of
CleanRL's ppo_atari_lstm.py. Both learn the default pack on the CPU, through the Gymnasium adapter,
with one network: flat observation -> linear -> tanh -> LSTM -> actor and critic. Neither knows
action masks; an illegal action wastes its tick.

The adapter gives a world one learner and three scripted players, and only the learner's steps
count: of 256 worlds' time on two cores, three tenths are the environment, most of that the
players' planner. `everyone` makes all four agents learners, one lane each under one policy and no
planner: a step of the town then serves four lanes, as it does where our own agents learn, and the
environment's share is below a tenth. The last line is JSON: the options, a `Peer` and
`steps_per_second`. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn
from torch.distributions import Categorical

from pipeline.files import HamletError
from pipeline.town.adapters.flat import flat_observation
from pipeline.town.adapters.gymnasium_env import TownVectorEnv

GAMMA, LAM, CLIP, ENTROPY, VALUE, MAX_NORM, LEARNING_RATE = 0.99, 0.95, 0.2, 0.01, 0.5, 0.5, 2.5e-4
# The fastest of 8, 16 .. 256 worlds on two cores, with and without `everyone`; four times as many
# gain at most half as much again with one learner per world, nothing with `everyone`.
BEST_WORLDS = {"recurrent_ppo": 256, "lstm_ppo": 256}


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


class Lanes(TownVectorEnv):
    """The Gymnasium adapter with a clock (`seconds` spent in `step`); see `everyone` above.

    With `everyone`, observations are f32 [worlds * agents, D], the agents of a world side by side.
    A lane terminates when its agent dies or retires; the dead idle until their world begins the
    next life, and then terminate again.
    """

    def __init__(self, worlds: int, everyone: bool = False):
        super().__init__(worlds)
        self.worlds, self.everyone, self.seconds = worlds, everyone, 0.0
        if everyone:
            self.num_envs = worlds * self.town.num_agents
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
            self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if not self.everyone:
            return super().reset(seed=seed)
        self._state = self.town.reset(seed or 0, self.worlds)
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        start = time.perf_counter()
        result = self._step_everyone(actions) if self.everyone else super().step(actions)
        self.seconds += time.perf_counter() - start
        return result

    def _step_everyone(self, actions: np.ndarray) -> Any:
        state = self.town.step_core(self._state, torch.from_numpy(actions).view(self.worlds, -1))
        over = state["episode_over"]
        ended = (state["died"] | state["retired"] | over[:, None]).flatten().numpy()
        self._state = self.town.renew(state, over) if over.any() else state
        return self._observe(), state["reward"].flatten().numpy(), ended, np.zeros_like(ended), {}

    def _observe(self) -> np.ndarray:
        seen = flat_observation(self.town, self.town.observe(self._state))
        return (seen.flatten(0, 1) if self.everyone else seen[:, 0]).numpy()


def recurrent_ppo(
    worlds: int, rollout: int, epochs: int, minibatches: int, hidden: int, iterations: int,
    threads: int, everyone: bool = False,
) -> Peer:  # fmt: skip
    """RecurrentPPO of Stable-Baselines3-contrib, its LSTM shared by actor and critic.

    The worlds are stepped as one batch: DummyVecEnv would step them one by one. Sets the number of
    torch's threads and seeds torch and numpy, for good.

    Args:
        worlds: stepped side by side; one lane each, with `everyone` one per agent.
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
        from stable_baselines3.common.vec_env import VecEnv
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

        def reset(self) -> Any:
            return lanes.reset(seed=0)[0]

        def step_async(self, actions: np.ndarray) -> None:
            self.actions = actions

        def step_wait(self) -> Any:
            observation, reward, terminated, truncated, info = lanes.step(self.actions)
            infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
            for lane in np.flatnonzero(info.get("_final_obs", ())):
                infos[lane]["terminal_observation"] = info["final_obs"][lane]
                infos[lane]["TimeLimit.truncated"] = bool(truncated[lane])
            return observation, reward, terminated | truncated, infos

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [getattr(lanes, attr_name)] * self.num_envs

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * self.num_envs

        def env_method(
            self, method_name: str, *args: Any, indices: Any = None, **named: Any
        ) -> Any:
            return [getattr(lanes, method_name)(*args, **named)] * self.num_envs

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
            setattr(lanes, attr_name, value)

        def close(self) -> None:
            pass

    torch.set_num_threads(threads)
    lanes = _lanes(worlds, everyone, minibatches)
    each = lanes.num_envs * rollout
    model = RecurrentPPO(
        "MlpLstmPolicy",
        Batched(lanes.num_envs, lanes.single_observation_space, lanes.single_action_space),
        LEARNING_RATE, rollout, each // minibatches, epochs, GAMMA, LAM, CLIP,
        ent_coef=ENTROPY, vf_coef=VALUE, max_grad_norm=MAX_NORM, seed=0, device="cpu",
        policy_kwargs={
            "features_extractor_class": Encoder, "lstm_hidden_size": hidden, "net_arch": [],
            "shared_lstm": True, "enable_critic_lstm": False,
        },
    )  # fmt: skip
    model.learn(each)
    lanes.seconds, start = 0.0, time.perf_counter()
    model.learn(each * iterations, reset_num_timesteps=False)
    return _peer(model.policy, lanes, rollout * iterations, time.perf_counter() - start)


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
    lanes = _lanes(worlds, everyone, minibatches)
    now, count = torch.from_numpy(lanes.reset(seed=0)[0]), lanes.num_envs
    policy = LstmPolicy(now.shape[1], hidden, lanes.town.num_actions)
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE, eps=1e-5)
    seen, action = torch.zeros(rollout, *now.shape), torch.zeros(rollout, count, dtype=torch.int64)
    log_prob, reward, value, begins, gains = torch.zeros(5, rollout, count)
    begun, memory = torch.ones(count), tuple(torch.zeros(2, 1, count, hidden))
    for iteration in range(1 + iterations):
        if iteration == 1:
            lanes.seconds, start = 0.0, time.perf_counter()
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
    return _peer(policy, lanes, rollout * iterations, time.perf_counter() - start)


def _lanes(worlds: int, everyone: bool, minibatches: int) -> Lanes:
    lanes = Lanes(worlds, everyone)
    if lanes.num_envs % minibatches:
        raise HamletError(f"minibatches: {minibatches} do not divide {lanes.num_envs} lanes")
    return lanes


def _peer(policy: nn.Module, lanes: Lanes, ticks: int, seconds: float) -> Peer:
    parameters = sum(value.numel() for value in policy.parameters())
    return Peer(lanes.num_envs * ticks, seconds, parameters, lanes.seconds / seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("peer", choices=sorted(BEST_WORLDS))
    parser.add_argument("--worlds", type=int, help="default: see BEST_WORLDS")
    defaults = {"rollout": 32, "epochs": 2, "minibatches": 4, "hidden": 192}
    for name, default in (defaults | {"iterations": 3, "threads": 2}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--everyone", action="store_true", help="all agents of a world learn")
    options = vars(parser.parse_args())
    name = options.pop("peer")
    options["worlds"] = options["worlds"] or BEST_WORLDS[name]
    peer = {"recurrent_ppo": recurrent_ppo, "lstm_ppo": lstm_ppo}[name](**options)
    speed = {"steps_per_second": round(peer.steps / peer.seconds, 1)}
    print(json.dumps({"peer": name} | options | peer._asdict() | speed))


if __name__ == "__main__":
    main()
