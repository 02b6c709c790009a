"""Module A: many ticks at once are the ticks one by one, and memory holds what was seen."""

from __future__ import annotations

import pytest
import torch

from hamlet.modules.contracts import LOOK, RawObservation, TownShape, observation_from
from hamlet.modules.perception import PLACE_STD_MIN, Perception, PerceptionHeads, packed
from hamlet.town import Scripted, Town, load_pack


@pytest.fixture(scope="module")
def recorded(town):
    """Observations [T, S] of agents that wander, with a life that begins in the middle."""
    rng = torch.Generator().manual_seed(1)
    world, ticks = town.reset(5, 3), []
    for _ in range(12):
        ticks.append(observation_from(town.observe(world), 2))
        actions = torch.randint(4, (3, town.num_agents), generator=rng)
        world = town.step_core(world, actions)
    obs = RawObservation(*(torch.stack(x) for x in zip(*ticks, strict=True)))
    first = torch.rand(12, 12, generator=rng) < 0.15
    first[0] = True
    return obs, first


def perceive(module, obs, t, state):
    return module(
        obs.view[t], obs.occupancy[t], obs.self_state[t], obs.cues[t], obs.visible[t],
        obs.others_offset[t], state,
    )  # fmt: skip


def test_sequence_is_forward_tick_by_tick(shape, recorded):
    module = Perception(shape, hidden=16, latent=4)
    torch.nn.init.normal_(module.location_table.weight, std=0.05)
    obs, first = recorded
    assert first[1:].any()
    asked = torch.tensor([0, 3, 7, 11])
    start = torch.randn(12, module.recurrent_dim)
    start[:, module.hidden :] = torch.randint(0, 3, (12, shape.num_cells)).float()
    with torch.no_grad():
        mean, log_std, logits, after = module.sequence(obs, first, start, asked)
        state, beliefs = start, []
        for t in range(12):
            belief = perceive(module, obs, t, state * (~first[t]).unsqueeze(-1))
            state = belief.recurrent_state
            beliefs.append(belief)
    for row, t in enumerate(asked.tolist()):
        torch.testing.assert_close(mean[row], beliefs[t].mean, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(log_std[row], beliefs[t].log_std, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, state, atol=1e-5, rtol=1e-5)
    assert logits.shape == (4, 12, shape.num_cells, shape.num_affordances)


def test_the_belief_tells_where_to_look(town, shape):
    module = Perception(shape, hidden=16, latent=4)
    obs = observation_from(town.observe(town.reset(9, 4)), 2)
    with torch.no_grad():
        belief = module(*obs[:6], torch.zeros(len(obs.view), module.recurrent_dim))
    told = belief.mean[:, 2 * shape.num_affordances :][:, :LOOK]
    assert torch.equal(told, module.look(belief.recurrent_state[:, 16:], obs.self_state))
    size = torch.tensor([shape.width, shape.height])
    memory = belief.recurrent_state[:, 16:].unflatten(1, (shape.height, shape.width))
    unknown = (memory == 0) | (memory == module.looked_at)
    torch.testing.assert_close(told[:, -1], unknown.float().mean((1, 2)))
    for way, new in ((told[:, :2], unknown), (told[:, 2:4], memory == 0)):
        cells = way * size
        torch.testing.assert_close(cells, cells.round(), rtol=0, atol=1e-5)  # whole cells
        spot = cells.round().long() + module.position(obs.self_state)
        for row, (column, line) in zip(new, spot.tolist(), strict=True):
            near = row[max(0, line - 2) : line + 3, max(0, column - 2) : column + 3]
            assert near.any()  # something new is to be seen from there


def test_who_scouts_goes_where_nobody_has_looked_and_else_where_somebody_has():
    shape = TownShape.of(Town(load_pack("l7_scarce"), num_layouts=8))
    module = Perception(shape, hidden=16, latent=4)
    memory = torch.ones(2, shape.height, shape.width)  # all is seen, and the agent in the corner
    memory[:, 5:10, 0:5] = module.looked_at  # near by, another has this in view
    memory[0, 0:5, 11:16] = 0  # far off lies this, of which nobody knows
    told = module.look(memory.flatten(1), torch.zeros(2, shape.self_dim))
    cells = (told[:, :4] * shape.width).round().long().unflatten(1, (2, 2)).tolist()
    # The one way of each, then the other: right and down.
    (near, far), (nearest, last) = cells
    assert near == nearest == last
    assert near[0] <= 2
    assert 3 <= near[1] <= 7
    assert far[0] >= 9
    assert far[1] <= 4
    assert told[:, -1].tolist() == [50 / 256, 25 / 256]


def test_cells_that_others_have_in_view_are_remembered_where_nothing_else_is_known():
    town = Town(load_pack("l7_scarce"), num_layouts=8)
    shape = TownShape.of(town)
    module = Perception(shape, hidden=16, latent=4)
    players, world = Scripted(town, ["expert"]), town.reset(9, 4)
    lives = players.reset(world)
    memory = torch.zeros(4 * shape.num_agents, shape.num_cells)
    cell = torch.arange(shape.num_cells)
    column, row = cell % shape.width, cell // shape.width
    watched = torch.zeros(4, shape.num_agents, shape.num_cells, dtype=torch.bool)
    for _ in range(25):
        obs = observation_from(town.observe(world), 2)
        own = module.update_map(obs.view, obs.self_state, memory)
        looked = module.update_map_from_looks(obs.self_state, obs.visible, obs.others_offset, own)
        memory = module.update_map_from_cues(obs.self_state, obs.cues, obs.others_offset, looked)
        x, y = (v.long().unsqueeze(-1) for v in world["position"].unbind(-1))
        sees = ((column - x).abs() <= town.vision) & ((row - y).abs() <= town.vision)
        apart = (x - x.mT).abs().maximum((y - y.mT).abs())
        near = (apart <= town.pack.cue_distance) & world["alive"].unsqueeze(1)
        near &= ~torch.eye(shape.num_agents, dtype=torch.bool)
        watched |= (near.unsqueeze(-1) & sees.unsqueeze(1)).any(2)
        known = own > 0
        assert torch.equal(looked[known], own[known])
        assert torch.equal(
            looked == module.looked_at,
            watched.flatten(0, 1) & ((own == 0) | (own == module.looked_at)),
        )
        # Who shows that he uses a place tells more than who looks.
        assert not ((memory != looked) & (memory <= module.looked_at)).any()
        actions, _, lives = players.act(world, lives)
        world = town.step_core(world, actions)
    assert 0.2 < (memory == module.looked_at).float().mean() < 0.8


@pytest.mark.parametrize("where", [-4.0, 6.3, 1e30, float("inf")])
def test_who_says_it_stands_beside_the_map_is_put_on_its_edge(shape, where):
    module = Perception(shape, hidden=16, latent=4)
    said = torch.full((2, shape.self_dim), where)
    x, y = module.position(said).unbind(1)
    assert 0 <= int(x.min()) <= int(x.max()) < shape.width
    assert 0 <= int(y.min()) <= int(y.max()) < shape.height
    assert module.look(torch.zeros(2, shape.num_cells), said).isfinite().all()


def test_memory_is_the_true_map_where_the_agent_has_looked(town, shape):
    module = Perception(shape, hidden=16, latent=4)
    world = town.reset(9, 4)
    memory = torch.zeros(4 * shape.num_agents, shape.num_cells)
    rng = torch.Generator().manual_seed(2)
    cell, looked = torch.arange(shape.num_cells), torch.zeros_like(memory, dtype=torch.bool)
    for _ in range(25):
        obs = observation_from(town.observe(world), 2)
        memory = module.update_map(obs.view, obs.self_state, memory)
        x, y = module.position(obs.self_state).split(1, 1)
        far = (cell % shape.width - x).abs().maximum((cell // shape.width - y).abs())
        looked |= far <= town.vision
        world = town.step_core(world, torch.randint(4, (4, shape.num_agents), generator=rng))
    truth = torch.zeros_like(memory)
    cells = town.affordance_cells[world["layout"]].repeat_interleave(shape.num_agents, 0)
    truth.scatter_(
        1, cells, torch.arange(1, shape.num_affordances + 1).float().expand(len(cells), -1)
    )
    assert torch.equal(memory, torch.where(looked, truth + 1, 0))
    assert 0.2 < looked.float().mean() < 1.0


def test_a_place_out_of_view_is_heard_of_from_whoever_shows_that_he_uses_it():
    town = Town(load_pack("l7_scarce"), num_layouts=8)
    shape = TownShape.of(town)
    names = [shape.cue_names[cue] for cue in shape.telling_cues]
    assert names[0] == "is_working"  # one of two places; the others tell which
    assert sorted(names[1:]) == sorted(f"uses_{place}" for place in shape.affordance_names)
    module = Perception(shape, hidden=16, latent=4)
    players, world = Scripted(town, ["expert"]), town.reset(9, 4)
    lives = players.reset(world)
    memory = torch.zeros(4 * shape.num_agents, shape.num_cells)
    told = 0
    for _ in range(25):
        obs = observation_from(town.observe(world), 2)
        seen = module.update_map(obs.view, obs.self_state, memory)
        memory = module.update_map_from_cues(obs.self_state, obs.cues, obs.others_offset, seen)
        in_view = (seen > 0) & (seen <= shape.num_cell_codes)
        assert torch.equal(memory[in_view], seen[in_view])  # one's own eyes are believed
        told += int(((seen == 0) & (memory > 0)).sum())
        actions, _, lives = players.act(world, lives)
        world = town.step_core(world, actions)
    assert told > 20
    truth = torch.zeros(memory.shape, dtype=torch.int64)
    cells = town.affordance_cells[world["layout"]].repeat_interleave(shape.num_agents, 0)
    truth.scatter_(1, cells, torch.arange(1, shape.num_affordances + 1).expand(len(cells), -1))
    row, cell = (memory > module.looked_at).nonzero().unbind(1)
    rank = memory[row, cell].long() - module.looked_at - 1
    heard = [shape.affordance_names[place - 1] for place in truth[row, cell].tolist()]
    assert [names[r] for r in rank.tolist()] == [f"uses_{place}" for place in heard]


@pytest.mark.parametrize("offset", [-9.0, 9.0, 1e30, float("inf"), float("nan")])
def test_what_is_shown_beside_the_map_is_not_heard(shape, offset):
    module = Perception(shape, hidden=16, latent=4)
    own = torch.full((2, shape.self_dim), 0.5)
    cues = torch.ones(2, shape.num_others, shape.num_cues)
    others = torch.full((2, shape.num_others, 2), offset)
    nothing = torch.zeros(2, shape.num_cells)
    assert not module.update_map_from_cues(own, cues, others, nothing).any()
    here = module.update_map_from_cues(own, cues, torch.zeros_like(others), nothing)
    assert (here > module.looked_at).sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("offset", [-9.0, 9.0, 1e30, float("inf"), float("nan")])
def test_who_is_said_to_be_beside_the_map_is_taken_to_be_on_it(shape, offset):
    module = Perception(shape, hidden=16, latent=4)
    own = torch.full((2, shape.self_dim), 0.5)
    others = torch.full((2, shape.num_others, 2), offset)
    seen = torch.ones(2, shape.num_others, dtype=torch.bool)
    nothing = torch.zeros(2, shape.num_cells)
    memory = module.update_map_from_looks(own, seen, others, nothing)
    assert set(memory.unique().tolist()) <= {0.0, float(module.looked_at)}
    assert torch.equal(module.update_map_from_looks(own, ~seen, others, nothing), nothing)


def test_a_table_that_knows_gives_the_place_exactly(shape):
    """Every affordance was seen and its code says so for certain: the belief is its offset."""
    module = Perception(shape, hidden=16, latent=4)
    kinds = torch.arange(shape.num_affordances)
    with torch.no_grad():
        module.location_table.weight.fill_(-1.0)
        module.location_table.weight[kinds + 2, kinds] = 1.0  # memory holds cell code + 1
    cell = kinds * 3
    memory = torch.ones(1, shape.num_cells)
    memory[0, cell] = kinds.float() + 2
    own = torch.zeros(1, shape.self_dim)
    own[0, 8], own[0, 9] = 2 / (shape.width - 1), 5 / (shape.height - 1)
    mean, log_std = module.believe(torch.zeros(1, 16), memory, own)
    places = 2 * shape.num_affordances
    offset = torch.stack([cell % shape.width - 2, cell // shape.width - 5], -1)
    size = torch.tensor([shape.width, shape.height])
    torch.testing.assert_close(mean[0, :places].view(-1, 2), offset / size, atol=1e-5, rtol=0)
    floor = torch.full((places,), PLACE_STD_MIN)
    torch.testing.assert_close(log_std[0, :places].exp(), floor, atol=2e-3, rtol=0)

    nothing = torch.zeros(1, shape.num_cells)  # never seen: anywhere, so the deviation is a map's
    _, unknown = module.believe(torch.zeros(1, 16), nothing, own)
    assert (unknown[0, :places].exp() > 0.2).all()


def test_places_are_believed_as_the_softmax_over_cells_has_them(shape):
    torch.manual_seed(3)
    module = Perception(shape, hidden=16, latent=4)
    torch.nn.init.normal_(module.location_table.weight, std=0.05)
    memory = torch.randint(module.location_table.num_embeddings, (6, shape.num_cells)).float()
    said = torch.rand(6, shape.self_dim)
    mean, log_std = (x.unflatten(1, (-1, 2)) for x in module.place_moments(memory, said))
    chance = module.location_logits(memory).double().softmax(1).unsqueeze(-1)  # [6, cells, F, 1]
    cell = torch.arange(shape.num_cells)
    size = torch.tensor([shape.width, shape.height])
    places = torch.stack([cell % shape.width, cell // shape.width], -1)
    offsets = (places - module.position(said)[:, None]) / size
    expected = (chance * offsets.unsqueeze(2)).sum(1)
    apart = offsets.unsqueeze(2) - expected.unsqueeze(1)
    variance = (chance * apart.square()).sum(1)
    torch.testing.assert_close(mean.double(), expected, atol=1e-5, rtol=1e-5)
    spread = (variance + PLACE_STD_MIN**2).sqrt()
    torch.testing.assert_close(log_std.double().exp(), spread, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("width", "height", "words"), [(8, 8, 1), (16, 16, 1), (64, 64, 2)])
def test_sums_of_any_cells_are_found_in_what_is_added_up(width, height, words):
    cell = torch.arange(width * height)
    x, y = cell % width, cell // width
    rows = torch.stack([torch.ones_like(x), x, y, x.square(), y.square()])
    together = packed(rows)
    assert len(together.word) == words
    rng = torch.Generator().manual_seed(1)
    some = torch.rand(20, len(cell), generator=rng) < torch.linspace(0, 1, 20)[:, None]
    some[0], some[1] = False, True
    for chosen in some:
        added = together.word[:, chosen].sum(1)
        found = (added[together.source, None] & together.mask).double() * together.unit
        assert torch.equal(found[:, 0], rows[:, chosen].sum(1).double())


def test_heads_decode_every_part_of_the_belief(shape, recorded):
    module = Perception(shape, hidden=16, latent=4)
    heads = PerceptionHeads(shape, module.belief_dim)
    obs, first = recorded
    mean, *_ = module.sequence(obs, first, torch.zeros(12, module.recurrent_dim), torch.arange(12))
    view, occupancy, following, meters = heads(
        mean, obs.self_state, torch.zeros(12, 12, dtype=torch.int64)
    )
    assert view.shape == following.shape == (12, 12, 25, shape.num_cell_codes)
    assert occupancy.shape == (12, 12, 25)
    assert meters.shape == (12, 12, shape.num_others, 8)


def test_settled_it_perceives_to_the_bit_the_same(shape, recorded):
    module = Perception(shape, hidden=16, latent=4)
    torch.nn.init.normal_(module.location_table.weight, std=0.05)
    state = torch.randn(12, module.recurrent_dim)
    state[:, module.hidden :] = torch.randint(0, 3, (12, shape.num_cells)).float()
    with torch.no_grad():
        before = perceive(module, recorded[0], 0, state)
        module.cache_odds()
        after = perceive(module, recorded[0], 0, state)
    for name, ours, theirs in zip(before._fields, before, after, strict=True):
        assert torch.equal(ours, theirs), name
    module.location_table.weight.data.zero_()  # it no longer looks at the table
    with torch.no_grad():
        assert torch.equal(perceive(module, recorded[0], 0, state).mean, after.mean)
