"""Imagination worked out by hand: a world model and a controller made of a few written rules."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hamlet.modules.agent import AgentState, Mind
from hamlet.modules.contracts import Features

ACTIONS, FIELDS = 3, 2
DISCOUNT = 0.97


class Ruled:
    """Goal g wants action (g + what was done last) mod 3 most, the one after it second."""

    places, meta_period = 2, 4

    def action_logits(self, f: Features, goal: torch.Tensor) -> torch.Tensor:
        first = (goal + f.moved) % ACTIONS
        second = (first + 1) % ACTIONS
        logits = torch.zeros(len(goal), ACTIONS)
        logits.scatter_(1, second.unsqueeze(1), 1.0)
        return logits.scatter_(1, first.unsqueeze(1), 2.0)


class Table:
    """What one tick brings, row by row of a table: known state counts, each number is its own."""

    def __init__(self, ticks: list[dict[str, float]]) -> None:
        self.ticks, self.calls = ticks, 0

    def __call__(self, mean, log_std, known, action):
        row = self.ticks[self.calls]
        self.calls += 1
        each = torch.ones(len(action))
        legal = torch.tensor([row["legal"]]).expand(len(action), -1)
        return (
            mean + 1, log_std + 0.5, known + 0.125,
            each * row["reward"] + 10 * action, each * row["survives"], each * row["value"],
            legal, each * 9.0, each * row["sure"], torch.full((len(action),), row["new"]),
        )  # fmt: skip


def features(rows: int) -> Features:
    return Features(
        torch.zeros(rows, 4), torch.zeros(rows, 2), torch.zeros(rows, FIELDS),
        torch.zeros(rows, 3), torch.zeros(rows, 1, 3), torch.zeros(rows, dtype=torch.int64),
        torch.arange(rows) % (ACTIONS + 1),
    )  # fmt: skip


number = st.floats(0.125, 1, width=32)
ticks = st.lists(
    st.fixed_dictionaries(
        {
            "reward": st.floats(-2, 2, width=32), "survives": number, "sure": number,
            "value": st.floats(-5, 5, width=32), "new": st.sampled_from([False, False, True]),
            "legal": st.lists(st.floats(-1, 1, width=32), min_size=ACTIONS, max_size=ACTIONS),
        }
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


def by_hand(rows, mask, moved, goal):
    """One candidate of one agent, with plain numbers."""
    total, alive, trust, novel, legal = 0.0, 1.0, 1.0, False, mask
    actions, lives = [], []
    for t, row in enumerate(rows):
        wanted = [(goal + moved + k) % ACTIONS for k in (0, 1)]
        rest = [a for a in range(ACTIONS) if a not in wanted]
        action = next(a for a in (*wanted, *rest) if legal[a])
        total += DISCOUNT**t * alive * (row["reward"] + 10 * action)
        alive *= row["survives"]
        lives.append(alive)
        trust *= row["sure"]
        novel = novel or row["new"]
        best = max(row["legal"])
        legal = [x > 0 or x == best for x in row["legal"]]
        moved = action + 1
        actions.append(action)
    total += DISCOUNT ** len(rows) * alive * rows[-1]["value"]
    confidence = trust ** (1 / len(rows))
    return total, actions, lives, confidence, 1 if novel else 2 if confidence < 0.37 else 0


@settings(max_examples=60)
@given(ticks, st.lists(st.booleans(), min_size=ACTIONS, max_size=ACTIONS).filter(any))
def test_a_future_is_its_discounted_rewards_while_alive_then_its_value(rows, mask):
    mind = Mind(None, Table(rows), None, Ruled(), candidates=2, horizon=len(rows))
    agents = 3
    candidates = torch.tensor([[0, 2], [1, 0], [2, 1]])
    f = features(agents)
    future, returns = mind.imagine(
        torch.zeros(agents, 4), f, torch.tensor([mask]).expand(agents, -1), candidates
    )
    assert returns.shape == (agents, 2)
    for i in range(agents):
        for c in range(2):
            total, actions, lives, confidence, reason = by_hand(
                rows, mask, int(f.moved[i]), int(candidates[i, c])
            )
            assert future.actions[i, c].tolist() == actions
            assert float(returns[i, c]) == pytest.approx(total, rel=1e-4, abs=1e-4)
            torch.testing.assert_close(future.continues[i, c], torch.tensor(lives))
            assert float(future.confidence[i, c]) == pytest.approx(confidence, rel=1e-4)
            if abs(confidence - 0.37) > 1e-4:
                assert int(future.uncertainty_reason[i, c]) == reason
            expected = [row["reward"] + 10 * a for row, a in zip(rows, actions, strict=True)]
            torch.testing.assert_close(future.rewards[i, c], torch.tensor(expected))
            torch.testing.assert_close(
                future.values[i, c], torch.tensor([row["value"] for row in rows])
            )
            steps = 0.125 * torch.arange(1, len(rows) + 1)
            torch.testing.assert_close(
                future.known_state[i, c], steps.unsqueeze(1).expand(-1, FIELDS)
            )


def sure_tick(sure: float) -> dict:
    nothing = {"reward": 0.0, "survives": 1.0, "value": 0.0, "new": False}
    return nothing | {"sure": sure, "legal": [1.0] * ACTIONS}


def test_every_tick_is_predicted_from_the_one_before():
    """The belief, its deviation and the self-state that B is given are those it said last."""
    given_states = []
    table = Table([sure_tick(1.0)] * 3)

    def tick(mean, log_std, known, action):
        given_states.append((float(mean[0, 0]), float(log_std[0, 0]), float(known[0, 0])))
        return table(mean, log_std, known, action)

    mind = Mind(None, tick, None, Ruled(), candidates=1, horizon=3)
    mask = torch.ones(1, ACTIONS, dtype=torch.bool)
    start = torch.full((1, 4), -3.0)
    mind.imagine(start, features(1), mask, torch.zeros(1, 1, dtype=torch.int64))
    assert given_states == [(0.0, -3.0, 0.0), (1.0, -2.5, 0.125), (2.0, -2.0, 0.25)]


def test_a_future_is_as_sure_as_its_ticks_in_the_geometric_mean():
    rows = [sure_tick(sure) for sure in (0.5, 1.0, 0.25)]
    mind = Mind(None, Table(rows), None, Ruled(), candidates=1, horizon=3)
    mask = torch.ones(1, ACTIONS, dtype=torch.bool)
    future, _ = mind.imagine(
        torch.zeros(1, 4), features(1), mask, torch.zeros(1, 1, dtype=torch.int64)
    )
    assert future.confidence.item() == pytest.approx(0.5)
    assert future.uncertainty_reason.item() == 0


class Chooser(Ruled):
    """Its goals end when they are older than the first number of the self-state."""

    def goal_ended(self, known_state, goal, age):
        return age > known_state[:, 0]


def test_a_goal_is_chosen_anew_by_the_clock_at_its_end_or_by_temptation():
    mind = Mind(None, None, None, Chooser(), candidates=1, horizon=1)
    #          clock says so, it ended, another is far likelier, nothing of it
    clock = torch.tensor([8, 9, 10, 11])
    age = torch.tensor([1, 5, 1, 1])
    prior = torch.tensor([[0.0, 0.5], [0.0, 0.5], [0.0, 1.5], [0.0, 0.5]])
    logits = torch.tensor([[0.0, 2.0]] * 4)
    state = AgentState(*(torch.zeros(4, 1) for _ in AgentState._fields))._replace(
        clock=clock, goal=torch.zeros(4, dtype=torch.int64), goal_age=age
    )
    f = features(4)._replace(known_state=torch.full((4, FIELDS), 3.0))
    decide, after = mind.pursue(f, state, prior, logits)
    assert decide.tolist() == [True, True, True, False]
    assert after.goal.tolist() == [1, 1, 1, 0]
    assert after.goal_age.tolist() == [1, 1, 1, 2]
    assert after.clock.tolist() == [9, 10, 11, 12]
