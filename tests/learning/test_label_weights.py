"""What each row counts for in the losses of A, B and C, against sums written out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from hamlet.learning.beliefs import believe
from hamlet.learning.train_perception import (
    decode_map,
    expected_calibration_error,
    perception_loss,
)
from hamlet.learning.train_social import evaluate_social, predict, social_loss, with_labels
from hamlet.learning.train_world_model import (
    IMPORTANCE,
    auroc,
    experience,
    output_scale,
    r_squared,
    targets,
    windows,
    world_model_loss,
)
from hamlet.learning.tune_social import held_out_loss
from hamlet.modules.contracts import METERS
from hamlet.modules.world_model import ERROR_UNIT, Prediction


def softmax_loss(logits, index: int) -> float:
    """-log p of one choice, from plain numbers."""
    return math.log(sum(math.exp(x) for x in logits)) - logits[index]


# ------------------------------------------------------------------------------------------------
# C: the others' goals and next actions


class Reader:
    """Module C whose state is, per other agent, one number to which 1 is added every tick; the
    state before it and the agent's own `mean` are its logits."""

    shape = SimpleNamespace(num_others=1, num_agents=2)
    recurrent_dim = 1

    def logits(self, mean, log_std, known, cues, visible, offset, action, state):
        goal = torch.cat([state, mean[:, None, :1], mean[:, None, 1:2]], -1)
        return goal, -goal[..., :2], state + 1


def recorded(ticks: int, worlds: int = 1) -> TensorDict:
    """Two agents in each world, everything random; lives begin at random."""
    rng = torch.Generator().manual_seed(4)
    size = (ticks, worlds, 2)

    def numbers(*more):
        return torch.randn(*size, *more, generator=rng)

    data = TensorDict(
        {
            "self_state": numbers(3), "cues": numbers(1, 2), "visible": numbers(1) > 0,
            "others_offset": numbers(1, 2),
            "others_action": torch.randint(2, (*size, 1), generator=rng),
            "action": torch.randint(2, size, generator=rng),
            "goal": torch.randint(3, size, generator=rng), "alive": numbers() > -1,
            "first": torch.rand(ticks, worlds, generator=rng) < 0.3,
        },
        batch_size=[ticks, worlds],
    )  # fmt: skip
    beliefs = TensorDict({"mean": numbers(2), "log_std": numbers(2)}, batch_size=[ticks, worlds, 2])
    return with_labels(data, beliefs), data, beliefs


def test_labels_are_the_other_agents_own_goal_and_action_of_the_same_tick():
    labelled, data, beliefs = recorded(6, 3)
    for mine, other in ((0, 1), (1, 0)):
        for label, field in {
            "others_goal": "goal", "others_next_action": "action", "others_alive": "alive",
        }.items():  # fmt: skip
            assert torch.equal(labelled[label][:, :, mine, 0], data[field][:, :, other])
    assert torch.equal(labelled["mean"], beliefs["mean"])


def flat(labelled: TensorDict) -> TensorDict:
    """[T, B] of worlds with two agents each -> [T, 2 B] of agents, written without the library."""
    rows = {}
    for name, value in labelled.items():
        if name == "first":
            value = torch.stack([value, value], 2)
        rows[name] = value.reshape(value.shape[0], -1, *value.shape[3:])
    return TensorDict(rows, batch_size=[labelled.shape[0], labelled.shape[1] * 2])


def said(chunk: TensorDict, state: list[float]) -> list[list[list[float]]]:
    """Goal logits of `Reader` by tick and slot; a new life begins at 0."""
    out = []
    for t in range(chunk.shape[0]):
        row = []
        for s in range(chunk.shape[1]):
            if chunk["first"][t, s]:
                state[s] = 0.0
            row.append([state[s], *chunk["mean"][t, s].tolist()])
            state[s] += 1
        out.append(row)
    return out


def test_what_is_seen_of_the_living_counts_ten_times_what_is_not():
    chunk = flat(recorded(9, 2)[0])
    start = torch.tensor([3.0, 1.0, 0.0, 5.0])
    got, after = social_loss(Reader(), chunk, start[:, None, None])
    state = start.tolist()
    logits = said(chunk, state)
    sums, weights = {"goal": 0.0, "next_action": 0.0}, 0.0
    for t in range(9):
        for s in range(4):
            alive = bool(chunk["others_alive"][t, s, 0]) and bool(chunk["alive"][t, s])
            weight = (1.0 if chunk["visible"][t, s, 0] else 0.1) * alive
            goal, action = (int(chunk[f"others_{x}"][t, s, 0]) for x in ("goal", "next_action"))
            sums["goal"] += weight * softmax_loss(logits[t][s], goal)
            sums["next_action"] += weight * softmax_loss([-x for x in logits[t][s][:2]], action)
            weights += weight
    for name, total in sums.items():
        assert float(got[name]) == pytest.approx(total / weights, rel=1e-5)
    torch.testing.assert_close(after.flatten(), torch.tensor(state))


def test_held_out_scores_count_living_others_in_sight_only():
    labelled, *_ = recorded(12, 3)
    chunk = flat(labelled)
    logits = said(chunk, [0.0] * 6)
    rows = [
        (t, s) for t in range(12) for s in range(6)
        if chunk["visible"][t, s, 0] and chunk["others_alive"][t, s, 0] and chunk["alive"][t, s]
    ]  # fmt: skip
    total = right = 0.0
    for t, s in rows:
        goal, action = (int(chunk[f"others_{x}"][t, s, 0]) for x in ("goal", "next_action"))
        total += softmax_loss(logits[t][s], goal)
        total += softmax_loss([-x for x in logits[t][s][:2]], action)
        right += max(range(3), key=lambda i, row=logits[t][s]: row[i]) == goal
    worlds = torch.arange(3)
    for ticks in (12, 5):  # chunks carry the state along
        loss = held_out_loss(Reader(), labelled, worlds, ticks)
        assert loss == pytest.approx(total / len(rows), rel=1e-5)
        report = evaluate_social(Reader(), labelled, worlds, ticks)
        assert report["goal_accuracy"] == pytest.approx(right / len(rows))
    goals = [int(chunk["others_goal"][t, s, 0]) for t, s in rows]
    assert report["goal_accuracy_prior"] == max(goals.count(g) for g in range(3)) / len(goals)
    confidence = [max(math.exp(-softmax_loss(logits[t][s], g)) for g in range(3)) for t, s in rows]
    gap = abs(sum(confidence) / len(rows) - right / len(rows))
    assert report["goal_confidence_gap"] == pytest.approx(gap, abs=1e-5)
    for ticks in (1, 5):
        after = []
        for s in range(6):
            streak = 0
            for t in range(12):
                going = bool(chunk["visible"][t, s, 0]) and not chunk["first"][t, s]
                streak = streak + 1 if going else 0
                if streak == ticks and (t, s) in rows:
                    best = max(range(3), key=lambda i, row=logits[t][s]: row[i])
                    after.append(best == int(chunk["others_goal"][t, s, 0]))
        expected = sum(after) / len(after) if after else 0.0
        assert report[f"goal_accuracy_after_{ticks}"] == pytest.approx(expected)


def test_a_new_life_is_read_without_the_old_ones_state():
    chunk = flat(recorded(8, 2)[0])
    goal, action, _ = predict(Reader(), chunk, torch.full((4, 1, 1), 7.0))
    expected = said(chunk, [7.0] * 4)
    torch.testing.assert_close(goal.squeeze(2), torch.tensor(expected))
    torch.testing.assert_close(action, -goal[..., :2])


# ------------------------------------------------------------------------------------------------
# A: beliefs


def test_beliefs_are_carried_from_tick_to_tick_and_not_into_another_life():
    ticks, worlds, agents = 5, 2, 3
    rng = torch.Generator().manual_seed(0)
    names = ("view", "occupancy", "self_state", "cues", "visible", "others_offset")
    data = TensorDict(
        {name: torch.rand(ticks, worlds, agents, 1, generator=rng) for name in names}
        | {"action": torch.zeros(ticks, worlds, agents), "first": torch.zeros(ticks, worlds) > 0},
        batch_size=[ticks, worlds],
    )  # fmt: skip
    data["first"][0] = data["first"][3, 1] = True

    def perceive(view, occupancy, known, cues, visible, offset, state):
        state = state + known
        return state + view, state - offset, known, cues, state

    got = believe(perceive, 1, data)
    assert got.batch_size == (ticks, worlds, agents)
    for w in range(worlds):
        for n in range(agents):
            state = 0.0
            for t in range(ticks):
                state = 0.0 if data["first"][t, w] else state
                state += float(data["self_state"][t, w, n])
                assert float(got["mean"][t, w, n]) == pytest.approx(
                    state + float(data["view"][t, w, n])
                )
                assert float(got["log_std"][t, w, n]) == pytest.approx(
                    state - float(data["others_offset"][t, w, n])
                )


class Believer:
    """Module A that believes (mean, deviation) fixed numbers, whatever it sees."""

    latent = 2

    def sequence(self, obs, first, state, now):
        rows, slots = len(now), first.shape[1]
        mean = torch.tensor([5.0, 0.5, -1.0]).expand(rows, slots, -1)
        log_std = torch.tensor([1.0, -100.0, -100.0]).expand(rows, slots, -1)
        location = torch.zeros(rows, slots, 4, 2)
        location[:, :, 0] = 1.0
        return mean, log_std, location, state + len(now)


def test_the_weights_of_perceptions_labels():
    """A quarter of the ticks; the next view not over a death; the dead count nothing."""
    ticks, slots = 9, 2
    rng = torch.Generator().manual_seed(1)

    def numbers(*shape, high=3):
        return torch.randint(high, (ticks, slots, *shape), generator=rng)

    chunk = TensorDict(
        {
            "view": numbers(2, 2).to(torch.uint8), "occupancy": numbers(2, 2).to(torch.uint8),
            "self_state": torch.rand(ticks, slots, 3, generator=rng), "cues": numbers(1, 1),
            "visible": numbers(1, high=2) > 0, "others_offset": numbers(1, 2),
            "others_action": numbers(1), "comm": numbers(1), "action_mask": numbers(2) > 0,
            "action": numbers(), "first": numbers(high=2) > 0, "alive": numbers(high=4) > 0,
            "places": numbers(2, high=4),
            "others_meters": torch.rand(ticks, slots, 1, 2, generator=rng),
        },
        batch_size=[ticks, slots],
    )  # fmt: skip
    chunk["visible"][0, 0] = True
    table = torch.randn(4, 3, generator=rng)

    def heads(belief, self_state, action):
        torch.testing.assert_close(belief[..., 1:], torch.tensor([0.5, -1.0]).expand(2, slots, 2))
        view = table.expand(2, slots, -1, -1)
        occupancy = table[:, 0].expand(2, slots, -1)
        meters = torch.full((2, slots, 1, 2), 0.25)
        return view, occupancy, view + action[..., None, None] * torch.eye(4, 3), meters

    loss, parts, state = perception_loss(Believer(), heads, chunk, torch.zeros(slots, 1), 0.5)
    total: dict[str, float] = dict.fromkeys(parts, 0.0)
    count: dict[str, float] = dict.fromkeys(parts, 0.0)

    def add(name: str, value: float, weight: float) -> None:
        total[name] += weight * value
        count[name] += weight

    for t in (0, 4):  # of nine ticks, the last has nothing after it
        for s in range(slots):
            alive = float(chunk["alive"][t, s])
            cells = chunk["view"][t, s].flatten().tolist()
            after = chunk["view"][t + 1, s].flatten().tolist()
            shifted = table + int(chunk["action"][t, s]) * torch.eye(4, 3)
            add("view", sum(softmax_loss(table[i].tolist(), c) for i, c in enumerate(cells)) / 4,
                alive)  # fmt: skip
            add("next_view",
                sum(softmax_loss(shifted[i].tolist(), c) for i, c in enumerate(after)) / 4,
                alive * (not chunk["first"][t + 1, s]))  # fmt: skip
            there = [int(c) > 0 for c in chunk["occupancy"][t, s].flatten()]
            add("occupancy",
                sum(math.log1p(math.exp(-x if yes else x))
                    for x, yes in zip(table[:, 0].tolist(), there, strict=True)) / 4,
                alive)  # fmt: skip
            add("places",
                sum(softmax_loss([1.0, 0.0, 0.0, 0.0], int(c)) for c in chunk["places"][t, s]) / 2,
                alive)  # fmt: skip
            error = (0.25 - chunk["others_meters"][t, s]).square().mean()
            add("others_meters", float(error), alive * float(chunk["visible"][t, s, 0]))
            kl = [0.5 * (m * m + math.exp(-200) - 1 + 200) for m in (0.5, -1.0)]
            add("kl", 0.5 * sum(kl) / 2, alive)
    for name, value in parts.items():
        expected = total[name] / max(count[name], 1.0)
        assert float(value) == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    assert float(loss) == pytest.approx(sum(map(float, parts.values())), rel=1e-5)
    assert state.flatten().tolist() == [2.0, 2.0]


def test_calibration_is_the_mean_gap_over_its_bins():
    confidence = torch.tensor([0.05, 0.15, 0.17, 0.95, 1.0])
    correct = torch.tensor([False, True, False, True, False])
    # of ten bins: {.05}, {.15, .17}, {.95, 1.0}
    gaps = [0.05, abs(0.32 - 1), abs(1.95 - 1)]
    got = expected_calibration_error(confidence, correct, bins=10)
    assert got == pytest.approx(sum(gaps) / 5, abs=1e-6)
    assert expected_calibration_error(torch.tensor([0.7] * 10), torch.arange(10) < 7) < 1e-6


def test_a_map_is_decoded_from_offsets_in_map_sizes():
    """An affordance surely two cells right and one up of the agent at (1, 2) is at (3, 1)."""
    shape = SimpleNamespace(width=4, height=4, num_affordances=1, num_cells=16)
    module = SimpleNamespace(
        shape=shape, position=lambda known: (torch.tensor([1]), torch.tensor([2]))
    )
    mean = torch.tensor([[2 / 4, -1 / 4, 9.0]])
    got = decode_map(module, mean, torch.full((1, 3), -4.0), torch.zeros(1, 3))
    assert got.shape == (1, 16, 2)
    assert int(got[0, :, 1].argmax()) == 1 * 4 + 3
    assert got[0, 7, 1].item() == pytest.approx(1.0, abs=1e-6)
    assert got[0, 7, 0].item() == pytest.approx(0.0, abs=1e-6)
    blurred = decode_map(module, mean, torch.full((1, 3), math.log(1 / 4)), torch.zeros(1, 3))
    near, far = blurred[0, 6, 1], blurred[0, 5, 1]  # one and two cells from it, of deviation 1
    assert float(near / blurred[0, 7, 1]) == pytest.approx(math.exp(-0.5), rel=1e-4)
    assert float(far / blurred[0, 7, 1]) == pytest.approx(math.exp(-2.0), rel=1e-4)
    torch.testing.assert_close(blurred.sum(-1), torch.ones(1, 16))


# ------------------------------------------------------------------------------------------------
# B: one tick ahead


def lives(ticks: int, worlds: int) -> tuple[TensorDict, TensorDict]:
    rng = torch.Generator().manual_seed(6)
    size = (ticks, worlds, 2)
    data = TensorDict(
        {
            "self_state": torch.rand(*size, 3, generator=rng),
            "action": torch.randint(3, size, generator=rng),
            "action_mask": torch.rand(*size, 3, generator=rng) < 0.5,
            "reward": torch.rand(size, generator=rng),
            "done": torch.rand(size, generator=rng) < 0.2,
            "alive": torch.rand(size, generator=rng) < 0.8,
        },
        batch_size=[ticks, worlds],
    )  # fmt: skip
    beliefs = TensorDict(
        {"mean": torch.rand(*size, 4), "log_std": torch.rand(*size, 4)}, batch_size=size
    )
    return data, beliefs


def test_a_ticks_value_is_the_return_that_followed_it():
    data, beliefs = lives(12, 3)
    got = experience(data, beliefs, gamma=0.9)
    alive = data["alive"]
    mean_reward = float((data["reward"] * alive).sum() / alive.sum())
    for w in range(3):
        for n in range(2):
            reward, done = data["reward"][:, w, n].tolist(), data["done"][:, w, n].tolist()
            for t in range(12):
                expected, factor, k = 0.0, 1.0, t + 1
                going = not done[t]
                while going and k < 12:
                    expected += factor * reward[k]
                    factor *= 0.9
                    going = not done[k]
                    k += 1
                if going:
                    expected += factor * mean_reward / (1 - 0.9)
                assert float(got["value"][t, w, n]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert torch.equal(got["legal"], data["action_mask"])
    assert torch.equal(got["known_state"], data["self_state"])


def test_windows_are_ticks_in_a_row_of_one_agent_of_the_worlds_given():
    data, beliefs = lives(20, 4)
    every = experience(data, beliefs, 0.9)
    every["mean"] = torch.stack(
        torch.meshgrid(torch.arange(20), torch.arange(4), torch.arange(2), indexing="ij"), -1
    ).float()
    rng = torch.Generator().manual_seed(0)
    got = windows(every, 3, 400, torch.tensor([1, 3]), rng)
    where = got["mean"].long()
    assert got.batch_size == (4, 400)
    assert torch.equal(where[..., 0], where[0, :, 0] + torch.arange(4).unsqueeze(1))
    assert (where[..., 1:] == where[0, :, 1:]).all()
    assert where[..., 1].unique().tolist() == [1, 3]
    assert where[..., 2].unique().tolist() == [0, 1]
    assert set(where[0, :, 0].tolist()) == set(range(17))  # the last begins 3 before the end
    rng = torch.Generator().manual_seed(0)
    some = windows(every, 3, 400, torch.tensor([1, 3]), rng, torch.tensor([5, 0]))
    assert torch.equal(some["mean"], got["mean"][:, [5, 0]])


def test_what_came_of_an_action_stands_one_row_later_but_for_what_it_brought():
    data, beliefs = lives(6, 1)
    window = experience(data, beliefs, 0.9)[:, 0]
    got = targets(window, 2)
    for name in ("mean", "log_std", "known_state"):
        assert torch.equal(got[name], window[name][3])
    assert torch.equal(got["legal_logit"], window["legal"][3].float())
    assert torch.equal(got["reward"], window["reward"][2])
    assert torch.equal(got["value"], window["value"][2])
    assert torch.equal(got["continue_logit"], 1 - window["done"][2].float())


class Guess:
    """Module B for a self-state of all meters and `blocked`: it says what it is given, changed by
    fixed numbers, and counts its members' ticks."""

    def __init__(self, places: int, latent: int) -> None:
        fields = METERS + 1
        self.places, self.latent = places, latent
        self.shape = SimpleNamespace(
            self_names=[*(f"m{i}" for i in range(METERS)), "blocked"],
            action_names=["WAIT", "INTERACT"],
        )
        self.sizes = [places + latent, places, fields, 1, 1, 2, 1, 1]
        self.scale = torch.arange(1, sum(self.sizes) + 1) / 10
        self.given: list[torch.Tensor] = []

    def members_step(self, mean, log_std, known, action, free):
        self.given.append(mean)
        rows = mean[..., 0]

        def say(number):
            return torch.full_like(rows, number)

        told = Prediction(
            mean + 0.1, log_std + 0.2, known + 0.01, say(0.3), say(0.4), say(0.5),
            torch.stack([say(0.6), say(-0.6)], -1), say(0.7), say(-0.2),
        )  # fmt: skip
        return told, told._replace(known_state=known + 0.04)


def test_the_world_models_loss_by_hand():
    """Two ticks, fed its own predictions; nobody counts after a death but for itself."""
    model = Guess(places=2, latent=1)
    rng = torch.Generator().manual_seed(2)
    members, count, horizon = 2, 3, 2
    size = (horizon + 1, members, count)
    window = TensorDict(
        {
            "mean": torch.rand(*size, 3, generator=rng),
            "log_std": torch.rand(*size, 3, generator=rng),
            "known_state": torch.rand(*size, METERS + 1, generator=rng).round(decimals=1),
            "action": torch.randint(2, size, generator=rng),
            "legal": torch.rand(*size, 2, generator=rng) < 0.5,
            "reward": torch.rand(size, generator=rng),
            "done": torch.rand(size, generator=rng) < 0.4,
            "alive": torch.rand(size, generator=rng) < 0.8,
            "value": torch.rand(size, generator=rng),
        },
        batch_size=size,
    )  # fmt: skip
    window["known_state"][..., -1] = (window["known_state"][..., -1] > 0.5).float()
    window["alive"][0, 0] = True
    loss, parts = world_model_loss(model, window)

    def bce(logit: float, truth: float) -> float:
        return math.log1p(math.exp(logit)) - truth * logit

    sizes = model.sizes
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def unit(place: int, i: int) -> float:
        return (starts[place] + i + 1) / 10

    expected = dict.fromkeys(parts, 0.0)
    for t in range(horizon):
        total, weight = dict.fromkeys(parts, 0.0), dict.fromkeys(parts, 0.0)
        for e in range(members):
            for c in range(count):
                row = {k: v[:, e, c] for k, v in window.items()}
                alive = float(row["alive"][0])
                for earlier in range(t):
                    alive *= not row["done"][earlier]
                lived = alive * (not row["done"][t])
                mean = [float(x) + 0.1 * (t + 1) for x in row["mean"][0]]
                spread = [float(x) + 0.2 * (t + 1) for x in row["log_std"][0]]
                known = [float(x) + 0.01 * (t + 1) for x in row["known_state"][0]]
                given = [float(x) + 0.01 * t for x in row["known_state"][0]]
                blind = [x + 0.04 for x in given]
                then, now = row["known_state"][t + 1].tolist(), row["known_state"][t].tolist()
                moved, spreading = row["mean"][t + 1].tolist(), row["log_std"][t + 1].tolist()
                square = [((m - x) / unit(0, i)) ** 2
                          for i, (m, x) in enumerate(zip(mean, moved))]  # fmt: skip
                spreads = [((s - x) / unit(1, i)) ** 2
                           for i, (s, x) in enumerate(zip(spread[:2], spreading))]  # fmt: skip
                off = [abs(k - x) / max(unit(2, i), ERROR_UNIT)
                       for i, (k, x) in enumerate(zip(known, then))]  # fmt: skip
                added = [abs(b - x) - abs(g - y)
                         for b, x, g, y in zip(blind, then, given, now)][:METERS]  # fmt: skip
                added = max(sum(added) / METERS, 0.0)
                free = 1 - then[-1]
                legal = row["legal"][t + 1].tolist()
                terms = {
                    "mean": (sum(square[:2]) / 2 + 0.1 * square[2], lived),
                    "log_std": (sum(spreads) / 2, lived),
                    "known_state": (4 * sum(off) / len(off), lived),
                    "reward": (10 * abs(0.3 - float(row["reward"][t])), alive),
                    "continue": (bce(0.4, float(not row["done"][t])), alive),
                    "value": (((0.5 - float(row["value"][t])) / unit(4, 0)) ** 2, alive),
                    "legal": ((bce(0.6, legal[0]) + bce(-0.6, legal[1])) / 2, lived),
                    "free": (0.3 * bce(0.7, free), alive * (int(row["action"][t]) == 1)),
                    "error": (0.1 * (added / ERROR_UNIT * math.exp(0.2) - 0.2), lived),
                }
                for name, (value, by) in terms.items():
                    total[name] += value * by
                    weight[name] += by
        for name in expected:
            expected[name] += total[name] / max(weight[name], 1.0) / horizon
    assert dict.fromkeys(parts, 1.0) | {
        "known_state": 4.0, "reward": 10.0, "free": 0.3, "error": 0.1,
    } == IMPORTANCE  # fmt: skip
    for name, value in parts.items():
        assert float(value) == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    assert float(loss) == pytest.approx(sum(expected.values()), rel=1e-4)
    torch.testing.assert_close(model.given[1], window["mean"][0] + 0.1)


def test_the_unit_of_each_number_is_its_deviation_among_those_that_live_on():
    model = Guess(places=2, latent=1)
    data, beliefs = lives(30, 4)
    data["self_state"] = torch.rand(30, 4, 2, METERS + 1)
    beliefs["mean"], beliefs["log_std"] = torch.rand(2, 30, 4, 2, 3)
    window = windows(experience(data, beliefs, 0.9), 1, 60, torch.arange(4), torch.Generator())
    got = output_scale(model, window)
    ok = [i for i in range(60) if window["alive"][0, i] and not window["done"][0, i]]

    def deviation(numbers: list[float]) -> float:
        mean = sum(numbers) / len(numbers)
        return math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))

    def change(name: str, i: int) -> float:
        return deviation([float(window[name][1, k, i] - window[name][0, k, i]) for k in ok])

    expected = [change("mean", i) for i in range(3)]
    expected += [change("log_std", i) for i in range(2)]
    expected += [change("known_state", i) for i in range(METERS + 1)]
    expected += [1.0, deviation([float(window["value"][0, k]) for k in ok]), 1.0, 1.0, 1.0, 1.0]
    assert got.tolist() == pytest.approx(expected, rel=1e-4)


def test_auroc_is_the_share_of_pairs_in_order_and_r_squared_what_is_explained():
    score = torch.tensor([0.1, 0.9, 0.4, 0.8, 0.3])
    positive = torch.tensor([False, True, True, False, False])
    pairs = [(p, n) for p in (0.9, 0.4) for n in (0.1, 0.8, 0.3)]
    assert auroc(score, positive) == pytest.approx(sum(p > n for p, n in pairs) / 6)
    assert auroc(score, torch.zeros(5, dtype=torch.bool)) == 0.5
    truth = torch.tensor([1.0, 2.0, 3.0, 6.0])
    # residuals 1, 0, 1, 2 against deviations 2, 1, 0, 3 from the mean
    assert r_squared(torch.tensor([2.0, 2.0, 2.0, 4.0]), truth) == pytest.approx(1 - 6 / 14)
    assert r_squared(truth.mean().expand(4), truth) == pytest.approx(0.0, abs=1e-6)
