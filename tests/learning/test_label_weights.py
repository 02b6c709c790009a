"""What each row counts for in the losses of A and C, against sums written out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional as F

from hamlet.learning.beliefs import believe
from hamlet.learning.train_perception import (
    decode_map,
    evaluate_perception,
    expected_calibration_error,
    perception_loss,
)
from hamlet.learning.train_social import evaluate_social, predict, social_loss, with_labels
from hamlet.learning.tune_social import held_out_loss
from hamlet.modules.contracts import TownShape
from hamlet.modules.perception import Perception
from hamlet.town import Scripted, Town, load_pack
from stages.collect import record


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
    module = SimpleNamespace(shape=shape, position=lambda known: torch.tensor([[1, 2]]))
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


def test_who_believes_the_truth_is_judged_to_know_everything():
    """And is as good as before where it says that all stays as it is."""
    town = Town(load_pack("l7_scarce"), num_layouts=8)
    players = Scripted(town, ["expert_searching"] * town.num_agents)
    state = town.reset(5, 3)
    memory, ticks = players.reset(state), []
    for _ in range(40):
        state, memory, tick = record(town, state, players, memory)
        ticks.append(tick)
    data = torch.stack(ticks)
    shape = TownShape.of(town)
    module, seen = Perception(shape, 16, 4), {}
    size = torch.tensor([shape.width, shape.height])

    def knows(obs, first, state, now):
        mean, log_std, location, after = Perception.sequence(module, obs, first, state, now)
        seen["view"] = F.one_hot(obs.view.flatten(2).long()).float()
        cells = seen["places"][now].long()
        at = torch.stack([cells % shape.width, cells // shape.width], -1)
        here = module.position(obs.self_state[now].flatten(0, 1))
        here = here.unflatten(0, at.shape[:2]).unsqueeze(-2)
        offsets = ((at - here) / size).flatten(-2)
        mean, log_std = mean.clone(), log_std.clone()
        mean[..., : offsets.shape[-1]] = offsets.float()
        log_std[..., : offsets.shape[-1]] = -6.0
        return mean, log_std, location, after

    def heads(mean, self_state, action):
        others = torch.full((*mean.shape[:2], shape.num_others, shape.num_meters), 0.75)
        return seen["view"], None, seen["view"], others

    module.sequence = knows
    chunk_ticks, places = 4, data["places"]

    class Chunks(TensorDict):
        """The data, which notes the places of every chunk that is read."""

        def __getitem__(self, index):
            part = TensorDict.__getitem__(self, index)
            if isinstance(index, slice):
                seen["places"] = places[index].repeat_interleave(shape.num_agents, 1)
            return part

    got = evaluate_perception(
        module, heads, Chunks(data.to_dict(), batch_size=data.batch_size), torch.arange(3),
        chunk_ticks,
    )  # fmt: skip
    for name in ("view_accuracy", "map_seen_accuracy", "map_unseen_accuracy", "map_heard_accuracy"):
        assert got[name] == 1.0, name
    assert got["map_ece"] < 0.01
    assert got["others_meters_error"] == got["others_meters_error_mean"] > 0
    assert got["next_view_accuracy"] == got["next_view_accuracy_persistence"]
    assert 0.5 < got["next_view_accuracy_persistence"] < 0.99
    for name in ("map_unseen_accuracy_prior", "map_seen_accuracy_last_view"):
        assert 0.3 < got[name] < 1.0, name
