"""Module C: what it keeps of another agent's way."""

from __future__ import annotations

import torch

from pipeline.modules.social import AGE_UNIT, OFFSET_UNIT, Social


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
    """A place six cells to the right; of the others one is at it, one beside me, one unseen."""
    social = Social(shape, 8)
    f, m = shape.num_affordances, shape.num_others
    places = torch.full((1, f, 2), 40.0)
    places[0, 0] = torch.tensor([6 / shape.width, 0.0])
    mean = torch.cat([places.flatten(1), torch.zeros(1, 9)], 1)
    wants = torch.zeros(1, m, shape.num_goals)
    wants[..., 0] = 0.8
    visible = torch.zeros(1, m, dtype=torch.bool)
    visible[0, :2] = True
    offset = torch.zeros(1, m, 2)
    offset[0, 0, 0], offset[0, 2, 0] = 6 / OFFSET_UNIT, 6 / OFFSET_UNIT
    ahead = social.ahead(wants, mean, visible, offset)
    expected = torch.tensor([0.8 + 0.5 * 0.8, 0.8, 0.5 * 0.8])  # six ticks: hardly six
    torch.testing.assert_close(ahead[0, 0], expected)
    assert not ahead[0, 1:].any()  # nobody wants those
