"""What a policy would earn: the estimates against the truth, and how often their intervals hold."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pyarrow")
from hamlet.offline.estimates import DRAWS, LeastSquaresQ, ReturnSums, draws_of, estimates
from tests.offline.logged import (
    ACTIONS,
    BEHAVIOUR,
    GAMMA,
    STATES,
    play,
    true_q,
    true_return,
)

TARGET = np.array([[0.45, 0.55], [0.3, 0.7], [0.2, 0.8]])
ONE_HOT = np.eye(STATES)


def padded(columns):
    """Columns of a log as time-major arrays [T, E], and bool [T, E] where there is a step."""
    episodes = columns["episode"].max() + 1
    longest = columns["step"].max() + 1
    at = (columns["step"], columns["episode"])
    arrays = {}
    for name in ("state", "action", "reward", "log_prob"):
        arrays[name] = np.zeros((longest, episodes), columns[name].dtype)
        arrays[name][at] = columns[name]
    arrays["acted"] = np.zeros((longest, episodes), bool)
    arrays["acted"][at] = True
    return arrays


def fitted_q(columns, blocks=20):
    fitted = LeastSquaresQ(STATES, ACTIONS, blocks, GAMMA)
    state, over = columns["state"], columns["terminated"]
    after = np.append(state[1:], 0)
    block = columns["episode"] % blocks
    for b in range(blocks):
        rows = block == b
        fitted.add(
            b, ONE_HOT[state[rows]], columns["action"][rows], columns["reward"][rows],
            ONE_HOT[after[rows]], TARGET[after[rows]], ~over[rows],
        )  # fmt: skip
    return fitted


def judged(columns, q, seed, first_values=None):
    log = padded(columns)
    longest, episodes = log["state"].shape
    sums = ReturnSums(min(episodes, 100), longest, GAMMA)
    log_target = np.log(TARGET[log["state"], log["action"]])
    value = (TARGET * q).sum(1)[log["state"]]
    half = episodes // 2
    for part in (slice(0, half), slice(half, None)):  # in parts, as a log that is read is
        sums.add(
            (np.arange(episodes) % sums.blocks)[part], (log_target - log["log_prob"])[:, part],
            log["reward"][:, part], q[log["state"], log["action"]][:, part], value[:, part],
            log["acted"][:, part],
        )  # fmt: skip
    return estimates(sums, np.random.default_rng(seed), first_values), sums


def test_least_squares_finds_the_true_q():
    q = fitted_q(play(BEHAVIOUR, 20_000, 0)).solve()
    np.testing.assert_allclose(q.T, true_q(TARGET), atol=0.08)


def test_a_truncated_row_goes_on_with_the_value_after_it():
    """One state for ever, reward 1: Q is 1 / (1 - gamma), and 1 if it ends there."""
    one = np.ones((50, 1))
    for goes_on, wanted in ((True, 10.0), (False, 1.0)):
        fitted = LeastSquaresQ(1, 1, 1, gamma=0.9, ridge=0.0)
        fitted.add(0, one, np.zeros(50, int), np.ones(50), one, one, np.full(50, goes_on))
        assert fitted.solve()[0, 0] == pytest.approx(wanted)


def test_the_estimates_of_three_episodes_written_out():
    """Two steps at most, gamma .5, ratios and Q by hand."""
    sums = ReturnSums(blocks=3, longest=2, gamma=0.5)
    ratio = np.array([[2.0, 1.0, 0.5], [1.0, 0.0, 4.0]])
    reward = np.array([[1.0, 0.0, 2.0], [3.0, 0.0, 1.0]])
    q = np.array([[1.5, 1.0, 0.5], [2.0, 0.0, 1.0]])
    value = np.array([[1.0, 1.0, 1.0], [2.5, 0.0, 0.5]])
    acted = np.array([[True, True, True], [True, False, True]])
    with np.errstate(divide="ignore"):
        log_ratio = np.where(acted, np.log(ratio), 0.0)
    sums.add(np.arange(3), log_ratio, reward, q, value, acted)
    found, _ = estimates(sums, np.random.default_rng(0)), None
    # Products of ratios: first step 2, 1, .5; second 2, 1 (kept), 2.
    first = (2 * 1 + 1 * 0 + 0.5 * 2) / 3.5
    second = (2 * 3 + 1 * 0 + 2 * 1) / 5
    assert found["importance"].value == pytest.approx(first + 0.5 * second)
    errors = (2 * (1 - 1.5) + 1 * (0 - 1) + 0.5 * (2 - 0.5)) / 3.5
    later = (2 * (3 - 2) + 0 + 2 * (1 - 1)) / 5
    values = 1.0 + 0.5 * (2 * 2.5 + 0 + 0.5 * 0.5) / 3.5
    robust = errors + 0.5 * later + values
    assert found["doubly_robust"].value == pytest.approx(robust)
    earned = ((1 + 1.5) + 0 + (2 + 0.5)) / 3
    assert found["behaviour"].value == pytest.approx(earned)
    assert found["improvement"].value == pytest.approx(robust - earned)
    assert found["fitted_q"].value == pytest.approx(1.0)
    assert sums.effective_episodes() == pytest.approx(min(3.5**2 / 5.25, 25 / 9))


def test_the_intervals_hold_the_truth_as_often_as_they_say():
    """At least 90 of 100 repetitions for each 95 % interval, and not because they are wide."""
    truth = true_return(TARGET)
    gain = truth - true_return(BEHAVIOUR)
    hits = dict.fromkeys(("importance", "doubly_robust", "fitted_q", "improvement"), 0)
    widths = dict.fromkeys(hits, 0.0)
    for repetition in range(100):
        columns = play(BEHAVIOUR, 400, 1000 + repetition)
        mine = columns["episode"] < 200
        learned = {name: x[mine] for name, x in columns.items()}
        rest = {name: x[~mine] for name, x in columns.items()}
        rest["episode"] = rest["episode"] - 200
        fitted = fitted_q(learned)
        generator = np.random.default_rng(repetition)
        q = fitted.solve().T
        refits = [(TARGET * fitted.solve(c).T).sum(1)[0] for c in draws_of(20, generator, 100)]
        found, _ = judged(rest, q, repetition, generator.choice(refits, DRAWS))
        for name in hits:
            wanted = gain if name == "improvement" else truth
            hits[name] += found[name].low <= wanted <= found[name].high
            widths[name] += (found[name].high - found[name].low) / 100
    assert min(hits.values()) >= 90, hits
    assert max(widths.values()) < 0.75 * truth, widths
    # With Q as a baseline, doubly robust knows it better than importance sampling alone.
    assert widths["doubly_robust"] < 0.9 * widths["importance"]


def test_a_policy_far_from_the_log_has_few_effective_episodes():
    columns = play(np.array([[0.9, 0.1]] * 3), 300, 0)
    q = np.zeros((STATES, ACTIONS))
    _, far = judged(columns, q, 0)
    _, near = judged(play(TARGET, 300, 0), q, 0)
    assert near.effective_episodes() == pytest.approx(300)
    assert far.effective_episodes() < 30
