"""The end-to-end network of the learning curves: what it is told, remembers, and learns."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional as F

from benchmarks.curves_ours import Meter
from benchmarks.curves_rivals import Imitator, Length, rivals_points
from benchmarks.end_to_end import (
    OBSERVED,
    EndToEnd,
    EndToEndLearner,
    EndToEndPlayer,
    Scan,
    Settings,
    losses,
    map_targets,
    one_of_many,
)
from benchmarks.study import HELD_OUT_WORLDS
from hamlet.artifacts import HamletError
from hamlet.learning.buffer import RolloutBuffer
from hamlet.learning.rollout import collect, fused_step
from hamlet.modules.contracts import TownShape
from hamlet.town import Scripted, Town, load_pack

TOWN = Town(load_pack("l4_contention"), num_layouts=8)
SHAPE = TownShape.of(TOWN)
SMALL = Settings(width=16, memory=16, worlds=2, kept=2, passes=1.0, lives=4, chunk=10, led=2)


pytestmark = pytest.mark.usefixtures("one_thread")


def played(town: Town, ticks: int) -> tuple[EndToEnd, TensorDict]:
    """A new network and what it played, with the teacher's word."""
    torch.manual_seed(2)
    shape = TownShape.of(town)
    model = EndToEnd(shape, 16, 24)
    player = EndToEndPlayer(town, shape, model, Scripted(town, ["expert_searching"]))
    world, buffer = town.reset(3, 6), RolloutBuffer(ticks)
    collect(fused_step(town, player), world, player.start(world), buffer)
    assert buffer.data is not None
    return model, buffer.data


@torch.no_grad()
def test_its_sequences_are_its_ticks_with_lives_that_end_in_between():
    town = Town(load_pack("l4_contention").model_copy(update={"lifespan": 5}), num_layouts=8)
    model, data = played(town, 12)
    assert data["over"].sum() >= 48  # every life ended twice
    assert torch.equal(data["moved"][1:] == 0, data["over"][:-1])  # as if nothing had been done
    assert (data["moved"][0] == 0).all()
    hidden, stepwise = torch.zeros(data.shape[1], 24), []
    for tick in range(12):
        known, hidden = model.remember(data[tick : tick + 1], data["over"][tick : tick + 1], hidden)
        stepwise.append(known[0])
    whole, last = model.remember(data, data["over"], torch.zeros(data.shape[1], 24))
    torch.testing.assert_close(whole, torch.stack(stepwise), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last, hidden, atol=1e-5, rtol=1e-5)
    first, rest = data[:7], data[7:]  # in two chunks
    one, between = model.remember(first, first["over"], torch.zeros(data.shape[1], 24))
    other, _ = model.remember(rest, rest["over"], between)
    torch.testing.assert_close(torch.cat([one, other]), whole, atol=1e-5, rtol=1e-5)


def test_what_is_remembered_ends_with_the_life_and_not_before():
    model, data = played(TOWN, 6)
    over = torch.zeros(6, data.shape[1], dtype=torch.bool)
    over[2, 1] = True  # of the second slot a life ends with the third tick
    hidden = torch.ones(data.shape[1], 24, requires_grad=True)
    known, _ = model.remember(data, over, hidden)
    (grad,) = torch.autograd.grad(known[5, :, -24:].sum(), hidden, retain_graph=True)
    assert (grad[0].abs() > 0).all()
    assert (grad[1] == 0).all()
    (grad,) = torch.autograd.grad(known[2, :, -24:].sum(), hidden)
    assert (grad[1].abs() > 0).all()


def test_the_recurrence_and_its_gradient():
    kept, added, hidden = (
        torch.rand(*size, dtype=torch.float64, requires_grad=True)
        for size in ((4, 2, 3), (4, 2, 3), (2, 3))
    )
    assert torch.autograd.gradcheck(Scan.apply, (kept, added, hidden))
    found = Scan.apply(kept, added, hidden)
    second = kept[1] * (kept[0] * hidden + added[0]) + added[1]
    torch.testing.assert_close(found[1], second)


def test_where_places_are_and_which_are_known():
    """On the 8x8 map the middle is at column and row 3.5; positions are in units of four cells."""
    places = torch.tensor([[0, 7, 8, 63]], dtype=torch.int16)
    seen = torch.zeros(1, 64, dtype=torch.bool)
    seen[0, [7, 8, 9]] = True
    at, known = map_targets(places, seen, SHAPE)
    middle = [[-3.5, -3.5], [3.5, -3.5], [-3.5, -2.5], [3.5, 3.5]]
    assert torch.equal(at[0] * 4, torch.tensor(middle))
    assert known.tolist() == [[False, True, True, False]]


def test_what_is_in_view_or_shown_is_told_by_its_place_on_the_map():
    model = EndToEnd(SHAPE, 8, 8)
    side = 2 * SHAPE.vision + 1
    view = torch.zeros(1, side, side, dtype=torch.int64)
    view[0, SHAPE.vision - 1, SHAPE.vision + 1] = 3  # the third place: one up, one to the right
    cues = torch.zeros(1, SHAPE.num_others, SHAPE.num_cues)
    cues[0, 0, 2] = cues[0, 1, 2] = 1
    away = torch.zeros(1, SHAPE.num_others, 2)
    away[0, 0] = torch.tensor([-0.5, 0.25])  # two to the left, one down
    x, y = torch.tensor([2]), torch.tensor([5])
    places, shown = model.sightings(x, y, view.flatten(1), cues, away)
    places, shown = places.view(-1, 3), shown.view(-1, 3)
    assert (places * 4)[2].tolist() == [3 - 3.5, 4 - 3.5, 4]
    assert places.any(1).nonzero().flatten().tolist() == [2]
    assert (shown * 4)[2].tolist() == [(0 + 2) / 2 - 3.5, (6 + 5) / 2 - 3.5, 4]
    assert shown.any(1).nonzero().flatten().tolist() == [2]


def test_one_of_many_side_by_side():
    told = one_of_many((torch.tensor([1, 0]), 2), (torch.tensor([2, 1]), 3))
    assert told.tolist() == [[0, 1, 0, 0, 1], [1, 0, 0, 1, 0]]


def test_the_map_it_is_taught_is_the_towns_and_what_it_saw():
    """What the recorded targets say, in the words of the town's own tables."""
    _, data = played(TOWN, 8)
    at, known = map_targets(data["places"], data["seen"], SHAPE)
    view, state = data["view"].long(), data["self_state"]
    x = (state[..., SHAPE.num_meters] * (SHAPE.width - 1)).round()
    y = (state[..., SHAPE.num_meters + 1] * (SHAPE.height - 1)).round()
    middle = SHAPE.vision
    stands_on = view[..., middle, middle]
    on_place = (stands_on > 0).nonzero()
    assert len(on_place)
    for t, slot in on_place.tolist():
        place = int(stands_on[t, slot]) - 1
        expected = torch.stack([x[t, slot], y[t, slot]]) - 3.5
        assert torch.allclose(at[t, slot, place] * 4, expected)
        assert known[t, slot, place]


def test_it_learns_what_needs_memory():
    """The last action of the first tick says what to do twelve ticks later; nothing else does."""
    model, data = played(TOWN, 13)
    one = data[:, :1].expand(13, 32).clone()
    one["moved"].zero_()
    over = torch.zeros(13, 32, dtype=torch.bool)
    answer = torch.arange(32) % 4
    one["moved"][0] = answer.to(torch.uint8) + 1
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def told(batch):
        known, _ = model.remember(batch, over, torch.zeros(32, 24))
        return model.decide(known[-1])[0]

    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(told(one), answer).backward()
        optimizer.step()
    assert (told(one).argmax(-1) == answer).float().mean() == 1
    one["moved"][0] = 0
    assert (told(one).argmax(-1) == answer).float().mean() <= 0.25


def test_who_is_led_does_what_the_teacher_does_and_the_others_what_they_would():
    teacher = Scripted(TOWN, ["expert_searching"])
    player = EndToEndPlayer(TOWN, SHAPE, EndToEnd(SHAPE, 8, 8), teacher)
    world = TOWN.reset(3, 6)
    led = torch.zeros(6, SHAPE.num_agents, dtype=torch.bool)
    led[:3] = True
    with torch.no_grad():
        memory, seen = player.start(world), TOWN.observe(world)
        acted, after, record = player.act(world, seen, memory, led)
        own, _, _ = player.act(world, seen, memory)
    expert = teacher.act(world, teacher.reset(world))[0]
    assert torch.equal(record["expert_action"].view(6, -1).long(), expert)
    assert torch.equal(acted[:3], expert[:3])
    assert torch.equal(acted[3:], own[3:])
    assert not torch.equal(own[:3], expert[:3])
    assert torch.equal(after.moved.long(), acted.flatten() + 1)


def test_actions_are_drawn_by_twice_the_logits(monkeypatch):
    torch.manual_seed(4)
    model = EndToEnd(SHAPE, 8, 8)
    torch.nn.init.normal_(model.actor[-1].weight)
    player, world = EndToEndPlayer(TOWN, SHAPE, model), TOWN.reset(3, 16)
    noise, said = torch.randn(16 * SHAPE.num_agents, SHAPE.num_actions), []
    monkeypatch.setattr("benchmarks.end_to_end.gumbel", lambda *drawn: noise)
    model.actor.register_forward_hook(lambda *call: said.append(call[2]))
    with torch.no_grad():
        seen = TOWN.observe(world)
        acted, _, _ = player.act(world, seen, player.start(world))
    illegal = ~seen["action_mask"].flatten(0, 1)
    for times, same in ((2, True), (1, False), (-2, False)):
        expected = (times * said[0]).masked_fill(illegal, -1e9) + noise
        assert torch.equal(acted.flatten(), expected.argmax(-1)) == same, times


@pytest.mark.parametrize(
    ("before", "rate", "share"), [(0, 1 / 20, 1.0), (3, 4 / 20, 1 / 4), (399, 0.5, 1 / 50)]
)
def test_the_rate_falls_and_the_average_is_over_ever_more_updates(before, rate, share):
    settings = SMALL._replace(steady=100, averaged=0.1)
    learner = EndToEndLearner(TOWN, Scripted(TOWN, ["expert_searching"]), 0, settings)
    learner.updates = before
    with torch.no_grad():
        for each in learner.average.parameters():
            each.zero_()
    learner.update({"all": sum(each.square().sum() for each in learner.parameters)})
    for group in learner.optimizer.param_groups:
        assert float(group["lr"]) == pytest.approx(rate * settings.learning_rate)
    for mean, now in zip(learner.average.parameters(), learner.parameters, strict=True):
        torch.testing.assert_close(mean, share * now.detach())


def test_the_teacher_acts_less_and_less_in_turns():
    learner = EndToEndLearner(TOWN, Scripted(TOWN, ["expert_searching"]), 0, Settings(worlds=64))
    shares, changes = [], []
    for learner.iteration in (0, 10, 40):
        led = torch.stack([now for (now,) in learner.led()])
        shares.append(led.float().mean().item())
        changes.append((led[1:] != led[:-1]).float().mean().item())
    assert shares[0] == 1
    assert shares[1] == pytest.approx(0.5, abs=0.05)
    assert shares[2] == pytest.approx(0.1, abs=0.03)
    assert changes[1] == pytest.approx(0.5 / 16, abs=0.005)


@pytest.mark.slow
def test_in_seconds_it_does_more_of_what_the_teacher_does():
    """On a small town in which a life is short; what it is judged by are the averaged weights."""
    pack = load_pack("l0_full_view").model_copy(update={"lifespan": 60})
    town = Town(pack, num_layouts=16)
    settings = Settings(width=48, memory=48, worlds=16, passes=6.0, lives=4, chunk=30, led=3)
    learner = EndToEndLearner(town, Scripted(town, ["expert_searching"], 0), 0, settings)

    learner.play()
    data = learner.kept[0]

    def wrong():
        with torch.no_grad():
            hidden = torch.zeros(data.shape[1], settings.memory)
            return losses(learner.average, data, hidden, settings.every)[0]

    before = wrong()
    for _ in range(3):
        learner.learn()
    assert learner.steps == 4 * 60 * 16 * town.num_agents
    after = wrong()
    assert all(after[name] < 0.6 * before[name] for name in ("action", "goal", "places", "known"))


def test_the_loss_asks_only_of_the_living():
    model, data = played(TOWN, 8)
    data = data.clone()
    data["active"][:, 0] = False
    hidden = torch.zeros(data.shape[1], 24)
    terms, _ = losses(model, data, hidden, 4)
    data["expert_action"][:, 0] = 0
    data["expert_goal"][:, 0] = 1
    data["seen"][:, 0] = ~data["seen"][:, 0]
    again, _ = losses(model, data, hidden, 4)
    assert terms.keys() == {"action", "goal", "places", "known", "seen"}
    for name, value in terms.items():
        assert torch.isfinite(value)
        torch.testing.assert_close(value, again[name])
    assert set(OBSERVED) <= set(data.keys())


def test_as_a_line_of_the_curves_it_learns_and_plays_as_it_has_learned():
    town = Town(load_pack("l4_contention").model_copy(update={"lifespan": 12}), num_layouts=8)
    rival = Imitator(town, "expert_searching", 0, SMALL)
    assert rival.settings["width"] == SMALL.width
    assert rival.settings["teacher"] == "expert_searching"
    before = [weight.clone() for weight in rival.learner.average.parameters()]

    def judge(seated) -> torch.Tensor:
        player, memory = seated(town)
        world = town.reset(1, HELD_OUT_WORLDS)
        after, _, _ = fused_step(town, player)(world, memory)
        assert (after["tick"] == 1).all()
        changed = [
            (new - old).abs().max()
            for new, old in zip(player.model.parameters(), before, strict=True)
        ]
        return torch.stack(changed).double()

    (only,) = rivals_points(rival, Length(1, 0.0), judge, Meter(), bar=False)
    assert only["mean_return"] > 0  # who plays is who learned
    assert only["steps"] == rival.steps == SMALL.worlds * town.num_agents * 12
    with pytest.raises(HamletError, match="expert keeps no map of what it saw"):
        Imitator(town, "expert", 0, SMALL)
