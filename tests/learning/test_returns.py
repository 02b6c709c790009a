"""Returns against their definitions, written out as sums and recurrences over plain numbers."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hamlet.learning.returns import discounted, gae, vtrace


@st.composite
def experience(draw):
    ticks = draw(st.integers(1, 9))
    numbers = st.floats(-3, 3, width=32)

    def row(kind):
        return torch.tensor(draw(st.lists(kind, min_size=ticks, max_size=ticks)))

    terminated, truncated = row(st.booleans()), row(st.booleans())
    return {
        "rewards": row(numbers), "values": row(numbers), "next_values": row(numbers),
        "terminated": terminated, "ended": terminated | truncated,
    }  # fmt: skip


@settings(max_examples=150)
@given(experience(), st.floats(0.5, 0.999), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_errors(e, gamma, lam):
    """Eq. 16: A_t = sum_k (gamma lam)^k delta_{t+k}, up to the end of the episode."""
    got = gae(**e, gamma=gamma, lam=lam)
    ticks = len(e["rewards"])
    for t in range(ticks):
        total = 0.0
        for k in range(t, ticks):
            bootstrap = 0.0 if e["terminated"][k] else float(e["next_values"][k])
            delta = float(e["rewards"][k]) + gamma * bootstrap - float(e["values"][k])
            total += (gamma * lam) ** (k - t) * delta
            if e["ended"][k]:
                break
        assert math.isclose(float(got.advantages[t]), total, rel_tol=1e-4, abs_tol=1e-3)
    torch.testing.assert_close(got.returns, got.advantages + e["values"])


def test_truncation_bootstraps_and_termination_does_not():
    one = {name: torch.tensor([x]) for name, x in
           {"rewards": 1.0, "values": 0.0, "next_values": 10.0}.items()}  # fmt: skip
    yes, no = torch.tensor([True]), torch.tensor([False])
    cut = gae(**one, terminated=no, ended=yes, gamma=0.9, lam=0.95)
    over = gae(**one, terminated=yes, ended=yes, gamma=0.9, lam=0.95)
    assert cut.returns.item() == 10.0
    assert over.returns.item() == 1.0


@settings(max_examples=150)
@given(
    experience(), st.floats(0.5, 0.999), st.floats(0, 1), st.floats(0.3, 2), st.floats(0.3, 2),
    st.data(),
)  # fmt: skip
def test_vtrace_is_the_sum_of_its_definition(e, gamma, lam, rho_clip, c_clip, data):
    """Eq. 1 and remark 2: v_s = V(x_s) + sum_t gamma^(t-s) (prod lam c) rho_t delta_t, inside the
    episode."""
    ticks = len(e["rewards"])
    numbers = st.lists(st.floats(-1, 1, width=32), min_size=ticks, max_size=ticks)
    now, then = torch.tensor(data.draw(numbers)), torch.tensor(data.draw(numbers))
    got = vtrace(now, then, **e, gamma=gamma, lam=lam, rho_clip=rho_clip, c_clip=c_clip)
    ratio = [math.exp(float(a - b)) for a, b in zip(now, then, strict=True)]

    def following(k):
        return 0.0 if e["terminated"][k] else float(e["next_values"][k])

    targets = []
    for s in range(ticks):
        total, weight = float(e["values"][s]), 1.0
        for t in range(s, ticks):
            delta = float(e["rewards"][t]) + gamma * following(t) - float(e["values"][t])
            total += gamma ** (t - s) * weight * min(ratio[t], rho_clip) * delta
            weight *= lam * min(ratio[t], c_clip)
            if e["ended"][t]:
                break
        targets.append(total)
    for t in range(ticks):
        assert math.isclose(float(got.targets[t]), targets[t], rel_tol=1e-3, abs_tol=2e-3)
        last = t == ticks - 1 or bool(e["ended"][t])
        # after the record's end the value itself continues it
        ahead = (
            (following(t) if e["ended"][t] else float(e["next_values"][t]))
            if last
            else targets[t + 1]
        )
        advantage = min(ratio[t], rho_clip) * (
            float(e["rewards"][t]) + gamma * ahead - float(e["values"][t])
        )
        assert math.isclose(float(got.advantages[t]), advantage, rel_tol=1e-3, abs_tol=2e-3)


@settings(max_examples=50)
@given(experience(), st.floats(0.5, 0.999))
def test_on_policy_vtrace_is_gae_with_lambda_one(e, gamma):
    log_prob = torch.zeros(len(e["rewards"]))
    ours = vtrace(log_prob, log_prob, **e, gamma=gamma)
    torch.testing.assert_close(
        ours.targets, gae(**e, gamma=gamma, lam=1.0).returns, atol=1e-3, rtol=1e-3
    )


@settings(max_examples=50)
@given(experience(), st.floats(0.5, 0.999), st.floats(-3, 3))
def test_discounted_stops_at_the_end_of_an_episode(e, gamma, last):
    got = discounted(e["rewards"], e["ended"], gamma, torch.tensor(last))
    ticks = len(e["rewards"])
    for t in range(ticks):
        total, k = 0.0, t
        while True:
            total += gamma ** (k - t) * float(e["rewards"][k])
            if e["ended"][k]:
                break
            k += 1
            if k == ticks:
                total += gamma ** (k - t) * last
                break
        assert math.isclose(float(got[t]), total, rel_tol=1e-3, abs_tol=1e-3)


def cut_lanes():
    """Two unfinished lanes of a constant world, V = r / (1 - gamma): every advantage is 0."""
    shape = (6, 2)
    truncated = torch.zeros(shape, dtype=torch.bool)
    truncated[2, 1] = True
    known = ~truncated
    known[-1] = False
    values = torch.full(shape, 10.0)
    following = torch.cat([values[1:], torch.zeros(1, 2)])
    following[2, 1] = -50.0  # of another episode
    return {
        "rewards": torch.ones(shape), "values": values, "next_values": following,
        "terminated": torch.zeros(shape, dtype=torch.bool), "ended": truncated, "known": known,
    }  # fmt: skip


def test_no_recursion_crosses_a_row_that_is_not_learned_from():
    e = cut_lanes()
    expected = torch.zeros(6, 2)
    got = gae(**e, gamma=0.9, lam=0.95)
    torch.testing.assert_close(got.advantages, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(got.returns, e["values"])
    now = torch.tensor([0.3, -0.4]).expand(6, 2)
    traced = vtrace(now, torch.zeros(6, 2), **e, gamma=0.9)
    torch.testing.assert_close(traced.advantages, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(traced.targets, e["values"])


@settings(max_examples=100)
@given(experience(), st.floats(0.5, 0.999), st.floats(0, 1), st.data())
def test_rows_of_which_nothing_is_known_are_cut_out(e, gamma, lam, data):
    """The rows between two unknown ones get what they get alone, continued by its value."""
    ticks = len(e["rewards"])
    known = torch.tensor(data.draw(st.lists(st.booleans(), min_size=ticks, max_size=ticks)))
    e["next_values"] = torch.cat([e["values"][1:], e["next_values"][-1:]])
    whole = gae(**e, gamma=gamma, lam=lam, known=known)
    ratio = torch.linspace(-0.5, 0.5, ticks)
    traced = vtrace(ratio, torch.zeros(ticks), **e, gamma=gamma, known=known)
    start = 0
    for t in range(ticks):
        if known[t] and t < ticks - 1:
            continue
        stop = t + 1 if known[t] else t
        if stop > start:
            part = {name: x[start:stop] for name, x in e.items()}
            alone = gae(**part, gamma=gamma, lam=lam)
            torch.testing.assert_close(whole.advantages[start:stop], alone.advantages)
            zero = torch.zeros(stop - start)
            alone = vtrace(ratio[start:stop], zero, **part, gamma=gamma)
            torch.testing.assert_close(traced.targets[start:stop], alone.targets)
            torch.testing.assert_close(traced.advantages[start:stop], alone.advantages)
        if not known[t]:
            assert whole.advantages[t] == 0.0 == traced.advantages[t]
            assert whole.returns[t] == e["values"][t] == traced.targets[t]
        start = t + 1
