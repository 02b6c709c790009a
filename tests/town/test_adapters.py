"""Each adapter against its library's own checker and conventions; wrong use is told in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hamlet.artifacts import HamletError
from hamlet.town import render_png

SHORT = str(Path(__file__).parent / "short.yaml")
INTERACT, WAIT, REST = 4, 5, 6


def one_line(caught) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


# ------------------------------------------------------------------ Gymnasium


def gymnasium_env(**kwargs):
    pytest.importorskip("gymnasium")
    from hamlet.town.adapters.gymnasium_env import TownEnv

    return TownEnv(**kwargs)


def vector_env(*args, **kwargs):
    pytest.importorskip("gymnasium")
    from hamlet.town.adapters.gymnasium_env import TownVectorEnv

    return TownVectorEnv(*args, **kwargs)


def test_gymnasium_env_passes_its_checker():
    env = gymnasium_env(pack=SHORT, names=["rest"], render_mode="rgb_array")
    from gymnasium.utils.env_checker import check_env

    check_env(env, skip_render_check=False)


def test_gymnasium_vector_env_resets_in_the_same_step():
    env = vector_env(3, pack=SHORT, names=["random"])
    observation, _ = env.reset(seed=1)
    assert env.observation_space.contains(observation)
    again, _ = vector_env(3, pack=SHORT, names=["random"]).reset(seed=1)
    assert np.array_equal(observation, again)
    age = env.town.self_names.index("age") + 25 * (env.town.num_cell_codes + 1)
    ended = 0
    for _ in range(60):
        observation, reward, died, retired, info = env.step(np.full(3, WAIT))
        assert env.observation_space.contains(observation)
        assert ((reward >= 0) & (reward <= 1)).all()
        if (died | retired).any():
            ended += int(died.sum())
            assert (info["_final_obs"] == (died | retired)).all()
            assert (observation[died | retired, age] == 0).all()
    assert ended >= 3


def test_what_ended_keeps_its_last_observation_and_mask():
    """Dying and retiring: final_info holds the mask of the last tick, not of the next life."""
    env = vector_env(8, pack=SHORT, names=["rest"])
    env.reset(seed=3)
    actions = np.array([WAIT, REST] * 4)
    died_once = retired_once = False
    for _ in range(90):
        before = env.world
        _, _, died, retired, info = env.step(actions)
        ended = died | retired
        assert (died & retired).sum() == 0
        assert ("final_info" in info) == ended.any()
        if not ended.any():
            continue
        died_once, retired_once = died_once or died.any(), retired_once or retired.any()
        last = info["final_info"]["action_mask"]
        assert last.dtype == np.int8
        assert (info["final_info"]["_action_mask"] == ended).all()
        assert (info["_final_info"] == ended).all()
        assert (last[died] == np.eye(env.town.num_actions, dtype=np.int8)[WAIT]).all()
        assert (last[retired].sum(1) > 1).all()
        assert (last[~ended] == 0).all()
        assert [x is not None for x in info["final_obs"]] == ended.tolist()
        age = env.town.self_names.index("age") + 25 * (env.town.num_cell_codes + 1)
        ages = np.array([info["final_obs"][i][age] for i in np.flatnonzero(ended)])
        expected = (before["tick"].numpy()[ended] + 1) / env.town.lifespan
        np.testing.assert_allclose(ages, expected, rtol=1e-6)
    assert died_once
    assert retired_once


def test_masks_can_be_sampled_from():
    env = vector_env(4)
    _, info = env.reset(seed=0)
    for row in info["action_mask"]:
        action = env.single_action_space.sample(mask=row)  # int8 only
        assert row[action] == 1
    alone = gymnasium_env()
    _, info = alone.reset(seed=0)
    assert info["action_mask"][alone.action_space.sample(mask=info["action_mask"])] == 1
    assert alone.action_masks().dtype == bool


def test_seeds_are_those_of_the_single_environments():
    env = vector_env(3)
    listed, _ = env.reset(seed=[7, 8, 20])
    counted, _ = env.reset(seed=np.int64(7))  # as a generator of NumPy draws it
    assert np.array_equal(listed[:2], counted[:2])
    assert not np.array_equal(listed[2], counted[2])
    for seed, row in ((7, listed[0]), (20, listed[2])):
        single, _ = gymnasium_env().reset(seed=seed)
        assert np.array_equal(single, row)
    free = [env.reset(seed=[7, None, 9])[0] for _ in range(2)]
    assert np.array_equal(free[0][0], free[1][0])
    assert not np.array_equal(free[0][1], free[1][1])
    for wrong in ([1, 2], [1, 2, -3], [1, 2, 3.5], -1):
        with pytest.raises(HamletError) as caught:
            env.reset(seed=wrong)
        assert "seed" in one_line(caught)


def test_unseeded_resets_differ():
    env = vector_env(2)
    first, _ = env.reset(seed=1)
    second, _ = env.reset()
    third, _ = env.reset()
    assert not np.array_equal(first, second)
    assert not np.array_equal(second, third)


@pytest.mark.parametrize("wrong", [-1, 8, 1.5, [3], np.nan, None])
def test_a_wrong_action_changes_nothing(wrong):
    """-1 means not to take part inside; it froze the world for good."""
    env = gymnasium_env(names=["rest"])
    env.reset(seed=1)
    with pytest.raises(HamletError) as caught:
        env.step(wrong)
    assert "pass" in one_line(caught)
    assert int(env.worlds.world["tick"][0]) == 0


def test_minus_one_is_named_with_the_actions_there_are():
    worlds = vector_env(2)
    worlds.reset(seed=1)
    with pytest.raises(HamletError) as caught:
        worlds.step(np.array([0, -1]))
    assert one_line(caught).startswith("action -1 does not exist: pass 0 to 7 (UP, DOWN")


def test_a_life_that_ended_wants_a_reset():
    env = gymnasium_env(pack=SHORT, names=["rest"])
    from gymnasium.error import ResetNeeded

    for call in (lambda: env.step(WAIT), env.action_masks):
        with pytest.raises(ResetNeeded):
            call()
    env.reset(seed=2)
    ended = False
    while not ended:
        _, _, died, retired, info = env.step(WAIT)
        ended = died or retired
    assert info["action_mask"].sum() == (1 if died else info["action_mask"].sum())
    assert info["action_mask"][WAIT] == 1
    with pytest.raises(ResetNeeded):
        env.step(WAIT)
    env.reset(seed=2)
    env.step(WAIT)
    with pytest.raises(ResetNeeded):
        vector_env(2).step(np.array([WAIT, WAIT]))


def test_the_mask_of_the_dead_is_theirs():
    """Not that of the next life, which has begun behind it."""
    env = gymnasium_env(pack=SHORT, names=["rest"])
    env.reset(seed=4)
    while True:
        _, _, died, retired, info = env.step(INTERACT)
        if died or retired:
            break
    assert died
    assert np.flatnonzero(info["action_mask"]).tolist() == [WAIT]


@pytest.mark.parametrize("make", [gymnasium_env, lambda **k: vector_env(2, **k),
                                  lambda **k: zoo_env(**k)])  # fmt: skip
def test_what_does_not_exist_is_refused_in_one_line(make):
    with pytest.raises(HamletError) as caught:
        make(render_mode="human")
    assert one_line(caught) == "render_mode 'human' does not exist: use rgb_array or None"
    with pytest.raises(HamletError) as caught:
        make(pack="l9_nowhere")
    assert "l9_nowhere" in one_line(caught)
    env = make(pack=SHORT)
    with pytest.warns(UserWarning, match="reset has no option 'hour': it is ignored"):
        env.reset(options={"hour": 3})


# ------------------------------------------------------------------ PettingZoo


def zoo_env(**kwargs):
    pytest.importorskip("pettingzoo")
    from hamlet.town.adapters.pettingzoo_env import TownParallelEnv

    return TownParallelEnv(**kwargs)


def play_zoo(env, seed=0, choose=lambda agent, observation: WAIT):
    """One world to its end; everything that each step returned, with who acted."""
    observations, _ = env.reset(seed=seed)
    found = []
    while env.agents:
        actions = {agent: choose(agent, observations[agent]) for agent in env.agents}
        observations, *rest = env.step(actions)
        found.append((list(actions), observations, *rest))
    return found


def test_pettingzoo_env_draws_its_world_if_it_was_asked_to():
    env = zoo_env(pack=SHORT, render_mode="rgb_array")
    env.reset(seed=1)
    assert np.array_equal(env.render(), np.asarray(render_png(env.town, env.world, 0)))
    silent = zoo_env(pack=SHORT)
    silent.reset(seed=1)
    assert silent.render() is None


@pytest.mark.parametrize("convention", ["pettingzoo", "rllib"])
def test_pettingzoo_env_passes_its_checkers(convention):
    env = zoo_env(pack=SHORT, convention=convention)
    from pettingzoo.test import parallel_api_test, parallel_seed_test

    parallel_api_test(env, num_cycles=100)
    parallel_seed_test(lambda: zoo_env(pack=SHORT, convention=convention), num_cycles=40)


@pytest.mark.parametrize("convention", ["pettingzoo", "supersuit", "rllib"])
def test_what_is_observed_lies_in_its_space(convention):
    env = zoo_env(pack=SHORT, convention=convention)
    observations, _ = env.reset(seed=0)
    for agent in env.agents:
        space = env.observation_space(agent)
        assert space.contains(observations[agent])
        if convention != "supersuit":
            mask = space["action_mask"]
            assert (mask.low.tolist(), mask.high.tolist()) == (
                [0] * len(mask.low),
                [1] * len(mask.low),
            )


def test_every_agent_ends_once_and_the_world_with_the_last():
    ends = dict.fromkeys(zoo_env().possible_agents, 0)
    rows = play_zoo(zoo_env(pack=SHORT))
    for acted, observations, rewards, terminated, truncated, infos in rows:
        for mapping in (observations, rewards, terminated, truncated, infos):
            assert sorted(mapping) == sorted(acted)
        for agent in acted:
            assert not (terminated[agent] and truncated[agent])
            ends[agent] += terminated[agent] or truncated[agent]
            if terminated[agent]:
                mask = observations[agent]["action_mask"]
                assert np.flatnonzero(mask).tolist() == [WAIT]
                assert rewards[agent] == 0.0
    assert set(ends.values()) == {1}


def test_for_supersuit_all_stay_until_the_world_ends():
    env = zoo_env(pack=SHORT, convention="supersuit")
    *before, last = play_zoo(env)
    assert before
    died: set[str] = set()
    for acted, _, _, terminated, _, _ in [*before, last]:
        assert acted == env.possible_agents
        died |= {agent for agent in acted if terminated[agent]}
    assert died
    _, _, _, terminated, truncated, _ = last
    for agent in env.possible_agents:
        assert (terminated[agent], truncated[agent]) == (agent in died, agent not in died)
    assert env.agents == []


def test_actions_are_wanted_of_those_who_play_and_nobody_else():
    env = zoo_env(pack=SHORT)
    env.reset(seed=1)
    everyone = dict.fromkeys(env.agents, WAIT)
    for wrong, part in (
        (dict.fromkeys(env.agents[1:], WAIT), "no action of agent_0"),
        (everyone | {"agent_9": WAIT}, "agent_9 does not play"),
        (everyone | {"agent_2": -1}, "action -1 does not exist"),
        (everyone | {"agent_2": 99}, "action 99 does not exist"),
        (everyone | {"agent_2": None}, "actions are object"),
    ):
        with pytest.raises(HamletError) as caught:
            env.step(wrong)
        assert part in one_line(caught)
    assert int(env.world["tick"][0]) == 0
    while len(env.agents) == 4:
        env.step(dict.fromkeys(env.agents, WAIT))
    gone = next(a for a in env.possible_agents if a not in env.agents)
    if env.agents:
        with pytest.raises(HamletError) as caught:
            env.step(dict.fromkeys(env.possible_agents, WAIT))
        assert f"{gone} does not play" in one_line(caught)


def test_the_state_is_the_whole_truth():
    env = zoo_env()
    env.reset(seed=2)
    before = env.state()
    assert env.state_space.contains(before)
    env.step(dict.fromkeys(env.agents, WAIT))
    assert not np.array_equal(before, env.state())
    town, state = env.town, env.world
    k, n, f = town.num_meters, town.num_agents, town.num_affordances
    parts = np.split(env.state(), np.cumsum([n * k, 2 * n, n, n, 2 * f]))
    meters, spots, progress, alive, places, clock = parts
    np.testing.assert_array_equal(meters.reshape(n, k), state["meters"][0].numpy())
    np.testing.assert_allclose(spots.reshape(n, 2) * 7, state["position"][0].numpy(), atol=1e-5)
    cells = town.affordance_cells[state["layout"][0]].numpy()
    np.testing.assert_allclose(
        places.reshape(f, 2) * 7, np.stack([cells % 8, cells // 8], 1), atol=1e-5
    )
    assert alive.tolist() == [1.0] * n
    assert progress.tolist() == [0.0] * n
    np.testing.assert_allclose(clock, [1 / 24, 1 / 500], rtol=1e-6)


def test_the_dead_stay_where_supersuit_wants_them():
    """Its vector environment refuses agents that vanish and masks that stand in observations."""
    library = pytest.importorskip("supersuit")
    env = zoo_env(pack=SHORT, convention="supersuit")
    died: set[str] = set()
    rows = play_zoo(env)
    for tick, (acted, observations, rewards, terminated, truncated, infos) in enumerate(rows):
        assert acted == env.possible_agents
        last = tick == len(rows) - 1
        for agent in acted:
            ends = terminated[agent] or truncated[agent]
            if agent in died:
                assert not observations[agent].any()
                assert rewards[agent] == 0.0
                assert np.flatnonzero(infos[agent]["action_mask"]).tolist() == [WAIT]
                assert ends == last
            elif ends:
                died.add(agent)
            else:
                assert observations[agent].any()
                assert infos[agent]["action_mask"].sum() > 1
        assert all(terminated[a] or truncated[a] for a in acted) == last
    assert len(died) == 4
    worlds = library.pettingzoo_env_to_vec_env_v1(zoo_env(pack=SHORT, convention="supersuit"))
    worlds.reset(seed=0)
    resets = 0
    for _ in range(100):
        observations, _, ended, aged, _ = worlds.step(np.full(4, WAIT))
        assert observations.shape[0] == 4
        resets += bool((ended | aged).all())
    assert resets >= 2


def test_rllib_finds_its_keys_and_an_end():
    """Its wrapper ends when all who acted died or all retired; else it steps once more."""
    env = zoo_env(pack=SHORT, convention="rllib")
    for seed in range(4):
        observations, _ = env.reset(seed=seed)
        assert set(observations["agent_0"]) == {"observations", "action_mask"}
        finished = False
        for _ in range(60):
            acts = {a: int(np.flatnonzero(o["action_mask"])[0]) for a, o in observations.items()
                    if a in env.agents}  # fmt: skip
            observations, _, terminated, truncated, _ = env.step(acts)
            finished = all(terminated.values()) or all(truncated.values())
            if finished:
                break
        assert finished


def test_an_unknown_convention_is_named():
    pytest.importorskip("pettingzoo")
    with pytest.raises(HamletError) as caught:
        zoo_env(convention="mine")
    assert "use one of pettingzoo, rllib, supersuit" in one_line(caught)


# ------------------------------------------------------------------ TorchRL


def torchrl_env(*args, **kwargs):
    pytest.importorskip("torchrl")
    from hamlet.town.adapters.torchrl_env import TownTorchRLEnv

    return TownTorchRLEnv(*args, **kwargs)


def test_torchrl_env_passes_its_checker():
    env = torchrl_env(4)
    from torchrl.envs.utils import check_env_specs

    check_env_specs(env)


def test_torchrl_tells_death_from_old_age_agent_by_agent():
    import torch

    env = torchrl_env(6, pack=SHORT)
    env.set_seed(1)

    def half_rest(td):
        return td.set(("agents", "action"), torch.tensor([WAIT, REST, WAIT, REST]).expand(6, 4))

    rows = env.rollout(90, policy=half_rest, break_when_any_done=False)
    after = rows["next"]
    alive, started = rows["agents", "mask"], after["agents", "done"].squeeze(-1)
    died = after["agents", "terminated"].squeeze(-1)
    aged = after["agents", "truncated"].squeeze(-1)
    over, root = after["done"].squeeze(-1), after["truncated"].squeeze(-1)
    assert died.any()
    assert aged.any()
    assert not (died & aged).any()
    assert torch.equal(started, died | aged)
    assert torch.equal(over, (died | aged).all(-1))
    assert torch.equal(root, aged.any(-1))
    assert torch.equal(after["terminated"].squeeze(-1), over & ~root)
    assert torch.equal(after["agents", "mask"], ~died)
    # The dead stay dead until their world is over; then all of it begins again, and nothing else.
    assert torch.equal(alive[:, 1:], ~(died & ~over.unsqueeze(-1))[:, :-1])
    age = torch.where(over, 0.0, after["state"][..., -1])
    assert torch.equal(rows["state"][:, 1:, -1], age[:, :-1])
    assert over.sum() >= 6


@pytest.mark.parametrize("wrong", [-1, 8])
def test_torchrl_refuses_a_wrong_action(wrong):
    env = torchrl_env(2)
    td = env.reset()
    td = env.rand_action(td)
    td["agents", "action"][1, 2] = wrong
    with pytest.raises(HamletError, match=f"action {wrong} does not exist"):
        env.step(td)


@pytest.mark.parametrize("make", [zoo_env, gymnasium_env, lambda **k: torchrl_env(2, **k)])
def test_a_town_of_one_is_played(make):
    env = make(pack="l3_hours")
    if hasattr(env, "rollout"):
        assert env.rollout(5)["agents", "observation"].shape[2] == 1
        return
    env.reset(seed=1)
    env.step({"agent_0": WAIT} if hasattr(env, "possible_agents") else WAIT)


@pytest.mark.slow
def test_a_stock_ppo_trains_through_the_gymnasium_adapter():
    library = pytest.importorskip("stable_baselines3")
    env = gymnasium_env(names=["rest"])
    model = library.PPO("MlpPolicy", env, n_steps=256, batch_size=64, seed=0)
    before = model.policy.state_dict()["action_net.weight"].clone()
    model.learn(512)
    assert not before.equal(model.policy.state_dict()["action_net.weight"])


def test_every_seed_is_a_world_of_its_own():
    """And the same one again; without a seed each reset goes on to another world."""
    env = zoo_env(pack=SHORT)
    worlds = []
    for seed in [*range(60), *range(60)]:
        env.reset(seed=seed)
        worlds.append(int(env.world["seed"][0]))
    assert worlds[:60] == worlds[60:]
    assert len(set(worlds)) == 60

    found = []
    for _ in range(2):  # what comes after a seed follows from it, also in the next resets
        env = vector_env(2, pack=SHORT, names=["random"])
        env.reset(seed=7)
        found.append([env.reset()[0].tolist() for _ in range(3)])
    assert found[0] == found[1]

    env = torchrl_env(1, pack=SHORT)
    found = []
    for seed in (None, 0, 1, 2):
        env.set_seed(seed)
        found.append([env.reset()["state"].sum().item() for _ in range(8)])
    assert found[0] == found[1]
    assert len({state for states in found[1:] for state in states}) > 20
