"""Module C: what it keeps of another agent's way."""

from __future__ import annotations

import pytest
import torch

from hamlet.modules.contracts import SOCIAL_REASONS
from hamlet.modules.social import AGE_UNIT, OFFSET_UNIT, Social


def test_steps_towards_a_place_are_kept_and_fade_out_of_sight(town, shape):
    """One other agent walks right, past the agent that watches it, and is then not seen."""
    social = Social(shape, 8)
    right, unknown = shape.action_names.index("RIGHT"), shape.num_actions
    places = torch.zeros(1, shape.num_affordances, 2)
    places[0, 0, 0], places[0, 1, 0] = 6 / shape.width, -6 / shape.width  # to the right, the left
    mean = torch.cat([places.flatten(1), torch.zeros(1, 9)], 1)
    log_std = torch.full_like(mean, -4.0)
    m = shape.num_others
    cues, known = torch.zeros(1, m, shape.num_cues), torch.zeros(1, shape.self_dim)
    state = torch.zeros(1, m, social.recurrent_dim)

    def tick(column: float | None, state):
        seen = torch.zeros(1, m, dtype=torch.bool)
        offset = torch.zeros(1, m, 2)
        action = torch.full((1, m), unknown)
        if column is not None:
            seen[0, 0], offset[0, 0, 0], action[0, 0] = True, column / OFFSET_UNIT, right
        with torch.no_grad():
            return social.logits(mean, log_std, known, cues, seen, offset, action, state)[2]

    for column in (-1.0, 0.0, 1.0):
        state = tick(column, state)
    heading = state[0, :, social.hidden : -1]
    assert heading.shape == (m, shape.num_affordances)
    torch.testing.assert_close(heading[0, :2], torch.tensor([2.44, -2.44]))  # 1 + .8 + .64
    assert not heading[1:].any()  # nobody else was seen
    state = tick(None, state)
    torch.testing.assert_close(state[0, 0, social.hidden : -1], 0.8 * heading[0])
    assert state[0, 0, -1] == 1 / AGE_UNIT


def test_who_is_nearer_is_ahead_and_by_so_many_ticks(town, shape):
    """A place six cells away, round a corner; of the others one is at it, one beside me, one
    unseen."""
    social = Social(shape, 8)
    f, m = shape.num_affordances, shape.num_others
    places = torch.full((1, f, 2), 40.0)
    places[0, 0] = torch.tensor([-4 / shape.width, -2 / shape.height])
    mean = torch.cat([places.flatten(1), torch.zeros(1, 9)], 1)
    wants = torch.zeros(1, m, shape.num_goals)
    wants[..., 0] = 0.8
    visible = torch.zeros(1, m, dtype=torch.bool)
    visible[0, :2] = True
    offset = torch.zeros(1, m, 2)
    offset[0, 0] = offset[0, 2] = torch.tensor([-4.0, -2.0]) / OFFSET_UNIT
    known, cues = torch.zeros(1, shape.self_dim), torch.zeros(1, m, shape.num_cues)
    ahead = social.ahead(wants, mean, known, cues, visible, offset)
    expected = torch.tensor([0.8 + 0.5 * 0.8, 0.8, 0.5 * 0.8])  # six ticks: hardly six
    torch.testing.assert_close(ahead[0, 0], expected)
    assert not ahead[0, 1:].any()  # nobody wants those


def test_who_uses_the_place_is_ahead_of_those_who_stand_there(town, shape):
    """I stand in a place, with one who is seen using it, or with one who is not."""
    social = Social(shape, 8)
    f, m = shape.num_affordances, shape.num_others
    places = torch.full((1, f, 2), 40.0)
    places[0, 0] = 0.0
    mean = torch.cat([places.flatten(1), torch.zeros(1, 9)], 1)
    wants = torch.zeros(1, m, shape.num_goals)
    wants[..., 0] = 0.8
    visible = torch.zeros(1, m, dtype=torch.bool)
    visible[0, 0] = True

    def ahead(using: bool, progress: float) -> float:
        known, cues = torch.zeros(1, shape.self_dim), torch.zeros(1, m, shape.num_cues)
        known[0, shape.self_names.index("progress")] = progress
        cues[0, 0] = 1.0  # whatever else it shows
        cues[0, 0, list(shape.telling_cues)] = 0.0
        cues[0, 0, shape.telling_cues[-1]] = float(using)
        return social.ahead(wants, mean, known, cues, visible, torch.zeros(1, m, 2))[0, 0, 0].item()

    assert ahead(True, 0.0) == pytest.approx(0.8)
    assert ahead(False, 0.0) == pytest.approx(0.4)
    assert ahead(False, 0.2) == 0.0


def test_who_is_long_out_of_sight_is_forgotten(town, shape):
    """Two pasts, then nobody in sight: after 16 ticks they are one."""
    torch.manual_seed(3)
    social = Social(shape, 8)
    m, mean = shape.num_others, torch.zeros(2, 2 * shape.num_affordances + 9)
    log_std, known = torch.full_like(mean, -4.0), torch.zeros(2, shape.self_dim)
    cues, offset = torch.zeros(2, m, shape.num_cues), torch.zeros(2, m, 2)
    nobody = torch.zeros(2, m, dtype=torch.bool)
    unknown = torch.full((2, m), shape.num_actions)
    state = torch.zeros(2, m, social.recurrent_dim)
    state[:, :, : social.hidden] = torch.randn(2, 1, social.hidden)
    apart = []
    with torch.no_grad():
        for _ in range(18):
            told = social(mean, log_std, known, cues, nobody, offset, unknown, state)
            state = told[-1]
            apart.append((told[0][0] - told[0][1]).abs().max().item())
    assert min(apart[:15]) > 1e-4
    assert apart[17] <= 2e-7  # equal but for where in the batch a row stands


def test_the_clock_is_the_hour_and_the_age_not_the_agents_own_business(town, shape):
    """What the agent itself does says nothing of what the others want; the hour does."""
    torch.manual_seed(5)
    social = Social(shape, 8)
    m = shape.num_others
    mean = torch.randn(1, 2 * shape.num_affordances + 9)
    seen = torch.ones(1, m, dtype=torch.bool)
    state = torch.zeros(1, m, social.recurrent_dim)
    known = torch.rand(1, shape.self_dim)

    def goals(known):
        cues, offset = torch.zeros(1, m, shape.num_cues), torch.zeros(1, m, 2)
        act = torch.zeros(1, m, dtype=torch.int64)
        with torch.no_grad():
            return social.logits(mean, mean * 0 - 3, known, cues, seen, offset, act, state)[0]

    for name in shape.self_names:
        changed = known.clone()
        changed[0, shape.self_names.index(name)] += 0.3
        moved = not torch.equal(goals(changed), goals(known))
        assert moved == (name in ("sin_hour", "cos_hour", "age")), name


def test_a_place_is_scored_by_the_facts_and_the_weights_the_network_chose(town, shape):
    """Against the same sum written out, for one other agent in sight."""
    torch.manual_seed(6)
    social = Social(shape, 8)
    f, m = shape.num_affordances, shape.num_others
    mean, log_std = torch.randn(1, 2 * f + 9), torch.randn(1, 2 * f + 9)
    cues, known = torch.zeros(1, m, shape.num_cues), torch.rand(1, shape.self_dim)
    seen = torch.ones(1, m, dtype=torch.bool)
    offset, act = torch.randn(1, m, 2), torch.zeros(1, m, dtype=torch.int64)
    state = torch.rand(1, m, social.recurrent_dim)
    said, read = [], []
    social.heads.register_forward_hook(lambda *call: said.append(call[2]))
    social.pair.register_forward_hook(lambda *call: read.append(call[1][0]))
    with torch.no_grad():
        got, _, after = social.logits(mean, log_std, known, cues, seen, offset, act, state)
    base, weights, elsewhere, _ = said[0][0].split(social.sizes)
    size = torch.tensor([shape.width, shape.height])
    for place in range(f):
        x, y = mean[0, 2 * place : 2 * place + 2] * size - offset[0, 0] * OFFSET_UNIT
        far = x.abs() + y.abs()
        facts = torch.stack(
            [
                x.clamp(-8, 8) / 4,
                y.clamp(-8, 8) / 4,
                *log_std[0, 2 * place : 2 * place + 2],
                far / 32,
                (1 - far).clamp_min(0),
                after[0, 0, social.hidden + place],
            ]
        )
        torch.testing.assert_close(got[0, 0, place], base[place] + (facts * weights).sum())
    assert read[0][0, 0, -3:].tolist() == [1.0, *offset[0, 0].tolist()]
    torch.testing.assert_close(got[0, 0, f:], elsewhere)


def test_the_encoder_reads_where_the_places_lie_for_those_in_sight_alone(shape):
    torch.manual_seed(3)
    social, m = Social(shape, 8), shape.num_others
    known, log_std = torch.rand(1, shape.self_dim), torch.randn(1, social.places + 9)
    seen = (torch.arange(m) % 2 == 0)[None]
    nothing = (
        torch.zeros(1, m, shape.num_cues),
        seen,
        torch.zeros(1, m, 2),
        torch.zeros(1, m).long(),
    )
    read = []
    social.heads.register_forward_hook(lambda *call: read.append(call[1][0][:, social.hidden :]))
    with torch.no_grad():
        for mean in (torch.zeros(1, social.places + 9), torch.randn(1, social.places + 9)):
            state = torch.zeros(1, m, social.recurrent_dim)
            social.logits(mean, log_std, known, *nothing, state)
    moved = (read[0] != read[1]).any(-1)
    assert torch.equal(moved, seen[0])
    own = social.own(torch.cat([log_std[:, : social.places], known[:, social.clock]], -1))
    near, (c, s) = social.near(mean[:, : social.places]), (shape.num_cues, shape.num_cues + 1)
    said = social.pair.weight[:, c:s].t() + near + own + social.action.weight[:1]
    torch.testing.assert_close(read[1][0], said[0].relu())


def test_why_a_reading_is_unsure_is_told(shape):
    """Who is in sight and may want anything shows conflicting cues; else who was long unseen."""
    social, m = Social(shape, 8), shape.num_others
    for parameter in social.heads.parameters():
        torch.nn.init.zeros_(parameter)
    mean = torch.zeros(3, 2 * shape.num_affordances + 9)
    state = torch.zeros(3, m, social.recurrent_dim)
    state[2, :, -1] = 1.0  # 32 ticks
    visible = torch.tensor([True, False, False])[:, None].expand(3, m)
    given = (
        mean, mean, torch.zeros(3, shape.self_dim), torch.zeros(3, m, shape.num_cues), visible,
        torch.zeros(3, m, 2), torch.zeros(3, m, dtype=torch.int64), state,
    )  # fmt: skip
    reasons = [[SOCIAL_REASONS[int(row[0])] for row in social(*given)[3]]]
    with torch.no_grad():  # one goal, surely
        social.heads.bias[shape.num_affordances + 7] = 20.0
    reasons.append([SOCIAL_REASONS[int(row[0])] for row in social(*given)[3]])
    assert reasons == [["conflicting_cues", "none", "unseen"], ["none", "none", "unseen"]]
