"""Module D's readable rule, what a place is worth, worked out by hand; and how it looks around."""

from __future__ import annotations

import copy

import pytest
import torch

from hamlet.modules.contracts import LEADS, LOOK, Features, TownShape
from hamlet.modules.policy import Prospects
from tests.learning.minds import new_mind
from tests.learning.test_train_policy import TINY

ENERGY, MONEY = 0, 3
MENU = torch.zeros(2, 17)
MENU[0, ENERGY], MENU[0, 8 + ENERGY], MENU[0, 16] = 0.1, 0.2, 4  # a bed
MENU[1, MONEY], MENU[1, 16] = 0.05, 2  # work


@pytest.fixture
def rule() -> Prospects:
    rule = Prospects(MENU, MONEY, [ENERGY])
    with torch.no_grad():
        for name, value in {
            "worth": 0.0, "fear": 0.0, "drain": 0.0, "overhead": -30.0, "queue": 1.0, "habit": 0.5,
            "heading": 0.25,
        }.items():  # fmt: skip
            getattr(rule, name).fill_(value)
        rule.worth[ENERGY], rule.worth[MONEY] = 1.0, 2.0
    return rule.requires_grad_(False)


def ask(rule, walk=0.0, until=0.0, left=24.0, price=0.0, progress=0.0, wait=0.0, pursued=0.0,
        nearer=0.0, money=0.5, energy=0.2, counts=1.0, stays=(1.0,)):  # fmt: skip
    meters = torch.full((1, 8), 0.5)
    meters[0, ENERGY], meters[0, MONEY] = energy, money
    each = (torch.full((1, 2), float(x)) for x in (walk, progress, wait, pursued, nearer))
    walk, progress, wait, pursued, nearer = each
    posted = (torch.full((1, 2), float(x)) for x in (until, left, price))
    habits = torch.full((1, 1), counts), torch.tensor([stays])
    return rule(meters, walk, progress, wait, pursued, nearer, *posted, *habits)[0]


def test_the_rate_is_the_gain_over_the_ticks_it_takes(rule):
    torch.testing.assert_close(ask(rule), torch.tensor([0.6 / 4, 2 * 0.1 / 2]))
    torch.testing.assert_close(ask(rule, walk=4), torch.tensor([0.6 / 8, 2 * 0.1 / 6]))
    torch.testing.assert_close(ask(rule, walk=1, until=4), ask(rule, walk=4))
    torch.testing.assert_close(ask(rule, pursued=1, nearer=1), 1.75 * ask(rule))
    weight = torch.nn.functional.softplus(torch.tensor(1.0)).item()
    torch.testing.assert_close(ask(rule, wait=2), ask(rule, walk=2 * weight))
    # Of four ticks of use, who came a tick ago has three left, who came four ticks ago none.
    just_now, before = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    assert rule.wait(just_now.expand(1, 2, 3).movedim(-1, 0))[0].tolist() == [3.0, 1.0]
    assert rule.wait(before.expand(1, 2, 3).movedim(-1, 0))[0].tolist() == [0.0, 0.0]
    assert rule.wait((just_now + before).expand(1, 2, 3).movedim(-1, 0))[0].tolist() == [3.0, 1.0]


def test_a_use_is_cut_short_by_closing_or_by_want_of_money_and_paid_for(rule):
    closing = ask(rule, left=3)[0].item()  # three ticks, not completed
    assert closing == pytest.approx(0.3 / 3, abs=1e-6)
    poor = ask(rule, price=0.1, money=0.2)[0].item()  # two ticks, for all that it has
    assert poor == pytest.approx((0.2 - 2 * 0.2) / 2, abs=1e-6)
    begun = ask(rule, progress=3)[0].item()  # one tick is left, and completes it
    assert begun == pytest.approx(0.3, abs=1e-6)
    full = ask(rule, energy=0.9)[0].item()
    assert full == pytest.approx(0.1 / 4, abs=1e-6)


def test_who_may_leave_early_stays_as_long_as_it_gains_most_per_tick(rule):
    """The bed gives 0.1 a tick for four ticks, and 0.2 more with the last; energy is worth one."""
    parts = (0.15, 0.4, 0.7, 1.0)  # one, two, three or all four ticks
    torch.testing.assert_close(ask(rule, stays=parts), ask(rule))
    # With 0.65 it is full after the fourth in any case, which brings what is left of 0.35.
    for energy, walk, ticks, gain in (
        (0.65, 0.0, 1, 0.1), (0.75, 3.0, 3, 0.25), (0.95, 0.0, 1, 0.05), (0.2, 2.0, 4, 0.6)
    ):  # fmt: skip
        found = ask(rule, stays=parts, energy=energy, walk=walk)[0].item()
        assert found == pytest.approx(gain / (walk + ticks), abs=1e-6), energy
    # Of a use of which two ticks are done, one or both that are left.
    found = ask(rule, stays=(0.5, 1.0), energy=0.85, progress=2)[0].item()
    assert found == pytest.approx(0.1, abs=1e-6)
    # It closes, or the money is spent, before it would leave.
    assert ask(rule, stays=(0.7, 1.0), left=2)[0] == ask(rule, left=2)[0]
    torch.testing.assert_close(
        ask(rule, stays=(0.15, 1.0), price=0.1, money=0.2), ask(rule, left=1, price=0.1, money=0.2)
    )


def test_each_has_its_own_stays_while_they_are_tried(rule):
    meters = torch.full((2, 8), 0.95)
    still, posted = torch.zeros(2, 2), (torch.zeros(2, 2), torch.full((2, 2), 24.0))
    given = (meters, still, still, still, still, still, *posted, still, torch.ones(2, 1))
    both = rule(*given, torch.tensor([[0.15, 1.0], [1.0, 1.0]]))
    early, whole = (rule(*given, torch.tensor([[part, 1.0]]))[0] for part in (0.15, 1.0))
    assert torch.equal(both, torch.stack([early, whole]))
    assert (early > whole)[0]


def test_as_many_stays_are_loaded_as_were_kept(town):
    kept, policy = (new_mind(town, TINY.policy)[0].policy for _ in range(2))
    kept.stays = torch.tensor([[0.2, 0.5, 1.0]])
    policy.load_state_dict(kept.state_dict())
    assert torch.equal(policy.stays, kept.stays)
    policy.load_state_dict(new_mind(town, TINY.policy)[0].policy.state_dict())
    assert policy.stays.tolist() == [[1.0]]


def test_what_drains_on_the_way_and_what_is_feared_count(rule):
    rule.drain[ENERGY] = 5.0  # hundredths a tick
    rule.fear[ENERGY], rule.comfort[ENERGY] = 1.0, 0.5
    # In four ticks 0.4 become 0.2; with the bed 0.8.
    expected = (0.6 - (0.0 - (0.5 - 0.2) ** 2)) / 4
    assert ask(rule, energy=0.4)[0].item() == pytest.approx(expected, abs=1e-6)


def test_a_small_gain_is_not_lost_in_the_rounding_of_what_all_meters_are_worth(rule):
    """A learned sharpness makes some 500 times as much of a rate, and ONNX Runtime rounds its own
    way: with rates off by 2e-7 their logits differ by the 1e-4 that the agent stage allows."""
    torch.manual_seed(0)
    for name, value in {"worth": 1.0, "fear": 1.0, "comfort": 0.8, "overhead": 0.5}.items():
        getattr(rule, name).fill_(value)
    rule.worth[6] = 3.0
    meters, walk, posted = torch.rand(5000, 8), torch.rand(5000, 2) * 8, torch.rand(3, 5000, 2)
    opens_in, open_for, price = posted * torch.tensor([12.0, 12.0, 0.1])[:, None, None]
    still = torch.zeros(5000, 2)
    given = (meters, walk, still, still, still, still, opens_in, open_for, price,
             torch.ones(5000, 1), torch.tensor([[0.15, 0.4, 1.0]]))  # fmt: skip
    exact = copy.deepcopy(rule).double()(*(x.double() for x in given))
    assert (rule(*given) - exact).abs().max() < 1e-7


def test_what_nobody_lives_by_counts_as_much_as_is_said(rule):
    whole = ask(rule)
    torch.testing.assert_close(ask(rule, counts=0.25), whole * torch.tensor([1.0, 0.25]))
    with torch.no_grad():
        rule.worth.zero_()
        rule.fear.fill_(1.0)
    whole = ask(rule, energy=0.1, money=0.1)
    assert (whole > 0).all()
    counted = ask(rule, energy=0.1, money=0.1, counts=0.5)
    torch.testing.assert_close(counted, whole * torch.tensor([1.0, 0.5]))


def test_the_less_is_left_of_a_life_the_less_counts_what_it_does_not_live_by(town):
    policy = new_mind(town, TINY.policy)[0].policy
    shape = TownShape.of(town)
    known = torch.zeros(5, shape.self_dim)
    left = torch.tensor([shape.lifespan, 200, 100, 50, 0])
    known[:, shape.self_names.index("age")] = 1 - left / shape.lifespan
    assert (policy.means_count(known) == 1).all()
    policy.countdown.fill_(100.0)
    expected = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.0])
    torch.testing.assert_close(policy.means_count(known)[:, 0], expected, atol=1e-5, rtol=0)
    # Each by its own habit, while it is tried.
    policy.countdown = torch.tensor([0.0, 400.0, 200.0, 0.0, 100.0]).unsqueeze(-1)
    expected = torch.tensor([1.0, 0.5, 0.5, 1.0, 0.0])
    torch.testing.assert_close(policy.means_count(known)[:, 0], expected, atol=1e-5, rtol=0)


def test_who_scouts_takes_the_other_way_and_that_is_all(town):
    shape = TownShape.of(town)
    policy = new_mind(town, TINY.policy)[0].policy
    rng = torch.Generator().manual_seed(4)
    rows, d = 64, 2 * shape.num_affordances
    mean = torch.randn(rows, d + LOOK + 4, generator=rng) / 4
    f = Features(
        mean, torch.randn(rows, d, generator=rng) - 3, torch.rand(rows, shape.self_dim),
        torch.rand(rows, shape.num_goals), torch.rand(rows, shape.num_affordances, len(LEADS)),
        torch.arange(rows) % shape.num_goals, torch.arange(rows) % shape.num_actions,
    )  # fmt: skip
    looking, scouting = slice(d, d + 2), slice(d + 2, d + 4)
    turned = mean.clone()
    turned[:, looking], turned[:, scouting] = mean[:, scouting], mean[:, looking]
    explores = torch.full((rows,), shape.goal_names.index("explore"))

    def thought(f):
        with torch.no_grad():
            return torch.cat([policy.prior_logits(f), policy.action_logits(f, explores)], -1)

    assert torch.equal(policy.way(f), mean[:, looking])
    looks, other = thought(f), thought(f._replace(mean=turned))
    assert ((looks - other).abs().amax(-1) > 1e-4).all()
    policy.scouts.fill_(True)
    assert torch.equal(policy.way(f), mean[:, scouting])
    assert torch.equal(thought(f), other)
    # Each by its own habit, while it is tried.
    policy.scouts = (torch.arange(rows) % 2 == 1).unsqueeze(-1)
    assert torch.equal(thought(f)[::2], looks[::2])
    assert torch.equal(thought(f)[1::2], other[1::2])
