"""The fused step of both worlds, and its two drivers."""

from __future__ import annotations

import warnings

import pytest
import torch

from hamlet.learning import compiling
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.rollout import collect, evaluate, fused_step, learn
from hamlet.learning.update import Apart, Update
from hamlet.town import Scripted, Town, load_pack

LIFE = 40


class Wanderers:
    """Scripted characters that record what happened; what they counted ends with a life."""

    def __init__(self, town, names):
        self.scripted = Scripted(town, names, seed=0)

    def act(self, state, seen, memory, *context):
        action, _, mind = self.scripted.act(state, memory["mind"])
        return action, {"mind": mind, "age": memory["age"] + 1}, {"age": memory["age"]}

    def outcome(self, before, after, memory):
        record = {
            "reward": after["reward"],
            "ticks": before["alive"],
            "lives": after["done"].all(1),
        }
        age = torch.where(after["episode_over"], 0, memory["age"])
        return {"mind": memory["mind"], "age": age}, record

    def start(self, world):
        return {"mind": self.scripted.reset(world), "age": torch.zeros(len(world))}


@pytest.fixture(scope="module")
def town():
    pack = load_pack("l4_contention")
    return Town(pack.model_copy(update={"lifespan": LIFE}), num_layouts=8)


def played(town, cases, slots, names=("random",)):
    player = Wanderers(town, list(names))
    town.eval(cases)
    memory = player.start(town.reset(3, slots))
    states = []
    totals = evaluate(town, fused_step(town, player), memory, cases, slots, 3, states.append)
    town.train()
    return totals, states


def test_every_case_is_played_once_whatever_the_number_of_slots(town):
    whole, _ = played(town, 13, 13)
    assert torch.equal(whole["lives"], torch.ones(13, dtype=torch.float64))
    assert whole["ticks"].min() >= 1
    assert len(whole["reward"].unique()) > 13
    for slots in (1, 4, 5, 20):
        recycled, states = played(town, 13, slots)
        for name, value in whole.items():
            assert torch.equal(value, recycled[name]), (slots, name)
        assert states[0]["over"].sum() == max(0, slots - 13)


def test_a_slot_takes_the_next_case_as_soon_as_its_life_is_over(town):
    _, states = played(town, 6, 2, names=["rest"])
    for state in states:
        assert not bool(state["over"].all())
    assert len(states) <= 3 * LIFE


def test_evaluation_and_rollout_do_not_touch_each_other(town):
    player = Wanderers(town, ["random"])
    step = fused_step(town, player)

    def rollout(between):
        world = town.reset(0, 5)
        memory = player.start(world)
        buffer = RolloutBuffer(LIFE)
        world, memory = collect(step, world, memory, buffer)
        if between:
            played(town, 7, 3)
        world, memory = collect(step, world, memory, buffer)
        return world, buffer.data

    (one, first), (two, second) = rollout(False), rollout(True)
    assert all(torch.equal(one[name], two[name]) for name in one.keys())  # noqa: SIM118
    assert all(torch.equal(first[name], second[name]) for name in first.keys())  # noqa: SIM118


def test_a_step_mutates_nothing_and_the_memory_ends_with_the_life(town):
    player = Wanderers(town, ["random"])
    step = fused_step(town, player)
    world = town.reset(1, 4)
    memory = player.start(world)
    ended = 0
    for _ in range(LIFE + 1):
        before = world.clone()
        after, following, record = step(world, memory)
        assert all(torch.equal(before[name], world[name]) for name in world.keys())  # noqa: SIM118
        expected = torch.where(after["episode_over"], 0, record["age"] + 1)
        assert torch.equal(following["age"], expected)
        ended += int(after["episode_over"].sum())
        world, memory = after, following
    assert ended >= 4


def test_a_full_buffer_is_asked_tick_by_tick_with_its_context(town):
    class Told(Wanderers):
        def act(self, state, seen, memory, number):
            action, memory, record = super().act(state, seen, memory)
            return action, memory, record | {"told": torch.full((len(state),), number)}

    player = Told(town, ["random"])
    world = town.reset(0, 2)
    buffer = RolloutBuffer(3)
    contexts = [(number,) for number in (7, 8, 9)]
    collect(fused_step(town, player), world, player.start(world), buffer, contexts)
    assert buffer.data["told"].tolist() == [[7, 7], [8, 8], [9, 9]]


@pytest.mark.slow
def test_compiled_it_is_one_graph_and_equals_eager(town):
    player = Wanderers(town, ["random"])
    world = town.reset(0, 3)
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    step = fused_step(town, player)
    traced = torch.compile(step, fullgraph=True, backend=count)
    one = two = (world, player.start(world))
    for _ in range(8):
        *one, first = step(*one)
        *two, second = traced(*two)
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(graphs) == 1
    town.eval(2)  # its mode is seen: two cases for three slots, the last one has nothing to do
    world = town.reset(0, 3)
    one, two = step(world, one[1])[0], traced(world, one[1])[0]
    town.train()
    assert one["over"].tolist() == two["over"].tolist() == [False, False, True]
    assert len(graphs) == 2


class Listener(Wanderers):
    """Acts on one layer's opinion of the hour, so that its weights and its precision show."""

    def __init__(self, town):
        super().__init__(town, ["random"])
        self.layer = torch.nn.Linear(town.self_dim, town.num_actions)

    def act(self, state, seen, memory, *context):
        _, memory, record = super().act(state, seen, memory)
        opinion = self.layer(seen["self_state"])
        return opinion.argmax(-1), memory, record | {"opinion": opinion.flatten(1)}


@pytest.mark.slow
def test_a_compiled_step_follows_its_player_as_it_learns_and_is_compiled_once(town):
    town.eval(2)  # two cases for three slots: the last one has nothing to do
    player, world = Listener(town), town.reset(0, 3)
    plain, fast = fused_step(town, player), fused_step(town, player, compile=True)
    memory = player.start(world)
    fast(world, memory)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(5):
        with torch.no_grad():
            player.layer.weight.add_(torch.randn_like(player.layer.weight))
        (after, _, one), (followed, _, two) = plain(world, memory), fast(world, memory)
        torch.testing.assert_close(one["opinion"], two["opinion"])
        torch.testing.assert_close(one["reward"], two["reward"])
        same = ("over", "position", "next_case")
        assert all(torch.equal(after[name], followed[name]) for name in same)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    town.train()


def test_where_nothing_compiles_the_step_is_eager_after_one_warning(town, monkeypatch):
    def broken(*inputs):
        raise RuntimeError("no compiler here\nand a long story")

    monkeypatch.setattr(compiling.torch, "compile", lambda *a, **k: broken)
    player, world = Wanderers(town, ["random"]), town.reset(0, 3)
    step = fused_step(town, player, compile=True)
    with pytest.warns(UserWarning, match="eager from now on: no compiler here$"):
        _, _, first = step(world, player.start(world))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(world, player.start(world))
    _, _, plain = fused_step(town, player)(world, player.start(world))
    assert torch.equal(first["reward"], plain["reward"])


def test_the_player_alone_runs_in_the_precision_asked_for(town):
    player, world = Listener(town), town.reset(0, 3)
    full, half = (
        fused_step(town, player, precision=precision)(world, player.start(world))
        for precision in ("fp32", "bf16")
    )
    assert (full[2]["opinion"].dtype, half[2]["opinion"].dtype) == (torch.float32, torch.bfloat16)
    assert half[0]["meters"].dtype == half[2]["reward"].dtype == torch.float32


def test_a_minibatch_too_far_from_the_old_policy_is_the_last():
    weight = torch.nn.Parameter(torch.zeros(1))
    buffer = RolloutBuffer(4)
    for _ in range(4):
        buffer.add({"x": torch.ones(3)})

    def loss(batch):
        return -(weight * batch["x"]).mean(), {"approx_kl": weight.detach().abs().squeeze()}

    def steps_taken(max_kl):
        weight.data.zero_()
        counted = []

        def counting(batch):
            counted.append(len(batch["x"]))
            return loss(batch)

        update = Update(counting, [weight], learning_rate=0.1)
        learn(update, [buffer], 5, 2, torch.Generator().manual_seed(0), max_kl)
        assert set(counted) == {6}
        return len(counted)

    # At step n, from 0, the divergence is 0.1 n; the first epoch has two of the ten steps.
    assert steps_taken(10.0) == 10
    assert steps_taken(0.45) == 6
    assert steps_taken(0.25) == 4
    assert steps_taken(0.05) == 2


def test_an_update_is_given_a_minibatch_of_every_buffer():
    many, few = RolloutBuffer(4), RolloutBuffer(2)
    for t in range(4):
        many.add({"x": torch.arange(3) + 3 * t})
    for t in range(2):
        few.add({"x": torch.arange(3) + 3 * t})
    given = []

    class Giving:
        def __call__(self, of_many, of_few):
            given.append((of_many["x"].tolist(), of_few["x"].tolist()))
            return {"loss": torch.zeros(())}

        def settled(self, data):
            return data

    learn(Giving(), [many, few], 2, 3, torch.Generator().manual_seed(0))
    assert [(len(a), len(b)) for a, b in given] == [(4, 2)] * 6
    for epoch in (given[:3], given[3:]):
        for side, rows in ((0, 12), (1, 6)):
            assert sorted(x for pair in epoch for x in pair[side]) == list(range(rows))


def test_what_settles_does_so_after_the_first_epoch_and_stands_still():
    """It is worked out of all rows, with what the first epoch taught, for the update that asked."""
    buffer, weight, other = RolloutBuffer(2), torch.zeros(1, requires_grad=True), torch.ones(1)
    other.requires_grad_()
    for t in range(2):
        buffer.add({"x": torch.arange(3.0) + 3 * t})
    seen, settled = [], []

    def settle(data):
        settled.append(weight.item())
        return {"sum": data["x"] + weight.detach()}

    def loss(batch):
        seen.append(batch)
        return -weight.sum(), {}

    def another(batch):
        return other.square().sum(), {}

    asking = Update(loss, [weight], learning_rate=0.1, settle=settle)
    both = Apart(asking, Update(another, [other], learning_rate=0.1))
    learn(both, [buffer], 3, 2, torch.Generator().manual_seed(0))
    assert settled == [pytest.approx(0.2, rel=1e-3)], "after the two steps of the first epoch"
    assert [len(batch.keys()) == 2 for batch in seen] == [False] * 2 + [True] * 4
    for batch in seen[2:]:
        assert torch.equal(batch["sum"], batch["x"] + settled[0])
    for epoch in (seen[:2], seen[2:4], seen[4:]):
        assert sorted(torch.cat([b["x"] for b in epoch]).tolist()) == [0.0, 1, 2, 3, 4, 5]
    assert list(buffer.data.keys()) == ["x"]
    # A rank that learns the other one by itself works nothing out.
    learn(both.part_of(1, 2), [buffer], 2, 2, torch.Generator().manual_seed(0))
    assert len(settled) == 1
    learn(both.part_of(0, 2), [buffer], 2, 2, torch.Generator().manual_seed(0))
    assert len(settled) == 2
