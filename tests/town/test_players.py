"""What scripted experts know: where others are going, what they saw, which prices they believe."""

from __future__ import annotations

import copy

import pytest
import torch
import yaml
from rich.progress import Progress

from benchmarks.discriminate import REQUIRED, loss, measure
from hamlet.town import Scripted, Town, load_pack, personalities
from hamlet.town.check import build_pack
from hamlet.town.expert import Expert
from hamlet.town.lives import HELD_OUT_LAYOUTS, play
from hamlet.town.load import PACKS
from hamlet.town.players import UNIT
from hamlet.town.schema import INTERACT, LEFT, RIGHT, WAIT

BASE = yaml.safe_load((PACKS / "l4_contention.yaml").read_text())
PLACES = [place["name"] for place in BASE["affordances"]]
BED, MEAL = PLACES.index("Bed"), PLACES.index("HomeMeal")


def street(agents: int, cue_distance: int = 2, schedule: tuple = (), **more) -> Town:
    """A street of 40 cells: a meal at 10, a bed at 16, and all else beyond 25."""
    content = copy.deepcopy(BASE) | {
        "name": "street", "width": 40, "height": 2, "agents": agents,
        "cue_distance": cue_distance, "schedule": list(schedule), **more,
    }  # fmt: skip
    cells = torch.arange(25, 25 + len(PLACES))
    cells[MEAL], cells[BED] = 10, 16
    return Town(build_pack(content, "street.yaml"), layouts=cells[None])


def standing(town: Town, *columns: int, **meters: float):
    """One world at noon: agents in these columns of the street, meters as named or full."""
    state = town.reset(0, 1)
    names = town.meter_names
    levels = torch.ones_like(state["meters"])
    for name, level in meters.items():
        levels[..., names.index(name)] = level
    position = torch.tensor([[[column, 0] for column in columns]])
    return town.rearrange(state, position=position, meters=levels, hour=torch.tensor([12]))


def plan(town: Town, state, name: str = "expert", **changed: float):
    """Actions and goals [N] of agents that all play by one expert's changed parameters."""
    row = personalities.parameters(town.pack, name) | changed
    table = torch.tensor([[row[key] for key in personalities.parameter_names(town.pack)]])
    players = Scripted.from_parameters(town, table, name)
    actions, found, _ = players.act(state, players.reset(state))
    return actions[0], found[0]


def test_whoever_foresees_leaves_a_place_to_those_who_get_there_first():
    """Hungry, then tired: agent 0 is four steps from the meal, agent 1 stands beside it."""
    town = street(agents=2)
    state = standing(town, 14, 11, satiation=0.2, energy=0.75)
    needs = {"occupied_wait": 0.0, "persistence": 0.0}
    _, blind = plan(town, state, foresight=0.0, **needs)
    assert blind.tolist() == [MEAL, MEAL]
    long = town.pack.affordances[MEAL].duration
    assert long == 2  # agent 1 is done before agent 0 is there: nothing to wait for
    _, foreseen = plan(town, state, foresight=50.0, **needs)
    assert foreseen.tolist() == [MEAL, MEAL]
    # Both two steps away: the needier goes, and the other one turns to the bed.
    state = standing(town, 12, 12, satiation=0.2, energy=0.75)
    hungrier = state["meters"].clone()
    hungrier[0, 1, town.meter_names.index("satiation")] = 0.1
    state = town.rearrange(state, meters=hungrier)
    actions, blind = plan(town, state, foresight=0.0, **needs)
    assert blind.tolist() == [MEAL, MEAL]
    assert actions.tolist() == [LEFT, LEFT]
    actions, foreseen = plan(town, state, foresight=50.0, **needs)
    assert foreseen.tolist() == [BED, MEAL]
    assert actions.tolist() == [RIGHT, LEFT]


def test_the_odds_of_goals_say_how_much_one_is_worth_more_than_another():
    """The plan is asked what each goal is worth per tick: its differences, in the unit."""
    town = Town(load_pack("l4_contention"), num_layouts=8)
    players = Scripted(town, ["expert_watching"])
    state = town.reset(3, 16)
    memory, wanted = players.reset(state), []
    for _ in range(30):
        actions, goals, odds = players.tell(state, memory)
        acted, meant, after = players.act(state, memory)
        assert torch.equal(actions, acted)
        assert torch.equal(goals, meant)
        torch.testing.assert_close(odds.sum(-1), torch.ones(16, 4))
        assert torch.equal(odds.argmax(-1), goals)
        wanted.append(goals)
        state, memory = town.step_core(state, actions), after
    assert torch.stack(wanted).unique().numel() > 4


def test_a_goal_worth_a_unit_more_has_e_times_the_odds():
    """And an expert that knows the map is never for looking around."""
    town = Town(load_pack("l4_contention"), num_layouts=8)
    unit = UNIT * sum(meter.depletion for meter in town.pack.meters)
    rest, look = (town.goal_names.index(name) for name in ("rest", "explore"))
    state, keys = town.reset(3, 16), personalities.parameter_names(town.pack)
    state = town.rearrange(state, meters=state["meters"] * 0.8)
    found = []
    for bonus in (0.0, 2 * unit):
        row = personalities.parameters(town.pack, "expert")
        row |= {"foresight": 0.0, "rest_bonus": bonus}
        players = Scripted.from_parameters(town, torch.tensor([[row[key] for key in keys]]))
        found.append(players.tell(state, players.reset(state))[2])
        assert not found[-1][..., look].any()
    before, after = (
        odds[..., [rest]].log() - odds[..., : town.num_affordances].log() for odds in found
    )
    had = before.isfinite() & (before < 20)
    assert had.sum() > 300
    torch.testing.assert_close(
        (after - before)[had], torch.full_like(before[had], 2.0), rtol=0, atol=1e-3
    )


def test_who_knows_the_map_is_not_for_looking_around_beside_those_who_do_not():
    town = Town(load_pack("l4_contention"), num_layouts=8)
    players, state = Scripted(town, ["expert", "expert_watching"]), town.reset(3, 64)
    memory = players.reset(state)
    look = players.tell(state, memory)[2][..., town.goal_names.index("explore")]
    knows = memory["character"] == 0
    assert not look[knows].any()
    assert (look[~knows] > 0).all()


@pytest.mark.parametrize("name", ["rest", "random", "visitor"])
def test_who_does_not_ask_what_is_worth_most_is_sure_of_its_goal(name):
    town = Town(load_pack("l4_contention"), num_layouts=8)
    state, players = town.reset(3, 64), Scripted(town, [name if name != "visitor" else "expert"])
    if name == "visitor":  # an expert that takes an interest in some place every time
        row = personalities.parameters(town.pack, "expert") | {"visit": 1.0}
        keys = personalities.parameter_names(town.pack)
        players = Scripted.from_parameters(town, torch.tensor([[row[key] for key in keys]]))
    _, goals, odds = players.tell(state, players.reset(state))
    sure = odds == torch.nn.functional.one_hot(goals, town.num_goals)
    if name == "visitor":  # it may be the one that is worth most, too
        assert (odds.argmax(-1) == goals).all()
        assert sure.all(-1).float().mean() > 0.5
    else:
        assert sure.all()


def test_own_sightings_foresee_only_whom_they_see():
    """Agent 0 has seen the street; that agent 1 is nearer to the meal it knows if it sees it."""
    needs = {"occupied_wait": 0.0, "persistence": 0.0, "foresight": 50.0, "explore_rate": 0.0}
    for sight, expected in ((2, [MEAL, MEAL]), (6, [BED, MEAL])):
        town = street(agents=2, cue_distance=sight)
        # agent 1 has walked away from the meal, two steps nearer than agent 0 on the other side
        state = standing(town, 12, 9, satiation=0.2, energy=0.75)
        row = personalities.parameters(town.pack, "expert") | needs
        table = torch.tensor([[row[key] for key in personalities.parameter_names(town.pack)]])
        players = Scripted.from_parameters(town, table, "expert_sightings")
        state["tick"][:] = 1
        memory = players.reset(state)
        memory["seen"][:] = True
        _, found, _ = players.act(state, memory)
        assert found[0].tolist() == expected


def test_own_sightings_count_only_on_a_user_they_see():
    """Agent 1 stands in the meal, four steps from agent 0, which knows the street."""
    needs = {"occupied_wait": 50.0, "persistence": 0.0, "foresight": 0.0, "explore_rate": 0.0}
    for sight, expected in ((3, MEAL), (4, BED)):
        town = street(agents=2, cue_distance=sight)
        state = standing(town, 14, 10, satiation=0.2, energy=0.75)
        state["tick"][:] = 1
        row = personalities.parameters(town.pack, "expert") | needs
        table = torch.tensor([[row[key] for key in personalities.parameter_names(town.pack)]])
        for name, wanted in (("expert_sightings", expected), ("expert", BED)):
            players = Scripted.from_parameters(town, table, name)
            memory = players.reset(state)
            if name != "expert":
                memory["seen"][:] = True
            assert players.act(state, memory)[1][0, 0] == wanted


def test_who_searches_weighs_what_may_be_found_against_what_is_known():
    """Tired, having seen the meal only: it looks for the bed, unless the search is long."""
    town = street(agents=1)
    state = standing(town, 8, energy=0.3, satiation=0.9)
    state["tick"][:] = 1
    for search, explores in ((2.0, True), (200.0, False)):
        row = personalities.parameters(town.pack, "expert") | {"search": search}
        table = torch.tensor([[row[key] for key in personalities.parameter_names(town.pack)]])
        players = Scripted.from_parameters(town, table, "expert_searching")
        memory = players.reset(state)
        memory["seen"][..., :13] = True
        memory["seen"][..., 40:53] = True
        actions, found, _ = players.act(state, memory)
        assert (found[0, 0] == town.num_goals - 1) == explores
        if explores:
            assert actions[0, 0] == RIGHT


def test_who_watches_learns_a_place_from_whoever_is_seen_using_it():
    """Agent 0 sees eight cells around it whether somebody uses a place; the meal is at 10."""
    for column, learns in ((18, True), (19, False)):
        town = street(agents=2, cue_distance=8)
        before = standing(town, column, 10, satiation=0.4)
        state = town.step_core(before, torch.tensor([[WAIT, INTERACT]]))
        known = {}
        for name in ("expert_watching", "expert_searching"):
            players = Scripted(town, [name])
            seen = players.act(state, players.reset(state))[2]["seen"]
            known[name] = seen[0, 0, 10].item()
        assert known == {"expert_watching": learns, "expert_searching": False}


def test_visitors_use_every_place_to_the_end_and_look_after_themselves():
    """Of every kind of use there are whole ones, also of those that no expert ends."""
    town = Town(load_pack("l7_scarce"), num_layouts=16)
    whole = {}
    for name in ("visitor", "expert"):
        players, state = Scripted(town, [name]), town.reset(3, 64)
        memory, ended = players.reset(state), torch.zeros(town.num_affordances)
        for _ in range(town.lifespan):
            actions, _, memory = players.act(state, memory)
            after = town.step_core(state, actions)
            held = (state["progress"] > 0) & (after["progress"] == 0) & (actions == INTERACT)
            used = state["last_affordance"][held & (after["used"] >= 0)].long()
            ended += torch.bincount(used, minlength=town.num_affordances)
            state = after
        whole[name] = ended
        assert state["alive"].float().mean() > 0.5
    temporal = torch.tensor([place.duration > 1 for place in town.pack.affordances])
    assert whole["visitor"][temporal].min() > 20
    assert whole["expert"][temporal].min() == 0


@pytest.mark.parametrize("name", ["expert_searching", "expert_watching"])
def test_what_is_watched_is_what_acting_sees(name):
    town = Town(load_pack("l7_scarce"), num_layouts=16)
    players = Scripted(town, [name])
    state = town.reset(3, 4)
    acting = watching = players.reset(state)
    for _ in range(8):
        actions, _, acting = players.act(state, acting)
        watching = players.watch(state, watching)
        state = town.step_core(state, actions)
    assert torch.equal(acting["seen"], watching["seen"])
    assert acting["seen"].float().mean() > 0.12  # more than one look


def test_what_is_known_is_the_view_so_far_in_this_life():
    """Cell by cell, on a map that is not square, past the end of a life."""
    content = copy.deepcopy(BASE) | {"name": "oblong", "width": 9, "height": 6, "lifespan": 7}
    town = Town(build_pack(content, "oblong.yaml"), num_layouts=4)
    players, state = Scripted(town, ["expert_searching"]), town.reset(3, 3)
    memory = players.reset(state)
    known = torch.zeros(3, town.num_agents, 6, 9, dtype=torch.bool)
    for turn in range(10):
        memory = players.watch(state, memory)
        if state["tick"][0] == 0:
            assert turn in (0, 7)
            known[:] = False
        for world in range(3):
            for agent, (x, y) in enumerate(state["position"][world].tolist()):
                left, top = max(0, x - town.vision), max(0, y - town.vision)
                known[world, agent, top : y + town.vision + 1, left : x + town.vision + 1] = True
        assert torch.equal(memory["seen"], known.flatten(2)), turn
        state = town.step_and_reset_core(state, players.act(state, memory)[0])
    assert known.any()
    assert not known.all()


def test_foresight_zero_is_the_player_without_it():
    """Rows without foresight act the same bits whether or not another row of the table has it."""
    town = Town(load_pack("l4_contention"), num_layouts=16)
    keys = personalities.parameter_names(town.pack)
    plain = personalities.parameters(town.pack, "expert")
    assert plain["foresight"] == 0.0
    rows = [[(plain | {"foresight": value})[key] for key in keys] for value in (0.0, 1.0)]
    alone = Scripted.from_parameters(town, torch.tensor(rows[:1]))
    mixed = Scripted.from_parameters(town, torch.tensor(rows))
    state = town.reset(3, 8)
    differs = 0
    for _ in range(60):
        one, goal, _ = alone.act(state, alone.reset(state))
        two, aim, _ = mixed.act(state, mixed.reset(state))
        assert torch.equal(one[::2], two[::2])
        assert torch.equal(goal[::2], aim[::2])
        differs += int((goal[1::2] != aim[1::2]).sum())
        state = town.step_core(state, one)
    assert differs > 0


@pytest.mark.slow
def test_the_easy_packs_expert_is_the_one_that_was_frozen():
    """What l4_contention's experts reach is what was measured when they were tuned.

    Up to the rounding of the town's sums, which has changed since and which a whole life amplifies.
    """
    pack = load_pack("l4_contention")
    town = Town(pack, layout_seed=HELD_OUT_LAYOUTS)
    for name in ("expert", "expert_ignoring"):
        returns = play(town, Scripted(town, [name]), 0, 256)["returns"]
        assert returns.shape == (256, 1, town.num_agents)
        assert returns.mean().item() == pytest.approx(pack.experts[name].contended, abs=0.5)


NIGHT = {"tick": 2, "hours": {"Bed": [20, 30]}, "price_factor": {"HomeMeal": 10.0}}


def test_yesterdays_expert_goes_by_the_old_hours_and_waits_at_the_closed_door():
    town = street(agents=1, schedule=(NIGHT,))
    for tick, expected in ((1, BED), (2, None)):
        state = standing(town, 15, energy=0.3)
        state["tick"][:] = tick
        assert plan(town, state, "expert_yesterday")[1].item() == BED
        found = plan(town, state)[1].item()
        assert (found == BED) == (expected == BED)
    at_the_door = town.rearrange(state, position=torch.tensor([[[16, 0]]]))
    action, goal = plan(town, at_the_door, "expert_yesterday")
    assert goal.item() == BED
    assert action.item() not in (INTERACT, *range(4))
    assert town.action_mask(at_the_door)[0, 0, action]


def test_yesterdays_expert_goes_by_the_old_prices():
    """It has the old price of a meal, not the new one, and tries in vain."""
    town = street(agents=1, schedule=(NIGHT,))
    state = standing(town, 10, satiation=0.1, money=0.05)
    state["tick"][:] = 2
    action, goal = plan(town, state, "expert_yesterday")
    assert (action.item(), goal.item()) == (INTERACT, MEAL)
    after = town.step_core(state, action[None])
    assert after["used"].item() == -1
    assert plan(town, state)[1].item() != MEAL


def test_yesterdays_expert_takes_only_legal_actions():
    """In a town that turns over every ten ticks it is wrong most of the time."""
    pack = load_pack("l7_scarce")
    early = tuple(
        change.model_copy(update={"tick": 10 * number})
        for number, change in enumerate(pack.schedule, start=1)
    )
    town = Town(pack.model_copy(update={"schedule": early, "start_hour": 8}), num_layouts=16)
    players, state = Scripted(town, ["expert_yesterday"]), town.reset(4, 8)
    memory = players.reset(state)
    for _ in range(60):
        actions, goals, memory = players.act(state, memory)
        assert town.action_mask(state).gather(2, actions[..., None]).all()
        assert ((goals >= 0) & (goals < town.num_goals)).all()
        state = town.step_core(state, actions)


def test_yesterdays_expert_is_the_expert_until_something_changes():
    town = Town(load_pack("l5_changing"), num_layouts=16)
    first = min(change.tick for change in town.pack.schedule)
    players = {name: Scripted(town, [name]) for name in ("expert", "expert_yesterday")}
    state = town.reset(5, 8)
    for tick in range(first + 40):
        acted = {n: p.act(state, p.reset(state))[:2] for n, p in players.items()}
        same = all(map(torch.equal, *acted.values()))
        if tick < first:
            assert same
        elif not same:
            return
        state = town.step_core(state, acted["expert_yesterday"][0])
    pytest.fail("nothing that changed mattered")


@pytest.mark.slow
def test_what_is_hidden_costs_on_the_scarce_pack():
    """The first 180 ticks of a life; how much it costs is for benchmarks.discriminate to tell."""
    pack = load_pack("l7_scarce").model_copy(update={"lifespan": 180})
    found = measure(pack, worlds=16, seed=3, progress=Progress(disable=True))
    kinds = found["kinds"]
    assert kinds["expert"]["retired"] > 0.9
    for kind in REQUIRED:
        row = kinds[kind]
        assert row["loss"] - row["loss_ci95"] > 0.03, (kind, row)
        assert row["normalised_loss"] > row["loss"]


def test_the_loss_is_a_ratio_of_means_with_its_interval():
    full = torch.tensor([100.0, 300.0, 200.0, 400.0])
    share, width = loss(full, 0.8 * full, torch.zeros(4))
    assert share == pytest.approx(0.2, abs=1e-6)
    assert width == pytest.approx(0.0, abs=1e-6)
    share, width = loss(full, full - torch.tensor([10.0, 90.0, 30.0, 70.0]), full * 0 + 50.0)
    assert share == pytest.approx(0.25)
    worlds = 4
    spread = torch.tensor([-2.5, 27.5, -7.5, -17.5]).std()
    assert width == pytest.approx(1.96 * spread.item() / worlds**0.5 / 200.0, rel=1e-5)


@pytest.mark.parametrize("name", ["l7_scarce", "l4_contention", "l1_economy"])
def test_what_a_use_cannot_change_is_left_out_and_decides_nothing(name):
    """Beside the same town whose places change every meter, most of them by next to nothing."""
    pack = load_pack(name)
    nothing = dict.fromkeys(pack.meter_names, 1e-12)
    places = [
        place.model_copy(update={"effects_per_tick": nothing | place.effects_per_tick})
        for place in pack.affordances
    ]
    town = Town(pack, num_layouts=8)
    other = Town(pack.model_copy(update={"affordances": tuple(places)}), num_layouts=8)
    keys = personalities.parameter_names(pack)
    few, every = (Expert(each, keys, torch.ones(1, len(keys))) for each in (town, other))
    assert len(few.place_of) < 0.7 * len(every.place_of)
    assert len(every.place_of) == town.num_affordances * town.num_meters
    ours, theirs = (Scripted(each, ["expert"]) for each in (town, other))
    state, chosen = town.reset(1, 16), set()
    for _ in range(60):
        actions, goals, _ = ours.act(state, ours.reset(state))
        found = theirs.act(state, theirs.reset(state))
        assert torch.equal(actions, found[0])
        assert torch.equal(goals, found[1])
        chosen |= set(goals.flatten().tolist())
        state = town.step_core(state, actions)
    assert len(chosen) >= 5


def test_what_every_tick_of_a_use_costs_is_weighed():
    """Hungry and hardly tired: a meal of two ticks, unless its cost makes a bed worth more."""
    chosen = []
    for price in (0.0, 0.04):
        town = street(1, interact_price={"energy": price})
        state = standing(town, 12, satiation=0.3, energy=0.8)
        chosen.append(plan(town, state)[1].item())
    assert chosen == [MEAL, BED]
