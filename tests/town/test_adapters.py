"""Each adapter against its library's own checker, and a stock PPO on the Gymnasium one."""

from __future__ import annotations

import numpy as np
import pytest


def test_gymnasium_env_passes_its_checker():
    pytest.importorskip("gymnasium")
    from gymnasium.utils.env_checker import check_env

    from hamlet.town.adapters.gymnasium_env import TownEnv

    check_env(TownEnv(render_mode="rgb_array"), skip_render_check=False)


def test_gymnasium_vector_env_resets_in_the_same_step():
    pytest.importorskip("gymnasium")
    from hamlet.town.adapters.gymnasium_env import TownVectorEnv

    env = TownVectorEnv(3, names=["random"])
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    again, _ = TownVectorEnv(3, names=["random"]).reset(seed=1)
    assert np.array_equal(observation, again)
    ended = 0
    for _ in range(260):
        observation, reward, died, retired, info = env.step(np.full(3, 5))
        assert env.observation_space.contains(observation)
        assert ((reward >= 0) & (reward <= 1)).all()
        if (died | retired).any():
            ended += int(died.sum())
            assert (info["_final_obs"] == died).all()
            age = env.town.self_names.index("age") + 25 * (env.town.num_cell_codes + 1)
            assert (observation[died, age] == 0).all()
    assert ended == 3


def test_pettingzoo_env_passes_its_checker():
    pytest.importorskip("pettingzoo")
    from pettingzoo.test import parallel_api_test

    from hamlet.town.adapters.pettingzoo_env import TownParallelEnv

    parallel_api_test(TownParallelEnv(), num_cycles=300)


def test_torchrl_env_passes_its_checker():
    pytest.importorskip("torchrl")
    from torchrl.envs.utils import check_env_specs

    from hamlet.town.adapters.torchrl_env import TownTorchRLEnv

    env = TownTorchRLEnv(4)
    check_env_specs(env)
    assert env.rollout(300)["next", "reward"].shape[2:] == (4, 1)


@pytest.mark.slow
def test_a_stock_ppo_trains_through_the_gymnasium_adapter():
    library = pytest.importorskip("stable_baselines3")
    from hamlet.town.adapters.gymnasium_env import TownEnv

    model = library.PPO("MlpPolicy", TownEnv(names=["rest"]), n_steps=256, batch_size=64, seed=0)
    before = model.policy.state_dict()["action_net.weight"].clone()
    model.learn(512)
    assert not before.equal(model.policy.state_dict()["action_net.weight"])
